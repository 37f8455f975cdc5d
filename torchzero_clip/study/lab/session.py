"""A session of the lab: the run that the page shows, and the answers to the page's requests."""

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
    LONG_WALK,
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
from torchzero_clip.study.table import increases
from torchzero_clip.study.trace import Trace

RUNS = Path(__file__).with_name("runs")
"""The folder of the recorded runs in an installed package."""
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
"""The folder of the recorded runs in a clone of the repository."""
FIRST_RUN = "language_trouble"
"""The recorded run that the page shows if the user passes no file."""
WALKS_KEPT = 8
"""The largest number of simulations that stay in memory."""


class LabSession:
    """The run that a page shows, and its simulations.

    Args:
        path: The file of the run. None shows one of the recorded runs.
        norms: The column of the norms. None chooses the likeliest column.
        follow: Whether another program is still writing the file. If so, the session reads the file
            again and again.
    """

    def __init__(
        self, path: Path | None = None, norms: str | None = None, follow: bool = False
    ) -> None:
        self._path = path
        self._norms = norms
        self._follow = follow
        self._lock = RLock()
        self.version = 0  # increases when the page shows another run
        self.trace: Trace | None = None
        self._title = ""
        self._notes: list[str] = []
        self._log: Log | None = None
        self._stamp: object = None  # the size and the time of the file when it was read
        self._walks: dict[tuple[str, ...], Walk] = {}
        if path is None:
            self.choose(FIRST_RUN)
        elif not follow:
            self._open(path.read_bytes(), path.name, norms)
        self.refresh()

    # ------------------------------------------------------------------ the run

    def take(self, contents: bytes, name: str) -> None:
        """Show the run in the contents of a file, and stop reading the previous file."""
        self._open(contents, name, None)
        self._follow = False

    def _open(self, contents: bytes, name: str, norms: str | None, growing: bool = False) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            log = parse(contents, name, growing)
            trace = Trace.from_log(log, norms)
        with self._lock:
            self._log = log
            self._title = name
            self._notes = [str(warning.message).removeprefix("Trace: ") for warning in caught]
            self._norms = log.choose(norms)
            self._begin(trace)

    def _begin(self, trace: Trace) -> None:
        """Show a trace. If the new trace begins with the old trace, keep the simulations."""
        old = self.trace
        self.trace = trace
        has_grown = False
        if old is not None and len(old) <= len(trace):
            has_grown = are_equal(old, trace.part(0, len(old)))
        if not has_grown:
            self.version += 1
            self._walks = {}

    def choose(self, run: str) -> None:
        """Show a recorded run."""
        files = recorded()
        if run not in files:
            raise ValueError(f"lab: the example run must be one of {[*files]}, got {run!r}")
        self.take(files[run].read_bytes(), run)

    def column(self, norms: str) -> None:
        """Show other norms of the same file."""
        if self._log is None:
            raise ValueError("lab: choose a run first")
        with self._lock:
            trace = Trace.from_log(self._log, norms)
            self._norms = norms
            self._begin(trace)

    def refresh(self) -> tuple[int, int]:
        """Read a growing file again, and return the version of the run and its number of steps."""
        path = self._path
        if self._follow and path is not None:
            try:
                status = path.stat()
                stamp = (status.st_size, status.st_mtime_ns)
                if stamp != self._stamp:
                    self._open(path.read_bytes(), path.name, self._norms, growing=True)
                    self._notes = []
                    self._stamp = stamp
            except (OSError, ValueError) as error:  # there is no file yet, or it has no steps yet
                if self.trace is None:
                    self._title = path.name
                    self._notes = [f"waiting: {error}"]
        return self.version, 0 if self.trace is None else len(self.trace)

    # ------------------------------------------------------------------ answers

    def run(self, start: int, version: int) -> dict[str, Any]:
        """Return all data about the run that the page shows.

        Args:
            start: The first step whose norms the page needs.
            version: The version of the run that the page shows.
        """
        with self._lock:
            trace = self.trace
            log = self._log
            answer: dict[str, Any] = {
                "title": self._title,
                "notes": self._notes,
                "version": self.version,
                "runs": [*recorded()],
                "follows": self._follow,
            }
            if trace is None or log is None:
                return {**answer, "steps": 0}
        start = start if version == self.version else 0
        has_no_gradient = ~trace.known.any(1)
        total = trace.total.masked_fill(has_no_gradient, math.nan)
        finite = rules.ordered(trace)
        answer["broken"] = len(total) - len(finite) - int(has_no_gradient.sum())
        if len(finite):
            for name, share in (("median", 0.5), ("high", 0.99), ("largest", 1.0)):
                answer[name] = finite[int(share * (len(finite) - 1))].item()
        if {"rounding/lost", "rounding/moving"} <= trace.logged.keys():
            share_lost = trace.logged["rounding/lost"]
            answer["lost"] = lost(share_lost, trace.logged["rounding/moving"])
        spikes = trace.spikes
        return {
            **answer,
            "steps": len(trace),
            "from": start,
            "norms": packed(total[start:]),
            "numbers": packed(trace.steps[start:]),
            "stride": trace.stride,
            "units": len(trace.names),
            "column": self._norms,
            "columns": list(dict.fromkeys([*log.norms, self._norms])),
            "spikes": [] if spikes is None else spikes.nonzero().flatten().tolist(),
            "marks": marks(log, start),
            "catalogue": [] if start else [repr(rule) for rule in rules.catalogue(trace)],
        }

    def rule(self, text: str, path: Sequence[str | int], value: str) -> dict[str, Any]:
        """Return all data about a rule that the page shows.

        Args:
            text: The rule.
            path: The path of the number to replace. With an empty path, the rule does not change.
            value: The new number.
        """
        rule = self._rule(text)
        trace = self._trace()
        if path:
            live = dict(rules.numbers(rule))
            if tuple(path) not in live:
                raise ValueError(f"lab: path must be one of {[*live]} for {rule!r}, got {path}")
            rule = rules.moved(rule, tuple(path), number(value))
        note = ""
        if len(trace.names) == 1 and rule.scope in (None, "layer"):
            note = (
                "This file has one norm per step, so the rule is applied to that norm here. In "
                f"training, this rule is applied to each {rule.scope or 'tensor'}. For one norm in "
                "training too, write dim='global'."
            )
        used = {"attach", *(type(part).__name__ for part in rule.walk())}
        imported = ", ".join(sorted(used, key=str.lower))
        return {
            "text": repr(rule),
            "chain": f"from torchzero_clip import {imported}\nattach(optimizer, {rule!r})",
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
        """Yield the effect of a rule, part by part. A long simulation begins with a preview.

        Args:
            text: The rule.
            path: The path of the number that the user is moving with a slider, or an empty path.
            start: The first step that the page needs.
            version: The version of the run that the page shows. The simulation ends if the run gets
                a new version.
            bad: The rows that are known to be bad.
        """
        trace = self._trace()
        rule = self._rule(text)
        walk = self._walk(rule, tuple(path))
        verdict = Verdict(bad)
        if not start and walk.ahead(trace) > LONG_WALK:
            yield previewed(preview(trace, rule), walk.ahead(trace))
        for begin, steps in walk.steps(trace, repr(rule)):
            if version != self.version:
                break
            end = begin + len(steps.left)
            verdict.add(torch.arange(begin, end), steps)
            if end > start:
                skip = max(start - begin, 0)
                yield {"from": begin + skip, **numbers(steps, skip)}
                yield {"summary": verdict.summary(), "steps": end, "seconds": walk.seconds(trace)}
        yield {"end": True}

    def _trace(self) -> Trace:
        if self.trace is None:
            raise ValueError("lab: the file has no steps yet")
        return self.trace

    def _rule(self, text: str) -> NormRule:
        """Return the rule in a text. Raise an error if the rule cannot be simulated on this run."""
        rule = read_rule(text)
        check([rule])
        rules.check_counts(rule)
        units(self._trace(), rule)
        return rule

    def _walk(self, rule: NormRule, path: tuple[str | int, ...]) -> Walk:
        """Return a simulation of this rule and of all positions of the slider that is moved."""
        with self._lock:
            for texts, walk in self._walks.items():
                if repr(rule) in texts:
                    return walk
            trace = self._trace()
            others: list[NormRule] = []
            for slider in rules.sliders(rule, trace):
                if slider.path == path:  # the nearest first, because there may not be room for all
                    current = slider.positions.index(slider.value)
                    nearest = sorted(
                        enumerate(slider.positions), key=lambda place: abs(place[0] - current)
                    )
                    others = [rules.moved(rule, path, value) for _, value in nearest]
            walk = Walk(together(rule, others, len(units(trace, rule)), len(trace)))
            self._walks[tuple(walk.texts)] = walk
            if len(self._walks) > WALKS_KEPT:
                del self._walks[next(iter(self._walks))]
            return walk


def marks(log: Log, start: int) -> list[tuple[int, str, float]]:
    """Return the rows with a step that a guard skipped, and the rows after a rollback.

    Args:
        log: The log of the run.
        start: The first row.

    Returns:
        For each mark, the row, the name of the column, and the value in the column. For a rollback,
        the value is the number of undone steps or of skipped batches.
    """
    columns, _ = log.columns(log.choose(None))
    marked: list[tuple[int, str, float]] = []
    for name, values in columns.items():
        kind = name.rpartition("/")[2]
        if kind == "skipped":  # the column counts skipped steps
            values = increases(values)
        if kind == "skipped" or name.startswith("recover/"):
            rows = [int(i) for i in (values > 0).nonzero()]
            marked += [(i, kind, values[i].item()) for i in rows if i >= start]
    return marked


def recorded() -> dict[str, Path]:
    """Return the files of the recorded runs, by name."""
    folders = [RUNS] if RUNS.is_dir() else [RESULTS / "traces", RESULTS / "troubles"]
    files = [path for folder in folders for path in sorted(folder.glob("*.csv.gz"))]
    return {path.name.partition(".")[0]: path for path in files}


def lost(share: Tensor, moving: Tensor) -> float:
    """Return the share of lost updates in all updates of a run. Rounding can lose updates.

    Args:
        share: The share of lost updates in each step.
        moving: The number of elements with an update in each step.
    """
    moving = moving.nan_to_num()
    return ((share.nan_to_num() * moving).sum() / moving.sum().clamp(min=1.0)).item()


def are_equal(a: Trace, b: Trace) -> bool:
    """Return whether two traces have the same norms."""
    if a.names != b.names or not torch.equal(a.known, b.known):
        return False
    return torch.equal(a.norms.nan_to_num(-1.0), b.norms.nan_to_num(-1.0))


def numbers(steps: Steps, skip: int = 0) -> dict[str, str]:
    """Return the effect of a rule in the form that the page reads.

    Args:
        steps: The effect of the rule on each step.
        skip: The number of steps to skip at the beginning.
    """
    return {name: packed(x[skip:]) for name, x in steps._asdict().items()}


def previewed(sample: Preview, ahead: int) -> dict[str, Any]:
    """Return a preview in the form that the page reads.

    Args:
        sample: The preview.
        ahead: The number of steps that will be simulated.
    """
    share = (sample.steps.clipped > 0).double().mean().item()
    return {
        "every": sample.every,
        "rows": packed(sample.rows),
        **numbers(sample.steps),
        "share": share,
        "seconds": ahead * sample.seconds,
    }


def packed(x: Tensor) -> str:
    """Return numbers in float64 (little-endian) as a base64 text."""
    values = array.array("d", x.tolist())
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def spelt(x: float | None) -> str:
    """Return a number as the page shows it. None is "none"."""
    return "none" if x is None else repr(x).removesuffix(".0")


def number(text: str) -> float | None:
    """Return the number in a text from the page. An empty text and "none" mean None."""
    try:
        return None if text.strip().lower() in ("", "none") else float(text)
    except ValueError:
        raise ValueError(f"lab: the value must be a number, got {text!r}") from None
