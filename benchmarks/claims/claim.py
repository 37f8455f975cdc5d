"""What a claim is, and the comparisons of all studies by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.atlas.rules import BEFORE_ADAM
from benchmarks.atlas.runs import Row
from benchmarks.guide import report
from benchmarks.guide.comparison import Comparison, signed
from benchmarks.rows import read
from benchmarks.studies import averaged
from benchmarks.traces.judge import Line
from benchmarks.traces.report import DEFAULTS
from examples.published import study

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = Path(__file__).parents[1] / "results"
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
COMPARED = re.compile(r"<!-- (effect|mean|came): (.+?) -->")
SOURCES = {"effect": "guide", "mean": "averages"}
LINK = re.compile(r"\[([^\[\]]*)\]\([^()]*(?:\([^()]*\))?[^()]*\)")
GAP = "…"
NOT_BETTER = "not significantly better"
NOT_WORSE = "not significantly worse"


@dataclass(frozen=True)
class Compared:
    """A comparison with its test, and the verdict that the sentence gives.

    Attributes:
        source: "guide", "averages", or the name of a script of examples/published.
        key: The comparison, as its source names it.
        says: A verdict, NOT_BETTER or NOT_WORSE; an empty text if a script writes the verdict
            into the sentence. These two can come from a study that is too small to see a
            difference, so their sentences must contain "significant".
    """

    source: str
    key: tuple[str, ...]
    says: str = ""

    @property
    def comparison(self) -> Comparison:
        return comparisons(self.source)[self.key]

    def holds(self) -> bool:
        verdict = self.comparison.verdict
        if self.says == NOT_BETTER:
            return verdict != "better"
        if self.says == NOT_WORSE:
            return verdict != "worse"
        return self.says in ("", verdict)

    def __str__(self) -> str:
        x = self.comparison
        words = [f"{self.source}: {'; '.join(self.key)}", f"{x.pairs} seeds"]
        if x.failed or x.other_failed:
            words.append(x.failures)
        words += [
            f"shift {signed(x.shift)} ({signed(x.low)} to {signed(x.high)})",
            f"p = {x.p:.2g}, {x.corrected:.2g} after Holm over {x.family}",
        ]
        said = f"; the page says {self.says}" if self.says else ""
        return f"{', '.join(words)}: {x.verdict}{said}"


@dataclass(frozen=True)
class Seen:
    """Something that a file shows without a test.

    Attributes:
        what: What it is.
        shown: Whether the file shows it.
    """

    what: str
    shown: Callable[[], bool]

    def holds(self) -> bool:
        return self.shown()

    def __str__(self) -> str:
        return f"without a test: {self.what}"


@dataclass(frozen=True)
class Claim:
    """A sentence of a page and what it rests on.

    Attributes:
        page: A file in docs.
        sentence: A part of it as `plain` has it; `…` stands for anything.
        rests: What it rests on.
    """

    page: str
    sentence: str
    rests: Sequence[Compared | Seen]

    def found(self) -> re.Match[str] | None:
        """Return where the page has the sentence."""
        parts = [re.escape(part) for part in self.sentence.split(GAP)]
        return re.search(".{0,200}?".join(parts), text_of(self.page))


def guide(says: str, trouble: str, method: str, other: str) -> Compared:
    """Return a comparison of benchmarks/results/guide.csv."""
    return Compared("guide", (trouble, method, other), says)


def averages(says: str, task: str, method: str, other: str) -> Compared:
    """Return a comparison of benchmarks/results/averaged.csv."""
    return Compared("averages", (task, method, other), says)


def atlas(rule: str, trouble: str, place: str = BEFORE_ADAM) -> Row:
    """Return what a rule does in the atlas, whose gradients have fixed seeds."""
    rows = read(RESULTS / "atlas.csv", Row)
    return next(x for x in rows if (x.rule, x.trouble, x.place) == (rule, trouble, place))


def missed(trace: str, family: str) -> float:
    """Return the share of spikes of a recorded run that a rule misses."""
    return float(simulated(trace, family).missed)


def wrongly_clipped(trace: str, family: str) -> float:
    """Return the share of good steps of a recorded run that a rule clips."""
    return float(simulated(trace, family).false)


def simulated(trace: str, family: str) -> Line:
    """Return the simulation of a rule on a recorded run, at the sensitivity that pages show."""
    (line,) = [
        x
        for x in read(RESULTS / "simulate.csv", Line)
        if (x.trace, x.family, x.sensitivity) == (trace, family, DEFAULTS[family])
    ]
    return line


@cache
def comparisons(source: str) -> Mapping[tuple[str, ...], Comparison]:
    """Return the comparisons of a study by name."""
    if source == "guide":
        return report.compare(report.results())
    if source == "averages":
        return averaged.compared(averaged.results())
    return study.results(source).comparisons


@cache
def text_of(page: str) -> str:
    """Return the words of a page."""
    return plain((DOCS / page).read_text(encoding="utf-8"))


def plain(text: str) -> str:
    """Return Markdown without comments, addresses of links and emphasis, with single spaces."""
    words = LINK.sub(r"\1", COMMENT.sub("", text)).replace("*", "")
    return " ".join(words.split())


def marked(page: str) -> list[Compared]:
    """Return the comparisons whose verdict a script writes into the page."""
    found = []
    for kind, words in COMPARED.findall((DOCS / page).read_text(encoding="utf-8")):
        key = tuple(words.split("; "))
        if kind == "came":
            source, key = key[0], of_cell(key[0], key[1:])
        else:
            source = SOURCES[kind]
        if key:
            found.append(Compared(source, key))
    return list(dict.fromkeys(found))


def of_cell(name: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the comparison that a cell of a table shows; nothing if it shows a number."""
    made = comparisons(name)
    if words in made:
        return words
    *row, column = words
    if not column.startswith("against "):
        return ()
    *case, method = row
    return (*(case or [""]), method, column.removeprefix("against "))
