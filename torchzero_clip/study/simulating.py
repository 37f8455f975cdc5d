"""Simulation: apply norm rules to the norms of a recorded run, without training again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Chain, NormRule, Transform, UnitState
from torchzero_clip.core.chain import bind
from torchzero_clip.core.decision import Cells, decide
from torchzero_clip.core.division import UnitIds, layer_of
from torchzero_clip.core.norm_rule import has_own_step
from torchzero_clip.optimizer.keys import GroupKeys
from torchzero_clip.study.plot import draw
from torchzero_clip.study.table import Series, Table
from torchzero_clip.study.trace import Trace, norm_of_all

SCOPES = (None, "layer", "group", "global")
SHARED = ("q", "percentile")
"""Live hyperparameters that must have one value for all units. Both select a quantile."""


def simulate(trace: Trace, *rules: NormRule) -> Simulation:
    """Compute what each rule would have done to the norms of a run, without training again.

    The simulation does not change the run. Clipping would have changed later norms, but the
    simulation uses the recorded norms.

    Rules are supported if they need only 2-norms of tensors, layers or the model. Rules that need
    the weights, such as `TrustRatio`, or averages of gradients, such as `ClipNormByEMA`, raise a
    `ValueError`.

    Args:
        trace: The norms. See `Trace.read` and `Trace.of`.
        *rules: The rules. Each rule is simulated separately, not as a part of a chain.

    Returns:
        A `Simulation` with the norms, limits and factors of each rule.

    Example:
        >>> import torch
        >>> from torchzero_clip import AutoClip, Trace, ZClip, simulate
        >>> trace = Trace(torch.rand(100, 2))
        >>> done = simulate(trace, ZClip(max_norm=None), AutoClip())
        >>> share = done.clipped.double().mean(0)  # of the steps, for each rule
    """
    if not isinstance(trace, Trace):
        raise TypeError(
            f"simulate: trace= must be a Trace, got {trace!r}: use Trace.read(path) for a "
            "file, or Trace.of(recorder) for a Recorder"
        )
    if not rules:
        raise ValueError("simulate: at least one rule is required, such as ZClip()")
    check(rules)
    metrics: dict[str, dict[str, Tensor]] = {repr(rule): {} for rule in rules}
    for alike in kinds(rules):
        metrics.update(zip(map(repr, alike), Rerun(alike).take(trace), strict=True))
    names = {repr(rule): [name for name, _ in units(trace, rule)] for rule in rules}
    return Simulation(trace, metrics, names)


class Simulation:
    """The result of `simulate`: the metrics of each rule in each step.

    Args:
        trace: The norms of the run.
        metrics: The metrics of each rule.
        units: The names of the units of each rule.

    Attributes:
        trace: The norms of the run.
        metrics: A dict for each rule, by the `repr` of the rule. It has the tensors "norm",
            "limit", "factor" and "clipped", with one row for each step and one column for each
            unit, as `Modular.metrics()` returns them after each step. If a unit had no gradient,
            "norm", "limit" and "factor" are NaN.
        units: The names of the units of each rule, by the `repr` of the rule.
    """

    def __init__(
        self, trace: Trace, metrics: dict[str, dict[str, Tensor]], units: dict[str, list[str]]
    ) -> None:
        self.trace = trace
        self.metrics = metrics
        self.units = units

    @property
    def clipped(self) -> Tensor:
        """Whether each rule would have clipped any unit: a bool tensor of shape (steps, rules)."""
        return torch.stack([of_rule["clipped"].any(1) for of_rule in self.metrics.values()], 1)

    @property
    def left(self) -> Tensor:
        """The global norm after each rule: a tensor of shape (steps, rules)."""
        after = [of_rule["norm"] * of_rule["factor"] for of_rule in self.metrics.values()]
        return torch.stack([norm_of_all(x.nan_to_num(0, math.inf)) for x in after], 1)

    def alarms(self) -> tuple[Tensor, Tensor]:
        """Return the share of false alarms and the share of missed spikes, for each rule.

        A false alarm is a good step in which the rule clips any unit. A spike is missed if the rule
        clips no unit. The trace must contain the spikes, so log `spike=1` in each step with a
        spike.

        Returns:
            Two tensors with one element for each rule: the share of good steps that the rule clips,
            and the share of spikes that it misses.
        """
        spikes = self.trace.spikes
        if spikes is None:
            raise ValueError(
                "Simulation: the method alarms needs a trace that marks the spikes: call "
                "Recorder.log(spike=1) before each step with a spike, and "
                "Recorder.log(spike=0) before each step without a spike"
            )
        clipped = self.clipped.double()
        return clipped[~spikes].mean(0), 1 - clipped[spikes].mean(0)

    def plot(self, path: str | PathLike[str], title: str | None = None) -> None:
        """Draw the norms, limits and clipped steps of each rule. Needs matplotlib.

        Args:
            path: The file. Its name ends in .png, .svg or .pdf.
            title: A title above the picture.
        """
        steps = list(range(1, len(self.trace) + 1))
        block = []
        for rule, metrics in self.metrics.items():
            names = tuple(self.units[rule])
            ids = UnitIds(tuple([(0, i, name) for i, name in enumerate(names)]))
            for kind, values in metrics.items():
                block.append((Series(f"{rule}/{kind}", ids), False, steps, values.double()))
        table = Table()
        table.add(len(self.trace), block)
        table.steps = table.steps * self.trace.stride
        table.stride = self.trace.stride
        draw(table, path, title, type(self).__name__)


def check(rules: Sequence[NormRule]) -> None:
    """Raise an error unless all rules can be simulated."""
    for rule in rules:
        if not isinstance(rule, NormRule):
            raise TypeError(
                f"simulate: rules must be transforms that clip norms, such as ZClip(), got {rule!r}"
            )
        has_own_code = has_own_step(rule) or type(rule).init is not Transform.init
        if has_own_code or rule.ord != 2 or rule.scope not in SCOPES or rule.min_size > 1:
            raise ValueError(
                f"simulate: {rule!r} is not supported, because a recorded run contains only "
                "the 2-norms of tensors, layers or the model, and simulate calls only the methods "
                "limit and observe of a rule"
            )


def kinds(rules: Sequence[NormRule]) -> list[list[NormRule]]:
    """Group the rules. The rules of a group differ only in numbers that can differ between units.

    The rules of a group are simulated together, as if they were different units of one rule.
    """
    groups: dict[str, list[NormRule]] = {}
    for rule in rules:
        fixed = [(k, v) for k, v in vars(rule).items() if not may_differ(rule, k)]
        groups.setdefault(repr((type(rule), fixed)), []).append(rule)
    return list(groups.values())


def may_differ(rule: NormRule, name: str) -> bool:
    """Return whether each unit may have its own value of this hyperparameter."""
    is_live = name in rule.live and name not in SHARED
    return is_live and type(getattr(rule, name)) is float


class Recorded(dict[str, Any]):
    """A parameter group for a simulated rule. It has hyperparameters but no tensors."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(
            f"simulate: rules that read group[{key!r}] are not supported, because a recorded "
            "run contains only norms"
        )


class Rerun:
    """A simulation of similar rules. Each call of `take` continues it with a part of the run.

    Args:
        rules: Rules that differ only in numbers, as one of the groups that `kinds` returns.
    """

    def __init__(self, rules: Sequence[NormRule]) -> None:
        self.rules = rules
        self._group: Recorded | None = None
        self._state: UnitState = {}

    @torch.inference_mode()
    def take(self, part: Trace) -> list[dict[str, Tensor]]:
        """Simulate the next steps of the run, and return the metrics of each rule."""
        norms, known = norms_of_units(part, self.rules[0])
        count = norms.shape[1]
        known = known.repeat(1, len(self.rules))
        rounded = as_measured(norms).repeat(1, len(self.rules))
        if self._group is None:
            self._group = group_of(self.rules, count)
            self._state = {  # in float32, as the state of an optimizer
                name: torch.stack([torch.as_tensor(value)] * rounded.shape[1]).float()
                for name, value in self.rules[0].init_unit().items()
            }
        limits, divisors = self._walk(self._group, rounded, known, part.total)
        metrics = {"norm": rounded, "limit": limits, "factor": 1 / divisors}
        metrics = {name: values.masked_fill(~known, math.nan) for name, values in metrics.items()}
        metrics["clipped"] = (divisors > 1) & known
        of_rules = {name: values.split(count, dim=1) for name, values in metrics.items()}
        return [
            {name: values[i].clone() for name, values in of_rules.items()}
            for i in range(len(self.rules))
        ]

    def _walk(
        self, group: Recorded, norms: Tensor, known: Tensor, totals: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the limit and the divisor of each unit in each step.

        A rule without state decides about all steps at once, as if steps were units.
        """
        rule = self.rules[0]
        if not self._state:
            group["total"] = lambda: totals.unsqueeze(1)
            decision = decide(rule, norms, {}, [group], Cells())
            limits = torch.as_tensor(decision.limits[0], dtype=torch.float64).expand_as(norms)
            return limits, decision.divisors[0]
        limits = torch.empty_like(norms)
        divisors = torch.empty_like(norms)
        for step, norm in enumerate(norms):
            group["total"] = partial(totals.__getitem__, step)
            state = {name: value.double() for name, value in self._state.items()}
            decision = decide(rule, norm, state, [group], KnownCells(known[step]))
            limits[step] = decision.limits[0]
            divisors[step] = decision.divisors[0]
            self._state = {name: value.float() for name, value in decision.state.items()}
        return limits, divisors


def as_measured(norms: Tensor) -> Tensor:
    """Round norms to float32, like the norms of a step. Norms out of range stay as they are."""
    rounded = norms.float().double()
    return rounded.where(rounded.isfinite() == norms.isfinite(), norms)


class KnownCells(Cells):
    """The units of one step of a trace. The state of a unit without a gradient does not change."""

    dtype = torch.float32

    def __init__(self, known: Tensor) -> None:
        self.known = known

    def finite(self, norm: Tensor) -> Tensor:
        return self.known & super().finite(norm)


def group_of(rules: Sequence[NormRule], units: int) -> Recorded:
    """Return the parameter group whose hyperparameters the rules read.

    A hyperparameter that can differ between the rules is a vector. It has one element for each unit
    of each rule.

    Args:
        rules: The rules.
        units: The number of units of each rule.
    """
    groups = []
    for rule in rules:
        (link,) = bind(Chain(rule))
        groups.append(link.values(GroupKeys([link]).defaults))
    group = Recorded(groups[0])
    for name in group:
        if may_differ(rules[0], name) and len(rules) > 1:
            values = torch.tensor([other[name] for other in groups], dtype=torch.float64)
            group[name] = values.repeat_interleave(units)
    return group


def units(trace: Trace, rule: NormRule) -> list[tuple[str, list[int]]]:
    """Return the name of each unit of a rule, and the indices of its norms in the trace."""
    if rule.scope is None:
        return [(name, [i]) for i, name in enumerate(trace.names)]
    if rule.scope != "layer":
        return [(str(rule.scope), [*range(len(trace.names))])]
    if all(name.isdigit() for name in trace.names):
        raise ValueError(
            "simulate: dim='layer' needs a trace with the norm and the name of each parameter"
        )
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(trace.names):
        layers.setdefault(layer_of(name), []).append(i)
    return [*layers.items()]


def norms_of_units(trace: Trace, rule: NormRule) -> tuple[Tensor, Tensor]:
    """Return the norms of the units of a rule, and a bool tensor of which norms are known."""
    if rule.scope is None:
        return trace.norms, trace.known
    parts = [
        Trace(trace.norms[:, places], None, trace.known[:, places])
        for _, places in units(trace, rule)
    ]
    norms = torch.stack([part.total for part in parts], 1)
    known = torch.stack([part.known.any(1) for part in parts], 1)
    return norms, known
