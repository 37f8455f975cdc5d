"""QKClip: a rule that shrinks the query and key weights of heads with too large logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core import Bucket, Live, TensorList, Transform
from torchzero_clip.core.bounds import AboveZero, Fraction
from torchzero_clip.modules.descent.heads import Heads, shrunk


class QKClip(Transform):
    """QK-Clip: scales down the query and key weights of an attention head whose logits explode.

    Put it after `LR`, where the update is the step that is subtracted from the weights.

    w ← w · γ^α for queries, w ← w · γ^(1 - α) for keys after the step;   γ = min(1, tau / S)

    Here S is the largest logit of a head in this step. If S is NaN or infinite, the head does not
    change.

    Args:
        max_logits: A function of the name and value of a parameter. It returns the `Heads` of the
            parameter, or None. If the parameter has both queries and keys, it returns a list of
            `Heads`. The rule calls the function in every step.
        tau: The largest allowed logit. Larger logits shrink the weights. Default: 100.0.
        alpha: α, the exponent of γ for queries. The exponent for keys is 1 - α. Default: 0.5.

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
    tau: Live[AboveZero] = 100.0
    alpha: Live[Fraction] = 0.5

    complex = "refuse"
    widens = True
    reach = "tensor"
    place = "end"
    impure = "max_logits returns new tensors in each step"

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            bucket.u = shrink(bucket, self.max_logits)
        return buckets


def shrink(bucket: Bucket, max_logits: Callable[[str, Tensor], Any]) -> TensorList:
    """Return the steps of a bucket, after changing them so that heads with large logits shrink."""
    pairs = zip(bucket.names, bucket.originals, strict=True)
    heads = [max_logits(name or "", p) for name, p in pairs]
    if not any(heads):
        return bucket.u
    u = bucket.u
    tau = bucket.group["tau"]
    alpha = bucket.group["alpha"]
    rows = zip(heads, bucket.params.tensors, u, bucket.names, bucket.cohort.layouts, strict=True)
    steps = [
        shrunk(heads_of_p, w, step, tau, alpha, name or "", layout)
        for heads_of_p, w, step, name, layout in rows
    ]
    return TensorList(steps, owned=u.owned)
