"""What `test_sharded.py` starts on every rank: logits that explode in a model under FSDP2.

torchrun --nproc-per-node 2 tests/processes/explode.py
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from benchmarks.studies.qk_clip import BACK, LENGTH, LETTERS, Model
from torchzero_clip import LR, Lion, Modular, QKClip

STEPS, TAU = 100, 4.0


def optimizer(model: Model) -> Modular:
    return Modular(model.named_parameters(), Lion(), LR(0.003), QKClip(model.heads, TAU))


def backward(model: Model, text: torch.Tensor) -> float:
    """Make the gradients; returns the largest logit of all heads here."""
    model.zero_grad()
    logits = model(text)
    F.cross_entropy(logits[:, BACK:].flatten(0, 1), text[:, :-BACK].flatten()).backward()
    return max(attention.maxima.max().item() for attention in model.attention)


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # Lion's signs do not hang on the order of sums
    alone = Model()
    for layer in alone.attention:
        layer.k.bias.requires_grad_(False)  # no attention hangs on it: its gradient is rounding
    shared = copy.deepcopy(alone)
    for layer in shared.attention:
        fully_shard(layer)
    fully_shard(shared)
    first, second = optimizer(alone), optimizer(shared)
    largest = wrong = 0.0
    for _ in range(STEPS):
        text = torch.randint(LETTERS, (8, LENGTH))
        largest = max(largest, backward(alone, text))
        backward(shared, text.chunk(ranks)[rank])
        for attention in shared.attention:
            dist.all_reduce(attention.maxima, dist.ReduceOp.MAX)
        first.step()
        second.step()
    for p, q in zip(alone.parameters(), shared.parameters(), strict=True):
        assert isinstance(q, DTensor)
        wrong += not torch.allclose(p, q.full_tensor(), rtol=1e-8, atol=1e-10)
    assert TAU < largest < 2 * TAU, largest
    print(f"explode: {wrong:.0f} wrong")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
