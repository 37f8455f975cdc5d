"""What `test_exact_ranks.py` starts on every rank: float32 behind sharded parameters in bfloat16.

torchrun --nproc-per-node 2 tests/processes/exact.py FOLDER twins save
torchrun --nproc-per-node 3 tests/processes/exact.py FOLDER load draws
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchzero_clip import LR, Adam, ClipNorm, Modular, ScheduleFree, Transform, WeightDecay
from torchzero_clip.core.formats import Exact
from torchzero_clip.core.sharding.layout import full, local
from torchzero_clip.optimizer.rounding import weights_of

HALF, END = 5, 10
DTYPES = {"exact": torch.bfloat16, "nearest": torch.float32}


def run(rounding: str, **options: Any) -> tuple[nn.Module, Modular]:
    """A sharded model, whose parameters no number of ranks divides, and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False)).bfloat16()
    net = net.to(DTYPES[rounding])
    fully_shard(net, mesh=MESH)
    links = ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.1), LR(1e-3)
    return net, Modular(net.named_parameters(), *links, rounding=rounding, **options)


def train(net: nn.Module, opt: Modular, steps: range) -> None:
    """Gradients in bfloat16, whatever the parameters are in."""
    for i in steps:
        for k, p in enumerate(net.parameters()):
            generator = torch.Generator().manual_seed(100 * i + k)
            whole = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements)  # type: ignore[attr-defined]
        opt.step()


def agree(one: tuple[nn.Module, Modular], other: tuple[nn.Module, Modular]) -> bool:
    pairs = zip(one[0].parameters(), other[0].parameters(), strict=True)
    return all([weights_of(one[1], p).equal(local(q)) for p, q in pairs])


def twins() -> int:
    """Exact weights are those of float32, in both engines; returns how many are not."""
    wrong = 0
    for options in ({}, {"compile": True}):
        both = [run(rounding, **options) for rounding in DTYPES]
        for i in range(END):
            for net, opt in both:
                train(net, opt, range(i, i + 1))
            wrong += not agree(*both)
        kept = both[0][1].state[next(both[0][0].parameters())][Exact.key]
        wrong += not isinstance(kept, DTensor)
        if options:
            wrong += not both[0][1].engine.replays.count  # type: ignore[attr-defined]
    return wrong


def save() -> int:
    """Checkpoints of both in the middle."""
    for rounding in DTYPES:
        net, opt = run(rounding)
        train(net, opt, range(HALF))
        state = {"model": get_model_state_dict(net), "opt": get_optimizer_state_dict(net, opt)}
        dcp.save(state, checkpoint_id=str(FOLDER / rounding))
    return 0


def load() -> int:
    """Both go on from there, on any number of ranks, and still agree."""
    both = [run(rounding) for rounding in DTYPES]
    for rounding, (net, opt) in zip(DTYPES, both, strict=True):
        opt.init_state()
        state = {"model": get_model_state_dict(net), "opt": get_optimizer_state_dict(net, opt)}
        dcp.load(state, checkpoint_id=str(FOLDER / rounding))
        set_model_state_dict(net, state["model"])
        set_optimizer_state_dict(net, opt, state["opt"])
    wrong = int(not agree(*both))
    for net, opt in both:
        train(net, opt, range(HALF, END))
    whole = both[0][1].exact_state_dict(both[0][0])
    theirs = both[1][0].state_dict()
    wrong += sum([not full(whole[key]).equal(full(t)) for key, t in theirs.items()])
    return wrong + (not agree(*both))


def whole() -> int:
    """Full state dicts, of which each rank or the first one alone has one, go on as the run did."""
    wrong = 0
    for broadcast in (False, True):
        net, opt = run("exact")
        train(net, opt, range(HALF))
        saves = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
        model = copy.deepcopy(get_model_state_dict(net, options=saves))
        state = copy.deepcopy(get_optimizer_state_dict(net, opt, options=saves))
        train(net, opt, range(HALF, END))
        other, later = run("exact")
        later.init_state()
        loads = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(other, model, options=loads)
        set_optimizer_state_dict(other, later, state, options=loads)
        train(other, later, range(HALF, END))
        ours, theirs = later.exact_state_dict(other), opt.exact_state_dict(net)
        wrong += sum([not full(ours[key]).equal(full(t)) for key, t in theirs.items()])
    return wrong


def draws() -> int:
    """Stochastic rounding draws by the place in the whole parameter, however it is sharded."""
    wrong = 0
    chains: list[list[Transform]] = [[LR(1e-4)], [LR(0.01), ScheduleFree()]]
    engines: list[dict[str, Any]] = [{"fused": False}, {}, {"compile": True}]
    dtypes = torch.bfloat16, torch.float16
    for dtype, chain, engine in itertools.product(dtypes, chains, engines):
        placements = None, Shard(0), Shard(1), Replicate()
        ends = [drawn(dtype, chain, engine, placement) for placement in placements]
        wrong += sum([not end.equal(ends[0]) for end in ends])
    return wrong


def drawn(dtype: torch.dtype, chain: list[Transform], engine: Any, placement: Any) -> Tensor:
    """The whole parameter after five steps with stochastic rounding."""
    whole = torch.linspace(-2, 2, 11 * 6).view(11, 6).to(dtype)
    placed = whole if placement is None else distribute_tensor(whole, MESH, [placement])
    p = nn.Parameter(placed.clone())
    opt = Modular([p], *chain, rounding="stochastic", **engine)
    for i in range(5):
        grad = torch.randn(11, 6, generator=torch.Generator().manual_seed(i)).to(dtype)
        p.grad = grad if placement is None else distribute_tensor(grad, MESH, [placement])
        opt.step()
    return p.detach() if placement is None else full(p.detach())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    MESH, FOLDER = init_device_mesh("cpu", (dist.get_world_size(),)), Path(sys.argv[1])
    for name in sys.argv[2:]:
        print(f"{name}: {globals()[name]()} wrong", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way
