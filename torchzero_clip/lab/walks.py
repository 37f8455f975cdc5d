"""Walks: replays that go as far as somebody asks, and are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import NormRule
from torchzero_clip.replaying import Replay, Rerun, kinds
from torchzero_clip.trace import Trace

PART = 1000  # steps that are answered together
WIDEST = 4096  # units of all rules that walk together
MOST = 2**20  # steps of all of them, which are kept


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
        self._length = PART if rules[0].init_unit() else None  # else all steps are as one

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
        begin = self._ends[-1]
        end = len(trace) if self._length is None else min(begin + self._length, len(trace))
        part = trace.part(begin, end)
        made = self._rerun.take(part)
        self._parts.append([summed(part, one) for one in made])
        self._ends.append(end)


def summed(part: Trace, made: dict[str, Tensor]) -> Steps:
    """All units of a rule as one."""
    done = Replay(part, {"": made}, {})
    limits = made["limit"].nan_to_num(0.0, posinf=math.inf)
    limit = torch.linalg.vector_norm(limits, dim=1)
    nothing = made["norm"].isnan().all(1)
    return Steps(limit.masked_fill(nothing, math.nan), done.left[:, 0], made["clipped"].sum(1))


def judged(trace: Trace, bad: Sequence[int], steps: Steps) -> dict[str, float | None]:
    """The shares of steps clipped, of false alarms and of missed bad steps, and what was left."""
    marks = torch.zeros(len(steps.left))
    marks[[i for i in bad if i < len(marks)]] = 1.0
    seen = Trace(trace.norms[: len(marks)], None, None, {"spike": marks})
    column = {"clipped": steps.clipped[:, None] > 0, "norm": steps.left[:, None]}
    done = Replay(seen, {"": {**column, "factor": torch.ones(len(marks), 1)}}, {})
    false, missed = done.alarms()
    told = {
        "clipped": done.clipped.double().mean().item(),
        "largest": done.left.max().item(),
        "false": false.item(),
        "missed": missed.item(),
    }
    return {name: x if math.isfinite(x) else None for name, x in told.items()}


def together(rule: NormRule, others: Sequence[NormRule], units: int, steps: int) -> list[NormRule]:
    """The rule, and those of the others that can walk with it."""
    if not rule.init_unit():
        return [rule]
    unlike = {repr(other): other for other in others if repr(other) != repr(rule)}
    (alike, *_) = kinds([rule, *unlike.values()])
    most = max(1, min(WIDEST // units, MOST // steps))
    return alike[:most]
