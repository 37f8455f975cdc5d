"""Blocks: groups of rows in a fused matrix that are separate matrices, such as attention heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.argument_values import is_row
from torchzero_clip.core.names import by_name, check_patterns

Cuts: TypeAlias = "int | Sequence[int] | None"
Blocks: TypeAlias = "Mapping[str, Cuts] | Callable[[str, Tensor], Cuts] | None"
"""The type of `blocks`: the blocks of each parameter.

The value for one parameter is a number of equal blocks, or a list with the number of rows of each
block. A dict has a name or regular expression as its key. A function receives the name and the
tensor.
"""


def check_blocks(rule: Any) -> None:
    """Raise an error unless `blocks` is a dict or a function that `block_rows` can use."""
    if isinstance(rule.blocks, Mapping):
        check_patterns(rule, "blocks")
    elif rule.blocks is not None and not callable(rule.blocks):
        raise TypeError(
            f"{type(rule).__name__}: blocks= must be a dict from names or regular expressions "
            f"to numbers of rows, or a function of a name and a tensor, got {rule.blocks!r}"
        )


def block_rows(rule: Any, name: str, t: Tensor, rows: int) -> list[int]:
    """Return the number of rows of each block, for a tensor whose matrices have `rows` rows."""
    cuts: Any = None
    if isinstance(rule.blocks, Mapping):
        key = by_name(rule.blocks, name)
        cuts = None if key is None else rule.blocks[key]
    elif rule.blocks is not None:
        cuts = rule.blocks(name, t)
    count = 1 if cuts is None else cuts
    sizes = [rows // count] * count if isinstance(count, int) and count > 0 else count
    if not is_row(sizes) or sum(sizes) != rows:
        raise ValueError(
            f"{type(rule).__name__}: blocks= must give None or a number of rows per block "
            f"that divides the {rows} rows of {name!r}, got {cuts!r}"
        )
    return list(sizes)


def joined(blocks: Sequence[Tensor]) -> Tensor:
    """Return one tensor with the rows of all blocks."""
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=1)
