"""The numbers of the specification by hand: descent.

`modules/test_descent.py` compares it with torch.optim.
"""

from __future__ import annotations

import torch

from tests.helpers import about, param
from tests.modules.numbers.common import Bench, sequence
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Cautious,
    ClipNormGrowth,
    Lion,
    Modular,
    Momentum,
    Scale,
    Standardize,
    Warmup,
    WeightDecay,
)


def test_cautious_keeps_what_agrees_and_rescales_by_the_share_kept():
    bench = Bench((Momentum(0.9), Cautious()), 4)
    bench([10.0, 10.0, 10.0, 10.0])
    (u,) = bench([1.0, 1.0, -1.0, 0.0])  # the momentum is 10, 10, 8, 9
    assert u.tolist() == about([20.0, 20.0, 0.0, 0.0])


def test_cautious_divides_by_no_less_than_a_thousandth():
    grads = torch.full((4000,), -1.0)
    grads[0] = 1.0
    bench = Bench((Momentum(0.9), Cautious()), 4000)
    bench(torch.full((4000,), 10.0))
    assert bench(grads)[0][0].item() == about(10.0 * 1000)


def test_warmup_multiplies_by_t_over_steps():
    assert sequence(Warmup(4), [8] * 6) == about([2, 4, 6, 8, 8, 8])


def test_ema_with_and_without_debias():
    assert sequence(EMA(0.9), [1, 1, 3]) == about([0.1, 0.19, 0.471])
    assert sequence(EMA(0.9, debias=True), [1, 1, 3]) == about([1, 1, 0.471 / 0.271])


def test_ema_with_nesterov_looks_ahead():
    ahead = [0.1 * u + 0.9 * m for u, m in [(1, 0.1), (1, 0.19), (3, 0.471)]]
    assert sequence(EMA(0.9, nesterov=True), [1, 1, 3]) == about(ahead)


def test_lion_takes_the_sign_of_an_interpolation():
    bench = Bench(Lion((0.5, 0.9)), 1)
    assert [bench([x])[0].item() for x in (1.0, -0.05, -0.2)] == [1, 1, -1]


def test_weight_decay_before_adam_is_coupled_and_after_it_decoupled():
    for links, expected in (
        ((WeightDecay(0.5), Adam(eps=0.0), LR(0.1)), 2 - 0.1 * 1.0),  # the sign of g + w / 2
        ((Adam(eps=0.0), WeightDecay(0.5), LR(0.1)), 2 - 0.1 * (1.0 + 1.0)),
    ):
        p = torch.tensor([2.0], requires_grad=True)
        p.grad = torch.tensor([3.0])
        Modular([p], *links).step()
        assert p.item() == about(expected)


def test_scale_by_minus_one_goes_uphill():
    assert sequence((Scale(-1), LR(0.5)), [4.0]) == [-2.0]


def test_a_layer_keeps_its_state_when_its_first_parameter_joins_late():
    layer = torch.nn.Linear(1, 1)
    opt = Modular(layer.named_parameters(), ClipNormGrowth(dim="layer"), LR(0.0))
    for _ in range(3):
        layer.bias.grad = torch.ones(1)
        opt.step()
    layer.weight.grad = torch.full((1, 1), 100.0)
    opt.step()
    assert opt.metrics()["ClipNormGrowth/limit"].item() == 1.5


def test_a_double_tensor_is_standardized_by_its_own_precision():
    values = [1.0, 1.0 + 1e-8, 1.0 - 1e-8]
    alone, beside = (param(*values, dtype=torch.float64, grad=values) for _ in range(2))
    Modular([alone], Standardize(0.0), LR(1.0)).step()
    Modular([beside, param(1.0, 2.0, grad=[1.0, 2.0])], Standardize(0.0), LR(1.0)).step()
    assert torch.equal(alone, beside)
    assert not torch.equal(alone.detach(), torch.tensor(values, dtype=torch.float64))
