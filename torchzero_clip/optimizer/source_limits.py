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
        return f"rounding={optimizer.rounding!r} has no words {plain} rounds to the nearest"
    if not optimizer.place.usual:
        return f"grad={optimizer.grad!r} has no words {plain} reads .grad"
    for sentence in norm_groups.sentences(optimizer.param_groups):
        return f"{sentence}, for which there are no words {plain} takes all groups alike"
    return None
