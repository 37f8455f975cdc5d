"""The files of a race: race.html, a page without other files, and race.png."""

from __future__ import annotations

import json
import platform
from html import escape
from pathlib import Path
from string import Template
from types import ModuleType

import torch

import torchzero_clip
from race.chains import spell
from race.console import COLUMNS, cells, headline
from race.data import BATCH, CLEAN, CONTEXT, CORRUPTED, TEXT
from race.training import PROMPT, Result

REPEATS = "On the same machine, the same seed gives exactly the same numbers, except for the times."
PAGE = Path(__file__).with_name("page.html")


def save(
    results: list[Result], folder: Path, command: str, seed: int, device: torch.device
) -> list[str]:
    """Write the files, and print their names."""
    picture = drawing()
    page = folder / "race.html"
    page.write_text(html(results, command, seed, device, picture), encoding="utf-8")
    told = [f"Report:  {page}"]
    if picture is None:
        told.append('No picture: install matplotlib with pip install "torchzero-clip[plot]"')
    else:
        picture.save_png(results, folder / "race.png")
        told.append(f"Picture: {folder / 'race.png'}")
    return told


def drawing() -> ModuleType | None:
    """Return the module that draws, if matplotlib is installed."""
    try:
        from race import picture
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return None
    return picture


def html(
    results: list[Result],
    command: str,
    seed: int,
    device: torch.device,
    picture: ModuleType | None,
    timed: bool = True,
) -> str:
    """Return page.html with the results, without times for readers on another machine."""
    count = len(results[0].corrupted)
    columns = {name: what for name, what in COLUMNS.items() if timed or not name.startswith("ms")}
    versions = {
        "torchzero_clip": torchzero_clip.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    words = {
        "title": headline(results),
        "summary": summary(results),
        "count": count,
        "batches": "batch" if count == 1 else "batches",
        "steps": f"{len(results[0].norm):,}",
        "odds": f"{1 / CORRUPTED:.0f}",
        "clean": CLEAN,
        "batch": BATCH,
        "context": CONTEXT,
        "text": TEXT.name,
        "seed": seed,
        "device": device.type,
        "repeats": REPEATS if device.type == "cpu" else "",
        "command": escape(command),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "table": table(results, [*columns]),
        "meanings": "".join(f"<dt>{name}</dt><dd>{what}</dd>" for name, what in columns.items()),
        "cards": "\n".join(card(result, results, picture) for result in results),
        "light": picture.variables(0) if picture else "",
        "dark": picture.variables(1) if picture else "",
        "missing": "" if picture else '<p class="note">There are no pictures, '
        "because matplotlib is not installed.</p>",
    }  # fmt: skip
    return Template(PAGE.read_text(encoding="utf-8")).substitute(words)


def summary(results: list[Result]) -> str:
    """Return the results in two or three sentences."""
    alive = [result for result in results if result.survived]
    order = sorted(alive, key=lambda result: result.final_loss)
    lost = [escape(result.name) for result in results if not result.survived]
    sentences = []
    if order:
        best = order[0]
        sentences.append(
            f"<b>{escape(best.name)}</b> ended with the lowest loss, {best.final_loss:.3f}."
        )
    if len(order) > 1:
        others = ", ".join(f"{escape(r.name)} {r.final_loss:.3f}" for r in order[1:])
        sentences.append(f"The other losses are {others}.")
    if lost:
        sentences.append(f"Diverged: <b>{', '.join(lost)}</b>.")
    return " ".join(sentences)


def table(results: list[Result], columns: list[str]) -> str:
    head = "".join(f'<th scope="col">{title}</th>' for title in ["chain", *columns])
    rows = []
    for result in results:
        shown = cells(result)
        numbers = "".join(f"<td>{escape(shown[title])}</td>" for title in columns)
        name = f'<th scope="row">{escape(result.name)} {badge(result)}</th>'
        rows.append(f"<tr>{name}{numbers}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def card(result: Result, results: list[Result], picture: ModuleType | None) -> str:
    """Return the part about one chain: its text, picture, config, and a text by its model."""
    drawn = picture.svg(result, results) if picture else ""
    prompt, written = result.writes[: len(PROMPT)], result.writes[len(PROMPT) :]
    config = json.dumps(result.chain.to_config())
    return f"""<article>
<h3>{escape(result.name)} {badge(result)}</h3>
<p class="chain"><code>{escape(spell(result.chain))}</code></p>
{drawn}
<p class="writes"><span>{escape(prompt)}</span>{escape(written)}</p>
<details><summary>as JSON</summary><code>{escape(config)}</code></details>
</article>"""


def badge(result: Result) -> str:
    return (
        '<span class="badge kept">✓ survived</span>'
        if result.survived
        else '<span class="badge lost">✕ lost</span>'
    )
