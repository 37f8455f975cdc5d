"""Cases in which ways of execution once parted: each has one outcome, whichever engine runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Guard,
    Modular,
    Momentum,
    Transform,
    WeightDecay,
)

WAYS = ["plain", "eager", "recorded", "compiled"]


def optimizer(way: str, params: Any, *chain: Transform) -> Modular:
    """The chain as one way of execution runs it."""
    if way in ("plain", "eager"):
        return Modular(params, *chain, fused=way == "eager")
    opt = Modular(params, *chain, compile=True)
    if way == "recorded":
        opt.engine = opt.engine.twin()
    return opt


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def one(value: float, grad: float) -> Parameter:
    p = Parameter(torch.tensor([value]))
    p.grad = torch.tensor([grad])
    return p


# --- what waits reads the parameters as they were


def test_two_weight_decays_around_a_learning_rate(way: str) -> None:
    """1 - (0.1 · (1 + 0.5) + 0.5) = 0.35"""
    p = one(1.0, 1.0)
    optimizer(way, [p], WeightDecay(0.5), LR(0.1), WeightDecay(0.5, name="second")).step()
    assert p.item() == pytest.approx(0.35)


class Pull(Transform):
    """u ← u + w / 2, by the parameters that the group shows"""

    def update(self, u: Any, state: Any, group: Any) -> Any:
        return u.add(group["params"].mul(0.5))


@pytest.mark.parametrize("first", [Momentum(0.9), Adam(betas=(0.0, 0.0), eps=0.0), LR(1.0)])
def test_a_link_of_ones_own_reads_parameters_before_a_decay_moves_them(
    way: str, first: Transform
) -> None:
    """Each of the first links leaves a gradient of 1 as it is: 1 - (1 + 0.5 + 0.5)."""
    p = one(1.0, 1.0)
    optimizer(way, [p], first, Pull(), WeightDecay(0.5)).step()
    assert p.item() == pytest.approx(-1.0, abs=1e-6)


# --- layers


def test_a_layer_has_one_memory_whichever_member_has_a_gradient(way: str) -> None:
    """Norms 1, 100, 100 with a growth of 1.5 become 1, 1.5, 2.25."""
    a, b = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    opt = optimizer(way, [("l.a", a), ("l.b", b)], ClipNormGrowth(mul=1.5, dim="layer"))
    norms = []
    for first, second in [(1.0, None), (None, 100.0), (1.0, 100.0)]:
        a.grad = None if first is None else torch.tensor([first])
        b.grad = None if second is None else torch.tensor([second])
        before = torch.stack([a.detach().clone(), b.detach().clone()])
        opt.step()
        norms.append((torch.stack([a.detach(), b.detach()]) - before).norm().item())
    assert norms == pytest.approx([1.0, 1.5, 2.25])


def test_the_memory_of_a_layer_stays_one_after_loading(way: str) -> None:
    """Loading copies what members share; one that sat out may not bring back an old number."""
    a, b = one(0.0, 1.0), one(0.0, 1.0)
    chain = ClipNormGrowth(mul=2.0, dim="layer")
    opt = optimizer(way, [("l.a", a), ("l.b", b)], chain)
    opt.step()
    saved, opt = opt.state_dict(), optimizer(way, [("l.a", a), ("l.b", b)], chain)
    opt.load_state_dict(saved)
    a.grad = None
    b.grad = torch.tensor([1000.0])
    opt.step()  # up to 2 √2
    a.grad, b.grad = torch.tensor([1000.0]), torch.tensor([1000.0])
    opt.step()
    assert opt.state[a]["ClipNormGrowth/previous"].item() == pytest.approx(4 * 2**0.5)
    assert opt.state[b]["ClipNormGrowth/previous"].item() == pytest.approx(4 * 2**0.5)


# --- guards and targets


def test_what_a_guard_made_of_the_gradient_is_not_the_gradient() -> None:
    p = one(0.0, 1.0)
    with pytest.raises(ValueError, match="has no effect, because Guard"):
        Modular([p], Guard("zero"), ClipNorm(0.1, target="grad"))


def test_a_guard_that_writes_the_gradient_leaves_it_to_later_rules(way: str) -> None:
    p = Parameter(torch.zeros(3))
    p.grad = torch.tensor([3.0, float("nan"), 4.0])
    optimizer(way, [p], Guard("zero", target="grad"), ClipNorm(1.0, target="grad")).step()
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.0, 0.8]))
    torch.testing.assert_close(p.detach(), -torch.tensor([0.6, 0.0, 0.8]))


# --- live values that are tensors


@pytest.mark.parametrize("value", [torch.tensor([0.1]), torch.tensor(0.1), torch.tensor([[0.1]])])
def test_a_tensor_of_one_number_is_that_number_for_all(way: str, value: Tensor) -> None:
    ps = [one(1.0, 1.0) for _ in range(3)]
    optimizer(way, ps, LR(value)).step()
    assert [p.item() for p in ps] == pytest.approx([0.9] * 3)


class ByVector(Transform):
    """u ← u · v with a vector of another length"""

    def update(self, u: Any, state: Any, group: Any) -> Any:
        return u.mul_(torch.ones(2))


def test_a_vector_of_another_length_is_a_sentence(way: str) -> None:
    ps = [one(1.0, 1.0) for _ in range(3)]
    with pytest.raises(ValueError, match=r"one element per tensor of the TensorList, here 3"):
        optimizer(way, ps, ByVector()).step()
    assert [p.item() for p in ps] == [1.0] * 3


# --- memory that is shared


def test_parameters_that_share_memory_move_one_after_the_other(way: str) -> None:
    a, b = Parameter(torch.ones(70_000)), Parameter(torch.ones(70_000))
    b.data = a.data
    a.grad, b.grad = torch.full((70_000,), 1.0), torch.full((70_000,), 2.0)
    optimizer(way, [a, b], ClipValue(10.0), LR(0.1)).step()
    torch.testing.assert_close(a.detach(), torch.full((70_000,), 0.7))


@pytest.mark.parametrize("chain", [(LR(0.1),), (WeightDecay(0.5), LR(0.1)), (Adam(), LR(0.1))])
def test_a_gradient_that_is_the_parameter_itself_is_read_before_it_moves(
    way: str, chain: tuple[Transform, ...]
) -> None:
    ps = [Parameter(torch.tensor([1.0, -2.0])) for _ in range(2)]
    ps[0].grad, ps[1].grad = ps[0].data, ps[1].data.clone()
    for p in ps:
        optimizer(way, [p], *chain).step()
    torch.testing.assert_close(ps[0].detach(), ps[1].detach())


def test_one_gradient_of_two_parameters_is_read_by_both(way: str) -> None:
    ps = [Parameter(torch.zeros(2)) for _ in range(2)]
    ps[0].grad = ps[1].grad = torch.tensor([3.0, 4.0])
    optimizer(way, ps, ClipNorm(1.0), LR(1.0)).step()
    for p in ps:
        torch.testing.assert_close(p.detach(), -torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(ps[0].grad, torch.tensor([3.0, 4.0]))


def test_one_gradient_of_two_parameters_is_written_once_for_each(way: str) -> None:
    """As torch.nn.utils does: scaled by the factor of the first, then by that of the second."""
    ps = [Parameter(torch.zeros(2)) for _ in range(2)]
    ps[0].grad = ps[1].grad = torch.tensor([3.0, 4.0])
    optimizer(way, ps, ClipNorm(2.5, target="grad")).step()
    torch.testing.assert_close(ps[0].grad, torch.tensor([0.75, 1.0]))


# --- an optimizer inside a link


class Nested(Transform):
    """u ← u, while another optimizer takes a step"""

    other: Any = None

    def update(self, u: Any, state: Any, group: Any) -> Any:
        held = u.mul(2.0)
        self.other.step()
        return held.mul_(0.5)


def test_a_link_may_step_another_optimizer(way: str) -> None:
    inner = [Parameter(torch.zeros(40, 40)) for _ in range(20)]
    for p in inner:
        p.grad = torch.ones_like(p)
    other = optimizer(way, inner, ClipNorm(1.0, dim="global"), Momentum(0.9), LR(0.1))
    outer = [Parameter(torch.zeros(40, 40)) for _ in range(20)]
    for i, p in enumerate(outer):
        p.grad = torch.full_like(p, float(i))
    optimizer(way, outer, ClipNorm(1e9, dim="global"), Nested(other=other), LR(1.0)).step()
    for i, p in enumerate(outer):
        assert torch.equal(p.detach(), torch.full_like(p, -float(i)))
