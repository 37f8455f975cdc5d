"""Rows: a momentum that updates only the weights in its largest rows."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, TensorList, TensorwiseTransform, Transform
from torchzero_clip.core.bounds import Fraction, Within
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.logical_matrices import LogicalMatrices, matrices_of
from torchzero_clip.core.stacks import MatrixState
from torchzero_clip.modules.matrices.batches import PRODUCTS


class Rows(TensorwiseTransform):
    """Sparse momentum: in each step, only the largest rows of the momentum update the weights.

    Use it with `Orthogonalize` to orthogonalize a small matrix in place of a large one.

    M ← M + u;   R the largest rows of M;   u ← tfm(R), zero elsewhere;   these of M ← error · R

    In each step, the rule uses max(1, ⌈share · n⌉) of the n rows: the rows with the largest sum of
    absolute values. If the matrix is sharded, the rule compares the rows of all shards. The other
    rows of the momentum wait, and grow until the rule uses them.

    Args:
        share: The fraction of the rows that the rule uses in a step.
        tfm: The rule that receives the used rows as one small matrix. It must be a rule for
            matrices without state, such as `Orthogonalize` or `ClipSpectral`.
        error: The factor that multiplies the momentum of the used rows after the step.
            Default: 0.95.
        lines: "shorter" or "rows". With "shorter", as in Dion2, the rule uses columns instead of
            rows if the matrix has more rows than columns. With "rows", as in Dion3 before
            `NeuronNorm`, the rule always uses rows. Default: "shorter".
        layout: The matrices in fused weights and stacks, as in `Orthogonalize`. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, NeuronNorm, Orthogonalize, Rows, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> dion3 = Rows(0.25, Orthogonalize(), error=0.95, lines="rows"), NeuronNorm()
        >>> opt = Modular(matrices, *dion3, WeightDecay(0.01), LR(1e-2))

    Reference:
        microsoft/dion, `dion/dion2.py` and `dion/nordion2.py`, with `selection_scope="global"`.
    """

    share: Annotated[float, Within(above=0, at_most=1)]
    tfm: Transform
    error: Live[Fraction] = 0.95
    lines: Literal["shorter", "rows"] = "shorter"
    layout: MatrixLayout = None

    batched = True
    impure = PRODUCTS

    @property
    def leaves(self) -> Literal["update", "gradient", "own", "ones", "set"]:  # type: ignore[override]
        return self.tfm.leaves

    def check(self) -> None:
        super().check()
        tfm: Any = self.tfm
        if (
            not isinstance(tfm, TensorwiseTransform)
            or tfm.target != "update"
            or type(tfm).init is not Transform.init
            or tfm.per_group()
            or tfm.keeps_matrices
            or {"param", "grads"} & {*tfm.reads}
            or getattr(tfm, "layout", None)
        ):
            raise TypeError(
                "Rows: tfm= must be a transform of matrices without state, layout= or "
                f"target=, such as Orthogonalize(), got {tfm!r}"
            )

    def matrices_of(self, name: str, param: Tensor) -> LogicalMatrices | None:
        return matrices_of(self, name, param) if param.numel() else None

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        return {"momentum": torch.zeros(rows, columns)}

    def observe_matrix(self, u: Tensor, state: MatrixState, group: Group) -> MatrixState:
        return {"momentum": state["momentum"] + u}

    def update_tensor(self, u: Tensor, state: MatrixState, group: Group) -> Tensor:
        momentum = state["momentum"]
        dim = self._dim(*u.shape[-2:])
        sums = momentum.abs().sum(-3 - dim)
        chosen = sums.topk(self._count(sums.shape[-1]), sorted=False).indices.unsqueeze(-3 - dim)
        shape = list(u.shape)
        shape[dim] = chosen.shape[dim]
        index = chosen.expand(shape)
        largest = momentum.gather(dim, index)
        finite = u.isfinite().all(-1).all(-1)[..., None, None]
        momentum.scatter_(dim, index, torch.where(finite, largest * group["error"], largest))
        result = torch.zeros_like(u).scatter_(dim, index, self._transformed(largest, group))
        return torch.where(finite, result, math.nan)

    def _transformed(self, lines: Tensor, group: Group) -> Tensor:
        """Apply the inner rule to each small matrix and return the result."""
        matrices = list(lines.unbind()) if lines.dim() > 2 else [lines]
        live = group[self.tfm.name or type(self.tfm).__name__]
        results = self.tfm.update(TensorList(matrices, owned=True), {}, live)
        return torch.stack(list(results)) if lines.dim() > 2 else results.tensors[0]

    def operations(self, rows: int, columns: int) -> float:
        assert isinstance(self.tfm, TensorwiseTransform)
        shape = [rows, columns]
        dim = self._dim(rows, columns)
        shape[dim] = self._count(shape[dim])
        return self.tfm.operations(*shape)

    def _dim(self, rows: int, columns: int) -> int:
        """Return -2 if the rule chooses rows, or -1 if it chooses columns."""
        return -1 if self.lines == "shorter" and rows > columns else -2

    def _count(self, lines: int) -> int:
        """Return the number of rows or columns that the rule uses in a step."""
        return max(1, math.ceil(self.share * lines))
