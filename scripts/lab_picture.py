"""Write the picture of the lab in README: its page with a recorded run, as Chromium shows it.

    python -m scripts.lab_picture

Writes docs/assets/lab.png. $CHROMIUM may name the browser.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from scripts.browser import Browser
from torchzero_clip.study.lab.server import LabServer
from torchzero_clip.study.lab.session import LabSession

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "assets" / "lab.png"
READY = "cards.length === 3 && cards.every((card) => card.have === run.steps && card.summary)"


def main(picture: Path = PICTURE) -> None:
    torch.set_num_threads(1)
    server = LabServer(LabSession())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Browser(1180, 1110, scale=1.25) as browser:
        browser.ask("Emulation.setScrollbarsHidden", hidden=True)
        browser.open(server.url)
        browser.wait("typeof cards !== 'undefined'")
        browser.wait(READY, 120)
        browser.value("choose(cards[0]); new Promise((then) => setTimeout(then, 300))")
        browser.picture(picture)
    server.shutdown()
    print(f"{picture}: {picture.stat().st_size} bytes")


if __name__ == "__main__":
    main()
