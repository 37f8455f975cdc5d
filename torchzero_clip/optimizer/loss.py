"""Loss: what a closure returns, or the optimizer is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def one_number(loss: Any) -> Tensor | float | None:
    """A loss as a number or a tensor that needs no gradient; None where it is no number."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.detach().reshape(())
    return float(loss) if isinstance(loss, (int, float)) else None


def evaluate(closure: Callable[[], Any]) -> Any:
    """The loss of a closure, with gradients."""
    if not callable(closure):
        raise TypeError(f"step takes a closure, a function that gives the loss, got {closure!r}")
    with torch.enable_grad():
        return closure()
