"""Transformer Engine's `FusedAdam` behind a handle: its own file, with a stand-in for its kernel.

The package cannot be imported without its kernels, and the optimizer wants a number on a GPU. Here
the file of the class and that of `multi_tensor_apply` are loaded alone, with `kernel` below, which
is the formula of `adam.cu` for float32, with empty classes for tensors in eight bits, and with
`cuda` read as `cpu`.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.frameworks.common import data, network, values
from tests.helpers import equal
from torchzero_clip import ClipNorm, Guard, ZClip, attach

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]
NAME = "transformer_engine.pytorch.optimizers"
FOLDER = Path(sys.prefix, "apart", *NAME.split("."))


def kernel(_: int, flag: Tensor, lists: list[list[Tensor]], *numbers: Any) -> None:
    lr, beta1, beta2, eps, step, decoupled, correct, decay = numbers
    assert (decoupled, correct) == (1, 1)
    for g, p, m, v in zip(*lists, strict=True):
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v / (1 - beta2**step)).sqrt() + eps
        p.sub_(lr * (m / (1 - beta1**step) / denominator + decay * p))


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def fused_adam(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if not (FOLDER / "fused_adam.py").is_file():
        pytest.skip("transformer_engine is not in the folder apart: see tests/frameworks/README.md")
    kinds = ["", "_param_remainder", "_fp8", "_capturable", "_capturable_master"]
    top, eight = (
        NAME.rpartition(".")[0],
        {k: type(k, (), {}) for k in ("Float8Tensor", "Float8Quantizer")},
    )
    for made in (
        module(
            "transformer_engine_torch", **{f"multi_tensor_adam{kind}": kernel for kind in kinds}
        ),
        module("transformer_engine"),
        module(top),
        module(f"{top}.tensor"),
        module(f"{top}.tensor.float8_tensor", **eight),
        module(f"{top}.quantized_tensor", QuantizedTensor=type("QuantizedTensor", (), {})),
        module(f"{top}.constants", DType=SimpleNamespace(kFloat32=0)),
        module(NAME, __path__=[str(FOLDER)]),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    tensor = torch.tensor

    def here(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return tensor(*args, device="cpu" if device == "cuda" else device, **kwargs)

    monkeypatch.setattr(torch, "tensor", here)
    for name in ("multi_tensor_apply", "fused_adam"):
        monkeypatch.delitem(sys.modules, f"{NAME}.{name}", raising=False)
    yield importlib.import_module(f"{NAME}.fused_adam").FusedAdam
    for name in ("multi_tensor_apply", "fused_adam"):
        sys.modules.pop(f"{NAME}.{name}", None)


def train(net: nn.Module, opt: Any, batches: Any) -> dict[str, Tensor]:
    for x, y in batches:
        nn.functional.mse_loss(net(x), y).backward()
        opt.step()
        opt.zero_grad()
    return values(net)


def test_a_handle_in_front_of_it_clips_as_torch_does_in_front_of_adamw(fused_adam):
    net, other = network(), network()
    ours = fused_adam(net.parameters(), lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
    handle = attach(ours, ClipNorm(0.5, dim="global"))
    found, clipped = train(net, ours, data(50)), handle.metrics()["ClipNorm/clipped"]
    theirs.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5) and None
    )
    wanted = train(other, theirs, data(50))
    assert clipped
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_one_checkpoint_has_both_and_goes_on_bit_for_bit(fused_adam, tmp_path):
    def start() -> tuple[nn.Module, Any, Any]:
        net = network()
        opt = fused_adam(net.parameters(), lr=1e-2, master_weights=True)
        return net, opt, attach(opt, ZClip(warmup_steps=2), in_checkpoint=True)

    net, opt, _ = start()
    train(net, opt, data(8))
    torch.save({"model": net.state_dict(), "opt": opt.state_dict()}, tmp_path / "held.pt")
    wanted = train(net, opt, data(8, seed=3))
    again, other, handle = start()
    held = torch.load(tmp_path / "held.pt", weights_only=True)
    again.load_state_dict(held["model"])
    other.load_state_dict(held["opt"])
    assert handle.param_groups[0]["chain"]["ZClip/count"] > 0
    assert equal(train(again, other, data(8, seed=3)), wanted)


def test_a_step_that_a_guard_ends_moves_nothing_and_is_counted(fused_adam):
    net = network()
    opt = fused_adam(net.parameters(), lr=1e-2, weight_decay=0.1)
    handle = attach(opt, Guard())
    train(net, opt, data(1))
    before = values(net), copy.deepcopy([opt.state[p] for p in net.parameters()])
    next(net.parameters()).grad = torch.full((32, 10), torch.nan)
    opt.step()
    assert handle.metrics()["Guard/skipped"] == 1
    assert equal((values(net), [opt.state[p] for p in net.parameters()]), before)
    assert opt.param_groups[0]["step"] == 2


def test_decoupled_gradients_are_rewritten_where_they_are(fused_adam):
    net = network()
    opt = fused_adam(net.parameters(), lr=1e-2, use_decoupled_grad=True)
    attach(opt, ClipNorm(0.5, dim="global"), grad="decoupled_grad")
    for p in net.parameters():
        p.decoupled_grad = torch.full_like(p, 2.0)
    opt.step()
    norm = torch.cat([p.decoupled_grad.flatten() for p in net.parameters()]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.5))
    assert all([p.grad is None for p in net.parameters()])
