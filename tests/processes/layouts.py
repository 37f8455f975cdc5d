"""What `test_layouts.py` runs: a fused parameter, and the separate ones that it stands for.

`python -m tests.processes.layouts` prints a table of layouts and rules for one process. On several
ranks, every parameter is sharded:

torchrun --nproc-per-node 4 -m tests.processes.layouts
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchzero_clip import (
    EMA,
    LR,
    Adam,
    ClipNorm,
    ClipSpectral,
    EqualRows,
    Graft,
    InBasis,
    KLBasis,
    Kron,
    Modular,
    NeuronNorm,
    Orthogonalize,
    Rows,
    ScaleByShape,
    Shampoo,
    SOAPBasis,
    Steepest,
    Transform,
    heads,
    join_matrices,
    logical_matrices,
)

LAYOUTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "gate and up": ("(gate rows) d -> gate rows d, gate=2", (12, 8)),
    "interleaved": ("(rows gate) d -> gate rows d, gate=2", (12, 8)),
    "heads": (heads(4, 1, 1, size=4), (24, 8)),
    "heads of two sizes": (heads(3, 1, 1, size=(4, 4, 6)), (22, 8)),
    "sizes": ([6, 4, 4], (14, 8)),
    "columns": ("d (head k) -> head d k, head=2", (6, 8)),
    "experts": ("e two f d -> (e two) f d", (2, 2, 6, 4)),
    "transposed experts": ("e d (gate rows) -> e gate rows d, gate=2", (2, 8, 12)),
    "several": (
        [("(head k) d -> head k d, k=2", 4), ("rows (head k) -> head rows k, head=2", 6)],
        (10, 8),
    ),
    "a convolution": ("out into k -> out (into k)", (5, 4, 3)),
}
"""For each layout, an entry of `layout` and a shape."""
Chains = Callable[[Any], Sequence[Transform]]
RULES: dict[str, Chains] = {
    "Orthogonalize": lambda x: [Orthogonalize(scale="original", layout=x)],
    "ClipSpectral": lambda x: [ClipSpectral(0.5, layout=x)],
    "EqualRows": lambda x: [EqualRows(layout=x)],
    "NeuronNorm": lambda x: [NeuronNorm(layout=x)],
    "NeuronNorm, longer": lambda x: [NeuronNorm(neurons="longer", layout=x)],
    "ScaleByShape": lambda x: [ScaleByShape(layout=x)],
    "Rows": lambda x: [Rows(0.5, Orthogonalize(), layout=x)],
    "Kron": lambda x: [Kron(every=2, layout=x)],
    "Shampoo": lambda x: [Shampoo(every=2, layout=x)],
    "Shampoo, grafted": lambda x: [Graft(Adam(), Shampoo(every=2, layout=x))],
    "SOAP": lambda x: [InBasis(SOAPBasis(every=2, layout=x), Adam())],
    "KL-SOAP": lambda x: [InBasis(KLBasis(every=2, layout=x), Adam())],
    "Steepest": lambda x: [Steepest(Orthogonalize(layout=x))],
    "Dion3": lambda x: [
        Rows(0.5, Orthogonalize(), lines="rows", layout=x),
        NeuronNorm(layout=x),
        ScaleByShape(layout=x),
    ],
    "Muon": lambda x: [
        EMA(0.9, nesterov=True),
        EqualRows(layout=x),
        Orthogonalize(layout=x),
        NeuronNorm(layout=x),
        ScaleByShape(layout=x),
    ],
}
"""For each name, a function of `layout` that returns links."""
STEPS = 4


def drawn(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


class Pair:
    """A fused parameter and the separate parameters that it stands for, each in an optimizer.

    Another plain matrix is in both optimizers.

    Args:
        layout: A name of `LAYOUTS`.
        chain: The links, as a function of `layout`.
        mesh: The mesh on which parameters are sharded, or None.
        dim: The dim along which they are sharded.
    """

    def __init__(
        self, layout: str, chain: Chains, mesh: Any = None, dim: int = 0, **options: Any
    ) -> None:
        self.entry, self.shape = LAYOUTS[layout]
        self.mesh = mesh
        self.dim = dim
        fused = drawn(self.shape, 0)
        plain = drawn((6, 6), 1)
        self.fused = [("w", self.parameter(fused)), ("plain", self.parameter(plain))]
        matrices = logical_matrices(self.entry, fused)
        self.separate = [(f"w{i}", self.parameter(t)) for i, t in enumerate(matrices)]
        self.separate.append(("plain", self.parameter(plain)))
        self.chain = chain
        self.options = options
        self.opt = Modular(self.fused, *chain({"w": self.entry}), LR(0.1), **options)
        self.other = Modular(self.separate, *chain(None), LR(0.1), **options)

    def parameter(self, t: Tensor) -> nn.Parameter:
        return nn.Parameter(self.sharded(t))

    def sharded(self, t: Tensor) -> Tensor:
        if self.mesh is None:
            return t.clone()
        dim = min(self.dim, t.dim() - 1)
        return distribute_tensor(t.contiguous(), self.mesh, [Shard(dim)], src_data_rank=None)

    def step(self, number: int) -> None:
        """Take a step of both optimizers with the same gradients."""
        grad = drawn(self.shape, 100 + 2 * number)
        plain = self.sharded(drawn((6, 6), 101 + 2 * number))
        self.fused[0][1].grad = self.sharded(grad)
        for (_, p), t in zip(self.separate, logical_matrices(self.entry, grad), strict=False):
            p.grad = self.sharded(t)
        self.fused[1][1].grad = plain
        self.separate[-1][1].grad = plain.clone()
        self.opt.step()
        self.other.step()

    def away(self) -> float:
        """Return the largest difference between the fused and the separate parameters."""
        fused = whole(self.fused[0][1].detach())
        matrices = logical_matrices(self.entry, fused)
        pairs = zip(matrices, self.separate, strict=False)
        return max([(a - whole(p.detach())).abs().max().item() for a, (_, p) in pairs])

    def fused_state(self) -> dict[str, Any]:
        """Return the state dict of the separate parameters as one of the fused parameter."""
        saved = self.other.state_dict()
        states = saved["state"]
        count = len(self.separate) - 1
        parts = [states[i] for i in range(count)]
        state = fused_state(self.entry, self.shape, parts)
        new = Modular(self.fused, *self.chain({"w": self.entry}), LR(0.1), **self.options)
        (group,) = new.state_dict()["param_groups"]
        group["chain"] = {**saved["param_groups"][0]["chain"], **group["chain"]}  # its counts
        return {"state": {0: state, 1: states[count]}, "param_groups": [group]}


def fused_state(
    entry: Any, shape: Sequence[int], parts: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the optimizer state of a fused parameter from that of its matrices, as the docs do."""
    state: dict[str, Any] = {}
    of_matrices = ("Rows", "Kron", "Shampoo", "SOAPBasis", "KLBasis")
    sizes = [tuple(m.shape) for m in logical_matrices(entry, torch.empty(shape))]
    for key, first in parts[0].items():
        values = [part[key] for part in parts]
        rule = key.split("/")[-2]
        if rule in of_matrices and isinstance(first, Tensor):
            for i, value in enumerate(values):
                state[f"{key}_{i + 1}" if i else key] = value
        elif [tuple(getattr(t, "shape", ())) for t in values] == sizes:
            state[key] = join_matrices(entry, shape, values)
        elif rule == "NeuronNorm":  # a number for each neuron
            state[key] = torch.cat([t.flatten() for t in values])
        else:  # a count of steps, which all matrices share
            state[key] = first
    return state


def away(layout: str, rule: str, mesh: Any = None, dim: int = 0, **options: Any) -> float:
    """Return how far the fused parameter is from the separate ones after some steps."""
    pair = Pair(layout, RULES[rule], mesh, dim, **options)
    for number in range(STEPS):
        pair.step(number)
    return pair.away()


def clipped(layout: str, rule: str, mesh: Any = None, dim: int = 0, **options: Any) -> float:
    """Return the same after one step with a joint norm."""

    def chain(x: Any) -> list[Transform]:
        return [ClipNorm(1.0, dim="global"), *RULES[rule](x)]

    pair = Pair(layout, chain, mesh, dim, **options)
    pair.step(0)
    return pair.away()


def main() -> None:
    torch.set_num_threads(1)
    mesh = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    world = 1 if mesh is None else dist.get_world_size()
    layouts = [name for name in LAYOUTS if name in sys.argv] or list(LAYOUTS)
    rules = [name for name in RULES if name in sys.argv] or list(RULES)
    for dim in (0, 1) if mesh is not None and "columns too" in sys.argv else (0,):
        for compile in (True,) if "compiled" in sys.argv else (False,):
            for rule in rules:
                cells = []
                for layout in layouts:
                    found = away(layout, rule, mesh, dim, compile=compile)
                    joint = clipped(layout, rule, mesh, dim, compile=compile)
                    cells.append("equal" if not found else f"{found:.1e}")
                    if not joint <= 1e-6:
                        cells[-1] += f" (clipped: {joint:.1e})"
                if mesh is None or dist.get_rank() == 0:
                    engine = "compiled" if compile else "default"
                    where = f"{world} ranks, dim {dim}, {engine}" if mesh else f"1, {engine}"
                    print(f"{rule:20} {where}:", ", ".join(cells), flush=True)
    if mesh is not None:
        dist.barrier()
        os._exit(0)  # gloo's threads may abort a process that ends in the usual way


if __name__ == "__main__":
    main()
