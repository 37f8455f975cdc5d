"""`explain()` says why steps are not replayed, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import at_once
from torchzero_clip import (
    LR,
    Accumulate,
    Adam,
    Chain,
    ClipNorm,
    Clipper,
    Freeze,
    Guard,
    InBasis,
    Lambda,
    Masked,
    Modular,
    Noise,
    Project,
    SkipSpike,
    SOAPBasis,
    Transform,
    When,
)
from torchzero_clip.core import Group, State, TensorList, count_step

CONSTANT = torch.tensor(0.5)


class Unsaid(Transform):
    """A rule that says nothing of itself."""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(0.5)


class Scaled(Transform):
    """A rule with a function that says nothing of itself."""

    schedule: Callable[[float], float]

    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(self.schedule(1.0))


class Doing(Transform):
    """A rule that does what it is told to each tensor, and says that it is pure."""

    what: Callable[[Tensor], Tensor]

    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.map(self.what)


class Counting(Transform):
    pure = True

    def step(self, buckets: list[Any]) -> list[Any]:
        count_step(buckets)
        return buckets


def pure(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    function.pure = True  # type: ignore[attr-defined]
    return function


def params(**options: Any) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (4,)]
    return [Parameter(torch.randn(shape, generator=generator, **options)) for shape in shapes]


def made(*chain: Transform, kind: Any = Modular, **options: Any) -> Modular:
    """A model whose programs run node by node."""
    opt: Modular = kind(params(), *chain, compile=True, **options)
    opt.engine = opt.engine.twin()
    return opt


def steps(opt: Modular, count: int = 6, change: Callable[[Modular, int], Any] | None = None) -> str:
    """What it says after some steps."""
    for i in range(count):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        if change is not None:
            change(opt, i)
        opt.step()
    return opt.explain()


# ---------------------------------------------------------------------- before the first step


NEVER: dict[str, tuple[Callable[[], Transform], tuple[str, ...]]] = {
    "a rule that says nothing": (
        Unsaid, ("Unsaid", "pure = True", "branch on the value", "check_pure"),
    ),
    "a function": (lambda: Scaled(lambda x: x), ("Scaled", "schedule.pure = True")),
    "noise": (lambda: Noise(0.1), ("Noise", "generator", "compile=False")),
    "lambda": (lambda: Lambda(torch.tanh), ("Lambda", "fn", "u.tanh()")),
    "when": (lambda: When(lambda t: t < 9, ClipNorm(1.0)), ("When", "condition", "schedule")),
    "accumulate": (lambda: Accumulate(2), ("Accumulate", "backward()")),
    "project": (lambda: Project(torch.relu), ("Project", "fn", "pure = True")),
    "matrices": (
        lambda: InBasis(SOAPBasis(), Adam()), ("InBasis", "matrix products"),
    ),
    "inside": (lambda: Masked(Noise(0.1), lambda name, p: True), ("Masked", "generator")),
}  # fmt: skip


@at_once("name", NEVER)
def test_before_the_first_step_it_says_what_stands_in_the_way_and_what_to_do(name: str) -> None:
    make, words = NEVER[name]
    said = made(make(), LR(0.1)).explain()
    assert "Steps are not recorded and replayed" in said
    assert [word for word in words if word not in said] == []


def test_every_link_that_stands_in_the_way_is_named() -> None:
    said = made(Noise(0.1), Lambda(torch.tanh), Lambda(torch.sin), Unsaid(), LR(0.1)).explain()
    lines = said[said.index("Steps are not recorded and replayed") :].splitlines()[1:]
    assert [line.split(":")[0].strip("- ") for line in lines] == [
        "Noise", "Lambda", "Lambda_2", "Unsaid",
    ]  # fmt: skip


def test_it_says_the_same_after_steps() -> None:
    opt = made(Noise(0.1), Unsaid(), LR(0.1))
    before = opt.explain()
    assert steps(opt) == before


def test_of_a_chain_that_may_be_repeated_it_says_so() -> None:
    assert "Steps of this chain can be recorded and replayed." in made(Adam(), LR(0.1)).explain()


def stepped(opt: Any, after: Callable[[Any], None], count: int = 4) -> str:
    """What it says after steps, each followed by a call."""
    for _ in range(count):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        opt.step()
        after(opt)
    return str(opt.explain())


@at_once(
    "name, after",
    [
        ("state_dict()", lambda opt: opt.state_dict()),
        ("load_state_dict()", lambda opt: opt.load_state_dict(opt.state_dict())),
    ],
)
def test_a_checkpoint_after_every_step_is_named(name: str, after: Callable[[Any], None]) -> None:
    opt = made(Adam(), LR(0.1))
    words = f"The two steps after {name} are not replayed"
    for _ in range(2):  # the explanation itself changes nothing
        assert words in stepped(opt, after)
    opt.step()
    assert words in opt.explain()
    assert "Steps are replayed" in stepped(opt, lambda opt: None)
    assert words not in opt.explain()


def test_a_reason_of_the_step_itself_comes_before_a_checkpoint() -> None:
    def read(t: Tensor) -> Tensor:
        return t * float(t.sum())

    read.pure = True  # type: ignore[attr-defined]
    opt = made(Doing(read), LR(0.1))
    opt.state_dict()
    said = stepped(opt, lambda opt: None)
    assert "was not replayed from a recording: " in said
    assert "are not replayed" not in said


def test_without_compile_it_says_nothing() -> None:
    for chain in (Chain(Adam(), LR(0.1)), Chain(Noise(0.1), Lambda(torch.tanh), LR(0.1))):
        assert "repeat" not in Modular(params(), *chain).explain()


def test_a_clipper_says_it_too() -> None:
    assert "Noise" in made(Noise(0.1), kind=Clipper).explain().partition("not recorded")[2]


# ---------------------------------------------------------------------- after steps


def test_after_steps_it_says_how_many_were_repeated() -> None:
    assert "Steps are replayed from a recording, 5 so far." in steps(made(Adam(), LR(0.1)), 7)


def rate(opt: Modular, i: int) -> None:
    opt.param_groups[0]["lr"] = torch.tensor(0.1)


def of_a_subclass(opt: Modular, i: int) -> None:
    class Mine(Tensor):
        pass

    p = opt.param_groups[0]["params"][0]
    p.grad = p.grad.as_subclass(Mine)


def in_turn(opt: Modular, i: int) -> None:
    opt.param_groups[0]["params"][i % 2].grad = None


def losses(opt: Modular, i: int) -> None:
    opt.report(loss=1.0 if i % 2 else torch.tensor(1.0))


def shared(opt: Modular, i: int) -> None:
    memory, (a, b) = torch.randn(12), opt.param_groups[0]["params"]
    a.grad, b.grad = memory.view(4, 3), memory[:4]


def moving(opt: Modular, i: int) -> None:
    for state in opt.state.values():
        state["Adam/exp_avg"] = state["Adam/exp_avg"].clone()


BEFORE = Chain(Adam(), LR(0.1))
FOUND: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "a rate that is a tensor": (BEFORE, rate, ("'lr'", "Tensor", "set it to a number")),
    "gradients of a subclass": (BEFORE, of_a_subclass, ("gradients", "Mine", "compile=False")),
    "other gradients in each step": (BEFORE, in_turn, ("that have a gradient changed",)),
    "losses of two kinds": (
        Chain(SkipSpike(), Adam(), LR(0.1)), losses, ("the type of the loss changed",),
    ),
    "gradients that share memory": (BEFORE, shared, ("share memory", "clone")),
    "state that moves": (BEFORE, moving, ("in place",)),
    "a value that is read": (
        Chain(Doing(pure(lambda x: x if (x > 0).any() else -x)), LR(0.1)), None,
        ("copies a value to the CPU", "torch.where", "test_steps_anew.py"),
    ),
    "numpy": (
        Chain(Doing(pure(lambda x: torch.from_numpy(x.numpy()))), LR(0.1)), None,
        ("numpy copies a tensor", "test_steps_anew.py"),
    ),
    "a shape that depends on values": (
        Chain(Doing(pure(lambda x: x * x.nonzero().shape[0])), LR(0.1)), None,
        ("aten.nonzero", "values", "test_steps_anew.py"),
    ),
    "random numbers": (
        Chain(Doing(pure(lambda x: x + torch.randn_like(x))), LR(0.1)), None,
        ("random", "group['step']", "test_steps_anew.py"),
    ),
    "a tensor from elsewhere": (
        Chain(Doing(pure(lambda x: x * CONSTANT)), LR(0.1)), None,
        ("shape ()", "state", "field"),
    ),
    "a guard that raises": (
        Chain(Guard("raise"), LR(0.1)), None, ("Guard", "synchronizes", "'skip'"),
    ),
    "a guard that gives up": (
        Chain(Guard(max_consecutive=3), LR(0.1)), None, ("Guard", "max_consecutive"),
    ),
    "a count on the host": (Chain(Counting(), LR(0.1)), None, ("Counting", "reads = ('step',)")),
    "gradients that a clipper leaves out": (
        Chain(ClipNorm(1.0), Freeze(lambda name, p: p.dim() < 2)), None,
        ("requires_grad_(False)",),
    ),
}  # fmt: skip


@at_once("name", FOUND)
def test_after_steps_it_says_why_they_were_done_anew_and_what_to_do(name: str) -> None:
    chain, change, words = FOUND[name]
    kind = Clipper if "clipper" in name else Modular
    said = steps(made(*chain, kind=kind), change=change)
    assert "was not replayed from a recording: " in said, said
    assert [word for word in words if word not in said] == [], said
    assert len(said.splitlines()[-1]) < 500


def test_complex_parameters_are_named() -> None:
    opt = Modular(params(dtype=torch.complex64), Adam(), LR(0.1), compile=True)
    assert "view_as_real" in steps(opt)


def test_parameters_that_share_memory_are_named() -> None:
    memory = torch.randn(12)
    opt = Modular([Parameter(memory.view(4, 3)), Parameter(memory[:4])], BEFORE, compile=True)
    assert "share memory" in steps(opt)
