"""Vector programs: recorded arithmetic on small tensors has the results of torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from torchzero_clip.core.norms.numeric import vector_norm
from torchzero_clip.engines.compiled.printers.operators import REDUCTIONS
from torchzero_clip.engines.compiled.printers.vectors import Region
from torchzero_clip.engines.compiled.replay.native_step import NativeStep
from torchzero_clip.engines.compiled.replay.regions import _region
from torchzero_clip.engines.compiled.replay.step_recorder import StepRecorder, python

Function = Callable[..., Any]
FLOATS = (torch.float64, torch.float32)
WHOLE = (torch.int64, torch.int32)
SHAPES: tuple[tuple[int, ...], ...] = ((5,), (), (1,), (0,), (3, 4), (2, 1, 3))
ODD = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, math.inf, -math.inf, math.nan, 1e-300, 1e300)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return numbers of both signs, with NaN, infinities and other edge cases among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if not dtype.is_floating_point:
        return (drawn * 5).to(dtype)
    which = torch.randint(0, 2 * len(ODD), shape, generator=generator)
    for i, x in enumerate(ODD):
        drawn = torch.where(which == i, torch.tensor(x, dtype=torch.float64), drawn)
    return drawn.to(dtype)


def recorded(function: Function, leaves: list[Tensor]) -> tuple[NativeStep, Any, list[Tensor]]:
    """Return a function as a native step and as a Python function, and its results' memory."""
    recorder = StepRecorder([])
    with recorder:
        out = function(*leaves)
        kept = recorder.end([out] if isinstance(out, Tensor) else list(out), [])
    again = python(recorder.graph)
    step = NativeStep(recorder.graph, recorder.leaves, [], {})
    recorder.close()
    return step, lambda: again(*recorder.leaves), kept


def compare(*cases: tuple[Function, Sequence[Tensor]], lacks: Sequence[str] = ()) -> None:
    """Check that a native step of these functions returns and writes the same as torch."""

    def all_of(*leaves: Tensor) -> list[Tensor]:
        each, found = iter(leaves), list[Tensor]()
        for function, some in cases:
            out = function(*[next(each) for _ in some])
            found += [out] if isinstance(out, Tensor) else out
        return found

    leaves = [t for _, some in cases for t in some]
    theirs, mine = [t.clone() for t in leaves], [t.clone() for t in leaves]
    expected = all_of(*theirs)
    step, _, kept = recorded(all_of, mine)
    assert (step.torch_calls, step.calls > 0) == (list(lacks), True)
    assert step([])
    for ours, other in [*zip(kept, expected, strict=True), *zip(mine, theirs, strict=True)]:
        tight = {"rtol": 1e-12, "atol": 0.0} if ours.dtype == torch.float64 else {}
        torch.testing.assert_close(ours, other, equal_nan=True, **tight)


def ids(x: Any) -> str:
    return str(x).replace("torch.", "")


WORDS: dict[str, Function] = {
    "a power": lambda x: torch.ops.aten.pow(x, 2),
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "at least": lambda x: x.clamp(min=0.5),
    "at most": lambda x: x.clamp(max=0.5),
    "between": lambda x: x.clamp(-0.5, 0.5),
    "from a number": lambda x: 1 - x,
    "remainder": lambda x: x.remainder(3.0),
    "root": lambda x: x**0.5,
    "cube": lambda x: x**3,
    "in place": lambda x: x.add_(1).mul_(0.5),
    "masked": lambda x: x.masked_fill(x > 0, 7.0),
}
"""Functions that torch records as another operator, or with numbers as operands."""
WORDS_OF_TWO: dict[str, Function] = {
    "smaller": torch.minimum,
    "larger": torch.maximum,
    "masked": lambda a, b: a.masked_fill(b > 0, 1.5),
    "stack": lambda a, b: torch.stack([a, b, a]),
    "cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
    "joined in the last dim": lambda a, b: torch.stack([a, b], -1),
    "in place": lambda a, b: a.mul_(b).sub_(b),
    "copied": lambda a, b: a.copy_(b),
    "of flags": lambda a, b: (a > 0) * (b > 0),
    "one of two flags": lambda a, b: torch.where(a > b, a > 0, b > 0),
}
SUMS: dict[str, Function] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "any": torch.any,
    "all": torch.all,
    "norm1": lambda x, **over: torch.linalg.vector_norm(x, 1, **over),
    "norm2": lambda x, **over: torch.linalg.vector_norm(x, 2, **over),
    "norminf": lambda x, **over: torch.linalg.vector_norm(x, math.inf, **over),
}


def test_every_reduction_is_compared_with_torch() -> None:
    assert SUMS.keys() == REDUCTIONS.keys()


@pytest.mark.parametrize("dtype", FLOATS, ids=ids)
@pytest.mark.parametrize("first", range(0, len(WORDS), 6))
def test_what_torch_says_otherwise_is_known(first: int, dtype: torch.dtype) -> None:
    cases = []
    for word in list(WORDS.values())[first : first + 6]:
        cases += [(word, [numbers(shape, dtype, i)]) for i, shape in enumerate(SHAPES)]
    compare(*cases)


@pytest.mark.parametrize("first", range(0, len(WORDS_OF_TWO), 5))
def test_what_torch_says_otherwise_of_two_is_known(first: int) -> None:
    cases = []
    for word in list(WORDS_OF_TWO.values())[first : first + 5]:
        mine = pairs(word)
        assert mine
        cases += mine
    compare(*cases)


def pairs(word: Function) -> list[tuple[Function, tuple[Tensor, Tensor]]]:
    """Return calls with two operands of each shape, and with two dtypes of some shapes."""
    cases = []
    for (i, shape), dtype, other in itertools.product(enumerate(SHAPES), FLOATS, FLOATS):
        if dtype != other and shape not in ((), (3, 4)):
            continue
        pair = numbers(shape, dtype, i), numbers(shape, other, i + 9)
        try:
            word(*[t.clone() for t in pair])
        except RuntimeError:  # torch wants one dtype
            continue
        cases.append((word, pair))
    return cases


PROMOTED: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "eq", "lt", "ge")},
    "where": lambda a, b: torch.where(a > b, a, b),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x in ("sub", "lt", "ge") else ()) for x in PROMOTED],
)
def test_a_number_and_a_vector_of_other_dtypes_are_promoted_as_torch_does(name: str) -> None:
    shapes = (((3, 1), ()), ((), (3,)), ((3, 1), (1, 2)))
    every = itertools.product((*FLOATS, *WHOLE), (*FLOATS, *WHOLE), shapes)
    cases = [(PROMOTED[name], (numbers(s, a, 5), numbers(t, b, 6))) for a, b, (s, t) in every]
    compare(*cases)


@pytest.mark.parametrize("first", range(0, len(SUMS), 3))
def test_a_reduction_is_that_of_torch(first: int) -> None:
    names = list(SUMS)[first : first + 3]
    compare(*[case for name in names for case in reductions(name)])


def reductions(name: str) -> list[tuple[Function, list[Tensor]]]:
    """Return calls of a reduction over all dims, and over each dim."""
    shapes = [(5,), (3, 4), (2, 3, 4), (1,), (2, 1, 3), ()]
    cases = []
    for dtype, shape in itertools.product(FLOATS, shapes):
        if dtype == torch.float32 and shape not in ((5,), (2, 1, 3)):
            continue
        x = numbers(shape, dtype, 3)
        cases.append((lambda x: SUMS[name](x, dim=tuple(range(x.dim()))), [x]))
        for dim, keep in itertools.product(range(len(shape)), (False, True)):
            cases.append((partial(SUMS[name], dim=dim, keepdim=keep), [x]))
    return cases


def test_sums_of_flags_and_of_nothing_are_those_of_torch() -> None:
    cases = [(partial(torch.sum, dim=0), [numbers((4, 3), t)]) for t in (torch.bool, *WHOLE)]
    for dtype, dim in itertools.product(FLOATS, (0, 1)):
        cases.append((partial(torch.sum, dim=dim), [numbers((0, 3), dtype)]))
    compare(*cases)


def test_a_conversion_is_that_of_torch() -> None:
    cases = []
    kinds = (*FLOATS, *WHOLE, torch.bool)
    for dtype, to in itertools.product(kinds, kinds):
        x = torch.tensor([0.0, 1.7, -2.3, 100.0]) if to in WHOLE else numbers((40,), torch.float64)
        x = x if dtype.is_floating_point else x.nan_to_num(1.0, 2.0, 3.0).clamp(-9, 9)
        cases.append((lambda x, to=to: x.to(to, copy=True), [x.to(dtype)]))
    compare(*cases)


VIEWS: dict[str, Function] = {
    "selected": lambda x: x.select(0, 1) + 1,
    "sliced": lambda x: x[1:, ::2] * 2,
    "transposed": lambda x: x.t() + x.t().contiguous(),
    "with another dim": lambda x: x.unsqueeze(1) - x.unsqueeze(0),
    "expanded": lambda x: x[0].expand(3, -1) + x[1],
    "unbound and joined in another order": lambda x: torch.stack([x.unbind(0)[i] for i in (2, 0)]),
    "written by a view": lambda x: [x.select(0, 1).mul_(3), x],
    "read before and behind a write": lambda x: [x + 1, x.mul_(2), x + 1],
    "written from its own other entries": lambda x: [x[:2].copy_(x[1:].clone()), x],
    "turned in place": lambda x: (x + 1).unsqueeze_(0).squeeze_(0) * 2,
    "gathered": lambda x: torch.cat([x[i : i + 1, 0] for i in (2, 2, 1)]),
}


def test_views_are_those_of_torch() -> None:
    compare(*[(view, [numbers((3, 4), torch.float64)]) for view in VIEWS.values()])


LISTS: dict[str, Function] = {
    "counted": lambda *some: [torch._foreach_add_(some, 1), *some][1:],
    "copied": lambda *some: [torch._foreach_copy_(some, [t + 1 for t in some]), *some][1:],
    "multiplied": lambda *some: torch._foreach_mul(some, [2.0, 3.0, 4.0]),
    "one by another": lambda *some: torch._foreach_mul(some, some[::-1]),
    "clamped": lambda *some: [torch._foreach_clamp_min_(some, 0.5), *some][1:],
    "by a tensor": lambda *some: torch._foreach_mul(some, torch.tensor(2.0)),
}


def test_an_operator_on_lists_is_that_of_torch() -> None:
    shapes: tuple[tuple[int, ...], ...] = ((), (2,), (1,))
    cases = []
    for function, shape in itertools.product(LISTS.values(), shapes):
        cases.append((function, [numbers(shape, torch.float32, i) for i in range(3)]))
    compare(*cases)


OPERANDS = ((5,), (), (1,), (1, 5), (5, 1), (5, 5))
FEWER: dict[str, Function] = {
    "add": torch._foreach_add,
    "div": torch._foreach_div,
    "maximum": torch._foreach_maximum,
    "in place": lambda some, others: [torch._foreach_mul_(some, others), *some][1:],
    "copied": lambda some, others: [torch._foreach_copy_(some, others), *some][1:],
    "lerp": lambda some, others: torch._foreach_lerp(some, others, others),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x in ("div", "maximum") else ()) for x in FEWER],
)
def test_lists_of_one_shape_meet_operands_of_fewer_dims_each_its_own(name: str) -> None:
    """The count of tensors equals the size of the last dim, so that a mix-up would be seen."""
    cases: list[tuple[Function, list[Tensor]]] = []
    for shape, count, other in itertools.product(OPERANDS, (2, 5), FLOATS):
        if count == 2 and other == torch.float64:
            continue
        some = [numbers((5, 5), torch.float32, i) for i in range(count)]
        others = [numbers(shape, other, i + 9) for i in range(count)]

        def function(*both: Tensor, count: int = count) -> Any:
            return FEWER[name](both[:count], both[count:])

        try:
            function(*[t.clone() for t in [*some, *others]])
        except RuntimeError:  # torch wants one dtype
            continue
        cases.append((function, [*some, *others]))
    assert cases
    compare(*cases)


def test_a_region_is_repeated_for_no_shape_but_one_that_torch_would_make_of_it() -> None:
    place = Region(0, torch.float32, (3, 1), (1, 1))
    assert place.expanded((2, 3, 4)).strides == (0, 1, 0)
    for shape in ((2, 4), (4, 1), (3,)):
        with pytest.raises(ValueError, match=r"shorter|broadcast"):
            place.expanded(shape)


def test_counters_that_share_a_vector_are_counted() -> None:
    count: Function = lambda x: [torch._foreach_add_(list(x.unbind()), 1), x][1:]  # noqa: E731
    compare((count, [numbers((3,), torch.float32)]))


def test_a_norm_in_any_range_is_that_of_the_plain_way() -> None:
    rows = [[1.0, 2], [1e-200, 3e-200], [1e200, 2e200], [0, 0], [math.inf, 1], [math.nan, 1]]
    x = torch.tensor(rows, dtype=torch.float64)
    norms = [lambda x, p=p: vector_norm(x, p) for p in (1.0, 2.0, 3.0, 10.0)]
    compare(*[(norm, [some]) for norm in norms for some in (x, x[:1].clone())])


def test_what_the_table_lacks_stays_a_call_of_torch_between_two_programs() -> None:
    def median(x: Tensor) -> list[Tensor]:
        rows = (x * 2).view(2, 3)
        middle, where = rows.sort(1)
        return [middle[:, 1] + rows[:, 0], where + 1, torch.cumsum(rows, 1).t() * 2]

    x = torch.tensor([3.0, 1.0, 2.0, -5.0, math.inf, 0.0], dtype=torch.float64)
    lacks = ("aten.sort.default", "aten.cumsum.default")
    compare((median, [x]), lacks=lacks)
    step, plainly, kept = recorded(median, [x])
    assert step([])
    ours = [t.clone() for t in kept]
    x.mul_(-1)  # and results of torch have other addresses now
    ballast = [torch.zeros(6, dtype=torch.float64) for _ in range(9)]
    assert step([])
    again = [t.clone() for t in kept]
    plainly()
    del ballast
    for a, b, c in zip(again, kept, ours, strict=True):
        torch.testing.assert_close(a, b)
        assert not a.equal(c)


def test_more_entries_than_are_worth_a_program_stay_torchs() -> None:
    step, _, _ = recorded(lambda x: [x + 1, x[:3] * 2], [torch.zeros(2**15)])
    assert step.torch_calls[0] == "aten.add.Tensor of 32,768 elements"


def test_programs_of_other_sizes_are_the_same_library() -> None:
    texts = []
    for n in (3, 50):
        step, _, _ = recorded(lambda x: (x * 2).sum(0) + 1, [numbers((n,), torch.float64)])
        texts.append(step.text)
    assert texts[0] == texts[1]


def test_a_region_starts_where_it_is_in_memory_that_begins_later() -> None:
    """Such memory is that of gradients inside a larger tensor."""
    form = (torch.float32, torch.device("cpu"), (2, 3), (3, 1), 10)
    node = SimpleNamespace(meta={"form": form})
    region = _region(cast(Any, node), memory=1, offset=4)
    assert (region.memory, region.start, region.shape) == (1, 6, (2, 3))
