"""What `test_released.py` starts on every rank: gradients of a sharded model, released.

torchrun --nproc-per-node 2 -m tests.processes.released eager compiled summed loaded
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchzero_clip import AGC, LR, Adam, ClipNorm, Modular, Transform, WeightDecay, ZClip, release

STEPS, HALF = 4, 2


class Peak(Transform):
    """The most gradients that were alive when a parameter stepped."""

    model: Any
    alive: Any

    reach = "tensor"

    def step(self, buckets: list[Any]) -> list[Any]:
        self.alive.append(sum(p.grad is not None for p in self.model.parameters()))
        return buckets


def sharded() -> nn.Sequential:
    """A model of which each layer is a unit of FSDP; shards are uneven."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 33), nn.Linear(33, 5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(8, 10, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(x).square().mean().backward()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }


def local() -> tuple[Transform, ...]:
    return ClipNorm(0.05), AGC(0.1), Adam(), WeightDecay(0.1), ClipNorm(0.3), LR(0.05)


def far() -> tuple[Transform, ...]:
    return ZClip(warmup_steps=2), ClipNorm(0.05, dim="global"), Adam(), LR(0.05)


def wrong_bits(compile: bool) -> int:
    """Parameters that differ from those without release."""
    found = []
    for make in (Modular, release):
        model, alive = sharded(), list[int]()
        spy = (Peak(model, alive),) if make is release else ()
        opt = make(model.named_parameters(), *spy, *local(), compile=compile)
        for step in range(STEPS):
            opt.zero_grad()
            backward(model, step)
            if make is release:
                assert all(p.grad is None for p in model.parameters())
            opt.step()
        found.append(whole(model))
        assert max(alive, default=1) == 1, alive
    return sum(not found[0][name].equal(found[1][name]) for name in found[0])


def wrong_sums() -> int:
    """Parameters that differ where gradients of two batches are summed without a reduction."""
    found = []
    for make in (Modular, release):
        model = sharded()
        opt = make(model.named_parameters(), *local())
        for step in range(STEPS):
            last = step % 2 == 1
            opt.last_backward = last
            model.set_requires_gradient_sync(last)
            backward(model, step)
            if last:
                opt.step()
                opt.zero_grad()
        found.append(whole(model))
    return sum(not found[0][name].equal(found[1][name]) for name in found[0])


def wrong_after_loading() -> int:
    """Parameters that differ after a checkpoint through torch.distributed.checkpoint."""
    model = sharded()
    opt = release(model, *far(), limit="last step")
    found, weights, saved = [], {}, {}
    for step in range(STEPS):
        if step == HALF:
            weights = {name: p.clone() for name, p in model.state_dict().items()}
            saved = copy.deepcopy(get_optimizer_state_dict(model, opt))
        backward(model, step)
        opt.step()
    found.append(whole(model))
    other = sharded()
    other.load_state_dict(weights)
    again = release(other, *far(), limit="last step")
    again.init_state()
    set_optimizer_state_dict(other, again, saved)
    for step in range(HALF, STEPS):
        backward(other, step)
        again.step()
    found.append(whole(other))
    return sum(not found[0][name].equal(found[1][name]) for name in found[0])


CHECKS = {
    "eager": lambda: wrong_bits(compile=False),
    "compiled": lambda: wrong_bits(compile=True),
    "summed": wrong_sums,
    "loaded": wrong_after_loading,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        print(f"{name}: {CHECKS[name]()} wrong")
    dist.destroy_process_group()
