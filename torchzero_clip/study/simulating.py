"""Simulation: what a norm rule would have done to the norms of a recorded run."""

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
from torchzero_clip.optimizer.keys import GroupKeys
from torchzero_clip.study.plot import draw
from torchzero_clip.study.table import Series, Table
from torchzero_clip.study.trace import Trace, norm_of_all

SCOPES = (None, "layer", "group", "global")
ONE_FOR_ALL = ("q", "percentile")  # a quantile of many units is the same for all


def simulate(trace: Trace, *rules: NormRule) -> Simulation:
    """What each of these rules would have done to the norms of a trace, without training.

    Open loop: the norms are those of the run that was recorded, whatever a rule would have made of
    it. A rule must be about 2-norms of tensors, layers or everything, and ask for nothing else: not
    for weights, as `TrustRatio` does, and not for averages of gradients, as `ClipNormByEMA` does.

    Args:
        trace: The norms.
        *rules: Each by itself; they are no chain.

    Example:
        >>> import torch
        >>> from torchzero_clip import AutoClip, Trace, ZClip, simulate
        >>> trace = Trace(torch.rand(100, 2))
        >>> done = simulate(trace, ZClip(max_norm=None), AutoClip())
        >>> share = done.clipped.double().mean(0)  # of the steps, for each rule
    """
    if not isinstance(trace, Trace):
        raise TypeError(
            f"simulate: takes a Trace, got {trace!r}: Trace.read(path) makes one of a file, "
            "Trace.of(recorder) of a Recorder"
        )
    if not rules:
        raise ValueError("simulate: give one rule or more, such as ZClip()")
    check(rules)
    made: dict[str, dict[str, Tensor]] = {repr(rule): {} for rule in rules}
    for alike in kinds(rules):
        made.update(zip(map(repr, alike), Rerun(alike).take(trace), strict=True))
    return Simulation(
        trace, made, {repr(rule): [n for n, _ in units(trace, rule)] for rule in rules}
    )


class Simulation:
    """What rules would have done: for each, by its spelling, `norm`, `limit`, `factor`, `clipped`.

    Each is steps by units, as `Modular.metrics()` of every step: NaN where no unit had a gradient.
    `units` has the names of the units of each rule.
    """

    def __init__(
        self, trace: Trace, metrics: dict[str, dict[str, Tensor]], units: dict[str, list[str]]
    ) -> None:
        self.trace, self.metrics, self.units = trace, metrics, units

    @property
    def clipped(self) -> Tensor:
        """Steps by rules: whether a rule would have clipped anything."""
        return torch.stack([made["clipped"].any(1) for made in self.metrics.values()], 1)

    @property
    def left(self) -> Tensor:
        """Steps by rules: the norm of everything that a rule would have left."""
        parts = [made["norm"] * made["factor"] for made in self.metrics.values()]
        return torch.stack([norm_of_all(part.nan_to_num(0, math.inf)) for part in parts], 1)

    def alarms(self) -> tuple[Tensor, Tensor]:
        """For each rule the share of good steps that it clips, and of known spikes that it misses.

        The trace must know its spikes. A spike is missed where nothing at all is clipped.
        """
        spikes = self.trace.spikes
        if spikes is None:
            raise ValueError(
                "Simulation: alarms needs a trace with known spikes: log spike=1 in steps that "
                "have one, and spike=0 in the others"
            )
        clipped = self.clipped.double()
        return clipped[~spikes].mean(0), 1 - clipped[spikes].mean(0)

    def plot(self, path: str | PathLike[str], title: str | None = None) -> None:
        """Draw norms, limits and clipped steps of each rule, as `Recorder.plot` does."""
        table, end = Table(), len(self.trace)
        table.add(
            end,
            [
                (Series(f"{rule}/{kind}", ids), False, [*range(1, end + 1)], values.double())
                for rule, made in self.metrics.items()
                for ids in [UnitIds(((0, (*range(len(self.units[rule])),), (*self.units[rule],)),))]
                for kind, values in made.items()
            ],
        )
        table.steps, table.stride = table.steps * self.trace.stride, self.trace.stride
        draw(table, path, title, "Simulation")


def check(rules: Sequence[NormRule]) -> None:
    """Raise a sentence unless all rules can be simulated."""
    for rule in rules:
        if not isinstance(rule, NormRule):
            raise TypeError(f"simulate: takes rules about norms, such as ZClip(), got {rule!r}")
        own = type(rule).step is not NormRule.step or type(rule).init is not Transform.init
        if own or rule.ord != 2 or rule.scope not in SCOPES or rule.min_size > 1:
            raise ValueError(
                f"simulate: {rule!r} needs more than the 2-norms of tensors, layers or everything, "
                "which is all that a recorded run has"
            )


def kinds(rules: Sequence[NormRule]) -> list[list[NormRule]]:
    """The rules that differ in live numbers alone: they run at once, as units do."""
    found: dict[str, list[NormRule]] = {}
    for rule in rules:
        fixed = [(k, v) for k, v in vars(rule).items() if not is_sensitivity(rule, k)]
        found.setdefault(repr((type(rule), fixed)), []).append(rule)
    return list(found.values())


def is_sensitivity(rule: NormRule, name: str) -> bool:
    """Whether it is a number of which every unit may have its own."""
    live = name in rule.live and name not in ONE_FOR_ALL
    return live and type(getattr(rule, name)) is float


class Recorded(dict[str, Any]):
    """The values that a rule may read; of tensors there are none."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(
            f"simulate: the rule reads group[{key!r}], which a recorded run does not have"
        )


class Rerun:
    """Rules of one kind on the norms of a run, part after part, each with units of its own.

    Args:
        rules: They differ in live numbers alone: see `kinds`.
    """

    def __init__(self, rules: Sequence[NormRule]) -> None:
        self.rules = rules
        self._group: Recorded | None = None
        self._state: UnitState = {}

    @torch.inference_mode()
    def take(self, part: Trace) -> list[dict[str, Tensor]]:
        """What each rule would have done in the steps that come next."""
        norms, known = together(part, self.rules[0])
        units, seen = norms.shape[1], known.repeat(1, len(self.rules))
        rounded = as_measured(norms).repeat(1, len(self.rules))
        if self._group is None:
            self._group = group_of(self.rules, units)
            self._state = {  # float32, as beside parameters
                name: torch.stack([torch.as_tensor(value)] * rounded.shape[1]).float()
                for name, value in self.rules[0].init_unit().items()
            }
        limits, ratios = self._walk(self._group, rounded, seen, part.total)
        rows = {"norm": rounded, "limit": limits, "factor": 1 / ratios}
        shown = {name: values.masked_fill(~seen, math.nan) for name, values in rows.items()}
        shown["clipped"] = (ratios > 1) & seen
        parts = {name: values.split(units, dim=1) for name, values in shown.items()}
        return [{name: parts[name][i].clone() for name in parts} for i in range(len(self.rules))]

    def _walk(
        self, group: Recorded, norms: Tensor, known: Tensor, totals: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Limits and divisors; without memory steps are as independent as units."""
        rule = self.rules[0]
        if not self._state:
            group["total"] = lambda: totals.unsqueeze(1)
            made = decide(rule, norms, {}, [group], Cells())
            limits = torch.as_tensor(made.limits[0], dtype=torch.float64).expand_as(norms)
            return limits, made.divisors[0]
        limits, ratios = torch.empty_like(norms), torch.empty_like(norms)
        for step, norm in enumerate(norms):
            group["total"] = partial(totals.__getitem__, step)
            wide = {name: value.double() for name, value in self._state.items()}
            made = decide(rule, norm, wide, [group], Known(known[step]))
            limits[step], ratios[step] = made.limits[0], made.divisors[0]
            self._state = {name: value.float() for name, value in made.state.items()}
        return limits, ratios


def as_measured(norms: Tensor) -> Tensor:
    """Norms rounded to float32, as a step measures them; those that it cannot hold as they are."""
    rounded = norms.float().double()
    return rounded.where(rounded.isfinite() == norms.isfinite(), norms)


class Known(Cells):
    """Units of one step of a trace, some of which it did not have."""

    dtype = torch.float32

    def __init__(self, known: Tensor) -> None:
        self.known = known

    def finite(self, norm: Tensor) -> Tensor:
        return self.known & super().finite(norm)


def group_of(rules: Sequence[NormRule], units: int) -> Recorded:
    """The live values that the rules see; where they differ, an entry for each rule's units."""
    groups = []
    for rule in rules:
        (link,) = bind(Chain(rule))
        groups.append(link.values(GroupKeys([link]).defaults))
    group = Recorded(groups[0])
    for name in group:
        if is_sensitivity(rules[0], name) and len(rules) > 1:
            values = torch.tensor([other[name] for other in groups], dtype=torch.float64)
            group[name] = values.repeat_interleave(units)
    return group


def units(trace: Trace, rule: NormRule) -> list[tuple[str, list[int]]]:
    """The units of a rule: the name of each, and which norms of the trace it has."""
    if rule.scope is None:
        return [(name, [i]) for i, name in enumerate(trace.names)]
    if rule.scope != "layer":
        return [(str(rule.scope), [*range(len(trace.names))])]
    if all(name.isdigit() for name in trace.names):
        raise ValueError("simulate: dim='layer' needs a trace with the names of the parameters")
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(trace.names):
        layers.setdefault(layer_of(name), []).append(i)
    return [*layers.items()]


def together(trace: Trace, rule: NormRule) -> tuple[Tensor, Tensor]:
    """The norms of the units of a rule, and where they are known."""
    if rule.scope is None:
        return trace.norms, trace.known
    own = [places for _, places in units(trace, rule)]
    parts = [Trace(trace.norms[:, places], None, trace.known[:, places]) for places in own]
    return (
        torch.stack([part.total for part in parts], 1),
        torch.stack([part.known.any(1) for part in parts], 1),
    )
