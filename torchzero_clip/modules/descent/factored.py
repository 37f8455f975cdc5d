"""Factored: the average squares of a matrix, kept as those of its rows and of its columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchzero_clip.core import Bucket, TensorList, Units, norms, zeros_like_state
from torchzero_clip.core.small_tensors import in_stacks, outer


class Factored(NamedTuple):
    """V = R C / mean(R), R and C the average squares of rows and of columns, in the last two dims.

    R and C are whole on every rank; what shards add to them is gathered once.

    Attributes:
        rows: The name of R in the state.
        columns: The name of C.
        whole: That of V for tensors of fewer than two dims, or None where these have none.
    """

    rows: str
    columns: str
    whole: str | None = None

    def init(self, param: Tensor) -> dict[str, Tensor]:
        """The state of a parameter."""
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
        """V ← V + weight · (u² + eps - V), with a list, a weight and an eps for each bucket."""
        given = list(zip(buckets, lists, weights, eps, strict=True))
        for bucket, u, weight, more in given:
            if self.whole in bucket.state_names:
                bucket.state[str(self.whole)].lerp_(u.square().add_(more), weight)
        given = [row for row in given if self.rows in row[0].state_names]
        for name, dims in ((self.rows, _in_rows), (self.columns, _in_columns)) if given else ():
            units = Units([row[0] for row in given], (), norms.measure("rms"), dims)
            squares = units.norms_of([row[1] for row in given]).square()
            held = [row[0].state[name] for row in given]
            parts = squares.split([sum([t.numel() for t in average]) for average in held])
            for average, part, (bucket, _, weight, more) in zip(held, parts, given, strict=True):
                means = (part + more).to(bucket.device, average.dtype)
                each = zip(means.split([t.numel() for t in average]), average, strict=True)
                average.lerp_(TensorList([mean.view_as(t) for mean, t in each]), weight)

    def divide(self, bucket: Bucket, u: TensorList, least: float | Tensor = 0.0) -> TensorList:
        """A new list: u / √V, neither mean(R) nor √V below `least`; u where there is no V."""
        state = bucket.state
        if self.whole in state:
            root = state[str(self.whole)].sqrt()
        elif self.rows not in state:
            return u.clone()
        else:
            rows, columns = state[self.rows], state[self.columns]
            mean = TensorList(in_stacks(rows.tensors, _mean, _mean), owned=True).maximum_(least)
            sides = bucket.parts(rows.div(mean).sqrt_()), bucket.parts(columns.sqrt())
            root = TensorList(outer(*sides, u.tensors), owned=True)
        return root.maximum_(least).div_(u).reciprocal_()


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(-2, keepdim=True)


def _in_rows(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.dim() - 1,)


def _in_columns(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.dim() - 2,)
