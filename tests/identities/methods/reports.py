"""Methods of technical reports that have no public code: their formulas, written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.identities.identity import optimizer
from tests.identities.inputs import Inputs, Shapes
from torchzero_clip import Heads, Modular, named

QUERIES = ("a.queries", (9, 4))
KEYS_AND_VALUES = ("a.keys and values", (12, 5))
LATENT_ATTENTION: Shapes = (
    QUERIES,
    KEYS_AND_VALUES,
    ("a.output", (4, 6)),
    ("b.square", (4, 4)),
    ("b.zero", (2, 3)),
)
"""The weights of latent attention with three heads, and two other matrices.

A head of the queries has two rows without and one row with a position. A head of the other weight
has two rows that make keys and two rows that make values.
"""
HEADS = 3
ROWS_OF_BLOCKS = {9: [3, 3, 3], 12: [2, 2, 2, 2, 2, 2]}
"""The rows of each matrix of a weight, by the number of its rows."""
MAXIMA = torch.empty(HEADS, dtype=torch.float64)
"""The largest logit of each head, which the attention would write in each step."""
DAMPENING = {"dampening": "the report has no such option"}


def layout(name: str, p: Tensor) -> list[int] | None:
    return ROWS_OF_BLOCKS.get(len(p))


def largest_logits_of(step: int) -> Tensor:
    """Return the largest logit of each head in a step, some above the threshold and some below."""
    largest = [40.0 + 25 * (step % 5), 90.0, 300.0 / (1 + step % 3)]
    return torch.tensor(largest, dtype=torch.float64)


def heads_of(name: str, p: Tensor) -> Heads | None:
    if len(p) == 9:
        return Heads("query", MAXIMA, last=1)
    if len(p) == 12:
        return Heads("key", MAXIMA, last=2)
    return None


def write_maxima(opt: Modular, step: int) -> None:
    MAXIMA.copy_(largest_logits_of(step))


def newton_schulz(x: Tensor) -> Tensor:
    """Return the result of five quintic steps with the coefficients of Jordan et al."""
    norm = x.norm()
    x = x / norm if norm > 0 else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Algorithm 1 of Kimi K2, with the momentum cut into blocks before the orthogonalization."""

    def __init__(self, groups: Any, nesterov: bool = False) -> None:
        super().__init__(groups, {})
        self.nesterov = nesterov
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        maxima = largest_logits_of(self.count)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, group)
                    self.clip(p, maxima, group)

    def move(self, p: Tensor, group: Any) -> None:
        state = self.state[p]
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(group["momentum"]).add_(p.grad)
        m = p.grad + group["momentum"] * momentum if self.nesterov else momentum
        blocks = m.split(ROWS_OF_BLOCKS.get(len(p), [len(p)]))
        o = [newton_schulz(block) * 0.2 * max(block.shape) ** 0.5 for block in blocks]
        p.sub_(group["lr"] * (torch.cat(o) + group["weight_decay"] * p))

    def clip(self, p: Tensor, maxima: Tensor, group: Any) -> None:
        """Multiply the rows of a head by √γ, and the rows of queries with a position by γ."""
        if "tau" not in group or len(p) not in ROWS_OF_BLOCKS:
            return
        for head, largest in zip(p.chunk(HEADS), maxima, strict=True):
            if largest > group["tau"]:
                gamma = group["tau"] / largest
                head[:2].mul_(gamma.sqrt())
                if len(p) == 9:
                    head[2:].mul_(gamma)


GROUPS: Any = (
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.0},
)


@optimizer(
    "kimi_k3",
    "Muon for each attention head, and then `QKClip`, is the optimizer of the report of Kimi K3",
    source="arXiv 2607.24653, section 2.5, and arXiv 2507.20534, algorithm 1",
    ours=lambda **options: named("kimi_k3", layout=layout, max_logits=heads_of, **options),
    groups=({**GROUPS[0], "tau": 100.0}, {**GROUPS[1], "tau": 80.0}),
    constant={**DAMPENING, "alpha": "the report has √γ for both queries and keys"},
    each_step=write_maxima,
    inputs=Inputs(LATENT_ATTENTION),
    rtol={torch.float32: 1e-5, torch.float64: 1e-12},
)
def kimi_k3(groups: Any) -> Any:
    return Muon(groups)


@optimizer(
    "glm5",
    "Muon for each attention head is Muon Split, the optimizer of the report of GLM-5",
    source="arXiv 2602.15763, section 2.1, and arXiv 2508.06471, section 2.4",
    ours=lambda **options: named("glm5", layout=layout, **options),
    groups=GROUPS,
    constant=DAMPENING,
    inputs=Inputs(LATENT_ATTENTION),
    rtol={torch.float32: 1e-5, torch.float64: 1e-12},
)
def glm5(groups: Any) -> Any:
    return Muon(groups, nesterov=True)
