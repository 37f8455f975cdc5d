"""QKClip: queries and keys that shrink where their logits explode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core import Bucket, Live, TensorList, Transform
from torchzero_clip.core.bounds import Fraction, Positive
from torchzero_clip.modules.descent.heads import Heads, shrunk


class QKClip(Transform):
    """w ← w · γ^α for queries, w ← w · γ^(1 - α) for keys after the step;   γ = min(1, tau / S)

    S is the largest logit of a head in this step. Put it after LR, where the update is the step
    that will be subtracted. A head whose S is not a number, or infinite, is left alone.

    Args:
        max_logits: A function of the name and value of a parameter that returns its `Heads`, a list
            of them for a parameter that holds both, or None. It is asked every step.
        tau: The largest logit that is left alone.
        alpha: α, the queries' share in what is taken off.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Heads, Modular, QKClip
        >>> q, k = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        >>> attention = torch.nn.ModuleDict({"q": q, "k": k})
        >>> maxima = torch.zeros(4)  # the attention writes largest_logits(query, key) here
        >>> roles = {"q.weight": "query", "k.weight": "key"}
        >>> heads = lambda name, p: Heads(roles[name], maxima) if name in roles else None
        >>> opt = Modular(attention.named_parameters(), Adam(), LR(1e-3), QKClip(heads))

    Reference:
        Kimi Team, "Kimi K2: open agentic intelligence", arXiv 2507.20534.
    """

    max_logits: Callable[[str, Tensor], Heads | Sequence[Heads] | None]
    tau: Live[Positive] = 100.0
    alpha: Live[Fraction] = 0.5

    complex = "refuse"
    widens = True
    reach = "tensor"
    place = "end"
    impure = "max_logits is asked in each step for tensors of that step: there is nothing to do"

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            bucket.u = shrink(bucket, self.max_logits)
        return buckets


def shrink(bucket: Bucket, max_logits: Callable[[str, Tensor], Any]) -> TensorList:
    """The steps of a bucket, those of heads such that the weights shrink."""
    pairs = zip(bucket.names, bucket.originals, strict=True)
    found = [max_logits(name or "", p) for name, p in pairs]
    if not any(found):
        return bucket.u
    u, live = bucket.u, (bucket.group["tau"], bucket.group["alpha"])
    rows = zip(found, bucket.params.tensors, u, bucket.names, bucket.cohort.layouts, strict=True)
    out = [shrunk(some, w, step, *live, name or "", layout) for some, w, step, name, layout in rows]
    return TensorList(out, owned=u.owned)
