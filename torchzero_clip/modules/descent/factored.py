"""Factored: a second moment that is stored as the averages of its rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchzero_clip.core import Bucket, TensorList, Units, norms, zeros_like_state
from torchzero_clip.core.small_tensors import in_stacks, outer


class Factored(NamedTuple):
    """A second moment V of matrices. The state stores only row averages R and column averages C.

    For the last two dims of a tensor, V = R C / mean(R). Every rank stores the whole R and C, even
    if the tensor is sharded. For a sharded tensor, the ranks communicate once per step.

    Attributes:
        rows: The name of R in the state.
        columns: The name of C in the state.
        whole: The name of V for tensors with fewer than two dims, or None if they have no V.
    """

    rows: str
    columns: str
    whole: str | None = None

    def init(self, param: Tensor) -> dict[str, Tensor]:
        """Return the first state of a parameter."""
        if param.dim() < 2:
            return {} if self.whole is None else {self.whole: zeros_like_state(param)}
        *stack, rows, columns = param.shape
        return {
            self.rows: zeros_like_state(param, (*stack, rows, 1)),
            self.columns: zeros_like_state(param, (*stack, 1, columns)),
        }

    def follow(
        self,
        buckets: Sequence[Bucket],
        lists: Sequence[TensorList],
        weights: Sequence[float | Tensor],
        eps: Sequence[float | Tensor],
    ) -> None:
        """Update V ← V + weight · (u² + eps - V), for the list, weight and eps of each bucket."""
        inputs = list(zip(buckets, lists, weights, eps, strict=True))
        for bucket, u, weight, bucket_eps in inputs:
            if self.whole in bucket.state_names:
                bucket.state[str(self.whole)].lerp_(u.square().add_(bucket_eps), weight)
        matrices = [entry for entry in inputs if self.rows in entry[0].state_names]
        if matrices:
            self._follow_sides(matrices)

    def _follow_sides(
        self, matrices: list[tuple[Bucket, TensorList, float | Tensor, float | Tensor]]
    ) -> None:
        """Update R and C with the mean squares of rows and of columns."""
        for name, dims in ((self.rows, _in_rows), (self.columns, _in_columns)):
            units = Units([bucket for bucket, *_ in matrices], (), norms.measure("rms"), dims)
            squares = units.norms_of([u for _, u, *_ in matrices]).square()
            averages = [bucket.state[name] for bucket, *_ in matrices]
            parts = squares.split([sum([t.numel() for t in average]) for average in averages])
            for average, part, entry in zip(averages, parts, matrices, strict=True):
                bucket, _, weight, eps = entry
                means = (part + eps).to(bucket.device, average.dtype)
                pairs = zip(means.split([t.numel() for t in average]), average, strict=True)
                average.lerp_(TensorList([mean.view_as(t) for mean, t in pairs]), weight)

    def divide(self, bucket: Bucket, u: TensorList, least: float | Tensor = 0.0) -> TensorList:
        """Return u / √V as a new list, or a copy of u if there is no V.

        √V and mean(R) are raised to at least `least`.
        """
        state = bucket.state
        if self.whole in state:
            root = state[str(self.whole)].sqrt()
        elif self.rows not in state:
            return u.clone()
        else:
            rows = state[self.rows]
            mean = TensorList(in_stacks(rows.tensors, _mean, _mean), owned=True).maximum_(least)
            root_of_rows = bucket.parts(rows.div(mean).sqrt_())
            root_of_columns = bucket.parts(state[self.columns].sqrt())
            root = TensorList(outer(root_of_rows, root_of_columns, u.tensors), owned=True)
        return root.maximum_(least).div_(u).reciprocal_()


def _mean(rows: Tensor) -> Tensor:
    """Return the mean of R over the rows of each matrix."""
    return rows.mean(-2, keepdim=True)


def _in_rows(tensor: Tensor) -> tuple[int, ...]:
    """Return the dim along which a row is averaged."""
    return (tensor.dim() - 1,)


def _in_columns(tensor: Tensor) -> tuple[int, ...]:
    """Return the dim along which a column is averaged."""
    return (tensor.dim() - 2,)
