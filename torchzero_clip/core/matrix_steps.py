"""The steps of rules that keep state of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.bucket import Bucket, count_step
from torchzero_clip.core.engine import Group, State, Wrapped
from torchzero_clip.core.logical_matrices import LogicalMatrices
from torchzero_clip.core.matrices import Matrices
from torchzero_clip.core.stacks import Stack
from torchzero_clip.core.tensorlist import TensorList


class OfMatrices(Wrapped):
    """A rule that observes matrices, refreshes their state if necessary, and updates them."""

    def __init__(self, matrices: Matrices) -> None:
        self.matrices = matrices

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        matrices = self.matrices
        rule = matrices.rule
        live = {name: x for name, x in group.items() if name not in ("params", "grads")}
        params = [group["params"].tensors] if "param" in rule.reads else []

        def process(batch: Stack, pieces: list[Tensor]) -> Tensor:
            of_batch = {**live, "first": rule.refreshes and batch.begins}
            if params:
                of_batch["param"] = pieces[1]
            matrices.keep(batch, rule.observe_matrix(pieces[0], batch.state, of_batch))
            for some in batch.parts(matrices.due) if rule.refreshes else ():
                part = batch.part(some)
                of_part = dict(of_batch)
                if params and batch.stacked:
                    of_part["param"] = pieces[1][some]
                matrices.keep(part, rule.refresh_matrix(part.state, of_part))
            return rule.update_tensor(pieces[0], batch.state, of_batch)

        u = u.own()
        return u.copy_(TensorList(matrices.over([u.tensors, *params], process)))


def planned_matrices(bucket: Bucket) -> list[LogicalMatrices | None]:
    """Return the matrices of each parameter of a bucket. They are found once for each cohort."""
    rule = bucket.bound.transform

    def find() -> list[LogicalMatrices | None]:
        pairs = zip(bucket.names, bucket.originals, strict=True)
        return [rule.matrices_of(name or "", p) for name, p in pairs]

    key = (bucket.cohort, bucket.bound.path, "matrices")
    found: list[LogicalMatrices | None] = bucket.step.roster.once(key, find)
    return found


def step_matrices(rule: Any, buckets: list[Bucket]) -> list[Bucket]:
    """Run a step of a rule that has state of matrices."""
    taken: list[Tensor] = []
    count = _count(rule, buckets)
    for bucket in buckets:
        matrices = Matrices(bucket, count)
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
    _count(rule, buckets, by=0)
    for bucket in buckets:
        Matrices(bucket)


def record_unknown(buckets: Sequence[Bucket]) -> None:
    """Record NaN in `metrics()`, because the step has not reached these matrices."""
    if any([Matrices(bucket).where for bucket in buckets]):
        unknown = torch.full((), torch.nan, device=buckets[0].device)
        buckets[0].step.record[buckets[0].bound.path] = {"kept": unknown}


def _count(rule: Any, buckets: Sequence[Bucket], by: int = 1) -> int:
    """Return the number of this step, for a rule that refreshes state."""
    return count_step(buckets, "refreshed", by) if rule.refreshes else 0


def record(buckets: Sequence[Bucket], taken: Sequence[Tensor]) -> None:
    """Record how many matrices of this rank kept their old state, for `metrics()`.

    A matrix keeps its old state if a new value is not finite.
    """
    if taken:
        flags = torch.cat([flag.view(-1).to(buckets[0].device) for flag in taken])
        buckets[0].step.record[buckets[0].bound.path] = {"kept": flags.logical_not().sum()}
