"""The rules that the lab offers for a run, and the sliders for hyperparameters of these rules."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

import torchzero_clip
from torchzero_clip.core import NormRule
from torchzero_clip.core.description import Description
from torchzero_clip.study.simulating import simulate
from torchzero_clip.study.trace import Trace

T = TypeVar("T")
Path: TypeAlias = "tuple[str | int, ...]"
"""The path of a number in a rule, which begins with the name of a field.

If the field has a criterion, the name of a field of the criterion follows. If the field has a
tuple, an index follows.
"""

USUAL: tuple[type[NormRule], ...] = (
    torchzero_clip.ClipNorm,
    torchzero_clip.ZClip,
    torchzero_clip.AutoClip,
    torchzero_clip.AdaGC,
    torchzero_clip.ClipNormGrowth,
)
"""The rules that the page lists first."""
POSITIONS = 60
"""The number of positions of a slider on a logarithmic scale."""
SMALLEST = 1e-300
"""The smallest number on a logarithmic slider."""
LARGEST = 1e308
"""The largest number on a logarithmic slider."""
LONGEST_WINDOW = 2**24
"""The largest value that a fixed integer of a rule can have, such as the length of a window."""
SHARES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
SHARES += [0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998, 0.999]
PERCENTS = [float(f"{100 * share:.3g}") for share in SHARES]


class Slider(NamedTuple):
    """A hyperparameter of a rule, and the values that a slider can set.

    Attributes:
        path: The path of the hyperparameter in the rule.
        name: The name of the slider.
        value: The current value.
        positions: All values of the slider, in order.
    """

    path: Path
    name: str
    value: float | None
    positions: list[float | None]


@lru_cache(maxsize=1)
def ordered(trace: Trace) -> Tensor:
    """Return the finite global norms of a run, sorted. Steps without a gradient are skipped."""
    total = trace.total[trace.known.any(1)]
    return total[total.isfinite()].sort().values


def public_classes(base: type[T]) -> list[type[T]]:
    """Return the public subclasses of a class, and the class itself if it is public."""
    public = [getattr(torchzero_clip, name) for name in torchzero_clip.__all__]
    return [x for x in public if inspect.isclass(x) and issubclass(x, base)]


def catalogue(trace: Trace) -> list[NormRule]:
    """Return every public rule that can be simulated on this run. The usual rules come first."""
    rules = [
        rule
        for kind in public_classes(NormRule)
        for rule in instances(kind, trace)
        if can_simulate(rule, trace)
    ]
    order = {kind: i for i, kind in enumerate(USUAL)}
    return sorted(rules, key=lambda rule: order.get(type(rule), len(USUAL)))


def median(trace: Trace) -> float:
    """Return the median of the finite global norms of a run, or NaN if no norm is finite."""
    norms = ordered(trace)
    return norms[(len(norms) - 1) // 2].item() if len(norms) else math.nan


def instances(kind: type[NormRule], trace: Trace) -> Iterator[NormRule]:
    """Yield the rules of a class for a run: one rule, or one rule for each criterion.

    A rule gets the scope "global" if the run has only one norm, or if the rule has a norm as a
    required argument.
    """
    parameters = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {}
    needs_norm = False
    if "max_norm" in parameters:
        needs_norm = parameters["max_norm"].default is inspect.Parameter.empty
        arguments["max_norm"] = rounded(2 * median(trace)) if needs_norm else None
    if "dim" in parameters and (needs_norm or len(trace.names) == 1):
        arguments["dim"] = "global"
    criteria: list[Any] = [None]
    if "criterion" in parameters:
        base = torchzero_clip.Criterion
        criteria = [x for x in public_classes(base) if x is not base]
    for criterion in criteria:
        if criterion is not None:
            needs_quantile = "q" in inspect.signature(criterion).parameters
            arguments["criterion"] = criterion(q=0.95) if needs_quantile else criterion()
            arguments["warmup"] = None
        try:
            yield kind(**arguments)
        except (NotImplementedError, TypeError, ValueError):
            continue  # it is a base class, or it requires arguments that no run can give


def can_simulate(rule: NormRule, trace: Trace) -> bool:
    """Return whether the run has everything that a rule needs."""
    try:
        simulate(trace.part(0, 1), rule)
    except (NotImplementedError, TypeError, ValueError):  # a base class has no limit
        return False
    return True


def sliders(rule: NormRule, trace: Trace) -> list[Slider]:
    """Return a slider for each live hyperparameter of a rule."""
    norms = ordered(trace)
    positive = norms[torch.searchsorted(norms, 0.0, right=True) :]
    return [
        Slider(path, ".".join(map(str, path)), value, positions(rule, path, value, positive))
        for path, value in numbers(rule)
    ]


def numbers(rule: Description, before: Path = ()) -> Iterator[tuple[Path, float | None]]:
    """Yield the path and the value of each live number of a rule and of its criterion.

    Args:
        rule: The rule, or a criterion.
        before: The path of `rule`, if `rule` is a part of another rule.
    """
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        path = (*before, field.name)
        if isinstance(value, Description):
            yield from numbers(value, path)
        elif field.name in rule.live and isinstance(value, (tuple, list)):
            yield from (((*path, i), x) for i, x in enumerate(value))
        elif field.name in rule.live:
            yield path, value


def check_counts(rule: Description) -> None:
    """Raise an error if a window of a rule needs too much memory in the lab."""
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, Description):
            check_counts(value)
        elif type(value) is int and value > LONGEST_WINDOW and field.name not in rule.live:
            raise ValueError(
                f"lab: {field.name} of {type(rule).__name__} must be at most {LONGEST_WINDOW}, got "
                f"{value}"
            )


def moved(rule: Any, path: Path, value: Any) -> Any:
    """Return a copy of a rule with another number at a path."""
    if not path:
        return value
    first = path[0]
    rest = path[1:]
    if isinstance(rule, (tuple, list)):
        return tuple([moved(x, rest, value) if i == first else x for i, x in enumerate(rule)])
    field = str(first)
    old: Mapping[str, Any] = rule.arguments()
    return type(rule)(**{**old, field: moved(getattr(rule, field), rest, value)})


def positions(rule: NormRule, path: Path, value: float | None, norms: Tensor) -> list[float | None]:
    """Return the positions of a slider: values that the rule accepts for a number.

    The current value is one of them. A slider for a norm covers the norms of the run.

    Args:
        rule: The rule.
        path: The path of the number.
        value: The current value.
        norms: The norms of the run that are above 0, sorted.
    """

    def accepts(x: float | None) -> bool:
        try:
            moved(rule, path, x)
        except (TypeError, ValueError):
            return False
        return True

    if not accepts(1e6) and accepts(0.5):
        scale = PERCENTS if accepts(2.0) else SHARES
    elif "norm" in str(path[-1]) and len(norms):
        scale = magnitudes(norms[len(norms) // 100].item() / 4, 2 * norms[-1].item())
    else:
        size = value if value is not None and 0 < value < math.inf else 1.0
        scale = magnitudes(size / 10, size * 10)
    accepted = {x for x in scale if accepts(x)}
    if value is not None:
        accepted.add(value)
    absent: list[float | None] = [None] if accepts(None) else []
    return [*absent, *sorted(accepted)]


def magnitudes(low: float, high: float) -> list[float]:
    """Return numbers from low to high in equal ratios, rounded to three significant digits."""
    low = math.log(min(max(low, SMALLEST), LARGEST))
    high = math.log(min(max(high, SMALLEST), LARGEST))
    step = (high - low) / (POSITIONS - 1)
    return [rounded(math.exp(low + i * step)) for i in range(POSITIONS)]


def rounded(x: float) -> float:
    """Round a number to three significant digits."""
    return float(f"{x:.3g}")
