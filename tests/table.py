"""The contract table: one row for every transform, and the cases that its contracts run over.

The rows lie by folder of rules in `tests/modules/rows`. Contracts take `every` construction of the
table, so that a new rule is tested by adding a row.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import torchzero_clip as tz
from tests.helpers import SHAPES, asking, run_each
from tests.modules.rows import adaptive, averages, clipping, descent, flow, matrices
from tests.modules.rows.row import Row
from torchzero_clip import Transform

ROWS = [*clipping.ROWS, *descent.ROWS, *adaptive.ROWS, *flow.ROWS, *matrices.ROWS, *averages.ROWS]
# what a construction is written with: every class, and the functions that rows define
NAMES: dict[str, Any] = {
    **vars(tz),
    **vars(adaptive),
    **vars(descent),
    **vars(flow),
    "halves": matrices.halves,
}


@dataclass(frozen=True)
class Case:
    """One construction of one row."""

    row: Row
    label: str
    make: Callable[[], Transform]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    def __str__(self) -> str:
        return f"{self.row.cls.__name__}-{self.label}"

    @functools.cached_property
    def scope(self) -> str:
        """What is treated together: an entry, a tensor, slices, a layer, a group, or all."""
        if self.label in self.row.scope:
            return self.row.scope[self.label]
        tfm = self.make()
        scope = getattr(tfm, "scope", getattr(tfm, "dim", None))
        if self.row.per_entry:
            return "entry"
        if scope is None:
            return "tensor"
        return scope if isinstance(scope, str) else "slices"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The named parameters of a small model that the rule takes."""
        return {
            name: shape for name, shape in SHAPES.items() if len(shape) > 1 or not self.row.matrices
        }


GOOD = [Case(row, label, make) for row in ROWS for label, make in row.good.items()]


SCOPED = (tz.ClipNorm, tz.ClipNormGrowth)  # rules that stand for others in quick tests


LOOSE = [Case(row, label, make) for row in ROWS for label, make in row.loose.items()]


Check = Callable[..., None]


def over(cases: Sequence[Case]) -> Callable[[Check], Any]:
    """Check all of these cases, those of one class in one test."""
    rows = [pytest.param(some, id=cls.__name__) for cls, some in by_class(cases).items()]
    return _over(rows)


def by_class(cases: Sequence[Case]) -> dict[type, list[Case]]:
    """The cases of each class."""
    grouped: dict[type, list[Case]] = {}
    for case in cases:
        grouped.setdefault(case.cls, []).append(case)
    return grouped


def every(where: Callable[[Case], Any] = lambda case: True) -> Callable[[Check], Any]:
    """Check every construction where it applies: the first of each class, and of each scope of two
    rules about norms, in quick tests, the others of a class in one behind `slow`."""
    return _first_of_each(lambda case: (case.cls, case.cls in SCOPED and case.scope), where)


def sampled(
    where: Callable[[Case], Any] = lambda case: True, one_in: int = 1
) -> Callable[[Check], Any]:
    """The same, with the first of each class in the quick tests, or of one in so many classes."""
    return _first_of_each(lambda case: case.cls, where, one_in)


MECHANISMS = (
    tz.Scale, tz.ClipNorm, tz.Adam, tz.Momentum, tz.ScheduleFree, tz.NormalizeByEMA,
    tz.ClipNormGrowth, tz.ZClip, tz.Prodigy, tz.Orthogonalize, tz.InBasis, tz.Accumulate,
)  # fmt: skip
"""One class for each way to work: per element, by norms, with an average, with a model-wide scalar,
for matrices, and so on."""


def mechanisms(where: Callable[[Case], Any] = lambda case: True) -> Callable[[Check], Any]:
    """The same, with the first of each of `MECHANISMS` in the quick tests, for what the rules leave
    to others."""
    cases = [case for case in GOOD if where(case)]
    first = {case.cls: case for case in reversed(cases)}
    return _quick(cases, [first[cls] for cls in MECHANISMS if cls in first])


def _first_of_each(
    kind: Callable[[Case], Any], where: Callable[[Case], Any], one_in: int = 1
) -> Callable[[Check], Any]:
    cases = [case for case in GOOD if where(case)]
    first = {kind(case): case for case in reversed(cases)}
    return _quick(cases, [case for case in cases if first[kind(case)] is case][::one_in])


def _quick(cases: Sequence[Case], quick: Sequence[Case]) -> Callable[[Check], Any]:
    """Check these cases: each of the quick ones in a test, the others of a class in one behind
    `slow`."""
    slow = [case for case in cases if not any([case is x for x in quick])]
    others = {f"other {cls.__name__}": some for cls, some in by_class(slow).items()}
    return _over(
        [pytest.param([case], id=str(case)) for case in quick]
        + [pytest.param(some, id=id, marks=pytest.mark.slow) for id, some in others.items()]
    )


def _over(rows: Sequence[Any]) -> Callable[[Check], Any]:
    """A test for each of these lists of cases, all of which are checked."""

    def together(check: Check) -> Any:
        @functools.wraps(check)
        def test(cases: list[Case], **others: Any) -> None:
            run_each(functools.partial(check, **others), "case", cases)

        names = inspect.signature(check).parameters
        asking(test, ["cases" if name == "case" else name for name in names])
        return pytest.mark.parametrize("cases", rows)(test)

    return together


def other_values(tfm: Transform) -> dict[str, Any]:
    """Live values of the transform that differ from its own and that it takes."""
    values: dict[str, Any] = {}
    for name in tfm.live:
        value = getattr(tfm, name)
        for factor in (0.8, 1.3):
            try:
                tfm.with_values({name: _times(value, factor)})
            except ValueError:
                continue
            values[name] = _times(value, factor)
            break
    return values


def _times(value: Any, factor: float) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(_times(v, factor) for v in value)
    return value + 1 if isinstance(value, int) and not isinstance(value, bool) else value * factor


def concrete() -> set[str]:
    """The public transforms that can be constructed."""
    abstract = {"Transform", "NormRule", "AdaptiveRule", "TensorwiseTransform"}
    public = {name for name in tz.__all__ if isinstance(getattr(tz, name), type)}
    return {n for n in public if issubclass(getattr(tz, n), Transform)} - abstract


def required(cls: type[Transform]) -> set[str]:
    """The names of the arguments without a default."""
    missing = dataclasses.MISSING
    return {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is missing and f.default_factory is missing
    }
