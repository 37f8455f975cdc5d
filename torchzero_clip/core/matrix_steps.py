"""Matrix steps: what a rule with state of matrices does in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.bucket import Bucket, count_step
from torchzero_clip.core.engine import Group, State, Wrapped
from torchzero_clip.core.matrices import Matrices
from torchzero_clip.core.stacks import Stack
from torchzero_clip.core.tensorlist import TensorList


class OfMatrices(Wrapped):
    """A rule of matrices as engines take it: it learns, is refreshed if that is due, and acts."""

    def __init__(self, matrices: Matrices) -> None:
        self.matrices = matrices

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        matrices, rule = self.matrices, self.matrices.rule
        reads = "param" in rule.reads
        live = {name: x for name, x in group.items() if name not in ("params", "grads")}

        def one(batch: Stack, pieces: list[Tensor]) -> Tensor:
            mine = {**live, "first": rule.refreshes and batch.begins}
            mine |= {"param": pieces[1]} if reads else {}
            matrices.keep(batch, rule.observe_matrix(pieces[0], batch.state, mine))
            for some in batch.parts(matrices.due) if rule.refreshes else ():
                part = batch.part(some)
                theirs = {"param": pieces[1][some]} if reads and batch.stacked else {}
                matrices.keep(part, rule.refresh_matrix(part.state, mine | theirs))
            return rule.update_tensor(pieces[0], batch.state, mine)

        u = u.own()
        beside = [group["params"].tensors] if reads else []
        return u.copy_(TensorList(matrices.over([u.tensors, *beside], one)))


def count(rule: Any, buckets: Sequence[Bucket], by: int = 1) -> int:
    """The number of the step of a rule that is refreshed now and then."""
    return count_step(buckets, "refreshed", by) if rule.refreshes else 0


def step_matrices(rule: Any, buckets: list[Bucket]) -> list[Bucket]:
    """The step of a rule with state of matrices."""
    taken: list[Tensor] = []
    now = count(rule, buckets)
    for bucket in buckets:
        matrices = Matrices(bucket, now)
        for batch in matrices.batches(list(matrices.mine)):
            bucket.step.skip.hold(list(batch.state.values()))
        u = bucket.u.to(bucket.state_dtype)
        bucket.u = bucket.session.update(OfMatrices(matrices), u, {}, bucket.group)
        if rule.refreshes:
            matrices.begin()
        taken += matrices.taken
    record(buckets, taken)
    return buckets


def prepare_matrices(rule: Any, buckets: list[Bucket]) -> None:
    """Make the state that a step of the rule would make."""
    count(rule, buckets, by=0)
    for bucket in buckets:
        Matrices(bucket)


def record_unknown(buckets: Sequence[Bucket]) -> None:
    """Record NaN for a step that has not reached these matrices."""
    if any([rows for bucket in buckets for rows in Matrices(bucket).rows]):
        unknown = torch.full((), torch.nan, device=buckets[0].device)
        buckets[0].step.record[buckets[0].bound.path] = {"kept": unknown}


def record(buckets: Sequence[Bucket], taken: Sequence[Tensor]) -> None:
    """Tell `metrics()` how many matrices of this rank kept their state since the new was not
    finite.
    """
    if taken:
        flags = torch.cat([flag.view(-1).to(buckets[0].device) for flag in taken])
        buckets[0].step.record[buckets[0].bound.path] = {"kept": flags.logical_not().sum()}
