"""What a chain does that a file of plain torch has no words for."""

from __future__ import annotations

from typing import Any

from torchzero_clip.optimizer import norm_groups


def unwritten(optimizer: Any) -> str | None:
    """The reason why an optimizer is no file of plain torch, whatever its links; None without."""
    plain = "in a file of plain torch, which"
    if optimizer.rounding != "nearest":
        return f"rounding={optimizer.rounding!r} has no words {plain} rounds to the nearest"
    if not optimizer.place.usual:
        return f"grad={optimizer.grad!r} has no words {plain} reads .grad"
    for told in norm_groups.sentences(optimizer.param_groups):
        return f"{told}, for which there are no words {plain} takes all groups alike"
    return None
