"""ClipSpectral: a rule that limits the singular values of a matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, State, TensorList, TensorwiseTransform
from torchzero_clip.core.bounds import Threshold
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.logical_matrices import LogicalMatrices, matrices_of
from torchzero_clip.core.norms import readable
from torchzero_clip.modules.matrices.batches import (
    PRODUCTS,
    apply_to_matrices,
    changed_matrices,
    in_batches,
)

RESOLUTION = 1e-5
"""The smallest singular value that eigenvectors of u uᵀ resolve, relative to the largest element.

For a lower limit, the rule needs several rounds. Each round reduces the limit by this factor.
"""
ROUNDS_IN_FLOAT32 = 2
ROUNDS_IN_FLOAT64 = 4
"""The number of rounds after which the errors are as small as rounding errors in float64.

On CPU the host can read the limit, so one round is enough if the limit is above `RESOLUTION`.
"""


class ClipSpectral(TensorwiseTransform):
    """Spectral clipping: limits every singular value of a matrix to `max_norm`.

    Use it for weight matrices. Unlike `ClipNorm`, this rule shrinks only the directions whose
    singular value is too large.

    u ← U min(S, max_norm) Vᵀ of u = U S Vᵀ

    The rule computes U as the eigenvectors of u uᵀ in double precision. The singular values S are
    the norms of the rows of Uᵀ u. The result is U min(1, max_norm / S) Uᵀ u. If no singular value
    is above the limit, the result is bitwise identical to u.

    Args:
        max_norm: The largest singular value.
        layout: The matrices in fused weights and stacks, as in `Orthogonalize`. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipSpectral, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> opt = Modular(matrices, Adam(), ClipSpectral(1.0), LR(1e-3))

    Reference:
        Jiang et al., "Enhancing LLM training via spectral clipping", arXiv 2603.14315.
    """

    max_norm: Live[Threshold]
    layout: MatrixLayout = None

    reach = "tensor"
    clips = True
    impure = PRODUCTS

    def operations(self, rows: int, columns: int) -> float:
        short, long = sorted((rows, columns))
        return short**2 * (4 * long + 9 * short)

    def matrices_of(self, name: str, param: Tensor) -> LogicalMatrices:
        return matrices_of(self, name, param)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return apply_to_matrices(self, buckets)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        def changed(stacks: list[Tensor]) -> list[Tensor]:
            return in_batches(stacks, lambda x: clipped(x, group["max_norm"]))

        return changed_matrices(self, u, group, changed)


def clipped(x: Tensor, limit: Any) -> Tensor:
    """Return matrices with limited singular values. They need at least as many columns as rows."""
    if not x.numel():
        return x
    size = torch.linalg.vector_norm(x, torch.inf, dim=(1, 2), keepdim=True).double()
    bad = ~torch.isfinite(size)
    zero = size == 0
    scale = torch.where(bad | zero, torch.ones_like(size), size)
    y = torch.where(bad, torch.zeros_like(x), x).double() / scale
    bound = limit / scale
    resolved = bad | zero | (bound >= RESOLUTION)
    rounds = ROUNDS_IN_FLOAT64 if x.dtype == torch.float64 else ROUNDS_IN_FLOAT32
    if readable(resolved) and resolved.all():
        rounds = 1
    changed = torch.zeros_like(bad)
    for remaining in reversed(range(rounds)):
        level = bound.clamp(min=RESOLUTION) if remaining else bound
        u = torch.linalg.eigh(y @ y.mT).eigenvectors
        rows = u.mT @ y
        norms = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        over = norms > level
        factor = torch.where(over, level / norms, torch.ones_like(norms))
        clips = over.any(dim=1, keepdim=True)
        below = bound < RESOLUTION
        unit = torch.where(below, torch.full_like(level, RESOLUTION), torch.ones_like(level))
        y = torch.where(clips, u @ (rows * factor), y) / unit
        changed = changed | clips
        bound = bound / unit
        scale = scale * unit
    result = torch.where(changed, (y * scale).to(x.dtype), x)
    return torch.where(bad, x * torch.nan, result)
