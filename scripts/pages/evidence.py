"""What result files say, as the numbers, tables and figures of pages."""

import importlib
import json
import statistics
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
WORDS = {3: "Three", 10: "Ten", 20: "Twenty"}
RESULTS = DOCS.parent / "benchmarks" / "results"


def atlas(wanted):
    report, (rows, _) = module("benchmarks.atlas.report"), atlas_results()
    if wanted == "table":
        return report.first_table(rows, pages())
    if wanted == "sentences":
        return "\n".join(f"{i}. {text}" for i, text in enumerate(report.sentences(rows), 1))
    return getattr(report, wanted)()


def atlas_table():
    """All results, as the built page shows them; links are those of its address."""
    rows, _ = atlas_results()
    links = {name: f"../{page.removesuffix('.md')}/" for name, page in pages().items()}
    return module("benchmarks.atlas.report").table(rows, links)


def simulate(wanted):
    report, lines = module("benchmarks.traces.report"), simulations()
    if wanted in ("traces", "defaults", "policy"):
        return getattr(report, wanted)(lines)
    return report.picture(lines, wanted)


def race(chain, rate):
    """The loss of a chain of the demo, the median of the seeds with the least and the most."""
    study = module("benchmarks.studies.race")
    return study.told(study.results(), chain, float(rate))


def race_table():
    study = module("benchmarks.studies.race")
    return study.table(study.results())


def recover(wanted):
    """What came of the runs of examples/recover.py."""
    found = json.loads((RESULTS / "recover.json").read_text(encoding="utf-8"))
    rows = ["| | loss at the end | steps | rollbacks | batches left out |", "|---|--:|--:|--:|--:|"]
    for name, run in found["runs"].items():
        step, loss = run["losses"][-1]
        out = sum([back[3] for back in run["backs"]])
        rows.append(f"| {name} | {loss:.2f} | {step} | {len(run['backs'])} | {out} |")
    return "\n".join(rows)


def guide(wanted):
    report, drawing = module("benchmarks.guide.report"), module("benchmarks.guide.picture")
    rows = report.results()
    if wanted.startswith("picture_"):
        troubles = {report.named(trouble): trouble for trouble in report.CASES}
        return drawing.picture(rows, troubles[wanted.removeprefix("picture_")])
    return guide_tables()[wanted]


@cache
def guide_tables():
    report = module("benchmarks.guide.report")
    return report.tables(report.results())


def averages(wanted):
    return averaged_tables()[wanted]


@cache
def averaged_tables():
    study = module("benchmarks.studies.averaged")
    return study.tables(study.results())


@cache
def averaged_comparisons():
    study = module("benchmarks.studies.averaged")
    return study.compared(study.results())


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
    return str(guide_comparison(*wanted))


def equal(*wanted):
    """In how many pairs of seeds two methods have the same loss to the last digit."""
    found = guide_comparison(*wanted)
    return f"{found.equal} of {found.pairs}"


def guide_comparison(*wanted):
    report = module("benchmarks.guide.report")
    return report.compare(report.results())[wanted]


def mean(*wanted):
    return str(averaged_comparisons()[wanted])


def cell(rule, place, trouble, column):
    report, (rows, _) = module("benchmarks.atlas.report"), atlas_results()
    return report.cells(report.find(rows, rule, place, trouble))[column]


def alarms(trace, family):
    report = module("benchmarks.traces.report")
    (line,) = [
        line
        for line in simulations()
        if (line.trace, line.family, line.sensitivity) == (trace, family, report.DEFAULTS[family])
    ]
    return (
        f"{report.percent(line.false)} false alarms and {report.percent(line.missed)} missed spikes"
    )


def raced(table, decimals, *races):
    """Return the ratio of a race, or the least and greatest of several or of a whole table."""
    found = module("benchmarks.printed").ratios(table, races)
    ends = [f"{end:.{decimals}f}" for end in (min(found), max(found))]
    return " to ".join(dict.fromkeys(ends))


def printed(table, row, column):
    """Return a cell of a table that a benchmark printed as Markdown."""
    return module("benchmarks.printed").cell(table, row, column)


def printed_table(name):
    """Return a table that a benchmark printed as Markdown."""
    return "\n".join(module("benchmarks.printed").markdown(name))


def norm_of(trace, statistic):
    """Return the median or the smallest global norm of a recorded run."""
    norms = module("benchmarks.traces.__main__").load(trace).total.tolist()
    value = {"median": statistics.median, "smallest": min}[statistic](norms)
    return f"{value:.2g}"


def verdicts(table):
    """Return how many lines of a table meet their bar, of how many that have one."""
    met, missed = module("benchmarks.printed").verdicts(table)
    return f"{met} of {met + missed}"


def private(wanted):
    """Return the table of the private names of torch, and of those that a version may not have."""
    private = module("torchzero_clip.core.torch_private")
    rows = [f"| `{name}` | {use} |" for name, use in private.NAMES.items()]
    rows += ["", "| name that a supported version may not have | what happens |", "|---|---|"]
    rows += [f"| `{name}` | {text} |" for name, text in private.WITHOUT.items()]
    return "\n".join(["| name | use |", "|---|---|", *rows])


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
def simulations():
    line = module("benchmarks.traces.report").Line
    return module("benchmarks.rows").read(RESULTS / "simulate.csv", line)


@cache
def pages():
    """The pages of rules by their names there, from the folder of the pages."""
    found = {page.stem.replace("_", ""): page for page in DOCS.glob("modules/*/*.md")}
    names = {entry.page for entry in module("benchmarks.atlas.rules").RULES.values()}
    return {name: found[name.lower()].relative_to(DOCS).as_posix() for name in sorted(names)}


def atlas_picture(name):
    """The picture of a rule in the atlas."""
    report, (_, curves) = module("benchmarks.atlas.report"), atlas_results()
    text = "[The atlas](../../atlas.md) has the numbers for all rules, places and troubles."
    return f"{report.picture(curves, name)}\n\n{text}"


def module(name):
    return importlib.import_module(name)
