"""Walks: simulations that go as far as somebody asks, and are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import NormRule
from torchzero_clip.study.simulating import Rerun, Simulation, kinds
from torchzero_clip.study.trace import Trace, norm_of_all

PART, QUICK = 1000, 2**15  # steps that are answered together; of a rule without memory
LONG, THIN = 20_000, 1000  # steps that nobody waits for, and of how many there is a preview
WIDEST = 4096  # units of all rules that walk together
MOST = 2**20  # steps of all of them, which are kept
ROOM = 2**26  # numbers that all of them remember


class Steps(NamedTuple):
    """What a rule would have done, a number a step."""

    limit: Tensor
    """The norm that everything together might have; NaN where there was no gradient."""
    left: Tensor
    """The norm that was left of everything."""
    clipped: Tensor
    """How many units were clipped."""


class Walk:
    """Rules of one kind on their way through a run, which may grow.

    Where rules differ in a number that a slider moves they walk at once, which costs little more
    than one of them: the next position of the slider is there before it is asked for.
    """

    def __init__(self, rules: Sequence[NormRule]) -> None:
        self.texts = [repr(rule) for rule in rules]
        self._rerun, self._lock = Rerun(rules), Lock()
        self._parts: list[list[Steps]] = []
        self._ends = [0]
        self._remembers = bool(rules[0].init_unit())
        self._seconds = 0.0  # that it has walked

    def ahead(self, trace: Trace) -> int:
        """How many steps it has still to walk, one after the other."""
        return max(0, len(trace) - self._ends[-1]) if self._remembers else 0

    def seconds(self, trace: Trace) -> float:
        """How long that will take, if it goes on as it went."""
        return self._seconds * self.ahead(trace) / max(1, self._ends[-1])

    def steps(self, trace: Trace, text: str, start: int) -> Iterator[tuple[int, Steps]]:
        """The steps of a rule from this one on, part by part, each with where it begins."""
        place, i = self.texts.index(text), 0
        while True:
            with self._lock:  # another drag may have gone on already
                while i >= len(self._parts):
                    if self._ends[-1] >= len(trace):
                        return
                    self._go(trace)
            begin, end = self._ends[i], self._ends[i + 1]
            if end > start:
                skip = max(start - begin, 0)
                yield begin + skip, Steps(*[x[skip:] for x in self._parts[i][place]])
            i += 1

    def _go(self, trace: Trace) -> None:
        since, begin = time.perf_counter(), self._ends[-1]
        end = min(begin + (PART if self._remembers else QUICK), len(trace))
        part = trace.part(begin, end)
        made = self._rerun.take(part)
        self._parts.append([summed(part, one) for one in made])
        self._ends.append(end)
        self._seconds += time.perf_counter() - since


class Preview(NamedTuple):
    """What a rule makes of one row in so many, as if these were all."""

    every: int
    rows: Tensor
    steps: Steps
    seconds: float
    """How long a step took."""


def preview(trace: Trace, rule: NormRule) -> Preview:
    """What a rule makes of rows from all of a run: of so many that follow each other one by chance.

    What comes back at every thousandth step is then seen neither always nor never.
    """
    every = -(-len(trace) // THIN)
    first = torch.arange(0, len(trace), every)
    chance = torch.randint(every, first.shape, generator=torch.Generator().manual_seed(0))
    rows = (first + chance).clamp(max=len(trace) - 1)
    thin = Trace(trace.norms[rows], trace.names, trace.known[rows], steps=trace.steps[rows])
    walk = Walk([rule])
    parts = [steps for _, steps in walk.steps(thin, repr(rule), 0)]
    return Preview(every, rows, joined(parts), walk._seconds / len(rows))


def joined(parts: Sequence[Steps]) -> Steps:
    """Parts that follow each other as one."""
    return Steps(*map(torch.cat, zip(*parts, strict=True)))


def summed(part: Trace, made: dict[str, Tensor]) -> Steps:
    """All units of a rule as one."""
    done = Simulation(part, {"": made}, {})
    limits = made["limit"].nan_to_num(0.0, posinf=math.inf)
    limit = norm_of_all(limits)
    nothing = made["norm"].isnan().all(1)
    return Steps(limit.masked_fill(nothing, math.nan), done.left[:, 0], made["clipped"].sum(1))


class Verdict:
    """The shares of steps clipped, of false alarms and of missed bad steps, and what was left.

    Args:
        bad: The rows that are known to be bad.
    """

    def __init__(self, bad: Sequence[int]) -> None:
        self._bad = torch.tensor(sorted(set(bad)), dtype=torch.int64)
        self._steps, self._clipped = [0, 0], [0, 0]  # good ones, and bad ones
        self._largest = 0.0

    def add(self, rows: Tensor, steps: Steps) -> None:
        """Judge more rows."""
        bad, clipped = torch.isin(rows, self._bad), steps.clipped > 0
        for kind, those in enumerate((~bad, bad)):
            self._steps[kind] += int(those.sum())
            self._clipped[kind] += int((those & clipped).sum())
        self._largest = max(self._largest, steps.left.max().item())

    def told(self) -> dict[str, float | str | None]:
        """The numbers for a page; None where there was no step of a kind."""
        (good, bad), (false, caught) = self._steps, self._clipped
        return {
            "clipped": (false + caught) / (good + bad),
            "largest": self._largest if math.isfinite(self._largest) else "infinite",
            "false": false / good if good else None,
            "missed": 1 - caught / bad if bad else None,
        }


def judged(bad: Sequence[int], steps: Steps) -> dict[str, float | str | None]:
    """The verdict on a run from its first step on."""
    verdict = Verdict(bad)
    verdict.add(torch.arange(len(steps.left)), steps)
    return verdict.told()


def together(rule: NormRule, others: Sequence[NormRule], units: int, steps: int) -> list[NormRule]:
    """The rule, and those of the others that can walk with it."""
    if not remembered(rule):
        return [rule]
    size = units * remembered(rule)
    if size > ROOM:
        raise ValueError(
            f"lab: {rule!r} remembers {size:,} numbers of this run, and here is room for "
            f"{ROOM:,}: let it look back less far"
        )
    unlike = {repr(other): other for other in others if repr(other) != repr(rule)}
    (alike, *_) = kinds([rule, *unlike.values()])
    most = max(1, min(WIDEST // units, MOST // steps, ROOM // size))
    return alike[:most]


def remembered(rule: NormRule) -> int:
    """How many numbers a rule remembers of each unit."""
    return sum(torch.as_tensor(value).numel() for value in rule.init_unit().values())
