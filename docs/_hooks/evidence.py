"""Fills pages from result files, while the docs are built.

A page asks with `<!-- atlas: table -->`, `troubles`, `settings` or `sentences`, or with
`<!-- replay: traces -->`, `defaults` or the name of a trace for a picture. The page of each rule in
the atlas gets its picture.
"""

import importlib
import re
import sys
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "benchmarks" / "results"
ASKED = re.compile(r"^<!-- (atlas|replay): (\w+) -->$", re.MULTILINE)
sys.path.insert(0, str(DOCS.parent))  # for the benchmarks


def on_page_markdown(markdown, page, **_):
    filled = ASKED.sub(lambda match: KINDS[match[1]](match[2]), markdown)
    source = page.file.src_uri
    if source.startswith("modules/") and source != "modules/index.md":
        filled += picture(Path(source).stem.replace("_", ""))
    return filled


def picture(stem):
    """The section of a rule's page, if the atlas has the rule."""
    report, (_, curves) = module("benchmarks.atlas.report"), atlas_results()
    name = {page.lower(): page for page in pages()}.get(stem)
    drawn = name and report.picture(curves, name)
    if not drawn:
        return ""
    text = "[The atlas](../../atlas.md) has the numbers for all rules, places and troubles."
    return f"\n\n## In the atlas\n\n{drawn}\n\n{text}\n"


def atlas(wanted):
    report, (rows, _) = module("benchmarks.atlas.report"), atlas_results()
    if wanted == "table":
        return report.table(rows, pages())
    if wanted == "sentences":
        return "\n".join(f"{i}. {text}" for i, text in enumerate(report.sentences(rows), 1))
    return getattr(report, wanted)()


def replay(wanted):
    report, rows = module("benchmarks.traces.report"), module("benchmarks.rows")
    lines = rows.read(RESULTS / "replay.csv", report.Line)
    if wanted in ("traces", "defaults"):
        return getattr(report, wanted)(lines)
    return report.picture(lines, wanted)


KINDS = {"atlas": atlas, "replay": replay}


@cache
def atlas_results():
    runs, rows = module("benchmarks.atlas.runs"), module("benchmarks.rows")
    return (
        rows.read(RESULTS / "atlas.csv", runs.Row),
        rows.read(RESULTS / "atlas_curves.csv", runs.Curve),
    )


@cache
def pages():
    """The addresses of the rules' pages, from the page of the atlas."""
    found = {page.stem.replace("_", ""): page for page in DOCS.glob("modules/*/*.md")}
    names = {entry.page for entry in module("benchmarks.atlas.rules").RULES.values()}
    return {
        name: f"../{found[name.lower()].relative_to(DOCS).with_suffix('').as_posix()}/"
        for name in sorted(names)
    }


def module(name):
    return importlib.import_module(name)
