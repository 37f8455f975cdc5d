"""What a norm clip does to a model of two parts, a matrix with its method and a vector with Adam.

    python -m benchmarks.studies.matrix_clipping

Gradients are drawn for 43 steps, and the last update is looked at: its direction, as the cosine
with the update of a run with the same gradients and no clip, and its size, over that run's. The
clip stands before both parts, inside each, or after both. In the first table norms are at the limit
but for a spike of a hundred times that, five steps before the end, which the run to compare with
has not. In the second all norms are ten times the limit.
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
    ClipRMS,
    Graft,
    InBasis,
    KLBasis,
    Kron,
    Modular,
    NeuronNorm,
    Normalize,
    Orthogonalize,
    Partition,
    RMSprop,
    Rows,
    ScaleByShape,
    Shampoo,
    Sign,
    SOAPBasis,
    Steepest,
    Transform,
)

STEPS, SPIKE = 43, 38  # bases are renewed in step 41, between the two
SHAPES = {"matrix": (40, 40), "vector": (64,)}
ADAM = "Adam, the vector"
METHODS: dict[str, Callable[..., Chain]] = {  # of the matrix, behind a clip inside if there is one
    "Muon": lambda *clip: Chain(*clip, EMA(0.95, nesterov=True), Orthogonalize()),
    "NorMuon": lambda *clip: Chain(
        *clip, EMA(0.95, nesterov=True), Orthogonalize(), NeuronNorm(0.95)
    ),
    "AdaMuon": lambda *clip: Chain(
        *clip,
        EMA(0.95, nesterov=True),
        Sign(),
        Orthogonalize(),
        RMSprop(0.95),
        Normalize(0.2, "rms"),
    ),
    "Dion3": lambda *clip: Chain(
        *clip, Rows(0.25, Orthogonalize(), lines="rows"), NeuronNorm(0.95), ScaleByShape()
    ),
    "Scion": lambda *clip: Chain(*clip, EMA(0.9), Orthogonalize(), ScaleByShape(50.0)),
    "PolarGrad": lambda *clip: Chain(
        *clip, EMA(0.95), Steepest(Orthogonalize(coefficients="polar_express"))
    ),
    "SOAP": lambda *clip: Chain(*clip, InBasis(SOAPBasis(), Adam((0.95, 0.95)))),
    "SOAP, inside its bases": lambda *clip: Chain(InBasis(SOAPBasis(), *clip, Adam((0.95, 0.95)))),
    "KL-SOAP": lambda *clip: Chain(
        *clip, InBasis(KLBasis(0.98), Adam((0.9, 0.98), bias_correction=False))
    ),
    "Shampoo": lambda *clip: Chain(*clip, Graft(Adam(), Shampoo())),
    "Kron": lambda *clip: Chain(*clip, Kron(), ClipRMS(1.1)),
}


def gradients(size: float, spike: float = 1.0) -> list[dict[str, Tensor]]:
    """A slow signal and noise, both parts together of this norm, more at the spike."""
    source = torch.Generator().manual_seed(0)
    signal = {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}
    out = []
    for step in range(STEPS):
        row = {n: s + torch.randn(s.shape, generator=source) for n, s in signal.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in row.values()))
        factor = size * (spike if step == SPIKE else 1.0) / norm
        out.append({name: (g * factor).double() for name, g in row.items()})
    return out


def clip() -> ClipNorm:
    return ClipNorm(1.0, dim="global")


def parts(method: Callable[..., Chain], *inside: Transform) -> Partition:
    branches = {"matrix": method(*inside), "vector": Chain(*inside, Adam((0.9, 0.95)))}
    return Partition(branches, lambda name, p: name)


PLACES: dict[str, Callable[[Callable[..., Chain]], list[Transform]]] = {
    "no clip": lambda method: [parts(method)],
    "before both": lambda method: [clip(), parts(method)],
    "inside each": lambda method: [parts(method, clip())],
    "after both": lambda method: [parts(method), clip()],
}


def last(chain: list[Transform], grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The update of the last step."""
    params = {n: Parameter(torch.zeros(s, dtype=torch.float64)) for n, s in SHAPES.items()}
    opt = Modular(params.items(), *chain, LR(1.0))
    for row in grads:
        for name, p in params.items():
            p.data.zero_()
            p.grad = row[name].clone()
        opt.step()
    return {name: -p.detach() for name, p in params.items()}


def table(grads: list[dict[str, Tensor]]) -> list[str]:
    """A row for each method, a column for each place of the clip."""
    quiet, found = gradients(1.0), {}
    for name, method in METHODS.items():
        calm = last(PLACES["no clip"](method), quiet)
        made = [last(place(method), grads) for place in PLACES.values()]
        for part, row in (("matrix", name), ("vector", ADAM)):
            found.setdefault(row, [cell(x[part], calm[part]) for x in made])
    lines = [f"| | {' | '.join(PLACES)} |", "|---|" + "---|" * len(PLACES)]
    return [*lines, *[f"| {name} | {' | '.join(cells)} |" for name, cells in found.items()]]


def cell(made: Tensor, calm: Tensor) -> str:
    cosine = torch.cosine_similarity(made.flatten(), calm.flatten(), 0)
    return f"{float(cosine):.3f}, × {float(made.norm() / calm.norm()):.3g}"


def tables() -> dict[str, str]:
    """Both tables, of a spike and of a factor that is the same in all steps."""
    grads = {"spike": gradients(1.0, spike=100.0), "constant": gradients(10.0)}
    return {name: "\n".join(table(some)) for name, some in grads.items()}


if __name__ == "__main__":
    for name, text in tables().items():
        print(f"{name}\n\n{text}\n")
