"""Every method of a TensorList, in every engine: what it returns is a new list or shares memory as
its docstring says, so that no engine computes other numbers when one of both is written later.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import field

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.engines.accelerated import Accelerated, as_on_an_accelerator
from tests.helpers import at_once, run_each
from torchzero_clip import LR, Bucket, Group, Modular, State, TensorList, Transform
from torchzero_clip.core import zeros_like_state
from torchzero_clip.core.formats import Nearest
from torchzero_clip.core.lazy import Joined, Lazy
from torchzero_clip.engines import Compiled
from torchzero_clip.engines.compiled.lists.tape import Taped
from torchzero_clip.engines.kept import Kept, Wide

Lists = tuple[TensorList, TensorList]
Call = Callable[[TensorList, TensorList], TensorList]

UNARY = ["neg", "abs", "sign", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p"]
UNARY += ["tanh", "sigmoid", "erf", "sin", "cos", "square"]
BINARY = ["mul", "div", "sub", "add", "maximum", "minimum"]
FLAGS = ["isfinite", "isinf", "isnan", "positive"]


def unary(name: str) -> Call:
    return lambda x, y: getattr(x, name)()


def binary(name: str) -> Call:
    return lambda x, y: getattr(x, name)(y)


NEW: dict[str, Call] = {
    **{name: unary(name) for name in UNARY},
    **{name: binary(name) for name in BINARY},
    **{name: unary(name) for name in FLAGS},
    "add, alpha": lambda x, y: x.add(y, alpha=0.5),
    "lerp": lambda x, y: x.lerp(y, 0.25),
    "clamp": lambda x, y: x.clamp(0.2, 0.6),
    "pow": lambda x, y: x.pow(2.0),
    "eq": lambda x, y: x.eq(y),
    "hypot": lambda x, y: x.hypot(y),
    "atan2": lambda x, y: x.atan2(y),
    "where, a mask": lambda x, y: x.where(y.sub(x).positive(), y),
    "where, true flags": lambda x, y: x.where(x.sum() > 0, y),
    "where, false flags": lambda x, y: x.where(x.sum() < 0, y),
    "where, or a number": lambda x, y: x.where(x.sum() > 0, 0.0),
    "clone": lambda x, y: x.clone(),
    "to, another dtype": lambda x, y: x.to(torch.float64),
    "to, and back": lambda x, y: x.to(torch.float64).to(torch.float32),
    "borrow": lambda x, y: x.borrow(),
    "borrow, twice": lambda x, y: x.borrow().borrow(),
    "borrow, converted": lambda x, y: x.borrow().to(torch.float64),
    "map, new tensors": lambda x, y: x.map(torch.expm1),
    "map, the same tensors": lambda x, y: x.map(lambda t: t),
    "map, views": lambda x, y: x.map(lambda t: t.view(-1).view(t.shape)),
    "map, rows": lambda x, y: x.map(lambda t: t[-1:].expand_as(t)),
}
IN_PLACE: dict[str, Call] = {
    **{f"{name}_": unary(f"{name}_") for name in UNARY},
    **{f"{name}_": binary(f"{name}_") for name in BINARY},
    "add_, alpha": lambda x, y: x.add_(y, alpha=0.5),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "clamp_": lambda x, y: x.clamp_(0.2, 0.6),
    "pow_": lambda x, y: x.pow_(2.0),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.5),
    "copy_": lambda x, y: x.copy_(y),
    "masked_fill_": lambda x, y: x.masked_fill_(y.sub(x).positive(), 0.5),
    "own": lambda x, y: x.own(),
    "to, the same dtype": lambda x, y: x.to(x.dtype),
}
NO_LISTS = {"stack", "sum", "dot", "statistics"}
SHARING = ("where", "borrow", "to", "map", "clone")  # what might share memory with a list


def computed(u: TensorList, state: State, group: Group) -> Lists:
    return u.mul(0.5), u.mul(0.25)


def read(u: TensorList, state: State, group: Group) -> Lists:
    """Lists that have memory already when the method is called."""
    lists = computed(u, state, group)
    assert all([len(x.tensors) for x in lists])
    return lists


def of_state(u: TensorList, state: State, group: Group) -> Lists:
    return state["m"].lerp_(u, 0.5), state["n"].lerp_(u, 0.25)


def of_others(u: TensorList, state: State, group: Group) -> Lists:
    return u, group["grads"]


def of_parameters(u: TensorList, state: State, group: Group) -> Lists:
    return group["params"].abs().add_(0.1), group["params"]


KINDS = {
    "computed": computed,
    "read": read,
    "state": of_state,
    "update": of_others,
    "parameters": of_parameters,
}


class Calls(Transform):
    """The result of a method, after its lists were written; or these, after the result was.

    The copies that `apart` makes have no memory in common with anything: what follows is what any
    engine must compute.
    """

    call: Call
    kind: str
    writes_result: bool = False
    apart: bool = False

    reads = ("grads",)
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"m": zeros_like_state(param), "n": zeros_like_state(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        x, y = KINDS[self.kind](u, state, group)
        if self.apart:
            made = fresh(self.call(fresh(x), fresh(y)))
        else:
            made = self.call(x, y)
        if made.dtype == torch.bool:
            return y.where(made, 0.0) if self.writes_result else x.mul_(3.0).where(made, 0.0)
        if self.writes_result:
            made.mul_(3.0)
            return x.add(y)
        x.mul_(3.0)
        y.add_(2.0)
        return made.to(torch.float32)


class ReturnsItself(Transform):
    """u, which a method writes or leaves as it is; its operand must stay as it was.

    Attributes:
        problems: What was not so.
    """

    name_of_call: str
    problems: list[str] = field(default_factory=list)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        for kind in ("computed", "read", "update"):
            formula = IN_PLACE[self.name_of_call]
            # computed before the call, from copies, so that the call cannot change them
            values = [fresh(some) for some in KINDS[kind](fresh(u), state, group)]
            operands = fresh(values[1])
            expected = formula(*values)
            x, y = KINDS[kind](u.borrow(), state, group)
            made = formula(x, y)
            if made is not x:
                self.problems.append(f"{self.name_of_call} of {kind} returns another list")
            for what, some, others in (("result", made, expected), ("operand", y, operands)):
                pairs = zip(some.tensors, others.tensors, strict=True)
                if not all([torch.allclose(a, b, equal_nan=True) for a, b in pairs]):
                    self.problems.append(f"{self.name_of_call} of {kind}: its {what} is wrong")
        return u


class Converts(Transform):
    """The gradients and the update in float32, each twice, with a write in between."""

    apart: bool = False

    reads = ("grads",)
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            converted = self.converted(bucket.grads)
            bucket.u = self.converted(bucket.u).add(converted)
        return buckets

    def converted(self, narrow: TensorList) -> TensorList:
        assert narrow.dtype == torch.bfloat16
        first = narrow.to(torch.float32)
        second = narrow.to(torch.float32)
        if self.apart:
            first = fresh(first)
            second = fresh(second)
        narrow.mul_(4.0)
        first.mul_(3.0)
        return second.add_(first).add(narrow.to(torch.float32))


def fresh(lists: TensorList) -> TensorList:
    return TensorList([t.clone() for t in lists.tensors], owned=True)


ENGINES = ("default", "plain", "recorded", "accelerated")


def trained(
    chain: list[Transform], engine: str, steps: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the weights after each of some steps."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator).to(dtype)

    params = [Parameter(drawn(shape)) for shape in [(3, 4), (5,)]]
    options = {
        "plain": {"fused": False},
        "recorded": {"compile": True},
        "native": {"compile": True},
    }
    rounding = {} if dtype == torch.float32 else {"rounding": "nearest"}
    opt = Modular(params, *chain, **options.get(engine, {}), **rounding)
    if engine == "recorded":  # torch runs what is recorded, so that nothing is compiled
        opt.engine = opt.engine.twin()
    if engine == "accelerated":
        opt.engine = Accelerated()
    seen: list[Tensor] = []
    for _ in range(steps):
        for p in params:
            p.grad = drawn(p.shape) + 0.1
        opt.step()
        seen += [p.detach().clone() for p in params]
    return seen


@functools.cache
def expected(name: str, kind: str, writes_result: bool) -> list[Tensor]:
    """Return the weights of a chain whose lists have no memory in common."""
    return trained([Calls(NEW[name], kind, writes_result, apart=True), LR(0.1)], "plain")


ALIKE = [*UNARY, *BINARY, *FLAGS]
SLOW = {
    (name, kind)
    for (i, name), (j, kind) in itertools.product(enumerate(ALIKE), enumerate(KINDS))
    if (i + j) % len(KINDS) > 1
}
"""Methods that are written alike: quick tests have each with two kinds of lists."""
PAIRS = list(itertools.product(NEW, KINDS))
OFTEN = pytest.mark.parametrize(
    ("engine", "pairs"),
    [
        pytest.param(engine, pairs, id=f"{engine}-{id}", marks=marks)
        for engine in ENGINES
        for id, marks, pairs in (
            ("quick", (), [pair for pair in PAIRS if pair not in SLOW]),
            ("slow", pytest.mark.slow, [pair for pair in PAIRS if pair in SLOW]),
        )
    ],
)
Pairs = list[tuple[str, str]]


def wrong(engine: str, writes_result: bool, pairs: Pairs) -> Iterator[str]:
    """The methods, and the kinds of lists, with which an engine computes other weights."""
    for name, kind in pairs:
        made = trained([Calls(NEW[name], kind, writes_result), LR(0.1)], engine)
        both = zip(made, expected(name, kind, writes_result), strict=True)
        if not all([torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in both]):
            yield f"{name} of {kind}"


@OFTEN
def test_a_new_list_stays_as_it_is_when_what_it_was_made_of_is_written(
    engine: str, pairs: Pairs
) -> None:
    assert list(wrong(engine, False, pairs)) == []


@OFTEN
def test_what_a_list_was_made_of_stays_as_it_is_when_the_new_list_is_written(
    engine: str, pairs: Pairs
) -> None:
    assert list(wrong(engine, True, pairs)) == []


SHARED = [
    (name, kind) for name in NEW if name.startswith(SHARING) for kind in ("computed", "state")
]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(SHARED[::4] + SHARED[7::8], id="quick"),
        pytest.param(SHARED, id="all", marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_and_their_replays_share_no_memory_that_is_written(
    pairs: list[tuple[str, str]],
) -> None:
    run_each(shares_no_memory, "call, kind", pairs)


def shares_no_memory(call: str, kind: str) -> None:
    """Check five steps in C++, of which the last three are replays."""
    chain = lambda apart: [Calls(NEW[call], kind, apart=apart), LR(0.1)]  # noqa: E731
    made = trained(chain(False), "native", steps=5)
    expected = trained(chain(True), "plain", steps=5)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_method_that_writes_returns_its_list_and_leaves_operands_as_they_are(engine: str) -> None:
    rules = [ReturnsItself(name) for name in IN_PLACE]
    for rule in rules:
        trained([rule, LR(0.1)], engine, steps=1)
    assert [problem for rule in rules for problem in rule.problems] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_list_is_converted_as_it_is_at_the_call(engine: str) -> None:
    made = trained([Converts(), LR(0.1)], engine, dtype=torch.bfloat16)
    expected = trained([Converts(apart=True), LR(0.1)], "plain", dtype=torch.bfloat16)
    torch.testing.assert_close(made, expected)


def test_every_method_is_tested_here() -> None:
    public = {name for name, x in vars(TensorList).items() if callable(x) and name[0] != "_"}
    tested = {name.split(",")[0] for name in [*NEW, *IN_PLACE]}
    assert public == tested | NO_LISTS


def ones() -> list[Tensor]:
    return [torch.ones(3), torch.ones(2, 2)]


def numbers() -> TensorList:
    return TensorList(ones())


def halves() -> list[Tensor]:
    return [t.bfloat16() for t in ones()]


def kept(owner: type[Wide]) -> TensorList:
    return owner(halves(), Nearest())


LISTS: dict[type[TensorList], Callable[[], TensorList]] = {
    TensorList: numbers,
    Joined: lambda: Joined([numbers()]),
    Wide: lambda: kept(Wide),
}


def taped() -> TensorList:
    places = range(2)
    session = Compiled(()).twin().open("key", places, ones(), ones())
    return session.grads.borrow()


LISTS[Taped] = taped


@pytest.mark.parametrize("accelerator", [False, True], ids=["", "accelerator"])
@at_once("how", ["copied", "written", "unread"])
@at_once("kind", LISTS)
def test_a_list_that_moved_lends_what_it_holds_now(
    kind: type[TensorList], how: str, accelerator: bool
) -> None:
    with as_on_an_accelerator() if accelerator else nullcontext():
        lender = LISTS[kind]()
        if how != "unread":
            before = lender.borrow()
            expected = [t.clone() for t in LISTS[kind]().tensors]
        if how == "written":
            lender.mul_(8.0)
        else:
            lender.copy_(TensorList([torch.full_like(t, 8.0) for t in ones()]))
        values = [t.clone() for t in lender.tensors]
        assert lender.owned
        torch.testing.assert_close(lender.borrow().tensors, values)
        if how != "unread":
            torch.testing.assert_close(before.tensors, expected)


class Finite(Transform):
    """u ← one if u is finite, as a mask"""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.isfinite()


class Whole(Transform):
    """u ← u without its fraction, as integers"""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.map(Tensor.long)


@at_once("options", [{}, {"fused": False}, {"compile": True}])
@at_once("rates", [(), (0.5,)])
@at_once("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.filterwarnings("ignore:the chain has no learning rate")
def test_masks_and_integers_are_subtracted_as_floats(
    dtype: torch.dtype, rates: tuple[float, ...], options: dict[str, bool]
) -> None:
    rate = rates[0] if rates else 1.0
    for rule, expected in ((Finite(), [1.0, 0.0, 1.0]), (Whole(), [2.0, 0.0, 0.0])):
        p = Parameter(torch.ones(3, dtype=dtype))
        p.grad = torch.tensor([2.5, torch.inf if rule == Finite() else 0.0, 0.5], dtype=dtype)
        opt = Modular([p], rule, *map(LR, rates), **options)
        opt.step()
        assert p.tolist() == [1.0 - rate * x for x in expected]


def test_every_class_of_lists_is_tested_here() -> None:
    def below(cls: type[TensorList]) -> set[type[TensorList]]:
        return {cls, *[one for sub in cls.__subclasses__() for one in below(sub)]}

    bases = {Lazy, Kept}  # Kept is Wide, and is settled with the session
    mine = {cls for cls in below(TensorList) if cls.__module__.startswith("torchzero_clip.")}
    assert mine == LISTS.keys() | bases
