"""Optimizers of a few lines, each with a defect on the line that says so, and some without."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Small(torch.optim.Optimizer):
    """A sum of gradients, which `change` may spoil, and a step along it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count = 0
        self.params = self.param_groups[0]["params"]
        self.sums = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.count += 1
        grads = [p.grad for p in self.params]
        torch._foreach_lerp_(self.sums, grads, 0.1)
        self.change(grads)
        torch._foreach_add_(self.params, self.sums, alpha=-0.1)

    def change(self, grads: Sequence[Tensor]) -> None:
        """Nothing."""


class ReadsItem(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        torch._foreach_mul_(grads, grads[0].sum().item())  # read


class ReadsFloat(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        scale = float(grads[0].norm())  # read
        torch._foreach_mul_(grads, scale)


class ReadsInt(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        torch._foreach_mul_(grads, int(grads[0].argmax()))  # read


class Branches(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        if grads[0].norm() > 1:  # read
            torch._foreach_div_(grads, 2)


class LooksForFinite(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        if not torch.isfinite(grads[0]).all():  # read
            torch._foreach_zero_(grads)


class Largest(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        torch._foreach_div_(grads, max(torch._foreach_norm(grads)))  # read


class Lists(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        scales = torch.stack(torch._foreach_norm(grads)).tolist()  # read
        torch._foreach_mul_(grads, scales)


class GivesATensorAsANumber(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        grads[0].add_(self.sums[0], alpha=grads[0].norm())  # type: ignore[arg-type] # read


class WritesByAMask(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        grads[0][grads[0] > 0] = grads[0].norm()  # read


class PicksByAMask(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        largest = grads[0][grads[0] > 1].mean()  # read
        torch._foreach_mul_(grads, largest)


class LooksForEntries(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        self.found = grads[0].nonzero()  # read


class GoesToTheHost(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        norm = grads[0].norm().cpu()  # copy
        torch._foreach_mul_(grads, norm.item())


class Prints(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        str(grads[0])  # copy


class MakesANumber(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        rate = torch.tensor(0.5, device=grads[0].device)  # copy
        torch._foreach_mul_(grads, rate)


class Counts(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        torch._foreach_div_(self.sums, 1 - 0.9**self.count)  # change


class Schedules(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        self.param_groups[0]["lr"] *= 0.99
        torch._foreach_add_(self.params, grads, alpha=-self.param_groups[0]["lr"])  # change


class CountsInATensorOfTheHost(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        self.steps = getattr(self, "steps", torch.zeros(())) + 1
        self.sums[0].div_(self.steps)  # change


class EverySecondStep(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        if self.count % 2:
            torch._foreach_zero_(self.sums)  # change


class MakesNewState(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        self.mean = 0.9 * getattr(self, "mean", grads[0]) + grads[0]  # change


class Loops(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        for grad in grads:
            grad.clamp_(-1, 1)  # loop


class TakesMemory(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        squares = torch._foreach_mul(grads, grads)  # memory
        torch._foreach_add_(self.sums, squares)


class WaitsInside(Small):
    def change(self, grads: Sequence[Tensor]) -> None:
        grads[0].copy_(torch.linalg.eigh(grads[0] @ grads[0].mT)[1])  # wait


PLANTED = list(Small.__subclasses__())


# --- without a defect


class Writes(Small):
    """State in place, numbers of the device, choices by `where`, entries by their numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = torch.zeros((), device=self.params[0].device)
        self.rows = torch.zeros(2, dtype=torch.int64, device=self.params[0].device)

    def change(self, grads: Sequence[Tensor]) -> None:
        self.steps += 1
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, torch.where(norm > 1, 1 / norm, 1.0))
        torch._foreach_div_(self.sums, 1 - torch.pow(0.9, self.steps))
        grads[0][grads[0].isnan()] = 0.0
        grads[0][self.rows] = 0.0
        grads[0][:2, 1:].mul_(2)


def fused(params: Any) -> Any:
    return torch.optim.AdamW(params, fused=True, capturable=True)


def foreach(params: Any) -> Any:
    return torch.optim.AdamW(params, foreach=True, capturable=True)


def momentum(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


RIGHT: list[Callable[..., Any]] = [Small, Writes, fused, foreach, momentum]


def line(kind: type[Small]) -> tuple[str, int]:
    """What is the matter with a planted optimizer, and on which line."""
    source = Path(__file__).read_text().splitlines()
    start = next(i for i, text in enumerate(source) if text.startswith(f"class {kind.__name__}("))
    for i in itertools.count(start):
        what = source[i].rpartition("  # ")[2].rpartition("# ")[2]
        if what in ("read", "copy", "wait", "change", "loop", "memory"):
            return what, i + 1
    raise AssertionError
