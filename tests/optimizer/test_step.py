"""What one step does, and what it leaves alone."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.helpers import at_once, equal, one, param, saved, state_of
from tests.optimizer.chains import CHAINS, each_chain, give_grads, groups, parameters
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Cautious,
    ClipNorm,
    ClipNormGrowth,
    ClipRMS,
    ClipValue,
    Modular,
    Momentum,
    Scale,
    Transform,
    Warmup,
    WeightDecay,
    ZClip,
)


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_comes_back():
    p = torch.tensor([3.0], requires_grad=True)
    opt = Modular([p], LR(0.1))
    calls = []

    def closure():
        opt.zero_grad()
        loss = p.square().sum()
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    assert opt.step(closure).item() == 9.0
    assert calls == [True]
    assert p.item() == pytest.approx(3 - 0.6)


def test_a_step_needs_no_grad_mode_and_leaves_no_graph():
    p = one()
    opt = Modular([p], Adam(), WeightDecay(0.1), LR(0.1))
    with torch.enable_grad():
        opt.step()
    assert p.is_leaf
    assert p.requires_grad
    assert all(not v.requires_grad for v in opt.state[p].values())


def test_step_hooks_fire_exactly_once():
    p, calls = one(), []
    opt = Modular([p], Adam(), LR(0.1))
    hooks = [
        opt.register_step_pre_hook(lambda o, *_: calls.append(("pre", o is opt))),
        opt.register_step_post_hook(lambda o, *_: calls.append(("post", o is opt))),
        register_optimizer_step_pre_hook(lambda *_: calls.append("all pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("all post")),
    ]
    opt.step()
    for hook in hooks:
        hook.remove()
    opt.step()
    assert calls == ["all pre", ("pre", True), ("post", True), "all post"]


def test_a_pre_hook_may_change_the_gradient():
    p = one()
    opt = Modular([p], LR(0.1))
    opt.register_step_pre_hook(lambda *_: (p.grad.mul_(5), None)[1])
    opt.step()
    assert p.item() == pytest.approx(0.5)


@each_chain
def test_no_gradient_at_all_is_a_step_that_does_nothing(chain):
    params = parameters()
    before = [p.detach().clone() for p in params]
    opt = Modular(groups(params), *CHAINS[chain]())
    state = state_of(opt)
    opt.step()
    assert equal([p.detach() for p in params], before)
    assert equal(state_of(opt), state)


@each_chain
def test_zero_gradients_and_lr_zero_leave_every_bit(chain):
    """Checkpointing tools take such a step to make state."""
    params = parameters()
    before = [p.detach().clone() for p in params]
    opt = Modular(groups(params), *CHAINS[chain]())
    for group in opt.param_groups:
        group["lr"] = 0.0
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert equal([p.detach() for p in params], before)
    assert all(
        v.isfinite().all() or "previous" in k for s in opt.state.values() for k, v in s.items()
    )


@each_chain
def test_the_gradient_is_left_as_it_was(chain):
    params = parameters()
    opt = Modular(groups(params), *CHAINS[chain]())
    for step in range(3):
        give_grads(params, step, scale=10.0)
        before = [(p.grad, p.grad.clone()) for p in params]
        opt.step()
        for p, (grad, values) in zip(params, before, strict=True):
            assert p.grad is grad
            assert torch.equal(grad, values)


@each_chain
def test_non_contiguous_parameters_and_gradients_take_the_same_steps(chain):
    params, reference = parameters(), parameters()
    strided = []
    for p in params:
        room = torch.zeros(*p.shape, 2)[..., 0]
        room.copy_(p.detach())
        strided.append(room.requires_grad_())
    a = Modular(groups(strided), *CHAINS[chain]())
    b = Modular(groups(reference), *CHAINS[chain]())
    for step in range(4):
        give_grads(reference, step)
        for p, q in zip(strided, reference, strict=True):
            room = torch.zeros(*p.shape, 3)[..., 1]
            p.grad = room.copy_(q.grad)
            assert not p.grad.is_contiguous()
        a.step(), b.step()
    for p, q in zip(strided, reference, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_dtypes_may_be_mixed_within_a_group():
    params = [p for d in (torch.float32, torch.float64, torch.bfloat16) for p in parameters(d)]
    alone = [p for d in (torch.float32, torch.float64, torch.bfloat16) for p in parameters(d)]
    opt = Modular(params, ClipNorm(1.0), Adam(), LR(0.1))
    opts = [Modular([p], ClipNorm(1.0), Adam(), LR(0.1)) for p in alone]
    for step in range(3):
        give_grads(params, step)
        for p, q, o in zip(params, alone, opts, strict=True):
            q.grad = p.grad.clone()
            o.step()
        opt.step()
    assert equal(params, alone)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch takes none")
def test_a_gradient_of_another_dtype_than_the_parameter_is_taken():
    p, q = one(1.0, torch.float32), one(1.0, torch.float32)
    a, b = Modular([p], Momentum(0.5), LR(0.1)), Modular([q], Momentum(0.5), LR(0.1))
    p.grad, p.grad_dtype = None, torch.float16
    p.grad = torch.tensor([0.5], dtype=torch.float16)
    q.grad = torch.tensor([0.5])
    a.step(), b.step()
    assert equal(p, q)


def test_the_order_in_which_gradients_appear_does_not_matter():
    params, reference = parameters(), parameters()
    a = Modular(params, ClipNormGrowth(), Adam(), LR(0.1))
    opts = [Modular([p], ClipNormGrowth(), Adam(), LR(0.1)) for p in reference]
    pattern = [(0,), (2,), (0, 1), (1, 2), (0, 1, 2), (1,)]
    for step, present in enumerate(pattern):
        give_grads(params, step)
        for i, (p, q, o) in enumerate(zip(params, reference, opts, strict=True)):
            q.grad = p.grad.clone() if i in present else None
            p.grad = p.grad if i in present else None
            o.step()
        a.step()
    assert equal(params, reference)


@pytest.mark.parametrize(
    "chain",
    [
        lambda: (Adam(), Scale(0.0, target="grad"), Cautious(), LR(0.1)),
        lambda: (LR(0.1), ClipValue(0.1, target="grad"), Cautious()),
    ],
)
def test_a_deferred_update_is_made_of_the_gradient_that_its_link_saw(chain):
    out = []
    for fused in (True, False):
        p = param(1.0, 1.0, grad=[1.0, 2.0])
        opt = Modular([p], *chain(), fused=fused)
        opt.step()
        out.append((p.data, list(opt.state[p].values()) if opt.state else []))
    torch.testing.assert_close(out[0], out[1])


def test_a_link_that_reads_the_update_does_not_meet_the_parameters():
    p = param(-math.inf, 1.0, 1.0, grad=[0.0, 1.0, 1.0])
    Modular([p], Adam(), ClipRMS(1.0), LR(0.1)).step()
    assert p.tolist() == pytest.approx([-math.inf, 0.9, 0.9])


def test_scalars_beside_vectors_keep_their_dtype_without_kept_memory():
    params = [param(1.0, 2.0, grad=[1.0, 1.0]), Parameter(torch.tensor(1.0))]
    params[1].grad = torch.tensor(1.0)
    opt = Modular(params, Warmup(3), EMA(0.5), LR(1.0), fused=False)
    opt._room = None  # as on an accelerator
    opt.step()
    assert params[1].item() == pytest.approx(1 - 1 / 6)


def test_half_precision_rounds_once_with_lr_and_decay():
    for fused in (True, False):
        p = param(1.0, dtype=torch.bfloat16, grad=[0.0015])
        Modular([p], LR(1.0), WeightDecay(0.001), fused=fused).step()
        assert p.item() == 0.99609375


def test_the_default_device_does_not_matter():
    p = param(3.0, 4.0, grad=[3.0, 4.0])
    opt = Modular([p], ClipNorm(1.0, dim="global"), ClipNorm(1.0, "std"), Adam(), LR(0.1))
    with torch.device("meta"):
        opt.step()
    assert p.tolist() == pytest.approx([2.9, 3.9])


@at_once("fused", [True, False])
def test_a_step_in_inference_mode_leaves_no_memory_that_others_cannot_write(fused):
    p = param(3.0, 4.0)
    opt = Modular([p], ClipNorm(1.0, dim="global"), ClipValue(0.5), LR(1.0), fused=fused)
    for inside in (True, False):
        p.grad = torch.tensor([30.0, 40.0])
        with torch.inference_mode(inside):
            opt.step()
    assert p.tolist() == pytest.approx([2.0, 3.0])


class FailsIfAsked(Transform):
    """u ← u, or an error if `asked` is not empty"""

    def update(self, u, state, group):
        if asked:
            raise OSError("the disk is full")
        return u


asked = []


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"compile": True}], ids=str)
def test_after_an_error_steps_continue_from_the_state_that_the_error_left(options):
    def start():
        params = parameters()
        return params, Modular(params, ZClip(), Momentum(0.9), FailsIfAsked(), LR(0.1), **options)

    params, opt = start()
    for i in range(6):
        give_grads(params, i)
        asked[:] = [i] if i == 4 else []
        with pytest.raises(OSError, match="disk") if asked else nullcontext():
            opt.step()
        if asked:
            others, resumed = start()
            resumed.load_state_dict(saved(opt.state_dict()))
            for p, q in zip(params, others, strict=True):
                q.data.copy_(p.data)
    give_grads(others, 5)
    resumed.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)
    assert resumed.state[others[0]].keys() == opt.state[params[0]].keys()


def test_a_gradient_of_another_shape_is_refused_before_any_group_changes():
    params = [one(), one()]
    groups_of_one = [{"params": [p]} for p in params]
    opt = Modular(groups_of_one, ZClip(), Adam(), LR(0.1), grad="main_grad")
    opt.step()
    before = state_of(opt), [p.detach().clone() for p in params]
    params[1].main_grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 has shape \(1,\), but its grad"):
        opt.step()
    assert equal(before, (state_of(opt), [p.detach() for p in params]))
