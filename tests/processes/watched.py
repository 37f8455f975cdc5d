"""What `test_watched.py` starts on every rank: steps and weights of sharded models, measured.

torchrun --nproc-per-node 2 -m tests.processes.watched fsdp tp
torchrun --nproc-per-node 2 -m tests.processes.watched brief fsdp tp

If brief, compiled steps are those of a sharded model in float32, whose programs run node by node.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchzero_clip import LR, Adam, Modular, Watch, WeightDecay, to_floats
from torchzero_clip.core.sharding.layout import layout_of

DIMS = None, "layer", "group", "global", 0
BRIEF = "brief" in sys.argv


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def shard(model: nn.Module, setting: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if setting == "tp":
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded: nn.Module = fully_shard(model, mesh=mesh)
    return sharded


def gradients(whole: list[nn.Parameter], parts: list[nn.Parameter], step: int) -> None:
    """The same for both, in the precision of the parts."""
    source = torch.Generator().manual_seed(step)
    for p, q in zip(whole, parts, strict=True):
        g, layout = torch.randn(p.shape, generator=source).to(q.dtype), layout_of(q)
        p.grad = g.double()
        q.grad = g if layout is None else layout.wrap(layout.part(g).clone())


def compared(setting: str, dtype: torch.dtype, compile: bool) -> list[str]:
    """What a sharded model says, beside one in float64 that is whole, at the same weights."""
    wrong = []
    for dim in DIMS:
        model, twin = net().to(dtype), net().to(dtype).double()
        sides = [[*shard(model, setting).named_parameters()], [*twin.named_parameters()]]
        parts, whole = [[p for _, p in pairs] for pairs in sides]
        links = Adam(), WeightDecay(0.1), LR(1e-2), Watch(dim)
        opt = Modular(sides[0], *links, compile=compile, rounding="nearest")
        if compile and BRIEF:
            opt.engine = opt.engine.twin()
        other = Modular(sides[1], *links)
        for step in range(3):
            gradients(whole, parts, step)
            opt.step()
            other.step()
            found, wanted = to_floats(opt.metrics()), to_floats(other.metrics())
            for name in [name for name in wanted if name.startswith("Watch")]:
                a, b = (torch.tensor(x[name]).double() for x in (found, wanted))
                if a.shape != b.shape or not torch.allclose(a, b, rtol=2e-4):
                    wrong.append(f"{setting}, {dim}, {dtype}: {name} of step {step}: {a}, {b}")
            if dtype == torch.bfloat16:
                break  # its weights are rounded from here on
    return wrong


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for setting in [word for word in sys.argv[1:] if word != "brief"]:
        wrong = [
            text
            for dtype in (torch.float32, torch.bfloat16)
            for compile in (False, True)
            if not (BRIEF and compile and (setting, dtype) != ("fsdp", torch.float32))
            for text in compared(setting, dtype, compile)
        ]
        print(f"{setting}: {len(wrong)} wrong", *wrong, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
