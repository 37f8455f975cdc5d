"""Devices: none is waited for, none mixed with another, over the whole table."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import Named, set_grads
from tests.modules.contract.common import NoCopyToHost, growing, on_devices, owns_lr
from tests.table import Case, every, mechanisms, sampled
from torchzero_clip import LR, Modular
from torchzero_clip.audit import fake_cuda


def on(device: Any, case: Case, live: Any = None) -> tuple[Named, Modular]:
    """A model on a device (a function of the place picks several), live values there as well."""
    pick = device if callable(device) else (lambda i: device)
    shapes = case.shapes.items()
    params = {
        name: Parameter(torch.empty(shape, device=pick(i)))
        for i, (name, shape) in enumerate(shapes)
    }
    opt = Modular(params.items(), case.make(), *([] if owns_lr(case) else [LR(0.1)]))
    for group in opt.param_groups if live is not None else ():
        for key in opt.keys.defaults:
            group[key] = as_tensor(group[key], live)
    return params, opt


def as_tensor(value: Any, device: Any) -> Any:
    """A live value as a 0-dim tensor on a device."""
    if isinstance(value, tuple):
        return tuple(as_tensor(v, device) for v in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    kind = torch.int64 if isinstance(value, int) else torch.float32
    return torch.full((), value, dtype=kind, device=device)


@pytest.mark.parametrize(
    "live",
    [pytest.param(False, id="numbers"), pytest.param(True, id="tensors", marks=pytest.mark.slow)],
)
@sampled(on_devices)
def test_no_value_on_the_device_is_read_by_the_host(case, live):
    """Tensors on the meta device have no values: reading one, or copying it away, raises."""
    params, opt = on("meta", case, "meta" if live else None)
    for _ in range(2):
        set_grads(params, {name: torch.empty_like(p) for name, p in params.items()})
        opt.step()
    with pytest.raises((RuntimeError, NotImplementedError)):  # that it raises here is the premise
        params["embed.weight"].sum().item()


@pytest.mark.parametrize(
    "live",
    [pytest.param(False, id="numbers", marks=pytest.mark.slow), pytest.param(True, id="tensors")],
)
@sampled(on_devices, one_in=3)
def test_an_accelerator_is_neither_read_nor_mixed_with_the_host(case, live):
    """A fake CUDA device raises where a value is read or two devices meet in one operator. Nothing
    is copied to or from the host where all values lie on the device, as a CUDA graph needs it."""
    with fake_cuda(), NoCopyToHost():
        params, opt = on("cuda", case, "cuda" if live else None)
        for _ in range(2):  # state is made in the first
            set_grads(params, {name: torch.empty_like(p) for name, p in params.items()})
            with Copies() as copies:
                opt.step()
        held = [value for memory in opt.state.values() for value in memory.values()]
        held += [v for group in opt.param_groups for v in group["chain"].values()]
        for value in held:
            assert not isinstance(value, Tensor) or value.device.type == "cuda"
    if live and case.traces and case.graphs == 1:  # no choice by the host
        assert copies.made == Counter()


@mechanisms(on_devices)
def test_a_model_may_lie_on_two_devices(case):
    with fake_cuda(), NoCopyToHost():
        params, opt = on(lambda i: f"cuda:{i % 2}", case)
        for _ in range(2):
            set_grads(params, {name: torch.empty_like(p) for name, p in params.items()})
            opt.step()
        for p in params.values():
            held = {k: v for k, v in opt.state.get(p, {}).items() if isinstance(v, Tensor)}
            for key, value in held.items():
                shared = case.scope == "layer" and value.shape != p.shape  # by a layer's tensors
                assert shared or value.device == p.device, key


class Copies(TorchDispatchMode):
    """Counts the copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[-1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device.type != out.device.type:
                self.made[source.device.type, out.device.type] += 1
        return out


def test_the_counter_sees_a_copy():
    with fake_cuda(), Copies() as copies:
        torch.tensor([1.0, 2.0], device="cuda")
    assert copies.made == Counter({("cpu", "cuda"): 1})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every(lambda case: not case.reads_host)
def test_a_cuda_device_is_never_waited_for(case):
    params, opt = on("cuda", case)
    steps = growing(case, 3)
    for i, step in enumerate(steps):
        set_grads(params, {name: g.cuda() for name, g in step.items()})
        torch.cuda.set_sync_debug_mode("error" if i else "default")  # state is made in step 0
        try:
            opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
