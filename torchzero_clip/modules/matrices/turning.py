"""Turning: updates that go into the bases of their matrices, which learn from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core import Bucket, Matrices, TensorList
from torchzero_clip.core.bucket import BEGUN, begun
from torchzero_clip.core.link import Link
from torchzero_clip.core.stacks import Stack
from torchzero_clip.modules.matrices.eigenbases import into
from torchzero_clip.modules.matrices.renewal import renew

PASSED = 2  # in place of 1 for a parameter that has begun: the links inside have seen it, too


def mark_passed(bucket: Bucket) -> None:
    """Note that the links inside have seen the parameters of a bucket."""
    for state in bucket.param_states:
        state[f"{bucket.bound.path}/{BEGUN}"] = PASSED


def has_passed(state: Mapping[str, Any]) -> bool:
    """Whether the links inside have seen a parameter, by its state under the link's name."""
    return state.get(BEGUN) == PASSED


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

    return TensorList(matrices.over([bucket.u.tensors], turned))


def learn(bucket: Bucket, matrices: Matrices, some: Sequence[int]) -> None:
    """Let the bases of some parameters see an update that stays as it is."""
    group = matrices.bucket.group

    def see(batch: Stack, pieces: list[Tensor]) -> Tensor:
        matrices.keep(batch, matrices.rule.observe_matrix(pieces[0], batch.state, group))
        return pieces[0]

    matrices.over([bucket.u.tensors], see, some)
