"""QKClip: queries and keys that shrink where their logits explode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Live, TensorList, Transform
from torchzero_clip.core.norms.shards import part_of
from torchzero_clip.core.tensors import wide
from torchzero_clip.modules.descent.heads import Heads, row_factors


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
        >>> maxima = torch.zeros(4)  # the attention writes largest_logits(query, key) here
        >>> roles = {"attention.q.weight": "query", "attention.k.weight": "key"}
        >>> heads = lambda name, p: Heads(roles[name], maxima) if name in roles else None
        >>> opt = Modular(model.named_parameters(), Adam(), LR(1e-3), QKClip(heads))

    Reference:
        Kimi Team, "Kimi K2: open agentic intelligence", arXiv 2507.20534.
    """

    max_logits: Callable[[str, Tensor], Heads | Sequence[Heads] | None]
    tau: Live[float] = 100.0
    alpha: Live[float] = 0.5

    complex = "refuse"
    reach = "tensor"

    def check(self) -> None:
        super().check()
        if not callable(self.max_logits):
            raise TypeError(f"QKClip: max_logits must be a function, got {self.max_logits!r}")
        if self.target != "update":
            raise ValueError(
                f"QKClip: target must be 'update', the step that is subtracted, got {self.target!r}"
            )
        self.require("tau", above=0)
        self.require("alpha", at_least=0, at_most=1)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            self.refuse_complex(bucket)
            factors = [self._factor(bucket, i) for i in range(len(bucket.places))]
            if any(factor is not None for factor in factors):
                u, params = bucket.u.to(bucket.state_dtype), bucket.params.tensors
                rows = zip(u, params, factors, strict=True)
                out = [step if f is None else _shrunk(w, step, f) for step, w, f in rows]
                bucket.u = TensorList(out, owned=u.owned)
        return buckets

    def _factor(self, bucket: Bucket, i: int) -> Tensor | None:
        """What each row of a parameter is multiplied by, of a sharded one each row here."""
        p, name, layout = bucket.originals[i], bucket.names[i] or "", bucket.layouts[i]
        found = self.max_logits(name, p)
        if found is None:
            return None
        group, heads = bucket.group, [found] if isinstance(found, Heads) else list(found)
        rows, parts, end = p.shape[0], [], 0
        one = torch.ones((), dtype=wide(bucket.device), device=bucket.device)
        for start, stop, some in sorted(
            [(*(some.rows or (0, rows)), some) for some in heads], key=lambda row: row[:2]
        ):
            parts += [one.expand(start - end), row_factors(some, stop - start, group, name)]
            end = stop
        factor = torch.cat([*parts, one.expand(rows - end)])
        factor = factor.view(-1, *[1] * (p.dim() - 1)).to(bucket.state_dtype)
        return part_of(factor, layout)


def _shrunk(w: Tensor, step: Tensor, factor: Tensor) -> Tensor:
    """The step that ends at (w - step) · factor; where that is 1, the step itself."""
    w = w.to(step.dtype)
    return torch.where(factor == 1, step, w - factor * (w - step))
