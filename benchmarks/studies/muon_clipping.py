"""What a norm clip does to a model of two parts, a matrix with Muon and a vector with Adam.

    python -m benchmarks.studies.muon_clipping

Forty gradients are drawn, and the last update is looked at: its direction, as the cosine with the
update of a run with the same gradients and no clip, and its size, over that run's. The clip stands
before both parts, inside each, or after both. Its factor is the same in all steps (all norms are
ten times the limit), or it varies (norms at the limit, and a spike of a hundred times that five
steps before the end, which the run to compare with has not).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Chain,
    ClipNorm,
    Modular,
    Orthogonalize,
    Partition,
    Transform,
)

STEPS, SPIKE = 40, 35
SHAPES = {"matrix": (32, 48), "vector": (64,)}
PARTS = {"matrix": "Muon", "vector": "Adam"}


def gradients(size: float, spike: float = 1.0) -> list[dict[str, Tensor]]:
    """A slow signal and noise, both parts together of this norm, more at the spike."""
    source = torch.Generator().manual_seed(0)
    signal = {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}
    out = []
    for step in range(STEPS):
        row = {n: s + torch.randn(s.shape, generator=source) for n, s in signal.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in row.values()))
        factor = size * (spike if step == SPIKE else 1.0) / norm
        out.append({name: g * factor for name, g in row.items()})
    return out


def parts(*front: Transform) -> Partition:
    muon = Chain(*front, EMA(0.95, nesterov=True), Orthogonalize(scale="match_rms_adamw"))
    return Partition(
        {"matrix": muon, "vector": Chain(*front, Adam((0.9, 0.95)))}, lambda name, p: name
    )


def clip() -> ClipNorm:
    return ClipNorm(1.0, dim="global")


CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "none": lambda: [parts()],
    "before both": lambda: [clip(), parts()],
    "inside each": lambda: [parts(clip())],
    "after both": lambda: [parts(), clip()],
}


def last(chain: list[Transform], grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The update of the last step."""
    params = {name: Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    opt = Modular(params.items(), *chain, LR(1.0))
    for row in grads:
        for name, p in params.items():
            p.data.zero_()
            p.grad = row[name].clone()
        opt.step()
    return {name: -p.detach() for name, p in params.items()}


def table() -> list[str]:
    """A row for each place of the clip."""
    calm = last(CHAINS["none"](), gradients(1.0))
    runs = {"constant": gradients(10.0), "varies": gradients(1.0, spike=100.0)}
    heads = [
        f"{part}, {what}"
        for what in ("factor constant", "factor varies")
        for part in PARTS.values()
    ]
    lines = ["| clip | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for name, chain in CHAINS.items():
        cells = []
        for grads in runs.values():
            made = last(chain(), grads)
            for part in PARTS:
                cosine = torch.cosine_similarity(made[part].flatten(), calm[part].flatten(), 0)
                size = made[part].norm() / calm[part].norm()
                cells.append(f"{float(cosine):.3f}, × {float(size):.3g}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
