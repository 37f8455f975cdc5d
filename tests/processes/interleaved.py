"""What `test_interleaved.py` starts on two ranks: an interleaved pipeline, two parts of it on each.

    torchrun --nproc-per-node 2 -m tests.processes.interleaved all apart shards lacking

Beside it goes the whole model in one process. One chain steps both parts of a rank. In "shards"
FSDP2 has the model instead, in groups with a norm apart and with none; in "lacking" a rank has no
gradient of one of the groups.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from torchzero_clip import LR, Adam, ClipNorm, Modular, SkipSpike, WeightDecay, ZClip

PARTS, BATCHES, WIDTH = 4, 4, 6


def whole() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(PARTS)]
    return nn.Sequential(*blocks)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, target)


def groups(blocks: list[nn.Module], setting: str) -> list[dict[str, Any]]:
    """All parameters in one group; or matrices, and biases with a norm of their own."""
    params = [p for block in blocks for p in block.parameters()]
    if setting == "all":
        return [{"params": params}]
    vectors = {"params": [p for p in params if p.dim() < 2], "norm_group": "vectors"}
    return [{"params": [p for p in params if p.dim() > 1]}, vectors]


def chain() -> list[Any]:
    clips = [SkipSpike(8, 3.0, 2), ClipNorm(0.05, dim="global"), ZClip()]
    return [*clips, Adam(), WeightDecay(0.1), LR(1e-2)]


def wrong(setting: str) -> list[str]:
    """The steps in which norms or weights are not those of one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, mine = whole(), whole()
    places = range(rank, PARTS, world)
    stages = [PipelineStage(mine[i], i, PARTS, torch.device("cpu")) for i in places]
    schedule = ScheduleInterleaved1F1B(stages, BATCHES, loss_fn=loss_of, scale_grads=False)
    opts = [Modular(groups(list(alone), setting), *chain())]
    parts = groups([mine[i] for i in places], setting)
    opts.append(Modular(parts, *chain(), process_group=dist.group.WORLD))
    found = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for opt in opts:
            opt.zero_grad()
        for _ in range(2):  # accumulated
            x, y = torch.randn(2, 8, WIDTH, generator=generator).unbind()
            (BATCHES * loss_of(alone(x), y)).backward()  # their means are added
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=[])
        for opt in opts:
            opt.step()
        norms = [opt.metrics()["ClipNorm/norm"] for opt in opts]
        if not torch.allclose(*norms, rtol=1e-5):
            found.append(f"step {step}: norms {norms}")
        for i in places:
            pairs = zip(alone[i].parameters(), mine[i].parameters(), strict=True)
            if not all([torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in pairs]):
                found.append(f"step {step}: weights of part {i}")
    return found


def shards() -> list[str]:
    """The steps in which shards of groups have other norms or weights than one process."""
    alone, mine = whole(), whole()
    fully_shard(mine, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    opts, found = [], []
    for net in (alone, mine):
        made = groups(list(net), "apart")
        made.append({"params": made[0]["params"][:1], "clip": False})
        made[0]["params"] = made[0]["params"][1:]
        opts.append(Modular(made, *chain()))
    for step in range(6):
        x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()
        for net, opt in zip((alone, mine), opts, strict=True):
            opt.zero_grad()
            loss_of(net(x), y).backward()
            opt.step()
        norms = [opt.metrics()["ClipNorm/norm"] for opt in opts]
        if not torch.allclose(*norms, rtol=1e-5):
            found.append(f"step {step}: norms {norms}")
        for p, q in zip(alone.parameters(), mine.parameters(), strict=True):
            if not torch.allclose(p, q.full_tensor(), rtol=1e-5, atol=1e-6):  # type: ignore[attr-defined]
                found.append(f"step {step}: weights")
    return found


def lacking() -> list[str]:
    """The norms that leave out a rank, where the other has no gradient of a norm group."""
    found = []
    for idle in range(2):
        ps = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        made: list[dict[str, Any]] = [{"params": ps[:1]}, {"params": ps[1:], "norm_group": "head"}]
        links = ClipNorm(1.0, dim="global"), LR(1.0)
        opt = Modular(made, *links, process_group=dist.group.WORLD)
        here = [i for i in range(2) if dist.get_rank() == 0 or i != idle]
        for i in here:
            ps[i].grad = torch.full_like(ps[i], 3.0 + i)
        opt.step()
        norms = torch.atleast_1d(opt.metrics()["ClipNorm/norm"])
        wanted = torch.tensor([(3.0 + i) * (2 if i == idle else 4) ** 0.5 for i in here])
        if not torch.allclose(norms, wanted):
            found.append(f"without group {idle}: {norms}")
    return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for setting in sys.argv[1:]:
        others = {"shards": shards, "lacking": lacking}
        found = others[setting]() if setting in others else wrong(setting)
        print(f"{setting}: {len(found)} wrong", *found, sep="\n", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


if __name__ == "__main__":
    main()
