"""The largest logits of attention, for those whose kernel does not tell."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def largest_logits(
    query: Tensor,
    key: Tensor,
    scale: float | None = None,
    causal: bool = False,
    block: int = 1024,
) -> Tensor:
    """The largest logit of every head of keys, for attention whose kernel does not tell.

    The logits are made block by block, so that none but a block by block square a head is ever
    in memory.

    Args:
        query: Of shape (..., heads, length, dim), as `scaled_dot_product_attention` takes it.
        key: Of shape (..., heads, length, dim); with fewer heads, which divide those of the
            queries, each is shared by as many that follow each other.
        scale: What the products are multiplied by; 1 / √dim unless it is given.
        causal: Leave out keys that come after their query.
        block: How many queries, and how many keys, are looked at together.

    Returns:
        One number for each head of keys, on the device: the largest over all else.

    Example:
        >>> import torch
        >>> from torchzero_clip import largest_logits
        >>> query, key = torch.randn(2, 8, 100, 16), torch.randn(2, 4, 100, 16)
        >>> print(largest_logits(query, key, causal=True).shape)
        torch.Size([4])
    """
    heads, shared = key.shape[-3], query.shape[-3] // max(key.shape[-3], 1)
    if query.dim() < 3 or shared * heads != query.shape[-3] or key.shape[-1] != query.shape[-1]:
        raise ValueError(
            "largest_logits: query and key must have shapes (..., heads, length, dim), of one "
            "dim, and the heads of the keys must divide those of the queries, got "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query = query.unflatten(-3, (heads, shared))
    found = torch.full((heads,), -torch.inf, device=query.device)
    for i in range(0, query.shape[-2], block):
        for j in range(0, min(key.shape[-2], i + block) if causal else key.shape[-2], block):
            rows, columns = query[..., i : i + block, :], key[..., j : j + block, :].unsqueeze(-3)
            logits = (rows @ columns.transpose(-1, -2)).float() * scale
            if causal and j + block > i + 1:
                after = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device)
                logits = logits.masked_fill(after.triu(i - j + 1), -torch.inf)
            whole = [d for d in range(logits.dim()) if d != logits.dim() - 4]
            found = torch.maximum(found, logits.amax(whole))
    return found
