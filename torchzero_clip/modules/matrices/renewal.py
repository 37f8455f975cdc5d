"""Renewal: new bases of matrices, and state of the links inside that follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Matrices, TensorList
from torchzero_clip.core.link import Link
from torchzero_clip.core.stacks import MatrixPlace, MatrixState, Stack, finite
from torchzero_clip.modules.matrices.eigenbases import back, into, ordered


def renew(bucket: Bucket, matrices: Matrices, inner: Sequence[Link], some: Sequence[int]) -> None:
    """Renew those bases of some that are due, and bring what the links inside keep into them."""
    due = [i for i in some if matrices.due(i)]
    turns: dict[MatrixPlace, tuple[_Turn, int]] = {}
    made: list[tuple[Stack, dict[str, Tensor]]] = []
    for batch in matrices.batches([i for i in due if i in matrices.mine]):
        group = {**matrices.bucket.group, "first": batch.begins}
        new, orders = matrices.rule.refreshed(batch.state, group)
        turn = _Turn({**batch.state, **new}, orders, finite(list(new.values()), batch.stacked))
        turns |= {place: (turn, k) for k, place in enumerate(batch.places)}
        made.append((batch, new))
    known = [i for i in due if not matrices.begins(i)]
    for link in [each for top in inner for each in top.walk() if known and each.transforms]:
        for name in link.transform.state_kinds:
            some = [i for i in known if f"{link.path}/{name}" in bucket.param_states[i]]
            if some:
                _follow(bucket, matrices, link, name, some, turns)
    for batch, new in made:
        matrices.keep(batch, new)


class _Turn(NamedTuple):
    """The way from the bases of matrices to new ones, if these will be taken."""

    new: MatrixState
    orders: dict[int, Tensor]
    taken: Tensor

    def of(self, x: Tensor, state: MatrixState, linear: bool) -> Tensor:
        """What is kept in the old bases, in the new ones; only sorted unless it is linear."""
        made = x
        if linear:
            made = into(back(x, state), self.new)
        else:
            for dim, order in self.orders.items():
                made = ordered(made, order, dim)
        return torch.where(self.taken[..., None, None], made, x)

    def part(self, some: slice) -> _Turn:
        """That of some of the matrices."""
        orders = {dim: order[some] for dim, order in self.orders.items()}
        return _Turn({name: t[some] for name, t in self.new.items()}, orders, self.taken[some])


def _follow(
    bucket: Bucket,
    matrices: Matrices,
    link: Link,
    name: str,
    some: list[int],
    turns: dict[MatrixPlace, tuple[_Turn, int]],
) -> None:
    """Bring state of a link, of some parameters, into the new bases."""
    linear = link.transform.state_kinds[name] == "linear"

    def turned(batch: Stack, pieces: list[Tensor]) -> Tensor:
        turn, first = turns[batch.places[0]]  # which is of these matrices, and maybe others
        if batch.stacked:
            turn = turn.part(slice(first, first + len(batch.places)))
        return turn.of(pieces[0], batch.state, linear)

    place = {bucket.cohort.places[i]: i for i in some}
    for part in bucket.select(some).seen_by(link).alike():
        if name not in part.state_names:
            continue
        part.make_state()  # there is some; but its rounding may be new
        held, where = part.state[name], [place[p] for p in part.cohort.places]
        row: list[Any] = [None] * len(bucket.cohort.places)
        for i, t in zip(where, held.tensors, strict=True):
            row[i] = t
        made = matrices.over([row], turned, where)
        part.set_state(name, TensorList([made[i] for i in where]))
