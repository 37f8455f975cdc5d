"""Rows: of a momentum only the largest rows, the others wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, TensorList, TensorwiseTransform, Transform
from torchzero_clip.core.bounds import Fraction, Within
from torchzero_clip.core.stacks import MatrixState
from torchzero_clip.modules.matrices.batches import PRODUCTS, matrix_shape
from torchzero_clip.modules.matrices.blocks import Blocks, block_rows, check_blocks


class Rows(TensorwiseTransform):
    """M ← M + u;   R the largest rows of M;   u ← tfm(R), zero elsewhere;   these of M ← error · R

    Of n rows the max(1, ⌈share · n⌉) with the largest sums of absolute values are taken, of the
    whole matrix however it is sharded. The others keep all that they have, and grow until it is
    their turn.

    Args:
        share: The share of the rows that is taken.
        tfm: What is made of them, as one small matrix: a rule about matrices without state, as
            `Orthogonalize` or `ClipSpectral`.
        error: How much of the rows that were taken stays.
        lines: "shorter" takes columns of matrices with more rows than columns, as Dion2; "rows"
            always takes rows, as Dion3, behind which `NeuronNorm` stands.
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).
            Tensors of more dims are one matrix (first, rest), or an error with True.
        blocks: The rows of fused matrices, of each of which a share is taken, as in
            `Orthogonalize`.

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
    stacks: bool | None = None
    blocks: Blocks = None

    batched, impure = True, PRODUCTS

    @property
    def leaves(self) -> Literal["update", "gradient", "own", "ones", "set"]:  # type: ignore[override]
        return self.tfm.leaves

    def check(self) -> None:
        super().check()
        check_blocks(self)
        tfm: Any = self.tfm
        fits = isinstance(tfm, TensorwiseTransform) and tfm.target == "update"
        fits = fits and type(tfm).init is Transform.init and not tfm.per_group()
        fits = fits and not (tfm.keeps_matrices or {"param", "grads"} & {*tfm.reads})
        if not fits or getattr(tfm, "blocks", None):
            raise TypeError(
                "Rows: tfm must be a rule that makes a matrix of a matrix, without state, blocks "
                f"and target of its own, as Orthogonalize(), got {tfm!r}"
            )

    def rows_of(self, name: str, param: Tensor) -> Sequence[int]:
        count, rows, _ = matrix_shape(self, param, self.stacks)
        return block_rows(self, name, param, rows) * count if param.numel() else []

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        return {"momentum": torch.zeros(rows, columns)}

    def observe_matrix(self, u: Tensor, state: MatrixState, group: Group) -> MatrixState:
        return {"momentum": state["momentum"] + u}

    def update_tensor(self, u: Tensor, state: MatrixState, group: Group) -> Tensor:
        momentum, dim = state["momentum"], self._dim(*u.shape[-2:])
        sums = momentum.abs().sum(-3 - dim)
        chosen = sums.topk(self._count(sums.shape[-1]), sorted=False).indices.unsqueeze(-3 - dim)
        shape = list(u.shape)
        shape[dim] = chosen.shape[dim]
        where = chosen.expand(shape)
        taken, fine = momentum.gather(dim, where), u.isfinite().all(-1).all(-1)[..., None, None]
        momentum.scatter_(dim, where, torch.where(fine, taken * group["error"], taken))
        out = torch.zeros_like(u).scatter_(dim, where, self._made(taken, group))
        return torch.where(fine, out, math.nan)

    def _made(self, taken: Tensor, group: Group) -> Tensor:
        """What the transform inside makes of each small matrix."""
        small = list(taken.unbind()) if taken.dim() > 2 else [taken]
        live = group[self.tfm.name or type(self.tfm).__name__]
        made = self.tfm.update(TensorList(small, owned=True), {}, live)
        return torch.stack(list(made)) if taken.dim() > 2 else made.tensors[0]

    def operations(self, param: Tensor) -> float:
        assert isinstance(self.tfm, TensorwiseTransform)
        count, rows, columns = matrix_shape(self, param, self.stacks)
        dim, shape = self._dim(rows, columns), [rows, columns]
        shape[dim] = self._count(shape[dim])
        return count * self.tfm.operations(torch.empty(shape, device="meta"))

    def _dim(self, rows: int, columns: int) -> int:
        """The dim that lines are taken along: -2 for rows, -1 for columns."""
        return -1 if self.lines == "shorter" and rows > columns else -2

    def _count(self, lines: int) -> int:
        return max(1, math.ceil(self.share * lines))
