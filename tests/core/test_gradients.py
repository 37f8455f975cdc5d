"""Memory with gaps, in another order, to be negated, or shared: steps are those of plain memory.

Links that read what others are to write are here too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers import close
from torchzero_clip import (
    EMA,
    LR,
    Adagrad,
    Adam,
    Cautious,
    ClipNorm,
    ClipNormGrowth,
    Clipper,
    ClipValue,
    Group,
    Guard,
    Masked,
    Modular,
    Momentum,
    Normalize,
    Scale,
    Sign,
    State,
    TensorList,
    Transform,
    WeightDecay,
    attach,
    release,
    to_floats,
)

WAYS = ("default", "plain", "recorded")
NUMBERS = torch.tensor([3.0, 4.0])


def made(way: str, params: Any, *links: Transform) -> Modular:
    """An optimizer that runs in this way."""
    opt = Modular(params, *links, fused=way != "plain", compile=way in ("recorded", "compiled"))
    if way == "recorded":
        opt.engine = opt.engine.twin()
    return opt


def weight(*values: float, grad: Tensor | None = None) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.tensor(values))
    p.grad = grad
    return p


class AddParameters(Transform):
    """u ← u + w"""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.add_(group["params"])


class StepAnother(Transform):
    """u as it is, while another optimizer steps with the same rules."""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        other = weight(0.0, 0.0, grad=torch.full((2,), 7.0))
        Modular([other], ClipNorm(1.0), Adam(), ClipNorm(0.1), LR(1.0)).step()
        return u.mul_(1.0)


class Doubled(Transform):
    """u · 2, by a vector of any length."""

    length: int = 1

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(torch.full((self.length,), 2.0))


# --- gaps, other orders, other signs


@pytest.mark.parametrize("way", [*WAYS, "compiled"])
def test_a_parameter_with_gaps_moves_as_one_without(way: str) -> None:
    w = torch.nn.Parameter(torch.ones(3, 4)[:, ::2])
    opt = made(way, [w], Sign(), ClipNorm(100.0), LR(0.1))
    for _ in range(6):
        w.grad = torch.full((3, 2), 0.5)
        opt.step()
        assert to_floats(opt.metrics())["ClipNorm/norm"] == pytest.approx(6**0.5)
    close(w.data, torch.full((3, 2), 0.4))


@pytest.mark.parametrize("way", WAYS)
def test_the_memory_that_is_kept_for_a_parameter_with_gaps_is_made_once(way: str) -> None:
    w = torch.nn.Parameter(torch.ones(3, 4)[:, ::2])
    opt = made(way, [w], ClipValue(1.0), ClipNorm(1.0), LR(0.1))
    kept = []
    for _ in range(3):
        w.grad = torch.ones(3, 2)
        opt.step()
        kept.append(opt.engine.lasting())
    assert all(map(operator.is_, kept[0], kept[2]))


def gaps(t: Tensor) -> Tensor:
    big = torch.full((*t.shape, 2), torch.nan, dtype=t.dtype)
    return big[..., 0].copy_(t)


def offset(t: Tensor) -> Tensor:
    big = torch.full((t.numel() + 5,), torch.nan, dtype=t.dtype)
    return big[3 : 3 + t.numel()].view(t.shape).copy_(t)


def turned(t: Tensor) -> Tensor:
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def negated(t: Tensor) -> Tensor:
    return torch._neg_view(-t)


def alike(t: Tensor) -> Tensor:
    return t.flatten()[0].expand(t.shape)


FORMS = {
    "gaps": gaps,
    "offset": offset,
    "turned": turned,
    "gaps in another order": lambda t: turned(gaps(turned(t))),
    "channels last": lambda t: (
        t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else gaps(t)
    ),
}
OF_GRADIENTS = {
    **FORMS,
    "negated": negated,
    "negated gaps": lambda t: negated(gaps(t)),
    "conjugated": lambda t: t.resolve_conj().conj().clone().conj() if t.is_complex() else t,
}
CHAINS: dict[str, Any] = {
    "operators": lambda: [Sign(), ClipNorm(100.0), Scale(0.1)],
    "fused": lambda: [ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.1), LR(0.1)],
    "the end": lambda: [ClipNormGrowth(mul=1.2), Momentum(0.9), LR(0.1)],
    "gradients": lambda: [ClipNorm(1e9, target="grad"), ClipNorm(0.5, target="grad"), EMA(0.9)],
    "nothing to clip": lambda: [ClipNorm(1e9, target="grad"), Adagrad(), LR(0.1)],
    "entries": lambda: [ClipValue(0.3), Masked(ClipNorm(0.2), lambda _, p: p.dim() > 1), LR(0.1)],
    "rows": lambda: [Normalize(1.0, dim=-1), Cautious(), LR(0.1)],
    "skipped": lambda: [Guard("skip"), Adam(), LR(0.1)],
}
RUNS = [*WAYS, "compiled", "clipper", "attached", "released"]
SHAPES = ((3, 4), (5,), (2, 3, 2, 2), (), (1,))


def starting(way: str, params: list[Any], *links: Transform) -> tuple[Any, Callable[[], Any]]:
    """What has the metrics, and a step."""
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    if way == "released":
        opt = release(groups, *links, limit="last step")
        return None, opt.step
    if way not in ("clipper", "attached"):
        opt = made(way, groups, *links)
        return opt, opt.step
    sgd, links = torch.optim.SGD(params, lr=0.1, foreach=False), links[:1]
    if way == "attached":
        return attach(sgd, *links), sgd.step
    clipper = Clipper(groups, *links)
    return clipper, lambda: (clipper.step(), sgd.step())


def followed(
    way: str, links: Sequence[Transform], of_param: Any, of_grad: Any, dtype: torch.dtype
) -> list[Any]:
    """All that can be seen of six steps, of parameters and gradients in this memory."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=dtype)
    params = [torch.nn.Parameter(of_param(draw(shape))) for shape in SHAPES]
    opt, step = starting(way, params, *links)
    seen: list[Any] = []
    for size in (1.0, 0.5, 3.0, 0.25, 1.0, 2.0):
        for p in params:
            p.grad = of_grad(draw(p.shape) * size)
        step()
        seen += [p.detach().clone() for p in params]
        seen += [] if way == "released" else [p.grad.clone() for p in params]
        seen += [] if opt is None else [t for name, t in opt.metrics().items() if "norm" in name]
    return seen


SOME = ("offset", "gaps in another order", "channels last", "negated gaps", "conjugated")
TELLING = ("fused", "gradients")
"""Chains that run with all of these forms, and with complex numbers, in quick tests too."""


@pytest.mark.parametrize(
    "quick", [pytest.param(True, id="some"), pytest.param(False, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("way", RUNS)
def test_a_step_does_not_depend_on_the_memory_of_parameters_and_gradients(
    way: str, quick: bool
) -> None:
    refused = {"skipped"} if way in ("released", "clipper", "attached") else set()
    compiled = {"operators", "gradients"} if way == "compiled" else set(CHAINS)  # one, two programs
    for name in [name for name in CHAINS if name in compiled - refused]:
        forms: Sequence[str] = tuple(OF_GRADIENTS)
        if quick:
            forms = SOME if name in TELLING else ("negated gaps",)
        complex_too = name in TELLING or (name == "nothing to clip" and not quick)
        for dtype in (torch.float32, *([torch.complex64] if complex_too else [])):
            wanted = followed(way, CHAINS[name](), torch.clone, torch.clone, dtype)
            for form in forms if dtype.is_complex else [x for x in forms if x != "conjugated"]:
                of_param, of_grad = FORMS.get(form, gaps), OF_GRADIENTS[form]
                found = followed(way, CHAINS[name](), of_param, of_grad, dtype)
                where = f"{name}, {form}"
                close({where: found}, {where: wanted}, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", RUNS)
def test_a_gradient_whose_entries_are_one_number_is_as_good_as_a_copy(way: str) -> None:
    for name in ("gradients", "nothing to clip", "fused"):
        runs = [
            followed(way, CHAINS[name](), torch.clone, of_grad, torch.float32)
            for of_grad in (alike, lambda t: alike(t).clone())
        ]
        close(*runs)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_another_form_may_come_after_any_number_of_steps(way: str) -> None:
    """A step that was recorded with plain gradients, with nothing to clip, writes these anew."""
    w, plain = weight(3.0, 4.0), weight(3.0, 4.0)
    opts = [made(way, [p], ClipNorm(10.0, target="grad"), LR(0.1)) for p in (w, plain)]
    for form in (torch.clone, torch.clone, torch.clone, torch.clone, negated, alike, gaps) * 2:
        for p, of_grad in ((w, form), (plain, torch.clone)):
            p.grad = of_grad(torch.full((2,), 0.5))
        for opt in opts:
            opt.step()
        close([w.data, w.grad], [plain.data, plain.grad])


def test_a_gradient_that_is_copied_for_a_step_stays_what_it_is_unless_it_is_written() -> None:
    for target, stays in (("update", True), ("grad", False)):
        w = weight(3.0, 4.0, grad=negated(NUMBERS))
        given = w.grad
        Modular([w], ClipNorm(1.0, target=target), LR(1.0)).step()
        assert (w.grad is given) is stays
        close([w.data, given], [torch.tensor([2.4, 3.2]), NUMBERS])
        close(w.grad, NUMBERS if stays else NUMBERS / 5)


# --- shared memory


@pytest.mark.parametrize("way", WAYS)
def test_two_decays_read_the_parameters_as_they_were(way: str) -> None:
    w = weight(1.0, grad=torch.ones(1))
    made(way, [w], WeightDecay(0.5), LR(0.1), WeightDecay(0.5)).step()
    close(w.data, torch.tensor([0.35]))


@pytest.mark.parametrize("way", WAYS)
def test_a_link_before_a_decay_reads_the_parameters_as_they_were(way: str) -> None:
    w = weight(1.0, grad=torch.ones(1))
    made(way, [w], AddParameters(), LR(0.1), WeightDecay(0.5)).step()
    close(w.data, torch.tensor([1 - 0.1 * 2 - 0.5]))


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_the_parameter_is_as_good_as_a_copy(way: str) -> None:
    for links in ([ClipNorm(1.0), LR(0.5)], [Adam(), WeightDecay(0.1), LR(0.5)]):
        itself, copied = weight(3.0, 4.0), weight(3.0, 4.0, grad=NUMBERS.clone())
        itself.grad = itself.data
        for p in (itself, copied):
            made(way, [p], *links).step()
        close(itself.data, copied.data)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_in_the_memory_of_another_parameter_is_read_before_that_moves(way: str) -> None:
    chains: list[Any] = [
        lambda: [LR(0.1)],
        lambda: [WeightDecay(0.1), LR(0.1)],
        lambda: [Adam(), LR(0.1)],
        lambda: [ClipNorm(0.5, target="grad"), LR(0.1)],
    ]
    for chain in chains:
        for groups in (1, 2):
            found = []
            for form in (torch.clone, torch.detach):
                both = torch.arange(12.0)
                a, b = weight(), weight()
                a.data, b.data = both[:8].view(2, 4), torch.ones(5)
                rows = [[a, b]] if groups == 1 else [[a], [b]]
                opt = made(way, [{"params": row} for row in rows], *chain())
                for _ in range(5):
                    a.grad, b.grad = torch.full((2, 4), 0.5), form(both[2:7])
                    opt.step()
                found.append([a.data, b.data, both[8:]])
            close(*found)


@pytest.mark.parametrize("way", WAYS)
def test_one_gradient_for_two_parameters_is_as_good_as_two(way: str) -> None:
    a, b = weight(0.0, 0.0, grad=NUMBERS.clone()), weight(0.0, 0.0)
    b.grad = a.grad
    made(way, [a, b], ClipNorm(1.0), LR(1.0)).step()
    close([a.data, b.data], [-NUMBERS / 5] * 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("groups", [1, 2])
def test_two_parameters_write_their_one_gradient_in_turn(way: str, groups: int) -> None:
    a, b = weight(0.0, 0.0, grad=NUMBERS.clone()), weight(0.0, 0.0)
    b.grad = a.grad
    given = [a, b] if groups == 1 else [{"params": [a]}, {"params": [b]}]
    made(way, given, Scale(0.5, target="grad"), LR(1.0)).step()
    close([a.data, b.data, a.grad], [-NUMBERS / 4, -NUMBERS / 4, NUMBERS / 4])


def test_one_gradient_of_two_groups_is_written_in_turn_after_any_number_of_steps() -> None:
    """A step that was recorded with a gradient for each is none with one for both."""
    sides = []
    for form in (torch.clone, gaps):  # a form that comes and goes is not replayed
        a, b = weight(0.0, 0.0), weight(0.0, 0.0)
        clipper = Clipper([{"params": [a]}, {"params": [b]}], ClipNorm(2.5), Momentum(0.9))
        for i in range(8):
            a.grad, b.grad = (form if i % 2 else torch.clone)(NUMBERS), NUMBERS.clone()
            if i >= 6:
                b.grad = a.grad
            clipper.step()
        sides.append([a.grad, b.grad])
    close(*sides)


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_inside_an_update_has_memory_of_its_own(way: str) -> None:
    w = weight(0.0, 0.0)
    opt = made(way, [w], ClipNorm(1.0), StepAnother(), LR(1.0))
    for _ in range(3):
        w.grad = NUMBERS.clone()
        opt.step()
    close(w.data, -3 * NUMBERS / 5)


@pytest.mark.parametrize("way", WAYS)
def test_members_of_a_layer_remember_together_also_in_turn(way: str) -> None:
    layer = torch.nn.Linear(1, 1)
    opt = made(way, layer.named_parameters(), ClipNormGrowth(mul=1.5, dim="layer"))
    limits = []
    for of_weight, of_bias in ((1.0, None), (None, 100.0), (1.0, 100.0)):
        layer.weight.grad = None if of_weight is None else torch.full((1, 1), of_weight)
        layer.bias.grad = None if of_bias is None else torch.full((1,), of_bias)
        opt.step()
        limits.append(to_floats(opt.metrics())["ClipNormGrowth/limit"])
    assert limits == [torch.inf, 1.5, 2.25]


@pytest.mark.parametrize("way", WAYS)
def test_a_vector_has_a_number_for_each_tensor(way: str) -> None:
    params = [weight(0.0, grad=torch.ones(1)) for _ in range(3)]
    for length in (1, 3):
        made(way, params, Doubled(length)).step()
    close([p.data for p in params], [torch.tensor([-4.0])] * 3)
    with pytest.raises(
        ValueError, match=r"one element per tensor of the TensorList, here 3, got shape \(2,\)"
    ):
        made(way, params, Doubled(2)).step()


def test_a_clip_of_the_gradient_after_one_that_replaced_it_is_refused() -> None:
    with pytest.raises(
        ValueError, match='ClipNorm with target="grad" has no effect, because Guard'
    ):
        Modular([weight(0.0)], Guard("zero"), ClipNorm(0.1, target="grad"), LR(1.0))


def test_a_gradient_that_cannot_be_sharded_like_its_parameter_is_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(2, 3)
        p = Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        plain = Modular([p], LR(1.0), grad=lambda p: local)
        with pytest.raises(TypeError, match=r"must be a DTensor, got a plain tensor .*from_local"):
            plain.step()
        partial = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()], run_check=False)
        summed = Modular([p], LR(1.0), grad=lambda p: partial)
        with pytest.raises(TypeError, match=r"\(Partial\(sum\),\) for a .*: return grad\.redistr"):
            summed.step()
    finally:
        dist.destroy_process_group()
