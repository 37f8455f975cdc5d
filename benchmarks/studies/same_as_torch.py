"""How far a chain is from torch's clip and AdamW: python -m benchmarks.studies.same_as_torch.

The model of README.md is trained for 100 steps on the same batches, with six seeds: once with
`torch.nn.utils.clip_grad_norm_` and `torch.optim.AdamW`, and once with
`ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.01), LR(1e-3)` in each engine. Gradients are
large enough that every step is clipped. A row of the table has the largest distance that a weight
has moved with an engine, and its largest difference from torch's weights after the last step. Both
are maxima over the seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.circumstances import watched
from benchmarks.guide.report import markdown
from torchzero_clip import LR, Adam, ClipNorm, Modular, WeightDecay

STEPS = 100
SEEDS = range(6)
COLUMNS = ("engine", "largest movement of a weight", "largest difference from torch")
ENGINES = {
    "default": {},
    "fused=False": {"fused": False},
    "compile=True": {"compile": True},
}


def trained(make_step: Callable[[nn.Module], Callable[[], None]], seed: int) -> list[Tensor]:
    """Return the weights of the model after the run."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    step = make_step(model)
    for _ in range(STEPS):
        inputs = torch.randn(64, 10)
        targets = 10 * inputs.sum(1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        step()
    return [p.detach().clone() for p in model.parameters()]


def torch_step(model: nn.Module) -> Callable[[], None]:
    """Clip with torch's function, then step torch's AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def step() -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm > 1.0, "every step must be clipped, or the comparison is of AdamW alone"
        optimizer.step()

    return step


def chain_step(model: nn.Module, **options: bool) -> Callable[[], None]:
    """Step the same method as a chain."""
    links = ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.01), LR(1e-3)
    opt = Modular(model.parameters(), *links, **options)

    def step() -> None:
        opt.step()

    return step


def no_step(model: nn.Module) -> Callable[[], None]:
    """Leave the weights where they are."""
    return lambda: None


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest absolute difference between two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def distances() -> dict[str, tuple[float, float]]:
    """Return for each engine how far weights have moved, and how far they are from torch's.

    Both are maxima over the seeds.
    """
    moved: dict[str, list[float]] = {name: [] for name in ENGINES}
    away: dict[str, list[float]] = {name: [] for name in ENGINES}
    for seed in SEEDS:
        start = trained(no_step, seed)
        reference = trained(torch_step, seed)
        for name, options in ENGINES.items():
            weights = trained(lambda model, o=options: chain_step(model, **o), seed)
            moved[name].append(largest_difference(weights, start))
            away[name].append(largest_difference(weights, reference))
    return {name: (max(moved[name]), max(away[name])) for name in ENGINES}


def main() -> None:
    with watched("benchmarks.studies.same_as_torch", [], counts=True):
        rows = [
            (name, f"{moved:.2g}", f"{away:.1e}") for name, (moved, away) in distances().items()
        ]
        print(markdown(COLUMNS, rows))


if __name__ == "__main__":
    main()
