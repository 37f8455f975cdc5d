"""What `tests/test_compat.py` starts on two ranks: one norm for shards, stages, and nothing."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.helpers import network
from torchzero_clip import compat
from torchzero_clip.core.sharding.layout import full

ORDERS = (2, 1, math.inf, -1, -math.inf)


def filled(model: nn.Module) -> nn.Module:
    """The model with gradients, the same on every rank."""
    torch.manual_seed(3)
    model(torch.randn(5, 4)).square().sum().backward()
    return model


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.group.WORLD

    for order in ORDERS:
        whole, sharded = filled(network()), network()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        filled(sharded)
        want = nn.utils.clip_grad_norm_(whole.parameters(), 0.1, order)
        total = compat.clip_grad_norm_(sharded.parameters(), 0.1, order)
        assert isinstance(total, DTensor)
        assert total.placements == (Replicate(),)
        close(total.full_tensor(), want)
        assert float(total) == total.item() == total.full_tensor().item()
        for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
            close(full(p.grad), q.grad)
        clipped = [p.grad.clone() for p in sharded.parameters()]
        filled(sharded.zero_grad() or sharded)
        total = compat.get_total_norm([p.grad for p in sharded.parameters()], order)
        assert isinstance(total, DTensor)
        close(total.full_tensor(), want)
        compat.clip_grads_with_norm_(sharded.parameters(), 0.1, total)
        for p, g in zip(sharded.parameters(), clipped, strict=True):
            close(full(p.grad), full(g))
    print("shards")

    for order in ORDERS:
        whole, staged = filled(network()), filled(network())
        want = nn.utils.clip_grad_norm_(whole.parameters(), 0.1, order)
        mine = list(staged[2 * rank].parameters())  # the first and the last layer
        close(compat.clip_grad_norm_(mine, 0.1, order, process_group=world), want)
        for p, q in zip(mine, whole[2 * rank].parameters(), strict=True):
            close(p.grad, q.grad)
    print("stages")

    for order in (2, -1):
        params = list(filled(network()).parameters()) if rank else [nn.Parameter(torch.ones(2))]
        want = nn.utils.clip_grad_norm_(filled(network()).parameters(), 0.1, order)
        close(compat.clip_grad_norm_(params, 0.1, order, process_group=world), want)
    print("nothing")

    mesh = init_device_mesh("cpu", (2,))
    for order in (2, 1, math.inf):
        weights = [nn.Parameter(t) for t in (torch.ones(4), torch.ones(6))]
        placed = [nn.Parameter(distribute_tensor(w, mesh, [Replicate()])) for w in weights]
        parts = [torch.arange(n) * (1.0 + rank) - rank for n in (4.0, 6.0)]
        for w, p, part in zip(weights, placed, parts, strict=True):
            p.grad = DTensor.from_local(part, mesh, [Partial()])
            w.grad = p.grad.full_tensor()
        grads = [p.grad for p in placed]
        want = nn.utils.get_total_norm([w.grad for w in weights], order)
        total = compat.get_total_norm(grads, order)
        close(full(total), want)
        close(full(nn.utils.get_total_norm(grads, order)), want)
        assert [p.grad.placements for p in placed] == [(Partial(),)] * 2
        compat.clip_grads_with_norm_(placed, 0.1, total)
        nn.utils.clip_grads_with_norm_(weights, 0.1, want)
        for w, p in zip(weights, placed, strict=True):
            close(full(p.grad), w.grad)
        sharded = [DTensor.from_local(part, mesh, [Shard(0)]) for part in parts]
        theirs = nn.utils.get_total_norm(sharded)  # partial itself
        for p in placed:
            p.grad = distribute_tensor(torch.full(p.shape, 2.0), mesh, [Replicate()])
        compat.clip_grads_with_norm_(placed, 0.1, theirs)
        for p in placed:
            close(full(p.grad), torch.full(p.shape, 0.2 / full(theirs).item()))
    print("partial")

    params = [nn.Parameter(torch.ones(2))]
    params[0].grad = torch.tensor([math.inf if rank else 1.0, 1.0])
    try:
        compat.clip_grad_norm_(params, 1.0, error_if_nonfinite=True, process_group=world)
    except RuntimeError:
        print("error")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
