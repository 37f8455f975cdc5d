"""How far a chain is from torch's clip and AdamW: python -m benchmarks.studies.same_as_torch.

The model of README.md is trained for 100 steps on the same batches: once with
`torch.nn.utils.clip_grad_norm_` and `torch.optim.AdamW`, and once with
`ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.01), LR(1e-3)` in each engine. Gradients are
large enough that every step is clipped. It prints the largest difference between two weights after
the last step, next to the largest distance that a weight has moved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchzero_clip import LR, Adam, ClipNorm, Modular, WeightDecay

STEPS = 100
ENGINES = {
    "default": {},
    "fused=False": {"fused": False},
    "compile=True": {"compile": True},
}


def trained(make_step: Callable[[nn.Module], Callable[[], None]]) -> list[Tensor]:
    """Return the weights of the model after the run."""
    torch.manual_seed(0)
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


def differences() -> dict[str, float]:
    """Return the largest difference from torch for each engine."""
    reference = trained(torch_step)
    return {
        name: largest_difference(
            trained(lambda model, o=options: chain_step(model, **o)), reference
        )
        for name, options in ENGINES.items()
    }


def main() -> None:
    moved = largest_difference(trained(no_step), trained(torch_step))
    print(f"after {STEPS} clipped steps, of weights that moved by up to {moved:.3f}:")
    for name, difference in differences().items():
        print(f"  {name:14}{difference:.1e}")


if __name__ == "__main__":
    main()
