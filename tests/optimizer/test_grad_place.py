"""`grad=`: gradients that are not in `.grad` are read and written where they are."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tests.helpers import at_once
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Clipper,
    Guard,
    Modular,
    Recorder,
    WeightDecay,
    WeightEMA,
    ZClip,
    attach,
    compat,
    optimizer_class,
    release,
)
from torchzero_clip.source import SourceError

SHAPES = [(8, 5), (8,), (3, 8), ()]
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"fused": False},
    "compiled": {"compile": True},
}


def main_grad(p: Tensor) -> Tensor | None:
    return getattr(p, "main_grad", None)


PLACES: list[str | Callable[[Tensor], Tensor | None]] = ["main_grad", main_grad]


def params(dtype: torch.dtype = torch.float32, elsewhere: bool = False) -> list[Parameter]:
    torch.manual_seed(0)
    made = [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    if elsewhere:
        flat = torch.zeros(sum(p.numel() for p in made))  # as frameworks lay them out
        for p, part in zip(made, flat.split([p.numel() for p in made]), strict=True):
            vars(p)["main_grad"] = part.view(p.shape)
    return made


def fill(made: Sequence[Parameter], i: int) -> None:
    """The same numbers wherever the gradient is."""
    generator = torch.Generator().manual_seed(i)
    for p in made:
        grad = torch.randn(p.shape, generator=generator)
        if main_grad(p) is None:
            p.grad = grad.to(p.dtype)
        else:
            p.main_grad.copy_(grad)


def chain() -> list[Any]:
    return [Guard(), ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.1), LR(1e-2)]


def agree(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for a, b in zip(some, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@at_once("engine", ENGINES)
@at_once("place", PLACES)
def test_a_step_is_that_of_the_same_gradients_in_grad(engine: str, place: Any) -> None:
    here, there = params(), params(elsewhere=True)
    opts = [
        Modular(here, *chain(), **ENGINES[engine]),
        Modular(there, *chain(), grad=place, **ENGINES[engine]),
    ]
    for i in range(8):
        for made, opt in zip((here, there), opts, strict=True):
            fill(made, i)
            opt.step()
        agree(here, there)
    if engine == "compiled":
        assert [opt.engine.replays.count for opt in opts] == [6, 6]


def test_replayed_steps_notice_when_the_attribute_is_another_tensor() -> None:
    here, there = params(), params(elsewhere=True)
    opts = [Modular(here, *chain(), compile=True)]
    opts.append(Modular(there, *chain(), compile=True, grad="main_grad"))
    for i in range(12):
        if i > 3:
            for p in there:
                p.main_grad = torch.empty(p.shape)  # new memory in every step
        for made, opt in zip((here, there), opts, strict=True):
            fill(made, i)
            opt.step()
        agree(here, there)
    assert opts[1].engine.replays.count == opts[0].engine.replays.count > 8


def test_float32_gradients_of_bfloat16_parameters_are_not_rounded() -> None:
    low, high = params(torch.bfloat16, elsewhere=True), params(torch.bfloat16)
    high = [Parameter(p.detach().float()) for p in high]
    opts = [Modular(low, *chain(), rounding="exact", grad="main_grad"), Modular(high, *chain())]
    for i in range(5):
        for made, opt in zip((low, high), opts, strict=True):
            fill(made, i)
            opt.step()
    state = opts[0].exact_state_dict(nn.ParameterList(low))
    agree([state[str(i)] for i in range(len(high))], high)


def test_grad_counts_where_there_is_no_other_and_none_moves_nothing() -> None:
    ps = params()
    start = [p.detach().clone() for p in ps]
    vars(ps[0])["main_grad"], ps[0].grad = torch.ones(8, 5), torch.full((8, 5), 7.0)
    vars(ps[1])["main_grad"], ps[1].grad = None, torch.full((8,), 2.0)
    Modular(ps, LR(1.0), grad="main_grad").step()
    moved = [a - b for a, b in zip(start, ps, strict=True)]
    torch.testing.assert_close(moved[0], torch.ones(8, 5))
    torch.testing.assert_close(moved[1], torch.full((8,), 2.0))
    assert not moved[2].any()
    assert not moved[3].any()


def test_zero_grad_fills_with_zeros_what_is_not_in_grad() -> None:
    ps = params(elsewhere=True)
    memory = [p.main_grad for p in ps]
    opt = Modular(ps, LR(1.0), grad="main_grad")
    fill(ps, 0)
    ps[0].grad = torch.ones(8, 5)
    opt.zero_grad()
    assert ps[0].grad is None
    assert all(p.main_grad is t and not t.any() for p, t in zip(ps, memory, strict=True))


@at_once("compiled", [False, True])
def test_a_clipper_writes_there_and_leaves_grad_alone(compiled: bool) -> None:
    here, there = params(), params(elsewhere=True)
    clippers = [Clipper(here, ClipNorm(0.5, dim="global"), compile=compiled)]
    clippers.append(Clipper(there, ClipNorm(0.5, dim="global"), compile=compiled, grad="main_grad"))
    memory = [p.main_grad for p in there]
    for i in range(4):
        fill(here, i)
        fill(there, i)
        there[0].grad = torch.full((8, 5), 3.0)
        norms = [clipper.step() for clipper in clippers]
        assert torch.equal(*norms)
        agree([p.grad for p in here if p.grad is not None], [p.main_grad for p in there])
        assert all(p.main_grad is t for p, t in zip(there, memory, strict=True))
        assert there[0].grad.eq(3.0).all()


def test_a_skipped_step_of_a_clipper_leaves_zeros_there() -> None:
    ps = params(elsewhere=True)
    clipper = Clipper(ps, Guard(), grad="main_grad")
    fill(ps, 0)
    ps[0].main_grad[0, 0] = torch.nan
    clipper.step()
    assert clipper.skipped()
    assert not any(p.main_grad.any() for p in ps)


class SGDThere(torch.optim.Optimizer):
    """As frameworks write one: it reads main_grad."""

    def __init__(self, ps: Any) -> None:
        super().__init__(ps, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.main_grad, alpha=group["lr"])


def test_attach_rewrites_what_the_optimizer_reads_and_follows_its_weights() -> None:
    here, there = params(), params(elsewhere=True)
    opts = [torch.optim.SGD(here, lr=1e-2), SGDThere(there)]
    handles = [attach(opts[0], ZClip(), after=WeightEMA(0.9))]
    handles.append(attach(opts[1], ZClip(), after=WeightEMA(0.9), grad="main_grad"))
    for i in range(6):
        for made, opt in zip((here, there), opts, strict=True):
            fill(made, i)
            opt.step()
    agree(here, there)
    for handle in handles:
        handle.eval()
    agree(here, there)


@at_once("compiled", [False, True])
def test_release_steps_each_parameter_from_there_and_drops_it(compiled: bool) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def moves(p: Tensor) -> None:  # what a framework does as soon as a gradient is whole
        p.main_grad.add_(p.grad)  # type: ignore[attr-defined, arg-type]
        p.grad = None

    here, there = net(), net()
    for p in there.parameters():
        vars(p)["main_grad"] = torch.zeros_like(p)
        p.register_post_accumulate_grad_hook(moves)

    def rules() -> list[Any]:
        return [ClipNorm(0.5), Adam(), LR(1e-2)]

    opts = [release(here, *rules(), compile=compiled)]
    opts.append(release(there, *rules(), compile=compiled, grad="main_grad"))
    for i in range(5):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
        for model, opt in zip((here, there), opts, strict=True):
            model(x).square().mean().backward()
            opt.step()
        agree(list(here.parameters()), list(there.parameters()))
        assert not any(p.main_grad.any() for p in there.parameters())


def test_torch_s_functions_take_it_as_well() -> None:
    here, there = params(), params(elsewhere=True)
    fill(here, 0)
    fill(there, 0)
    assert torch.equal(
        compat.clip_grad_norm_(here, 0.5), compat.clip_grad_norm_(there, 0.5, grad="main_grad")
    )
    compat.clip_grad_value_(here, 0.1)
    compat.clip_grad_value_(there, 0.1, grad=main_grad)
    total = torch.tensor(3.0)
    compat.clip_grads_with_norm_(here, 1.0, total)
    compat.clip_grads_with_norm_(there, 1.0, total, grad="main_grad")
    agree([p.grad for p in here if p.grad is not None], [p.main_grad for p in there])
    assert all(p.grad is None for p in there)


def test_a_recorder_sees_the_norms_of_there() -> None:
    ps = params(elsewhere=True)
    opt = Modular(ps, ClipNorm(0.5, dim="global"), LR(1e-2), grad="main_grad")
    with Recorder(opt) as recorder:
        for i in range(3):
            fill(ps, i)
            opt.step()
    norms = recorder.history()["ClipNorm/norm"]
    fill(ps, 2)
    square = sum(p.main_grad.square().sum().item() for p in ps)
    assert norms[-1] == pytest.approx(square**0.5, rel=1e-6)


def test_copies_and_classes_keep_it_and_say_so() -> None:
    opt = Modular(params(elsewhere=True), Adam(), LR(1e-2), grad="main_grad")
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert other.grad == "main_grad"
    assert "grad='main_grad'" in repr(opt)
    made = optimizer_class(Adam(), LR(1e-2), grad="main_grad")(params())
    assert made.grad == "main_grad"


def test_a_gradient_in_the_memory_of_its_parameter_is_copied_and_then_is_the_attribute() -> None:
    p = Parameter(torch.ones(4))
    vars(p)["main_grad"] = p.detach()
    Modular([p], ClipNorm(1.0, target="grad"), LR(0.5), grad="main_grad").step()
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.75))
    torch.testing.assert_close(p.main_grad, torch.full((4,), 0.5))
    with pytest.raises(
        RuntimeError,
        match="returned a gradient that cannot be changed in place",
    ):
        Modular([p], ClipNorm(0.1, target="grad"), LR(0.5), grad=lambda p: p.detach()).step()


@at_once("given", ["main grad", "", 3, None])
def test_what_is_neither_a_name_nor_a_function_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="grad must be the name of an attribute"):
        Modular(params(), LR(1.0), grad=given)


def test_a_file_of_plain_torch_has_no_words_for_it() -> None:
    with pytest.raises(SourceError, match="grad='main_grad' cannot be exported"):
        Modular(params(), Adam(), LR(1.0), grad="main_grad").to_source()


def test_a_name_that_no_parameter_has_is_told_of() -> None:
    opt = Modular(params(elsewhere=True), Adam(), LR(1.0), grad="main_gard")
    assert "no parameter has a gradient in grad='main_gard', so .grad is used." in opt.explain()


def test_explain_is_that_of_the_same_chain() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts = [
            Modular(params(), *chain()).explain(),
            Modular(params(elsewhere=True), *chain(), grad="main_grad").explain(),
        ]
    assert texts[0] == texts[1]
