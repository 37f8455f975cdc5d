"""What is kept from step to step holds no memory, and no kernel gets tensors of another shape."""

import gc
import weakref

import pytest
import torch
from torch.nn import Parameter

from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Modular,
    TensorList,
    Transform,
    clip_grad_norm_,
    to_floats,
)


def with_gradient(*shape: int) -> Parameter:
    p = Parameter(torch.ones(shape))
    p.grad = torch.full(shape, 5.0)
    return p


class OneNumber(Transform):
    def update(self, u, state, group):
        return TensorList([torch.tensor(1.0) for _ in u.tensors])


def test_a_fused_kernel_gets_no_update_of_another_shape(monkeypatch):
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **kw: pytest.fail("the kernel ran"))
    Modular([with_gradient(1000)], OneNumber(), Adam(), LR(0.1)).step()


def test_a_fused_kernel_gets_no_state_of_another_shape(monkeypatch):
    p = with_gradient(1000)
    opt = Modular([p], Adam(), LR(0.1))
    opt.step()
    opt.state[p]["Adam/exp_avg"] = torch.tensor(0.0)
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **kw: pytest.fail("the kernel ran"))
    with pytest.raises(RuntimeError, match="shape"):
        opt.step()


def test_a_live_limit_in_a_tensor_has_metrics_for_every_group():
    groups = [{"params": [with_gradient(3)]}, {"params": [with_gradient(3)]}]
    opt = Modular(groups, ClipNorm(torch.tensor(1.0), dim="global"), LR(0.1))
    opt.step()
    assert to_floats(opt.metrics())["ClipNorm/limit"] == [1.0, 1.0]


def test_a_helper_runs_inside_a_compiled_function():
    p = with_gradient(3)
    clip = torch.compile(lambda: clip_grad_norm_([p], 1.0, dim="global"), backend="eager")
    torch.testing.assert_close(clip(), torch.tensor(75.0).sqrt())


def test_the_parameters_of_a_group_that_was_removed_are_freed():
    p, q = with_gradient(3), with_gradient(2)
    opt = Modular([{"params": [p]}, {"params": [q]}], ClipNorm(1.0), LR(0.1))
    opt.step()
    gone = weakref.ref(q)
    opt.param_groups.pop()
    opt.state.clear()
    del q
    opt.step()
    gc.collect()
    assert gone() is None
