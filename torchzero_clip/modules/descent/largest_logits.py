"""largest_logits: a function that computes the largest attention logits of each head."""

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
    """Return the largest logit of every head of keys, for `QKClip`.

    Use it if the attention kernel does not return its logits. The logits are computed in blocks, so
    memory holds only `block` by `block` logits per head at a time.

    Args:
        query: The queries, of shape (..., heads, length, dim), as `scaled_dot_product_attention`
            receives them.
        key: The keys, of shape (..., heads, length, dim). The number of heads of `key` must divide
            the number of heads of `query`. Consecutive heads of queries share one head of keys.
        scale: The factor that multiplies each product of a query and a key. Default: None,
            1 / √dim.
        causal: If True, a query ignores the keys after its position. Default: False.
        block: The number of queries, and of keys, in a block. Default: 1024.

    Returns:
        A vector on the device with one element per head of keys. Each element is the largest logit
        of the head, over all other dims.

    Example:
        >>> import torch
        >>> from torchzero_clip import largest_logits
        >>> query, key = torch.randn(2, 8, 100, 16), torch.randn(2, 4, 100, 16)
        >>> print(largest_logits(query, key, causal=True).shape)
        torch.Size([4])
    """
    heads = key.shape[-3]
    shared = query.shape[-3] // max(heads, 1)
    if query.dim() < 3 or shared * heads != query.shape[-3] or key.shape[-1] != query.shape[-1]:
        raise ValueError(
            "largest_logits: query and key must have shapes (..., heads, length, dim), got "
            f"{tuple(query.shape)} and {tuple(key.shape)}. Both tensors must have the same "
            "last dim, and the number of key heads must divide the number of query heads"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query = query.unflatten(-3, (heads, shared))
    maxima = torch.full((heads,), -torch.inf, device=query.device)
    for i in range(0, query.shape[-2], block):
        for j in range(0, min(key.shape[-2], i + block) if causal else key.shape[-2], block):
            queries = query[..., i : i + block, :]
            keys = key[..., j : j + block, :].unsqueeze(-3)
            logits = (queries @ keys.transpose(-1, -2)).float() * scale
            if causal and j + block > i + 1:
                after = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device)
                logits = logits.masked_fill(after.triu(i - j + 1), -torch.inf)
            other_dims = [d for d in range(logits.dim()) if d != logits.dim() - 4]
            maxima = torch.maximum(maxima, logits.amax(other_dims))
    return maxima
