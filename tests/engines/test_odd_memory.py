"""Memory that is shared, and links that read what others are to write: every way agrees."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import close
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Group,
    Guard,
    Modular,
    Scale,
    Sign,
    State,
    TensorList,
    Transform,
    WeightDecay,
    to_floats,
)

WAYS = ("default", "plain", "recorded")
NUMBERS = torch.tensor([3.0, 4.0])


def made(way: str, params: Any, *links: Transform) -> Modular:
    """An optimizer that runs in this way."""
    opt = Modular(params, *links, fused=way != "plain", compile=way in ("recorded", "compiled"))
    if way == "recorded":
        opt.engine.backend = "plain"  # type: ignore[attr-defined]
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
        kept.append(opt.engine.workspaces.tensors())  # type: ignore[attr-defined]
    assert all(map(operator.is_, kept[0], kept[2]))


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
def test_one_gradient_for_two_parameters_is_as_good_as_two(way: str) -> None:
    a, b = weight(0.0, 0.0, grad=NUMBERS.clone()), weight(0.0, 0.0)
    b.grad = a.grad
    made(way, [a, b], ClipNorm(1.0), LR(1.0)).step()
    close([a.data, b.data], [-NUMBERS / 5] * 2)


@pytest.mark.parametrize("way", WAYS)
def test_two_parameters_write_their_one_gradient_in_turn(way: str) -> None:
    a, b = weight(0.0, 0.0, grad=NUMBERS.clone()), weight(0.0, 0.0)
    b.grad = a.grad
    made(way, [a, b], Scale(0.5, target="grad"), LR(1.0)).step()
    close([a.data, b.data, a.grad], [-NUMBERS / 4, -NUMBERS / 4, NUMBERS / 4])


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
    with pytest.raises(ValueError, match=r"one number for each of the 3 tensors .* shape \(2,\)"):
        made(way, params, Doubled(2)).step()


def test_a_clip_of_the_gradient_after_one_that_replaced_it_is_refused() -> None:
    with pytest.raises(ValueError, match='ClipNorm has target="grad" but comes after Guard'):
        Modular([weight(0.0)], Guard("zero"), ClipNorm(0.1, target="grad"), LR(1.0))
