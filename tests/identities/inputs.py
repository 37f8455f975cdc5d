"""What both sides of an identity are given: steps in which every branch acts."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

STEPS = 24
PLAIN = 3
"""The first steps, in which the first group has the values that our chain was made with."""
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
ORDINARY: Shapes = (
    ("a.weight", (4, 3)), ("a.bias", (4,)),
    ("b.weight", (2, 3, 2, 2)), ("b.one", (1,)), ("b.bias", (2,)),
)  # fmt: skip
MATRICES: Shapes = (
    ("a.wide", (3, 5)),
    ("a.tall", (6, 2)),
    ("b.square", (4, 4)),
    ("b.zero", (2, 3)),
)


@dataclass(frozen=True)
class Inputs:
    """Parameters in two groups, "a" and "b", gradients for each step, and schedules.

    A field is off where the official code makes a NaN of it or fails; an identity that turns one
    off says why.

    Args:
        shapes: The parameters; the first letter of a name is its group.
        size: Of the gradients, nearly: below and above the bounds of what is tested.
        spike: How much larger all gradients of the eighth step are, and those of "a" in the ninth.
        zero_start: The first tensor of "b" has no signal in the first two steps, and the last one
            starts at zero as a weight.
        zero_step: All gradients of the thirteenth step are zero.
        gaps: Each row has no gradient in every seventh step, the last one none in the first step.
        boundaries: Steps, the first of which is 1, at which the rule begins to do something else:
            there, one step before and one after, some of the rows are a spike.
    """

    shapes: Shapes = ORDINARY
    size: float = 1.0
    spike: float = 50.0
    zero_start: bool = True
    zero_step: bool = True
    gaps: bool = True
    boundaries: tuple[int, ...] = ()

    def parameters(self, dtype: torch.dtype) -> dict[str, Parameter]:
        values = {name: _drawn(name, -1, shape).to(dtype, copy=True) for name, shape in self.shapes}
        if self.zero_start:
            values[self.group("b")[-1]].zero_()
        return {name: Parameter(value) for name, value in values.items()}

    def gradients(self, step: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
        grads: dict[str, Tensor | None] = {}
        for row, (name, shape) in enumerate(reversed(self.shapes)):
            if self.gaps and (step + 3 * row) % 7 == 0:
                grads[name] = None
                continue
            size = self.size * (0.1 + 1.8 * float(_drawn(name + " size", step, ()).sigmoid()))
            if step == 7 or (step == 8 and name in self.group("a")) or self.spikes(row, step):
                size *= self.spike
            if self.zero_start and step < 2 and name == self.group("b")[0]:
                size = 0.0
            if self.zero_step and step == 12:
                size = 0.0
            grads[name] = (_drawn(name, step, shape) * size).to(dtype)
        return grads

    def spikes(self, row: int, step: int) -> bool:
        """Whether a row is a spike beside a boundary: one before, at it, or one after, by turns."""
        return any(step + 1 == boundary + row % 3 - 1 for boundary in self.boundaries)

    def group(self, letter: str) -> list[str]:
        return [name for name, _ in self.shapes if name.startswith(letter)]

    @staticmethod
    def rate(step: int) -> float:
        """What a scheduler multiplies the learning rates by: a warm-up, then a decay."""
        return (step + 1) / 5 if step < 5 else 0.9 ** (step - 4)

    def varied(self, name: str, step: int, value: Any) -> Any:
        """What a schedule makes of a live value: every name has its own way."""
        if step < PLAIN:
            return value
        if isinstance(value, tuple):
            return tuple(self.varied(f"{name} {i}", step, x) for i, x in enumerate(value))
        if name == "lr":
            return value * self.rate(step)
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            return value + step % 2
        factor = 0.7 + 0.7 * float(_drawn(name + " live", step, ()).sigmoid())
        return 1 - (1 - value) * factor if 0.5 <= value < 1 else value * factor

    def digest(self) -> str:
        """A few letters that change with the numbers, so that no recording outlives its inputs."""
        numbers = [p.detach() for p in self.parameters(torch.float32).values()]
        given = [g for i in range(STEPS) for g in self.gradients(i, torch.float32).values()]
        numbers += [torch.tensor(torch.nan) if g is None else g for g in given]
        numbers += [torch.tensor([self.varied("x", i, 0.9), self.rate(i)]) for i in range(STEPS)]
        rounded = ",".join(f"{x:.4e}" for t in numbers for x in t.flatten().tolist())
        return hashlib.sha256(rounded.encode()).hexdigest()[:16]


@functools.cache
def _drawn(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    """Normal numbers that depend on the name and the step alone."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:4], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
