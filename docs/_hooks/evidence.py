"""Fills pages from result files, while the docs are built.

A page asks with `<!-- atlas: table -->`, `troubles`, `settings` or `sentences`, with
`<!-- suites: table -->` or `causes`, `<!-- clips: table -->` or `causes`, `<!-- waits: table -->`,
`<!-- matrices: table -->`, `<!-- moved: picture -->`, `<!-- recover: table -->`, with
`<!-- replay: traces -->`, `defaults`, `policy` or the name of a trace for a picture, or with
`<!-- guide: … -->` and a name that `python -m benchmarks.guide --table` prints, or `picture_` and a
trouble; with `<!-- averages: … -->` and a task; with `<!-- published: … -->` and a script of
examples/published; with `<!-- private: names -->` for names that torch calls its own. Within a
sentence

    <!-- effect: trouble | method | other -->         is a comparison of the guide,
    <!-- mean: task | method | other -->              one of averages of weights,
    <!-- cell: rule | place | trouble | column -->    a cell of the atlas,
    <!-- alarms: trace | family -->                   what a replay found,
    <!-- came: script | row … | column -->            a cell of a table of examples/published,
    <!-- seeds: script -->                            and of how many seeds it is.

The page of each rule in the atlas gets its picture; what `benchmarks.atlas.rules` reads of it, as
`<!-- atlas entry: ZClip | ZClip() -->`, is taken out.
"""

import importlib
import json
import re
import sys
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[1]
WORDS = {3: "Three", 10: "Ten"}
RESULTS = DOCS.parent / "benchmarks" / "results"
ASKED = re.compile(
    r"^<!-- (atlas|replay|guide|averages|suites|clips|waits|matrices|moved|private|published"
    r"|recover): (\w+) -->$",
    re.MULTILINE,
)
NUMBER = re.compile(r"<!-- (effect|mean|cell|alarms|came|seeds): (.+?) -->")
ENTRY = re.compile(r"^<!-- atlas entry: .+ -->\n+", re.MULTILINE)
sys.path.insert(0, str(DOCS.parent))  # for the benchmarks


def on_page_markdown(markdown, page, **_):
    filled = ENTRY.sub("", markdown)
    filled = ASKED.sub(lambda match: KINDS[match[1]](match[2]), filled)
    filled = NUMBER.sub(lambda match: NUMBERS[match[1]](*match[2].split(" | ")), filled)
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
    report, lines = module("benchmarks.traces.report"), replays()
    if wanted in ("traces", "defaults", "policy"):
        return getattr(report, wanted)(lines)
    return report.picture(lines, wanted)


def recover(wanted):
    """What came of the runs of examples/recover.py."""
    found = json.loads((RESULTS / "recover.json").read_text(encoding="utf-8"))
    rows = ["| | loss at the end | steps | ways back | batches left out |", "|---|--:|--:|--:|--:|"]
    for name, run in found["runs"].items():
        step, loss = run["losses"][-1]
        out = sum([back[3] for back in run["backs"]])
        rows.append(f"| {name} | {loss:.2f} | {step} | {len(run['backs'])} | {out} |")
    return "\n".join(rows)


def guide(wanted):
    report, drawing = module("benchmarks.guide.report"), module("benchmarks.guide.picture")
    rows = report.results()
    if wanted.startswith("picture_"):
        return drawing.picture(rows, wanted.removeprefix("picture_").replace("_", " "))
    return report.tables(rows)[wanted]


def averages(wanted):
    study = module("benchmarks.studies.averaged")
    return study.tables(study.results())[wanted]


def suites(wanted):
    scripts = module("scripts.suites")
    return getattr(scripts, wanted)(module("benchmarks.rows").read(scripts.RESULTS, scripts.Row))


def clips(wanted):
    return getattr(module("benchmarks.studies.clips"), wanted)()


def waits(wanted):
    return getattr(module("benchmarks.studies.waits"), wanted)()


def matrices(wanted):
    return getattr(module("benchmarks.studies.matrices"), wanted)()


def moved(wanted):
    return getattr(module("benchmarks.studies.moved_weights"), wanted)()


def published(wanted):
    found = papers(wanted)
    opened = "<details markdown>\n<summary>Rates, figures and intervals</summary>"
    parts = found.study.picture(found), found.circumstances(), opened, found.table(), "</details>"
    return "\n\n".join(parts)


def came(name, *words):
    return papers(name).cell(*words)


def seeds(name):
    return f"{WORDS.get(papers(name).seeds, papers(name).seeds)} seeds"


def effect(*wanted):
    report = module("benchmarks.guide.report")
    return str(report.compare(report.results())[wanted])


def mean(*wanted):
    study = module("benchmarks.studies.averaged")
    return str(study.compared(study.results())[wanted])


def cell(rule, place, trouble, column):
    report, (rows, _) = module("benchmarks.atlas.report"), atlas_results()
    return report.cells(report.find(rows, rule, place, trouble))[column]


def alarms(trace, family):
    report = module("benchmarks.traces.report")
    (line,) = [
        line
        for line in replays()
        if (line.trace, line.family, line.sensitivity) == (trace, family, report.DEFAULTS[family])
    ]
    return f"{report.percent(line.false)} false alarms, {report.percent(line.missed)} missed"


def private(wanted):
    """The table of the names that torch calls its own."""
    names = module("torchzero_clip.core.private").NAMES
    rows = [f"| `{name}` | {told.use} | {told.without} |" for name, told in names.items()]
    return "\n".join(["| name | what it is for | without it |", "|---|---|---|", *rows])


NUMBERS = {
    "effect": effect,
    "mean": mean,
    "cell": cell,
    "alarms": alarms,
    "came": came,
    "seeds": seeds,
}
KINDS = {
    "atlas": atlas,
    "replay": replay,
    "guide": guide,
    "averages": averages,
    "suites": suites,
    "clips": clips,
    "waits": waits,
    "matrices": matrices,
    "moved": moved,
    "published": published,
    "private": private,
    "recover": recover,
}


@cache
def papers(name):
    return module("examples.published.study").results(name)


@cache
def atlas_results():
    runs, rows = module("benchmarks.atlas.runs"), module("benchmarks.rows")
    return (
        rows.read(RESULTS / "atlas.csv", runs.Row),
        rows.read(RESULTS / "atlas_curves.csv", runs.Curve),
    )


@cache
def replays():
    line = module("benchmarks.traces.report").Line
    return module("benchmarks.rows").read(RESULTS / "replay.csv", line)


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
