"""Functions for `InBasis`: rotate updates into the bases, and update the bases."""

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

PASSED = 2  # replaces 1, the mark of a parameter that has started, once the links inside had it


def mark_passed(bucket: Bucket) -> None:
    """Record that the inner links have received the parameters of a bucket."""
    for state in bucket.param_states:
        state[f"{bucket.bound.path}/{BEGUN}"] = PASSED


def has_passed(state: Mapping[str, Any]) -> bool:
    """Return whether the inner links have received a parameter, as recorded in its state."""
    return state.get(BEGUN) == PASSED


def begin(buckets: list[Bucket], basis: Link, now: int, taken: list[Tensor]) -> list[Bucket]:
    """Compute bases from first gradients, and return buckets of all other parameters."""
    key = f"{buckets[0].bound.path}/{BEGUN}"
    for bucket in buckets:
        new = [i for i, state in enumerate(bucket.param_states) if not state.get(key)]
        if new:
            new_part = bucket.select(new)
            matrices = Matrices(new_part.seen_by(basis), now)
            learn(new_part, matrices, matrices.where)
            renew(new_part, matrices, [], matrices.where)
            matrices.begin()
            taken += matrices.taken
    return begun(buckets)


def enter(bucket: Bucket, matrices: Matrices, inner: Sequence[Link]) -> TensorList:
    """Return the update in the bases. The averages of the bases also learn from the update."""
    basis = matrices.rule
    learn_first: list[int] = []
    if basis.first == "use":
        learn_first = [i for i in matrices.where if matrices.begins(i)]
    elif basis.first == "step" and any([matrices.due(i) for i in matrices.where]):
        learn_first = list(matrices.where)
    if learn_first:
        learn(bucket, matrices, learn_first)
        renew(bucket, matrices, inner, learn_first)
    have_learned = set(learn_first)

    def rotated(batch: Stack, pieces: list[Tensor]) -> Tensor:
        result: Tensor = into(pieces[0], batch.state)
        # the first matrix decides for its batch, because a batch starts as a whole or not at all
        if batch.places[0][0] not in have_learned:
            group = {**matrices.bucket.group, "rotated": result}
            matrices.keep(batch, basis.observe_matrix(pieces[0], batch.state, group))
        return result

    return TensorList(matrices.over([bucket.u.tensors], rotated))


def learn(bucket: Bucket, matrices: Matrices, indices: Sequence[int]) -> None:
    """Let the averages of some parameters learn from an update. The update does not change."""
    group = matrices.bucket.group

    def observe(batch: Stack, pieces: list[Tensor]) -> Tensor:
        matrices.keep(batch, matrices.rule.observe_matrix(pieces[0], batch.state, group))
        return pieces[0]

    matrices.over([bucket.u.tensors], observe, indices)
