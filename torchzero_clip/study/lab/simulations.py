"""Simulations that go as far as the page asks, and that continue when it asks for more."""

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

PART_STEPS = 1000
"""The number of steps that are simulated and sent together."""
STATELESS_PART_STEPS = 2**15
"""The same number for a rule without state, whose steps are simulated as one vector."""
LONG_WALK = 20_000
"""The number of steps above which the page gets a preview first."""
PREVIEW_ROWS = 1000
"""The number of rows of a preview."""
UNITS_TOGETHER = 4096
"""The most units of all rules that are simulated together."""
STEPS_KEPT = 2**20
"""The most steps of all rules that are simulated together, because their results are kept."""
NUMBERS_REMEMBERED = 2**26
"""The most numbers in the state of all rules that are simulated together."""


class Steps(NamedTuple):
    """The effect of a rule, with one number for each step.

    Attributes:
        limit: The limit of the global norm, or NaN if no unit had a gradient.
        left: The global norm after the rule.
        clipped: The number of units that were clipped.
    """

    limit: Tensor
    left: Tensor
    clipped: Tensor


class Walk:
    """A simulation of rules of one kind, which continues where it stopped. The run may grow.

    Rules that differ only in a number that a slider moves are simulated together. That takes hardly
    longer than a single rule. So the next position of the slider is known before the page asks.

    Args:
        rules: The rules, which are a group of `kinds`.
    """

    def __init__(self, rules: Sequence[NormRule]) -> None:
        self.texts = [repr(rule) for rule in rules]
        self._rerun = Rerun(rules)
        self._lock = Lock()
        self._parts: list[list[Steps]] = []  # for each part, the steps of each rule
        self._ends = [0]  # the first step, and the end of each part
        self._has_state = bool(rules[0].init_unit())
        self._seconds = 0.0  # the time of all parts

    def ahead(self, trace: Trace) -> int:
        """Return how many steps must still be simulated one after the other."""
        return max(0, len(trace) - self._ends[-1]) if self._has_state else 0

    def seconds(self, trace: Trace) -> float:
        """Return how long the rest will take, at the speed so far."""
        return self._seconds * self.ahead(trace) / max(1, self._ends[-1])

    def seconds_per_step(self) -> float:
        """Return how long a step has taken so far."""
        return self._seconds / self._ends[-1]

    def steps(self, trace: Trace, text: str, start: int) -> Iterator[tuple[int, Steps]]:
        """Yield the steps of a rule part by part, each with the number of its first step.

        Args:
            trace: The run.
            text: The `repr` of the rule.
            start: The first step.
        """
        place = self.texts.index(text)
        i = 0
        while True:
            with self._lock:  # another request may have continued already
                while i >= len(self._parts):
                    if self._ends[-1] >= len(trace):
                        return
                    self._simulate_part(trace)
            begin = self._ends[i]
            if self._ends[i + 1] > start:
                skip = max(start - begin, 0)
                yield begin + skip, Steps(*[x[skip:] for x in self._parts[i][place]])
            i += 1

    def _simulate_part(self, trace: Trace) -> None:
        """Simulate the next part of the run."""
        since = time.perf_counter()
        begin = self._ends[-1]
        size = PART_STEPS if self._has_state else STATELESS_PART_STEPS
        end = min(begin + size, len(trace))
        part = trace.part(begin, end)
        self._parts.append([summed(part, metrics) for metrics in self._rerun.take(part)])
        self._ends.append(end)
        self._seconds += time.perf_counter() - since


class Preview(NamedTuple):
    """A simulation of a sample of the rows of a run.

    Attributes:
        every: The sample has one row of this many rows.
        rows: The rows in the sample.
        steps: The effect of the rule if the sample were the whole run.
        seconds: How long a step has taken.
    """

    every: int
    rows: Tensor
    steps: Steps
    seconds: float


def preview(trace: Trace, rule: NormRule) -> Preview:
    """Simulate a rule on a random sample of the rows of a run.

    The sample has a random row of every few rows that follow each other. With a fixed distance,
    an event in every thousandth step would be in all rows of the sample, or in none.
    """
    every = -(-len(trace) // PREVIEW_ROWS)
    first = torch.arange(0, len(trace), every)
    offset = torch.randint(every, first.shape, generator=torch.Generator().manual_seed(0))
    rows = (first + offset).clamp(max=len(trace) - 1)
    sample = Trace(trace.norms[rows], trace.names, trace.known[rows], steps=trace.steps[rows])
    walk = Walk([rule])
    parts = [steps for _, steps in walk.steps(sample, repr(rule), 0)]
    return Preview(every, rows, joined(parts), walk.seconds_per_step())


def joined(parts: Sequence[Steps]) -> Steps:
    """Join parts that follow each other."""
    return Steps(*map(torch.cat, zip(*parts, strict=True)))


def summed(part: Trace, metrics: dict[str, Tensor]) -> Steps:
    """Return the steps of a rule over all units together, from its metrics for each unit."""
    simulation = Simulation(part, {"": metrics}, {})
    limits = metrics["limit"].nan_to_num(0.0, posinf=math.inf)
    has_no_gradient = metrics["norm"].isnan().all(1)
    limit = norm_of_all(limits).masked_fill(has_no_gradient, math.nan)
    return Steps(limit, simulation.left[:, 0], metrics["clipped"].sum(1))


class Verdict:
    """How well a rule separates bad steps from good ones, over the steps that were added so far.

    Args:
        bad: The rows that are known to be bad.
    """

    def __init__(self, bad: Sequence[int]) -> None:
        self._bad = torch.tensor(sorted(set(bad)), dtype=torch.int64)
        self._good_steps = 0
        self._bad_steps = 0
        self._good_clipped = 0
        self._bad_clipped = 0
        self._largest = 0.0  # the largest norm after the rule

    def add(self, rows: Tensor, steps: Steps) -> None:
        """Add more steps.

        Args:
            rows: The row of each step.
            steps: The effect of the rule in these steps.
        """
        is_bad = torch.isin(rows, self._bad)
        is_clipped = steps.clipped > 0
        self._good_steps += int((~is_bad).sum())
        self._bad_steps += int(is_bad.sum())
        self._good_clipped += int((~is_bad & is_clipped).sum())
        self._bad_clipped += int((is_bad & is_clipped).sum())
        self._largest = max(self._largest, steps.left.max().item())

    def summary(self) -> dict[str, float | str | None]:
        """Return the numbers that the page shows in its table.

        These are the shares of clipped steps, of false alarms and of missed bad steps, and the
        largest norm after the rule. A share is None if there are no steps of its kind.
        """
        clipped = self._good_clipped + self._bad_clipped
        false_alarms = None
        if self._good_steps:
            false_alarms = self._good_clipped / self._good_steps
        missed = None
        if self._bad_steps:
            missed = 1 - self._bad_clipped / self._bad_steps
        return {
            "clipped": clipped / (self._good_steps + self._bad_steps),
            "largest": self._largest if math.isfinite(self._largest) else "infinite",
            "false": false_alarms,
            "missed": missed,
        }


def judged(bad: Sequence[int], steps: Steps) -> dict[str, float | str | None]:
    """Return the summary of the `Verdict` about the steps of a whole run."""
    verdict = Verdict(bad)
    verdict.add(torch.arange(len(steps.left)), steps)
    return verdict.summary()


def together(rule: NormRule, others: Sequence[NormRule], units: int, steps: int) -> list[NormRule]:
    """Return the rule, followed by the other rules that can be simulated together with it.

    Args:
        rule: The rule.
        others: Other rules, the most useful first.
        units: The number of units of the rule.
        steps: The number of steps of the run.
    """
    if not state_size(rule):
        return [rule]
    size = units * state_size(rule)
    if size > NUMBERS_REMEMBERED:
        raise ValueError(
            f"lab: {rule!r} stores {size:,} numbers for this run, but the lab has room for "
            f"{NUMBERS_REMEMBERED:,}: use a shorter window"
        )
    different = {repr(other): other for other in others if repr(other) != repr(rule)}
    (alike, *_) = kinds([rule, *different.values()])
    count = max(1, min(UNITS_TOGETHER // units, STEPS_KEPT // steps, NUMBERS_REMEMBERED // size))
    return alike[:count]


def state_size(rule: NormRule) -> int:
    """Return how many numbers a rule keeps for each unit."""
    return sum(torch.as_tensor(value).numel() for value in rule.init_unit().values())
