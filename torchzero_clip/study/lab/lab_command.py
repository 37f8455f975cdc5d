"""The command `python -m torchzero_clip lab run.csv`. It opens the lab in a browser."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchzero_clip.study.lab.server import LabServer
from torchzero_clip.study.lab.session import LabSession


def command(argv: Sequence[str]) -> Iterator[str]:
    """Yield the lines that the command prints. The page is served before the last line."""
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip lab",
        description="Open a page in your browser that shows what clipping rules would have done to "
        "the norms of a recorded run.",
    )
    add = parser.add_argument
    add(
        "run",
        nargs="?",
        type=Path,
        help="a CSV or JSON lines file with a column such as grad_norm, for example from "
        "Recorder.to_csv, TensorBoard or Weights & Biases. By default, the page shows example runs",
    )
    add("--norms", help="the name of the column with the norms")
    add("--follow", action="store_true", help="keep reading the file while the run continues")
    add("--port", type=int, default=0, help="the port of the page; by default any free port")
    add("--no-browser", action="store_true", help="print the address, but do not open a browser")
    options = parser.parse_args(argv)
    if options.follow and options.run is None:
        parser.error("--follow requires a file, such as run.csv")
    try:
        session = LabSession(options.run, options.norms, options.follow)
        server = LabServer(session, options.port)
    except (OSError, TypeError, ValueError, OverflowError) as error:
        parser.error(str(error).removeprefix("Trace: "))
    with server:
        yield f"The lab is running at {server.url}"
        if options.no_browser or not (opens_windows() and webbrowser.open(server.url)):
            yield "Open this address in a browser on this machine."
        yield "To stop it, close the page or press Ctrl-C."
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)
    yield "The lab has stopped."


def opens_windows() -> bool:
    """Return whether the default browser opens a window. Some browsers run in the terminal."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
