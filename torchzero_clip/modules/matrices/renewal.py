"""Functions that renew the bases of matrices and rotate the state of the inner links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Matrices, TensorList
from torchzero_clip.core.link import Link
from torchzero_clip.core.stacks import MatrixPlace, MatrixState, Stack, finite
from torchzero_clip.modules.matrices.eigenbases import back, into, ordered


def renew(
    bucket: Bucket, matrices: Matrices, inner: Sequence[Link], indices: Sequence[int]
) -> None:
    """Renew the bases of the given parameters, and rotate the state of the inner links."""
    due = [i for i in indices if matrices.due(i)]
    rotations: dict[MatrixPlace, tuple[_Rotation, int]] = {}
    new_bases: list[tuple[Stack, dict[str, Tensor]]] = []
    for batch in matrices.batches([i for i in due if i in matrices.mine]):
        group = {**matrices.bucket.group, "first": batch.begins}
        new, orders = matrices.rule.refreshed(batch.state, group)
        is_finite = finite(list(new.values()), batch.stacked)
        rotation = _Rotation({**batch.state, **new}, orders, is_finite)
        rotations |= {place: (rotation, k) for k, place in enumerate(batch.places)}
        new_bases.append((batch, new))
    with_old_bases = [i for i in due if not matrices.begins(i)]
    if with_old_bases:
        for link in [link for top in inner for link in top.walk() if link.transforms]:
            for name in link.transform.state_kinds:
                key = f"{link.path}/{name}"
                with_state = [i for i in with_old_bases if key in bucket.param_states[i]]
                if with_state:
                    _follow(bucket, matrices, link, name, with_state, rotations)
    for batch, new in new_bases:
        matrices.keep(batch, new)


class _Rotation(NamedTuple):
    """The rotation of matrices from old bases to new bases, if the new bases are finite.

    Attributes:
        new: The new state of the matrices, including the new bases.
        orders: For each dim, the new order of second moments along this dim.
        finite: For each matrix, whether its new bases are finite and will replace the old ones.
    """

    new: MatrixState
    orders: dict[int, Tensor]
    finite: Tensor

    def of(self, x: Tensor, state: MatrixState, linear: bool) -> Tensor:
        """Return x in the new bases: rotated if x is linear in the update, else only sorted."""
        result = x
        if linear:
            result = into(back(x, state), self.new)
        else:
            for dim, order in self.orders.items():
                result = ordered(result, order, dim)
        return torch.where(self.finite[..., None, None], result, x)

    def part(self, members: slice) -> _Rotation:
        """Return the rotation of some of the matrices."""
        new = {name: t[members] for name, t in self.new.items()}
        orders = {dim: order[members] for dim, order in self.orders.items()}
        return _Rotation(new, orders, self.finite[members])


def _follow(
    bucket: Bucket,
    matrices: Matrices,
    link: Link,
    name: str,
    indices: list[int],
    rotations: dict[MatrixPlace, tuple[_Rotation, int]],
) -> None:
    """Transform one state of a link from the old bases to the new bases, for some parameters."""
    linear = link.transform.state_kinds[name] == "linear"

    def rotated(batch: Stack, pieces: list[Tensor]) -> Tensor:
        rotation, first = rotations[batch.places[0]]  # it may cover more matrices than this batch
        if batch.stacked:
            rotation = rotation.part(slice(first, first + len(batch.places)))
        return rotation.of(pieces[0], batch.state, linear)

    index_of_place = {bucket.cohort.places[i]: i for i in indices}
    for part in bucket.select(indices).seen_by(link).alike():
        if name not in part.state_names:
            continue
        part.make_state()  # the state exists, but the tensors of its rounding may not
        part_indices = [index_of_place[place] for place in part.cohort.places]
        tensors: list[Any] = [None] * len(bucket.cohort.places)
        for i, t in zip(part_indices, part.state[name].tensors, strict=True):
            tensors[i] = t
        results = matrices.over([tensors], rotated, part_indices)
        part.set_state(name, TensorList([results[i] for i in part_indices]))
