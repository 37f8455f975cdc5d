"""What can be tried on a run: the rules that simulate takes, and the numbers that sliders move."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

import torchzero_clip
from torchzero_clip.core import NormRule
from torchzero_clip.core.description import Description
from torchzero_clip.study.simulating import simulate
from torchzero_clip.study.trace import Trace

Path: TypeAlias = "tuple[str | int, ...]"
"""Where a number is: a field, perhaps of a criterion within, perhaps an entry of a tuple."""

POSITIONS = 60  # of a slider over magnitudes, about a twenty-fifth apart
SMALLEST, LARGEST = 1e-300, 1e308  # of such a slider
LONGEST = 2**24  # what may be counted, such as the steps of a window
SHARES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
SHARES += [0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998, 0.999]
PERCENTS = [float(f"{100 * share:.3g}") for share in SHARES]


class Slider(NamedTuple):
    """A number of a rule, and the values that a slider gives it."""

    path: Path
    name: str
    value: float | None
    positions: list[float | None]


@lru_cache(maxsize=1)
def ordered(trace: Trace) -> Tensor:
    """The finite norms of all of a run, of steps that have one, from the least to the largest."""
    total = trace.total[trace.known.any(1)]
    return total[total.isfinite()].sort().values


def catalogue(trace: Trace) -> list[NormRule]:
    """Every public rule that this run can be simulated with, the usual ones first."""
    public = [getattr(torchzero_clip, name) for name in torchzero_clip.__all__]
    kinds = [x for x in public if inspect.isclass(x) and issubclass(x, NormRule)]
    made = [rule for kind in kinds for rule in instances(kind, trace) if possible(rule, trace)]
    usual = ["ClipNorm", "ZClip", "AutoClip", "AdaGC", "ClipNormGrowth"]
    order = {name: i for i, name in enumerate(usual)}
    return sorted(made, key=lambda rule: order.get(type(rule).__name__, len(usual)))


def median(trace: Trace) -> float:
    """The middle one of the norms of a run; NaN where it has none."""
    norms = ordered(trace)
    return norms[(len(norms) - 1) // 2].item() if len(norms) else math.nan


def instances(kind: type[NormRule], trace: Trace) -> Iterator[NormRule]:
    """A rule of this class for the run, or one for each criterion.

    It is about everything at once where the run has one norm, or where a number of its is a norm.
    """
    public = [getattr(torchzero_clip, name) for name in torchzero_clip.__all__]
    fields = inspect.signature(kind).parameters
    given: dict[str, Any] = {}
    fixed = "max_norm" in fields and fields["max_norm"].default is inspect.Parameter.empty
    if "max_norm" in fields:
        given["max_norm"] = rounded(2 * median(trace)) if fixed else None
    if "dim" in fields and (fixed or len(trace.names) == 1):
        given["dim"] = "global"
    criteria: list[Any] = [None]
    if "criterion" in fields:
        base = torchzero_clip.Criterion
        criteria = [x for x in public if inspect.isclass(x) and issubclass(x, base) and x != base]
    for criterion in criteria:
        if criterion is not None:
            quantile = "q" in inspect.signature(criterion).parameters
            given["criterion"] = criterion(q=0.95) if quantile else criterion()
            given["warmup"] = None
        try:
            yield kind(**given)
        except (NotImplementedError, TypeError, ValueError):  # a base, or it takes what no run has
            continue


def possible(rule: NormRule, trace: Trace) -> bool:
    """Whether the run has all that a rule asks for."""
    try:
        simulate(trace.part(0, 1), rule)
    except (NotImplementedError, TypeError, ValueError):  # a base of others has no limit
        return False
    return True


def sliders(rule: NormRule, trace: Trace) -> list[Slider]:
    """A slider for each live number of a rule."""
    norms = ordered(trace)
    above = norms[torch.searchsorted(norms, 0.0, right=True) :]
    return [
        Slider(path, ".".join(map(str, path)), value, positions(rule, path, value, above))
        for path, value in numbers(rule)
    ]


def numbers(rule: Description, before: Path = ()) -> Iterator[tuple[Path, float | None]]:
    """The live numbers of a rule and of what is in it."""
    for field in dataclasses.fields(rule):
        value, path = getattr(rule, field.name), (*before, field.name)
        if isinstance(value, Description):
            yield from numbers(value, path)
        elif field.name in rule.live and isinstance(value, (tuple, list)):
            yield from (((*path, i), x) for i, x in enumerate(value))
        elif field.name in rule.live:
            yield path, value


def check_counts(rule: Description) -> None:
    """Raise a sentence for a window so long that it has no room here."""
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, Description):
            check_counts(value)
        elif type(value) is int and value > LONGEST and field.name not in rule.live:
            raise ValueError(
                f"lab: {field.name} of {type(rule).__name__} may be at most {LONGEST} here, "
                f"got {value}"
            )


def moved(rule: Any, path: Path, value: Any) -> Any:
    """The rule with another number in this place."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(rule, (tuple, list)):
        return tuple([moved(x, rest, value) if i == first else x for i, x in enumerate(rule)])
    old: Mapping[str, Any] = rule.arguments()
    return type(rule)(**{**old, str(first): moved(getattr(rule, str(first)), rest, value)})


def positions(rule: NormRule, path: Path, value: float | None, norms: Tensor) -> list[float | None]:
    """The values that a slider gives a number, which the rule takes; the one it has among them.

    A limit moves over the norms of the run, which are given in order and above 0.
    """

    def takes(x: float | None) -> bool:
        try:
            moved(rule, path, x)
        except (TypeError, ValueError):
            return False
        return True

    if not takes(1e6) and takes(0.5):
        scale = SHARES if not takes(2.0) else PERCENTS
    elif "norm" in str(path[-1]) and len(norms):
        scale = magnitudes(norms[len(norms) // 100].item() / 4, 2 * norms[-1].item())
    else:
        size = value if value is not None and 0 < value < math.inf else 1.0
        scale = magnitudes(size / 10, size * 10)
    kept = {x for x in scale if takes(x)} | ({value} if value is not None else set())
    return [*([None] if takes(None) else []), *sorted(kept)]


def magnitudes(low: float, high: float) -> list[float]:
    """Numbers of three digits, each the same factor above the last."""
    low, high = (math.log(min(max(x, SMALLEST), LARGEST)) for x in (low, high))
    step = (high - low) / (POSITIONS - 1)
    return [rounded(math.exp(low + i * step)) for i in range(POSITIONS)]


def rounded(x: float) -> float:
    """A number of three digits."""
    return float(f"{x:.3g}")
