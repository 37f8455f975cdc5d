"""A session of the lab: the run that is looked at, and the answers to what its page asks."""

from __future__ import annotations

import array
import base64
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import NormRule
from torchzero_clip.study.lab import rules
from torchzero_clip.study.lab.simulations import (
    LONG,
    Preview,
    Steps,
    Verdict,
    Walk,
    preview,
    together,
)
from torchzero_clip.study.logs import Log, parse
from torchzero_clip.study.simulate_command import rule as read_rule
from torchzero_clip.study.simulating import check, units
from torchzero_clip.study.trace import Trace

RUNS = Path(__file__).with_name("runs")  # in an installation
CLONE = Path(__file__).parents[3] / "benchmarks" / "results"
FIRST = "language_trouble"  # of the recorded runs, where nothing else was asked for
KEPT = 8  # walks


class LabSession:
    """What one page asks of one run.

    Args:
        path: The file of a run, or None for one of those recorded.
        norms: The column of its norms.
        follow: Look again whether the file has grown.
    """

    def __init__(
        self, path: Path | None = None, norms: str | None = None, follow: bool = False
    ) -> None:
        self._path, self._norms, self._follow = path, norms, follow
        self._lock = RLock()
        self.version = 0
        self.trace: Trace | None = None
        self._title, self._notes = "", list[str]()
        self._log: Log | None = None
        self._stamp: object = None
        self._walks: dict[tuple[str, ...], Walk] = {}
        if path is None:
            self.choose(FIRST)
        elif not follow:
            self._open(path.read_bytes(), path.name, norms)
        self.refresh()

    # ------------------------------------------------------------------ the run

    def take(self, contents: bytes, name: str) -> None:
        """Take up the run in a file with these contents; the one before is no longer followed."""
        self._open(contents, name, None)
        self._follow = False

    def _open(self, contents: bytes, name: str, norms: str | None, growing: bool = False) -> None:
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            log = parse(contents, name, growing)
            trace = Trace.from_log(log, norms)
        with self._lock:
            told = [str(note.message).removeprefix("Trace: ") for note in notes]
            self._log, self._title, self._notes = log, name, told
            self._norms = log.choose(norms)
            self._begin(trace)

    def _begin(self, trace: Trace) -> None:
        old, self.trace = self.trace, trace
        before = 0 if old is None else len(old)
        begun = trace.part(0, before) if 0 < before <= len(trace) else None
        grown = old is not None and begun is not None and alike(old, begun)
        if not grown:
            self.version += 1
            self._walks = {}

    def choose(self, run: str) -> None:
        """Take up a recorded run."""
        files = recorded()
        if run not in files:
            raise ValueError(f"lab: there is no recorded run {run!r}; there are {[*files]}")
        self.take(files[run].read_bytes(), run)

    def column(self, norms: str) -> None:
        """Look at other norms of the file."""
        if self._log is None:
            raise ValueError("lab: there is no file yet")
        with self._lock:
            trace = Trace.from_log(self._log, norms)
            self._norms = norms
            self._begin(trace)

    def refresh(self) -> tuple[int, int]:
        """Look again where a run is followed; the version of the run, and its steps."""
        path = self._path
        if self._follow and path is not None:
            try:
                status = path.stat()
                stamp = status.st_size, status.st_mtime_ns
                if stamp != self._stamp:
                    self._open(path.read_bytes(), path.name, self._norms, growing=True)
                    self._notes, self._stamp = [], stamp
            except (OSError, ValueError) as error:  # it is not there yet, or has no steps yet
                if self.trace is None:
                    self._title, self._notes = path.name, [f"waiting: {error}"]
        return self.version, 0 if self.trace is None else len(self.trace)

    # ------------------------------------------------------------------ answers

    def run(self, start: int, version: int) -> dict[str, Any]:
        """All that the page shows of the run, with the norms from a step on."""
        with self._lock:
            trace, log = self.trace, self._log
            told: dict[str, Any] = {"title": self._title, "notes": self._notes}
            told["version"] = self.version
            told["runs"] = [*recorded()]
            told["follows"] = self._follow
            if trace is None or log is None:
                return {**told, "steps": 0}
        start = start if version == self.version else 0
        nothing = ~trace.known.any(1)
        total = trace.total.masked_fill(nothing, math.nan)
        good = rules.ordered(trace)
        spikes = [] if trace.spikes is None else trace.spikes.nonzero().flatten().tolist()
        facts: dict[str, Any] = {"broken": len(total) - len(good) - int(nothing.sum())}
        if len(good):
            places = {"median": 0.5, "high": 0.99, "largest": 1.0}
            facts |= {name: good[int(q * (len(good) - 1))].item() for name, q in places.items()}
        if {"rounding/lost", "rounding/moving"} <= trace.logged.keys():
            facts["lost"] = lost(trace.logged["rounding/lost"], trace.logged["rounding/moving"])
        catalogue = [] if start else [repr(rule) for rule in rules.catalogue(trace)]
        return {
            **told,
            **facts,
            "steps": len(trace),
            "from": start,
            "norms": packed(total[start:]),
            "numbers": packed(trace.steps[start:]),
            "stride": trace.stride,
            "units": len(trace.names),
            "column": self._norms,
            "columns": list(dict.fromkeys([*log.norms, self._norms])),
            "spikes": spikes,
            "marks": marks(log, start),
            "catalogue": catalogue,
        }

    def rule(self, text: str, path: Sequence[str | int], value: str) -> dict[str, Any]:
        """A rule as the page shows it, perhaps with another number in one place."""
        rule, trace = self._rule(text), self._trace()
        if path:
            live = dict(rules.numbers(rule))
            if tuple(path) not in live:
                raise ValueError(f"lab: {rule!r} has no live number at {path}; it has {[*live]}")
            rule = rules.moved(rule, tuple(path), number(value))
        note = ""
        if len(trace.names) == 1 and rule.scope in (None, "layer"):
            note = (
                "This run has one norm. In a training this rule acts on the norm of each "
                f"{rule.scope or 'tensor'}: for what you see here, write dim='global'."
            )
        public = sorted({"attach", *(type(one).__name__ for one in rule.walk())}, key=str.lower)
        return {
            "text": repr(rule),
            "chain": f"from torchzero_clip import {', '.join(public)}\nattach(optimizer, {rule!r})",
            "note": note,
            "sliders": [
                {
                    "path": slider.path,
                    "name": slider.name,
                    "value": spelt(slider.value),
                    "positions": [spelt(x) for x in slider.positions],
                }
                for slider in rules.sliders(rule, trace)
            ],
        }

    def simulate(
        self, text: str, path: Sequence[str | int], start: int, version: int, bad: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """What a rule would have done, part by part; a preview first where all of it takes long."""
        trace, rule = self._trace(), self._rule(text)
        walk, verdict = self._walk(rule, tuple(path)), Verdict(bad)
        if not start and walk.ahead(trace) > LONG:
            yield previewed(preview(trace, rule), walk.ahead(trace))
        for begin, steps in walk.steps(trace, repr(rule), 0):
            if version != self.version:
                break
            end = begin + len(steps.left)
            verdict.add(torch.arange(begin, end), steps)
            if end > start:
                skip = max(start - begin, 0)
                yield {"from": begin + skip, **numbers(steps, skip)}
                yield {"summary": verdict.told(), "steps": end, "seconds": walk.seconds(trace)}
        yield {"end": True}

    def _trace(self) -> Trace:
        if self.trace is None:
            raise ValueError("lab: the run has no steps yet")
        return self.trace

    def _rule(self, text: str) -> NormRule:
        rule = read_rule(text)
        check([rule])
        rules.check_counts(rule)
        units(self._trace(), rule)
        return rule

    def _walk(self, rule: NormRule, path: tuple[str | int, ...]) -> Walk:
        """A walk that has this rule: where a slider moves it, with all its positions."""
        with self._lock:
            for texts, walk in self._walks.items():
                if repr(rule) in texts:
                    return walk
            trace, others = self._trace(), []
            for slider in rules.sliders(rule, trace):
                if slider.path == path:  # the nearest first, if there is no room for all
                    own = slider.positions.index(slider.value)
                    order = sorted(enumerate(slider.positions), key=lambda x: abs(x[0] - own))
                    others = [rules.moved(rule, path, value) for _, value in order]
            walk = Walk(together(rule, others, len(units(trace, rule)), len(trace)))
            self._walks[tuple(walk.texts)] = walk
            if len(self._walks) > KEPT:
                del self._walks[next(iter(self._walks))]
            return walk


def marks(log: Log, start: int) -> list[tuple[int, str, float]]:
    """The rows from one on that a guard skipped or that lie behind a way back, and how far."""
    columns, _ = log.columns(log.choose(None))
    found = list[tuple[int, str, float]]()
    for name, x in columns.items():
        what = name.rpartition("/")[2]
        fresh = x.nan_to_num(0).cummax(0).values.diff(prepend=x.new_zeros(1))
        x = fresh if what == "skipped" else x
        if what == "skipped" or name.startswith("recover/"):
            found += [(int(i), what, x[i].item()) for i in (x > 0).nonzero() if i >= start]
    return found


def recorded() -> dict[str, Path]:
    """The recorded runs by their names."""
    folders = [RUNS] if RUNS.is_dir() else [CLONE / "traces", CLONE / "troubles"]
    files = [path for folder in folders for path in sorted(folder.glob("*.csv.gz"))]
    return {path.name.partition(".")[0]: path for path in files}


def lost(share: Tensor, moving: Tensor) -> float:
    """Of all updates of a run the share that rounding lost."""
    moves = moving.nan_to_num()
    return ((share.nan_to_num() * moves).sum() / moves.sum().clamp(min=1.0)).item()


def alike(some: Trace, other: Trace) -> bool:
    """Whether two traces are of the same norms."""
    same = some.names == other.names and torch.equal(some.known, other.known)
    return same and torch.equal(some.norms.nan_to_num(-1.0), other.norms.nan_to_num(-1.0))


def numbers(steps: Steps, skip: int = 0) -> dict[str, str]:
    """What a rule would have done, for a page."""
    return {name: packed(x[skip:]) for name, x in steps._asdict().items()}


def previewed(some: Preview, ahead: int) -> dict[str, Any]:
    """A preview for a page: the share of its rows that are clipped, and when all will be there."""
    share = (some.steps.clipped > 0).double().mean().item()
    told = {"every": some.every, "rows": packed(some.rows), **numbers(some.steps)}
    return {**told, "share": share, "seconds": ahead * some.seconds}


def packed(x: Tensor) -> str:
    """Numbers in float64, least byte first, as text."""
    made = array.array("d", x.tolist())
    if sys.byteorder == "big":
        made.byteswap()
    return base64.b64encode(made.tobytes()).decode()


def spelt(x: float | None) -> str:
    """A number for a page; "none" for None."""
    return "none" if x is None else repr(x).removesuffix(".0")


def number(text: str) -> float | None:
    """The number that a page gave."""
    try:
        return None if text.strip().lower() in ("", "none") else float(text)
    except ValueError:
        raise ValueError(f"lab: wanted is a number, got {text!r}") from None
