"""Options of an optimizer that `to_source` cannot write into a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchzero_clip.optimizer import norm_groups

if TYPE_CHECKING:
    from torchzero_clip.optimizer.chain_runner import ChainRunner


def why_not_written(optimizer: ChainRunner) -> str | None:
    """Return why no file can express the options of an optimizer, or None if a file can."""
    plain = "in a file of plain torch, which"
    if optimizer.rounding != "nearest":
        return f"rounding={optimizer.rounding!r} cannot be written {plain} rounds to nearest"
    if not optimizer.place.usual:
        return f"grad={optimizer.grad!r} cannot be written {plain} reads .grad"
    for sentence in norm_groups.sentences(optimizer.param_groups):
        return f"{sentence}; this cannot be written {plain} treats all groups alike"
    return None
