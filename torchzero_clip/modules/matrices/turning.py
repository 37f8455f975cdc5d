"""Turning: updates that go into the bases of their matrices, and state that follows new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core import Bucket, Matrices, TensorList
from torchzero_clip.core.bucket import BEGUN, begun
from torchzero_clip.core.link import Link
from torchzero_clip.core.stacks import MatrixPlace, Stack, finite
from torchzero_clip.modules.matrices.eigenbases import into
from torchzero_clip.modules.matrices.turns import BasisTurn


def begin(buckets: list[Bucket], basis: Link, now: int, taken: list[Tensor]) -> list[Bucket]:
    """Make bases of first gradients; returns the buckets of what has begun before."""
    key = f"{buckets[0].bound.path}/{BEGUN}"
    for bucket in buckets:
        new = [i for i, state in enumerate(bucket.param_states) if not state.get(key)]
        if new:
            some = bucket.select(new)
            matrices = Matrices(some.seen_by(basis), now)
            learn(some, matrices, matrices.where)
            renew(some, matrices, [], matrices.where)
            matrices.begin()
            taken += matrices.taken
    return begun(buckets)


def enter(bucket: Bucket, matrices: Matrices, inner: Sequence[Link]) -> TensorList:
    """The update in the bases, which learn from it."""
    basis, group = matrices.rule, matrices.bucket.group
    every = basis.first == "step" and any([matrices.due(i) for i in matrices.where])
    new = matrices.begins if basis.first == "use" else lambda i: every
    before = [i for i in matrices.where if new(i)]
    if before:
        learn(bucket, matrices, before)
        renew(bucket, matrices, inner, before)
    knowing = set(before)

    def turned(batch: Stack, pieces: list[Tensor]) -> Tensor:
        made: Tensor = into(pieces[0], batch.state)
        if batch.places[0][0] not in knowing:  # all of a batch begin, or none
            known = {**group, "turned": made}
            matrices.keep(batch, basis.observe_matrix(pieces[0], batch.state, known))
        return made

    return TensorList(matrices.over([bucket.u.to(bucket.state_dtype).tensors], turned))


def learn(bucket: Bucket, matrices: Matrices, some: Sequence[int]) -> None:
    """Let the bases of some parameters see an update that stays as it is."""
    group = matrices.bucket.group

    def see(batch: Stack, pieces: list[Tensor]) -> Tensor:
        matrices.keep(batch, matrices.rule.observe_matrix(pieces[0], batch.state, group))
        return pieces[0]

    matrices.over([bucket.u.to(bucket.state_dtype).tensors], see, some)


def renew(bucket: Bucket, matrices: Matrices, inner: Sequence[Link], some: Sequence[int]) -> None:
    """Renew those bases of some that are due, and bring what the links inside keep into them."""
    due = [i for i in some if matrices.due(i)]
    turns: dict[MatrixPlace, tuple[BasisTurn, int]] = {}
    made: list[tuple[Stack, dict[str, Tensor]]] = []
    for batch in matrices.batches([i for i in due if i in matrices.mine]):
        group = {**matrices.bucket.group, "first": batch.begins}
        new, orders = matrices.rule.refreshed(batch.state, group)
        turn = BasisTurn({**batch.state, **new}, orders, finite(list(new.values()), batch.stacked))
        turns |= {place: (turn, k) for k, place in enumerate(batch.places)}
        made.append((batch, new))
    known = [i for i in due if not matrices.begins(i)]
    for link in [each for top in inner for each in top.walk() if known and each.transforms]:
        for name in (*link.transform.turns, *link.transform.permutes):
            some = [i for i in known if f"{link.path}/{name}" in bucket.param_states[i]]
            if some:
                _follow(bucket, matrices, link, name, some, turns)
    for batch, new in made:
        matrices.keep(batch, new)


def _follow(
    bucket: Bucket,
    matrices: Matrices,
    link: Link,
    name: str,
    some: list[int],
    turns: dict[MatrixPlace, tuple[BasisTurn, int]],
) -> None:
    """Bring state of a link, of some parameters, into the new bases."""
    linear = name in link.transform.turns

    def turned(batch: Stack, pieces: list[Tensor]) -> Tensor:
        turn, first = turns[batch.places[0]]  # which is of these matrices, and maybe others
        if batch.stacked:
            turn = turn.part(slice(first, first + len(batch.places)))
        return turn.of(pieces[0], batch.state, linear)

    place = {bucket.part.places[i]: i for i in some}
    for part in bucket.select(some).seen_by(link).alike():
        if name not in part.state_names:
            continue
        part.make_state()  # there is some; but its rounding may be new
        held, where = part.state[name], [place[p] for p in part.part.places]
        row: list[Any] = [None] * len(bucket.part.places)
        for i, t in zip(where, held.tensors, strict=True):
            row[i] = t
        made = matrices.over([row], turned, where)
        held.copy_(TensorList([made[i] for i in where]))
        part.settle()
