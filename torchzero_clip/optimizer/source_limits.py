"""Options of an optimizer that `to_source` cannot write into a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchzero_clip.optimizer import norm_groups

if TYPE_CHECKING:
    from torchzero_clip.optimizer.chain_runner import ChainRunner


def why_not_written(optimizer: ChainRunner) -> str | None:
    """Return why no file can express the options of an optimizer, or None if a file can."""
    if optimizer.rounding != "nearest":
        return f"rounding={optimizer.rounding!r} cannot be exported as plain PyTorch code"
    if not optimizer.place.usual:
        return f"grad={optimizer.grad!r} cannot be exported as plain PyTorch code"
    for sentence in norm_groups.sentences(optimizer.param_groups):
        return f"plain PyTorch code would treat all parameter groups alike, but {sentence}"
    return None
