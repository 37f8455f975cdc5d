"""Simulations that run as far as the page requires, and continue when it requires more."""

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
"""The value of `PART_STEPS` for a rule without state. Its steps are simulated as one vector."""
LONG_WALK = 20_000
"""If a simulation has more steps than this, the page first gets a preview."""
PREVIEW_ROWS = 1000
"""The number of rows of a preview."""
UNITS_TOGETHER = 4096
"""The largest number of units of all rules that are simulated together."""
STEPS_KEPT = 2**20
"""The largest number of results, for all steps and all rules that are simulated together."""
NUMBERS_REMEMBERED = 2**26
"""The largest number of scalars in the state of all rules that are simulated together."""


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
    """A simulation of similar rules. It can continue where it stopped, also if the run grows.

    Rules that differ only in a number that a slider moves are simulated together. This takes hardly
    longer than the simulation of one rule. So the effect of the next slider position is known
    before the page asks for it.

    Args:
        rules: The rules, as one of the groups that `kinds` returns.
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
        """Return how many steps the simulation must still run one after another."""
        return max(0, len(trace) - self._ends[-1]) if self._has_state else 0

    def seconds(self, trace: Trace) -> float:
        """Return how many seconds the rest of the simulation will take, at the speed so far."""
        return self._seconds * self.ahead(trace) / max(1, self._ends[-1])

    def seconds_per_step(self) -> float:
        """Return how many seconds a step has taken on average."""
        return self._seconds / self._ends[-1]

    def steps(self, trace: Trace, text: str) -> Iterator[tuple[int, Steps]]:
        """Yield the steps of a rule part by part, each with the number of its first step.

        Args:
            trace: The run.
            text: The `repr` of the rule.
        """
        place = self.texts.index(text)
        i = 0
        while True:
            with self._lock:  # another request may have continued already
                while i >= len(self._parts):
                    if self._ends[-1] >= len(trace):
                        return
                    self._simulate_part(trace)
            yield self._ends[i], self._parts[i][place]
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
        every: The sample has one row out of every `every` rows.
        rows: The rows in the sample.
        steps: The effect of the rule on the sample, as if the sample were the whole run.
        seconds: How many seconds a step has taken on average.
    """

    every: int
    rows: Tensor
    steps: Steps
    seconds: float


def preview(trace: Trace, rule: NormRule) -> Preview:
    """Simulate a rule on a random sample of the rows of a run.

    The run is split into blocks of equal length, and the sample has one random row of each block.
    With a fixed distance between rows, an event in every thousandth step could be in all rows of
    the sample, or in no row.
    """
    every = -(-len(trace) // PREVIEW_ROWS)
    first = torch.arange(0, len(trace), every)
    offset = torch.randint(every, first.shape, generator=torch.Generator().manual_seed(0))
    rows = (first + offset).clamp(max=len(trace) - 1)
    sample = Trace(trace.norms[rows], trace.names, trace.known[rows], steps=trace.steps[rows])
    walk = Walk([rule])
    parts = [steps for _, steps in walk.steps(sample, repr(rule))]
    return Preview(every, rows, joined(parts), walk.seconds_per_step())


def joined(parts: Sequence[Steps]) -> Steps:
    """Join consecutive parts of a simulation."""
    return Steps(*map(torch.cat, zip(*parts, strict=True)))


def summed(part: Trace, metrics: dict[str, Tensor]) -> Steps:
    """Return the effect of a rule over all units together, from the metrics of each unit."""
    simulation = Simulation(part, {"": metrics}, {})
    limits = metrics["limit"].nan_to_num(0.0, posinf=math.inf)
    has_no_gradient = metrics["norm"].isnan().all(1)
    limit = norm_of_all(limits).masked_fill(has_no_gradient, math.nan)
    return Steps(limit, simulation.left[:, 0], metrics["clipped"].sum(1))


class Verdict:
    """How well a rule separates bad steps from good steps, over the steps added so far.

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
        """Return the numbers in the table of the page.

        These are the shares of clipped steps, of false alarms and of missed bad steps, and the
        largest norm after the rule. A share is None if it is a share of no steps.
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
            f"lab: {rule!r} would store {size:,} numbers for this run, but the limit of the lab is "
            f"{NUMBERS_REMEMBERED:,}: use a shorter window"
        )
    different = {repr(other): other for other in others if repr(other) != repr(rule)}
    (alike, *_) = kinds([rule, *different.values()])
    count = max(1, min(UNITS_TOGETHER // units, STEPS_KEPT // steps, NUMBERS_REMEMBERED // size))
    return alike[:count]


def state_size(rule: NormRule) -> int:
    """Return how many scalars a rule stores for each unit."""
    return sum(torch.as_tensor(value).numel() for value in rule.init_unit().values())
