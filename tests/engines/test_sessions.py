"""Sessions: an engine that records has the results of an engine that computes at once."""

from __future__ import annotations

import importlib.resources
import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import at_once
from torchzero_clip.core.engine import Session
from torchzero_clip.core.norms import NAMED, statistics
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.engines import Compiled, Eager
from torchzero_clip.engines.compiled.compiled import CompiledSession
from torchzero_clip.engines.compiled.lists.tape import Taped
from torchzero_clip.engines.compiled.printers import program
from torchzero_clip.engines.compiled.printers.operators import OPERATORS
from torchzero_clip.engines.eager import EagerSession

SHAPES = [(5, 4), (7,), (1,), (), (0,), (3, 2, 2)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def tensors(seed: int, shapes: Any = SHAPES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def recorded() -> Compiled:
    """Return an engine whose programs run node by node."""
    engine = Compiled([])
    engine.backend = "plain"
    return engine


def opened(engine: Any, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Any:
    return engine.open("key", list(range(len(params))), params, grads)


def close(a: Any, b: Any, dtype: torch.dtype = torch.float32) -> None:
    half = dtype in (torch.bfloat16, torch.float16)
    for x, y in zip(a, b, strict=True):
        rtol, atol = (3e-2, 3e-2) if half else (3e-6, 3e-6)
        if half and not x.dim():  # torch promotes two 0-dim tensors as it promotes two large ones
            y = y.to(x.dtype)
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True)


class Rule:
    """A rule whose update is a function."""

    def __init__(self, update: Callable[..., TensorList]) -> None:
        self.update = update

    def fused(self, group: Any) -> None:
        return None

    def affine(self, group: Any) -> None:
        return None


# ---------------------------------------------------------------------- every operator

CALLS: dict[str, Callable[[TensorList, TensorList, Any], Any]] = {
    "add": lambda u, v, x: u.add(v).add(x).add(v, alpha=0.3).add(v, alpha=x).add(0.5, alpha=2),
    "add_": lambda u, v, x: u.add_(v).add_(v, alpha=0.3).add_(v, alpha=x).add_(0.5),
    "sub": lambda u, v, x: u.sub(v),
    "sub_": lambda u, v, x: u.sub_(v).sub_(0.5),
    "mul": lambda u, v, x: u.mul(v).mul(x),
    "mul_": lambda u, v, x: u.mul_(v).mul_(0.5).mul_([0.5] * len(u)),
    "div": lambda u, v, x: u.div(x),
    "div_": lambda u, v, x: u.div_(v.abs().add_(1.0)).div_(2.0),
    "lerp": lambda u, v, x: u.lerp(v, 0.25),
    "lerp_": lambda u, v, x: u.lerp_(v, 0.25).lerp_(v, x),
    "addcmul_": lambda u, v, x: u.addcmul_(v, u, value=0.5).addcmul_(v, v, value=x),
    "clamp": lambda u, v, x: u.clamp(-0.5, 0.5),
    "clamp_": lambda u, v, x: u.clamp_(-0.5, 0.5).clamp_(v, 1.0),
    "maximum": lambda u, v, x: u.maximum(v),
    "maximum_": lambda u, v, x: u.maximum_(v).maximum_(0.1),
    "minimum": lambda u, v, x: u.minimum(v),
    "minimum_": lambda u, v, x: u.minimum_(v).minimum_(0.1),
    "neg": lambda u, v, x: u.neg(),
    "abs": lambda u, v, x: u.abs(),
    "abs_": lambda u, v, x: u.abs_(),
    "sign": lambda u, v, x: u.sign(),
    "sign_": lambda u, v, x: u.sign_(),
    "sqrt": lambda u, v, x: u.abs().sqrt(),
    "sqrt_": lambda u, v, x: u.abs_().sqrt_(),
    "rsqrt": lambda u, v, x: u.abs().add_(1.0).rsqrt(),
    "rsqrt_": lambda u, v, x: u.abs_().add_(1.0).rsqrt_(),
    "neg_": lambda u, v, x: u.neg_(),
    "reciprocal": lambda u, v, x: u.abs().add_(1.0).reciprocal(),
    "exp": lambda u, v, x: u.exp(),
    "exp_": lambda u, v, x: u.exp_(),
    "expm1": lambda u, v, x: u.expm1(),
    "expm1_": lambda u, v, x: u.expm1_(),
    "log": lambda u, v, x: u.abs().add_(1.0).log(),
    "log_": lambda u, v, x: u.abs_().add_(1.0).log_(),
    "log1p": lambda u, v, x: u.abs().log1p(),
    "log1p_": lambda u, v, x: u.abs_().log1p_(),
    "tanh": lambda u, v, x: u.tanh(),
    "tanh_": lambda u, v, x: u.tanh_(),
    "sigmoid": lambda u, v, x: u.sigmoid(),
    "sigmoid_": lambda u, v, x: u.sigmoid_(),
    "erf": lambda u, v, x: u.erf(),
    "erf_": lambda u, v, x: u.erf_(),
    "sin": lambda u, v, x: u.sin(),
    "sin_": lambda u, v, x: u.sin_(),
    "cos": lambda u, v, x: u.cos(),
    "cos_": lambda u, v, x: u.cos_(),
    "square": lambda u, v, x: u.square(),
    "square_": lambda u, v, x: u.square_().square_(),
    "pow": lambda u, v, x: u.abs().pow(1.5).pow(x),
    "pow_": lambda u, v, x: u.abs_().pow_(v.abs()).pow_(0.3).pow_(x),
    "reciprocal_": lambda u, v, x: u.abs_().add_(1.0).reciprocal_(),
    "where": lambda u, v, x: u.where(v.positive(), v).where(u.positive(), 0.0),
    "atan2": lambda u, v, x: u.atan2(v),
    "hypot": lambda u, v, x: u.hypot(v),
    "isfinite": lambda u, v, x: u.where(u.div(0.0).isfinite(), v),
    "isinf": lambda u, v, x: u.where(u.div(0.0).isinf(), v),
    "isnan": lambda u, v, x: u.where(u.div(0.0).isnan(), v),
    "positive": lambda u, v, x: u.where(v.positive(), 0.0),
    "borrow": lambda u, v, x: u.borrow().mul_(2.0),
    "own": lambda u, v, x: u.borrow().own().mul_(2.0),
    "to": lambda u, v, x: u.to(torch.float64).mul_(2.0).to(u.dtype),
    "clone": lambda u, v, x: u.clone().add_(u.mul_(2.0)),
    "copy_": lambda u, v, x: u.copy_(v),
}
RUNS = {"eq", "map", "masked_fill_", "stack", "statistics", "sum", "dot"}  # they read tensors


def methods() -> set[str]:
    found = inspect.getmembers(TensorList, inspect.isfunction)
    return {name for name, _ in found if not name.startswith("_")} - RUNS


def test_every_method_of_a_list_has_a_call_here() -> None:
    assert set(CALLS) == methods()


@at_once("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_every_method_is_recorded_and_right(name: str, dtype: torch.dtype) -> None:
    """No method leaves the tape unnoticed: nothing runs before values are read."""
    found = []
    for engine in (recorded(), Eager(fuses=False)):
        session = opened(engine, tensors(0, dtype=dtype), tensors(1, dtype=dtype))
        before = program.program_of.cache_info()
        u, v = session.grads.borrow(), session.params.borrow()
        out = CALLS[name](u, v, torch.tensor(0.7))
        if isinstance(session, CompiledSession):
            assert isinstance(out, Taped)
            assert program.program_of.cache_info() == before, "nothing has run"
        found.append([t.clone() for t in out])
    close(*found, dtype)


def test_a_tape_and_its_lists_override_no_operator() -> None:
    own = {name for name in vars(Taped) if not name.startswith("_")}
    operators = {name for name in CALLS if name not in ("borrow", "own", "to", "clone", "copy_")}
    assert not own & operators


def test_boolean_operators_are_known_as_such() -> None:
    assert {name for name, operator in OPERATORS.items() if operator.torch and operator.flag} == {
        "positive", "isfinite", "isinf", "isnan",
    }  # fmt: skip


# ---------------------------------------------------------------------- random steps


def step(session: Session, seed: int, state: dict[str, list[Tensor]]) -> list[Tensor]:
    """Run random operators on the update, state and gradients; return the norms."""
    choose, measured = random.Random(seed), []
    u = session.adopt(session.grads.borrow())
    held = {name: session.state(name, row) for name, row in state.items()}
    lists = [u, *held.values(), session.params.borrow(), session.grads.borrow()]
    x: list[Any] = [0.3, torch.tensor(0.7), torch.linspace(0.1, 0.9, len(u)), torch.tensor([1.5])]
    for _ in range(12):
        kind = choose.randrange(10)
        name = choose.choice([one for one in CALLS if one not in ("to", "borrow")])
        if kind == 0:
            measured.append(lists[0].statistics(NAMED[choose.choice(["l1", "l2", "linf", "l3"])]))
        elif kind == 1:
            lists[0] = session.divide(lists[0], 1 / x[2])
        elif kind == 2:
            lists[0].tensors[0].mul_(1.0)
        elif kind == 3:
            choose.choice(list(held.values())).lerp_(lists[0], choose.choice(x))
        elif kind == 4:
            lists[0] = TensorList([t * 0.5 for t in lists[0]], owned=True)
        elif kind == 5:
            lists[0] = session.adopt(lists[0])
        elif kind == 6:
            lists[0] = session.write_grads(lists[0].clamp(-1.0, 1.0), lists[0])
        else:
            other = choose.choice(lists[1:])
            lists[0] = CALLS[name](lists[0].borrow(), other, choose.choice(x)).clamp(-9.0, 9.0)
    session.subtract(lists[0])
    session.close()
    return measured


@at_once("dtype", [torch.float32, torch.float64])
@at_once("seed", range(40))
def test_random_steps_are_those_of_the_eager_engine(seed: int, dtype: torch.dtype) -> None:
    found = []
    for engine in (recorded(), Eager(fuses=False)):
        params, state = tensors(0, dtype=dtype), {"m": tensors(2, dtype=dtype)}
        state |= {"v": tensors(3, dtype=dtype)}
        out: list[Tensor] = []
        for i in range(2):
            grads = tensors(10 + i, dtype=dtype)
            out += step(opened(engine, params, grads), seed, state)
            out += [t.clone() for t in (*params, *grads, *state["m"], *state["v"])]
        found.append(out)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("seed", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_random_steps_in_cpp(seed: int) -> None:
    found = []
    for engine in (Compiled([]), Eager(fuses=False)):
        params, state = tensors(0), {"m": tensors(2), "v": tensors(3)}
        grads = tensors(10)
        out = step(opened(engine, params, grads), seed, state)
        found.append([*out, *params, *grads, *state["m"], *state["v"]])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


# ---------------------------------------------------------------------- programs


def adam(session: Any, state: Any, group: Any, factor: float = 1.0) -> None:
    def update(u: TensorList, state: Any, group: Any) -> TensorList:
        state["m"].lerp_(u, 1 - group["betas"][0])
        u = state["v"].mul_(group["betas"][1]).addcmul_(u, u).sqrt().add_(group["eps"])
        return state["m"].div(u).add_(group["params"], alpha=group["decay"])

    u = session.adopt(session.grads.borrow())
    norm = u.statistics(NAMED["l2"])
    u = session.divide(u, torch.full_like(norm[0], 1 / factor))
    held = {name: session.state(name, row) for name, row in state.items()}
    u = session.update(Rule(update), u, held, {**group, "params": session.params})
    session.subtract(u)
    session.close()


def test_the_program_of_an_unchanged_chain_is_built_once() -> None:
    """Neither numbers such as 0 and 1, nor a clip that does nothing, change the program."""
    program.program_of.cache_clear()
    engine = recorded()
    params, state = tensors(0), {"m": tensors(1), "v": [t.square() for t in tensors(2)]}
    values = [(0.9, 0.999, 1e-8, 0.0), (0.0, 0.0, 1e-3, 1.0), (1.0, 0.5, 1.0, 0.5)]
    for i, (beta1, beta2, eps, decay) in enumerate(values * 2):
        group = {"betas": (beta1, beta2), "eps": eps, "decay": decay, "every": 3}
        adam(opened(engine, params, tensors(i)), state, group, factor=[1.0, 0.5][i % 2])
    assert program.program_of.cache_info().misses == 2  # the norm, and the rest
    assert not engine.lasting()


def test_update_cannot_branch_on_a_float_and_may_on_an_integer() -> None:
    seen: dict[str, Any] = {}

    def look(u: TensorList, state: Any, group: Any) -> TensorList:
        seen.update(group)
        return u

    session = opened(recorded(), tensors(0), tensors(1))
    group = {"lr": 0.0, "betas": (0, 0.5), "every": 3, "nesterov": False, "kind": "x"}
    session.update(Rule(look), session.grads.borrow(), {}, group)
    assert isinstance(seen["lr"], Tensor)
    assert all([isinstance(beta, Tensor) for beta in seen["betas"]])
    assert (seen["every"], seen["nesterov"], seen["kind"]) == (3, False, "x")


def test_the_hook_sees_every_launch_with_what_it_reads_and_writes() -> None:
    import contextlib
    from collections.abc import Iterator

    seen: list[Any] = []

    @contextlib.contextmanager
    def watch(*lists: Any) -> Iterator[None]:
        seen.append(lists)
        yield

    engine = recorded().twin(watch)
    params, grads = tensors(0), tensors(1)
    session = opened(engine, params, grads)
    session.subtract(session.grads.borrow().mul_(0.5))
    session.close()
    ((read, written),) = seen
    assert set(map(id, read)) == set(map(id, [*params, *grads]))
    assert list(map(id, written)) == list(map(id, params))


# ---------------------------------------------------------------------- what outlives what


def test_an_update_that_is_dropped_still_moves_its_state() -> None:
    session, state = opened(recorded(), tensors(0), tensors(1)), tensors(2)
    before = [t.clone() for t in state]
    session.state("m", state).mul_(0.5)
    close(state, before)
    session.close()
    close(state, [t * 0.5 for t in before])


def test_a_list_that_outlives_its_step_is_not_overwritten_by_the_next() -> None:
    engine, params = recorded(), tensors(0)
    session = opened(engine, params, tensors(1))
    kept = session.grads.borrow().mul_(2.0)
    session.close()
    right = [t * 2 for t in tensors(1)]
    other = opened(engine, params, tensors(5))
    u = other.grads.borrow().mul_(3.0)
    close(u, [t * 3 for t in tensors(5)])
    close(kept, right)


def test_parts_of_a_bucket_do_not_overwrite_each_other_or_the_whole() -> None:
    """All of them use spare memory with the same key."""
    engine = recorded()
    session = opened(engine, tensors(0), tensors(1))
    whole = session.grads.borrow().mul_(2.0)
    _ = whole.tensors
    first, second = [session.select(where, "key", where) for where in ([0, 1], [1, 2])]
    a, b = first.grads.borrow().mul_(3.0), second.grads.borrow().mul_(4.0)
    c = first.adopt(TensorList([*a.tensors])).mul_(1.0)
    d = second.adopt(TensorList([a.tensors[1], b.tensors[1]], owned=True))
    e = second.params.borrow().mul_(5.0)
    grads = tensors(1)
    close(a, [t * 3 for t in grads[:2]])
    close(c, [t * 3 for t in grads[:2]])
    close(e, [t * 5 for t in tensors(0)[1:3]])
    close(d, [grads[1] * 3, grads[2] * 4])
    close(b, [t * 4 for t in grads[1:3]])
    close(whole, [t * 2 for t in grads])


def test_a_part_that_writes_gradients_is_seen_by_the_whole() -> None:
    session = opened(recorded(), tensors(0), tensors(1))
    part = session.select([1], "key", [1])
    part.writable_grads().mul_(0.0)
    seen = session.grads.mul(2.0)
    assert not seen.tensors[1].any()


def test_a_branch_leaves_what_flows_as_it_is() -> None:
    session = opened(recorded(), tensors(0), tensors(1))
    u = session.adopt(session.grads.borrow())
    other = session.branch()
    v = other.adopt(session.grads.borrow()).mul_(2.0)
    close(u.add(v), [t * 3 for t in tensors(1)])


def test_tensors_that_a_program_reads_may_change_before_it_runs() -> None:
    """Vectors, numbers and plain lists are operands with their values at the time of the call."""
    session = opened(recorded(), tensors(0), tensors(1))
    own = TensorList([torch.full_like(t, 2.0) for t in tensors(1)], owned=True)
    vector = torch.full((len(SHAPES),), 3.0)
    u = session.grads.mul(own).mul(vector)
    own.mul_(100.0)
    vector.zero_()
    close(u, [t * 6 for t in tensors(1)])


def test_a_boolean_list_can_be_calculated_with() -> None:
    session = opened(recorded(), tensors(0), tensors(1))
    flags = session.grads.positive()
    close(flags.mul(0.5), [(t > 0) * 0.5 for t in tensors(1)])


# ---------------------------------------------------------------------- what must not be read past


@pytest.mark.parametrize("backend", ["native", "plain"])
def test_a_vector_of_one_entry_is_a_number(backend: Any) -> None:
    engine = Compiled([])
    engine.backend = backend
    session = opened(engine, tensors(0), tensors(1))
    close(session.grads.mul(torch.tensor([0.1])), [t * 0.1 for t in tensors(1)])
    close(session.grads.add(torch.tensor([[2.0]])), [t + 2.0 for t in tensors(1)])


@pytest.mark.parametrize("length", [0, 2, 5, 7, 100])
@pytest.mark.parametrize("kind", [torch.ones, lambda n: [1.0] * n])
def test_a_vector_of_another_length_is_a_sentence(length: int, kind: Any) -> None:
    session = opened(recorded(), tensors(0), tensors(1))
    with pytest.raises(ValueError, match=r"one element per tensor of the TensorList, here 6"):
        session.grads.mul(kind(length))
    with pytest.raises(ValueError, match="one element per tensor of the TensorList, here 6"):
        session.grads.mul(torch.ones(6, 1))


def test_lists_of_other_shapes_or_kinds_reach_no_program() -> None:
    session = opened(recorded(), tensors(0), tensors(1))
    other = [torch.ones(*t.shape, 2) for t in tensors(0)]
    mixed = [t.to(torch.float64 if i else torch.float32) for i, t in enumerate(tensors(0))]
    whole = [torch.ones_like(t, dtype=torch.int64) for t in tensors(0)]
    for row in (other, mixed, whole, tensors(0)[1:]):
        assert not isinstance(session.state("s", row), Taped)
        assert not isinstance(session.adopt(TensorList(row)), Taped)
    assert isinstance(session.state("s", tensors(2)), Taped)


def test_state_that_changes_its_memory_or_shape_is_looked_at_afresh() -> None:
    engine, params, state = recorded(), tensors(0), tensors(1)
    for change in (torch.zeros(9, 9), torch.zeros(4, 5).t(), torch.zeros(5, 4)):
        session = opened(engine, params, tensors(2))
        session.state("m", state).add_(1.0)
        session.close()
        state[0].data = change
    session = opened(engine, params, tensors(2))
    session.state("m", state).add_(1.0)
    session.close()
    assert (state[0] == 1).all()


def alias(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    params, grads = tensors(0, [(4,)] * 3), tensors(1, [(4,)] * 3)
    if kind == "parameters":
        params[2] = params[0].view(4)
    elif kind == "parts of parameters":
        memory = torch.arange(6.0)
        params[0], params[1] = memory[:4], memory[2:]
    elif kind == "one gradient":
        grads[1] = grads[0]
    else:
        grads[1] = params[1]
    return params, grads


@pytest.mark.parametrize(
    "kind", ["parameters", "parts of parameters", "one gradient", "the gradient is the parameter"]
)
def test_tensors_that_share_memory_are_worked_on_one_after_the_other(kind: str) -> None:
    found = []
    for engine in (Compiled([]), Eager(fuses=False)):
        params, grads = alias(kind)
        for _ in range(3):
            session = opened(engine, params, grads)
            assert isinstance(session, EagerSession)
            u = session.adopt(session.grads.borrow()).mul_(0.5)
            session.subtract(u)
            session.close()
        found.append([*params, *grads])
    close(*found)


def test_tensors_that_lie_side_by_side_share_no_memory() -> None:
    flat = torch.randn(2, 24)
    params, grads = [[row[:4], row[4:4], row[4:24].view(4, 5)] for row in flat]
    assert isinstance(opened(recorded(), params, grads), CompiledSession)


def test_state_that_lies_in_the_parameters_is_worked_on_at_once() -> None:
    params = tensors(0)
    session = opened(recorded(), params, tensors(1))
    assert not isinstance(session.state("m", [p.detach() for p in params]), Taped)


# ---------------------------------------------------------------------- other tensors


def test_complex_tensors_and_subclasses_get_an_eager_session() -> None:
    class Odd(Tensor):
        pass

    engine = recorded()
    for kind in (lambda t: t.to(torch.complex64), lambda t: t.as_subclass(Odd)):
        params, grads = [[kind(t) for t in tensors(i)] for i in (0, 1)]
        assert isinstance(opened(engine, params, grads), EagerSession)


def test_an_update_of_other_shapes_is_subtracted_plainly() -> None:
    params = tensors(0, [(2, 3), (4,)])
    session = opened(recorded(), params, tensors(1, [(2, 3), (4,)]))
    session.subtract(TensorList([torch.ones(3), torch.ones(1)]))
    session.close()
    close(params, [t - 1 for t in tensors(0, [(2, 3), (4,)])])


def test_what_a_program_measures_is_the_statistic() -> None:
    for engine in (Compiled([]), recorded()):
        u = opened(engine, tensors(0), tensors(1)).grads.mul(2.0)
        for name in ("l1", "l2", "linf"):
            right = statistics([t * 2 for t in tensors(1)], NAMED[name])
            torch.testing.assert_close(u.statistics(NAMED[name]), right, rtol=1e-6, atol=0)


def test_the_header_is_in_the_package() -> None:
    header = importlib.resources.files("torchzero_clip.engines.compiled.printers") / "kernel.h"
    assert "#pragma once" in header.read_text()
