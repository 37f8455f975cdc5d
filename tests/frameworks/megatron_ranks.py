"""Megatron-LM's own DistributedDataParallel and DistributedOptimizer around chains, on two ranks.

What is asked for in `sys.argv` prints a line. Its gradients are summed by one all-reduce of its
buffers, since its own exchange asks for streams of CUDA.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, _get_param_groups_and_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.transformer import TransformerConfig
from torch import nn

from tests.frameworks.as_cuda import AsCuda
from torchzero_clip import LR, Adam, ClipNorm, Modular, Orthogonalize, WeightDecay, megatron_entry


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def made(chain: list[Any], **options: Any) -> tuple[nn.Module, Any, Any]:
    """A model, its wrapper and its optimizer, by Megatron's own functions."""
    net = model()
    settings = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    wrapped = DistributedDataParallel(
        settings, DistributedDataParallelConfig(use_distributed_optimizer=True), net
    )
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=0.0, use_distributed_optimizer=True
    )
    entry = megatron_entry(*chain)
    groups, buffers = _get_param_groups_and_buffers(
        [wrapped],
        model_chunk_offset=0,
        config=config,
        config_overrides=None,
        filter_fn=lambda group: True,
        buffer_name="buffers",
    )
    inner = entry.optimizer_cls(groups, lr=1e-2, **options)
    data = parallel_state.get_data_parallel_group()
    opt = DistributedOptimizer(
        inner, config, None, entry.init_state_fn, [wrapped], buffers, data, None, 0, 0
    )
    return net, wrapped, opt


def trained(chain: list[Any], **options: Any) -> float:
    """How far its weights are from those of a process alone, after some steps."""
    net, wrapped, opt = made(chain, **options)
    other = model()
    ours = Modular(other.parameters(), *chain)
    size = dist.get_world_size()
    for i in range(5):
        x = torch.randn(8 * size, 6, generator=torch.Generator().manual_seed(i))
        wrapped.zero_grad_buffer()
        wrapped(x[dist.get_rank() :: size]).square().mean().backward()
        for buffer in wrapped.buffers:
            dist.all_reduce(buffer.grad_data)
            buffer.grad_data.div_(size)
        opt.step()
        for buffer in wrapped.buffers:
            gathered(buffer)
        ours.zero_grad()
        other(x).square().mean().backward()
        ours.step()
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max([(a - b).abs().max().item() for a, b in pairs])


def gathered(buffer: Any) -> None:
    """Every rank's part of the parameters, for all."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for bucket in buffer.buckets:
        parts = list(bucket.param_data.chunk(size))
        mine = parts[rank].clone()
        found = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(found, mine)
        for part, new in zip(parts, found, strict=True):
            part.copy_(new)


def entries() -> str:
    away = trained([Adam(), WeightDecay(0.1), LR(1e-2)])
    return "as a process alone" if away < 1e-6 else f"{away} away"


def norm() -> str:
    chain = [ClipNorm(0.1, dim="global"), Adam(), WeightDecay(0.1), LR(1e-2)]
    away = trained(chain, process_group=dist.group.WORLD)
    return "as a process alone" if away < 1e-6 else f"{away} away"


def refused(chain: list[Any]) -> str:
    net, wrapped, opt = made(chain)
    before = [p.detach().clone() for p in net.parameters()]
    wrapped.zero_grad_buffer()
    wrapped(torch.ones(4, 6)).square().mean().backward()
    try:
        opt.step()
    except ValueError as error:
        moved = not all(map(torch.equal, before, net.parameters()))
        return "moved" if moved else str(error).partition(":")[0]
    return "taken"


def layers() -> str:
    """Matrices by `LayerWiseDistributedOptimizer`, which leaves each rank some of them, whole."""
    chain = [Orthogonalize(), WeightDecay(0.1), LR(1e-2)]
    net = [p for p in model().bfloat16().parameters() if p.dim() > 1]
    copies = [nn.Parameter(p.detach().float()) for p in net]
    ours = Modular(copies, *chain)
    entry = megatron_entry(*chain)
    config = OptimizerConfig(optimizer="chain", lr=1e-2, weight_decay=0.1, clip_grad=0.0, bf16=True)
    config.use_layer_wise_distributed_optimizer = True
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = SimpleNamespace(dp_cp=dist.group.WORLD, expt_dp=alone, tp=alone, mp=alone)
    matrices = {"params": list(net), "is_expert_parallel": False}
    inner = entry.optimizer_cls([matrices], **entry.config_to_kwargs(config, [], groups))
    opt = LayerWiseDistributedOptimizer([inner], config, groups, [entry.init_state_fn])
    opt.allgather_params = opt.broadcast_params  # its other way: gloo gathers equal sizes alone
    mine = len(inner.param_groups[0]["params"])
    for i in range(3):
        generator = torch.Generator().manual_seed(i)
        for p, q in zip(net, copies, strict=True):
            q.grad = torch.randn(p.shape, generator=generator)
            vars(p)["main_grad"] = q.grad.clone()
        opt.prepare_grads()
        opt.step_with_ready_grads()
        ours.step()
    same = all([torch.equal(p, q.bfloat16()) for p, q in zip(net, copies, strict=True)])
    return "as a process alone" if same and mine == 1 else f"other, with {mine} of {len(net)}"


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with AsCuda():
        parallel_state.initialize_model_parallel()
        for name in sys.argv[1:]:
            told = {
                "entries": entries,
                "norm": norm,
                "tensors": lambda: refused([ClipNorm(1.0), LR(1.0)]),
                "matrices": lambda: refused([Orthogonalize(), LR(1.0)]),
                "layers": layers,
                "alone": lambda: refused([ClipNorm(1.0, dim="global"), LR(1.0)]),
            }[name]()
            print(f"{name}: {told}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
