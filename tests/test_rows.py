"""Small tensors of one shape are worked on as one: their state has one memory."""

import copy
import io
from unittest import mock

import pytest
import torch
from torch.nn import Parameter

from torchzero_clip import (
    EMA,
    LR,
    Adam,
    ClipNorm,
    ClipValue,
    Lion,
    Modular,
    Momentum,
    RMSprop,
    TensorList,
    Transform,
    WeightDecay,
    centralize_grads_,
)
from torchzero_clip.core.norms.scratch import PIECE
from torchzero_clip.core.tensors import MANY, whole_of

SHAPES = [*[(8, 8)] * 2 * MANY, (70, 100), *[(5,)] * (MANY - 1), *[(3, 4)] * MANY, (), (0,)]
CHAINS = {
    "Adam": lambda: [Adam()],
    "clipped Adam": lambda: [ClipNorm(1.0), Adam(amsgrad=True), WeightDecay(0.1)],
    "Momentum": lambda: [ClipValue(0.5), Momentum(0.9)],
    "RMSprop": lambda: [RMSprop(centered=True, momentum=0.9)],
    "EMA": lambda: [Lion(), EMA(0.9, debias=True), ClipNorm(1.0, dim="global")],
}


def model(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(opt, params, seeds, frozen=()):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.grad = None if i in frozen else grad
        opt.step()


def wholes(opt, params, key):
    """The one memory of the state of the first 2 · MANY parameters, if they have one."""
    return whole_of([opt.state[p][key] for p in params[: 2 * MANY]])


def same(params, others):
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", CHAINS)
def test_many_as_one_move_as_one_by_one(name):
    ours, plain = model(), model()
    train(Modular(ours, *CHAINS[name](), LR(0.1)), ours, range(4))
    train(Modular(plain, *CHAINS[name](), LR(0.1), fused=False), plain, range(4))
    same(ours, plain)


def test_a_kernel_is_called_with_one_tensor_for_many():
    params = model([(8, 8)] * 1000)
    opt = Modular(params, ClipNorm(1.0, dim="global"), Adam(), LR(0.1))
    train(opt, params, [0])
    with mock.patch.object(torch, "_fused_adamw_", wraps=torch._fused_adamw_) as kernel:
        train(opt, params, [1])
    ((lists, _),) = kernel.call_args_list
    assert [len(some) for some in lists] == [1, 1, 1, 1, 0, 1]
    assert lists[0][0].shape == (1000, 8, 8)


def test_so_are_as_many_as_go_into_a_piece():
    n = PIECE // 4096 + MANY
    ours, plain = model([(4096,)] * n), model([(4096,)] * n)
    opt = Modular(ours, Adam(), LR(0.1))
    train(opt, ours, [0])
    with mock.patch.object(torch, "_fused_adamw_", wraps=torch._fused_adamw_) as kernel:
        train(opt, ours, [1])
    assert [lists[0][0].shape[0] for lists, _ in kernel.call_args_list] == [n - MANY, MANY]
    train(Modular(plain, Adam(), LR(0.1), fused=False), plain, [0, 1])
    same(ours, plain)


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_which_have_gradients_may_change(name):
    ours, plain = model(), model()
    a = Modular(ours, *CHAINS[name](), LR(0.1))
    b = Modular(plain, *CHAINS[name](), LR(0.1), fused=False)
    for opt, params in ((a, ours), (b, plain)):
        train(opt, params, [0], frozen={1, 2})  # their state begins later, in a memory of its own
        train(opt, params, [1])
        train(opt, params, [2], frozen={0, *range(MANY, MANY + 5)})
        train(opt, params, [3])
    same(ours, plain)


def test_a_checkpoint_keeps_and_copies_the_values():
    ours, others = model(), model()
    a = Modular(ours, Adam(), LR(0.1))
    train(a, ours, range(2))
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    file.seek(0)
    b = Modular(others, Adam(), LR(0.1))
    b.load_state_dict(torch.load(file))
    with torch.no_grad():
        torch._foreach_copy_(others, ours)
    assert wholes(a, ours, "Adam/exp_avg") is not None
    assert wholes(b, others, "Adam/exp_avg") is not None
    for opt, params in ((a, ours), (b, others)):
        train(opt, params, [2])
    same(ours, others)
    c = copy.deepcopy(a)
    twins = c.param_groups[0]["params"]
    train(a, ours, [3])
    train(c, twins, [3])
    same(ours, twins)


def test_state_that_a_user_cuts_is_followed():
    """As pruning does: some rows of some parameters, and of their state."""
    ours, plain = model([(8, 8)] * MANY), model([(8, 8)] * MANY)
    for params, options in ((ours, {}), (plain, {"fused": False})):
        opt = Modular(params, Adam(), LR(0.1), **options)
        train(opt, params, [0])
        for p in params[3:5]:
            p.data = p.data[:5]
            for key in ("Adam/exp_avg", "Adam/exp_avg_sq"):
                opt.state[p][key] = opt.state[p][key][:5]
        for p in params[7:9]:
            p.data = p.data.t()
            opt.state[p]["Adam/exp_avg"] = opt.state[p]["Adam/exp_avg"].t()
            opt.state[p]["Adam/exp_avg_sq"] = opt.state[p]["Adam/exp_avg_sq"].t()
        train(opt, params, [1, 2])
    same(ours, plain)


class Again(Transform):
    """u ← 2 u, in the same tensors under another handle"""

    elementwise = True

    def update(self, u, state, group):
        return TensorList(u.mul_(2).tensors)


def test_what_a_rule_returns_may_be_scratch_memory():
    ours, plain = model(), model()
    train(Modular(ours, Again(), ClipNorm(1.0), Adam(), LR(0.1)), ours, range(3))
    train(Modular(plain, Again(), ClipNorm(1.0), Adam(), LR(0.1), fused=False), plain, range(3))
    same(ours, plain)
    train(Modular(ours, Again(), Adam(), LR(0.1)), ours, range(3))
    train(Modular(plain, Again(), Adam(), LR(0.1), fused=False), plain, range(3))
    same(ours, plain)


def test_whole_of():
    whole = torch.arange(24.0).view(6, 4).clone()
    rows = list(whole.unbind())
    assert whole_of(rows) is whole
    part = whole_of(rows[2:5])
    assert part is not None
    assert part.tolist() == whole[2:5].tolist()
    assert part.data_ptr() == whole[2].data_ptr()
    for others in ([rows[1], rows[0]], rows[::2], [rows[0][:2], rows[1]], [torch.zeros(4)], []):
        assert whole_of(others) is None
    assert whole_of([rows[0], rows[1][:3]]) is None
    assert whole_of(list(whole.t().unbind())) is None
    numbers = torch.arange(3.0)
    assert whole_of(list(numbers.unbind())) is numbers
    assert whole_of([numbers[0], numbers[1:2]]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_means_of_many_are_those_of_each(dtype):
    params = model()
    for p in params:
        p.data = p.data.to(dtype)
        p.grad = p.detach().clone() + 3
    expected = [p.grad - p.grad.double().mean().to(dtype) for p in params]
    centralize_grads_(params)
    for p, grad in zip(params, expected, strict=True):
        if p.numel() > 1:
            close = {"rtol": 1e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(p.grad, grad, **close)
