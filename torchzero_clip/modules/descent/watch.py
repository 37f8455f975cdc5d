"""Watch: a rule that reports metrics of steps and weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchzero_clip.core import Bucket, NormRule, Scope, Step, TensorList, Units
from torchzero_clip.core.bounds import Count
from torchzero_clip.core.chain import other_state
from torchzero_clip.core.division import UNITS
from torchzero_clip.core.step import counted


class Watch(NormRule):
    """Watch reports how large the steps are relative to the weights. The update does not change.

    Put it last, where u is the step that is subtracted from the weights w. The norms of steps are
    computed in float32, before the weights are rounded. They cover all ranks. The rule `Watch` does
    not synchronize with the GPU.

    u ← u, and `metrics()` has ‖u‖, ‖w‖, ‖u‖ / ‖w‖ and cos(u, momentum)

    The momentum comes from the last link of the chain that has a momentum. A momentum is a state
    that the class of the link declares as "linear" in `state_kinds`.

    Args:
        dim: The elements that share one norm, as in `ClipNorm`: None for each tensor, "layer",
            "group", "global", or the dims of slices. Default: None.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        every: Compute the metrics every `every` steps. In other steps, `metrics()` does not contain
            them. Steps that a guard skips count as well. Default: 1.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, Watch
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.named_parameters(), Adam(), LR(1e-3), Watch("layer"))
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> opt.step()
        >>> print([*opt.metrics()])
        ['Watch/step', 'Watch/weights', 'Watch/ratio', 'Watch/cosine']
    """

    dim: Scope = None
    inverse_dims: bool = False
    every: Count = 1

    clips = False
    widens = True
    reach = "model"  # all metrics are measured in the same step
    place = "end"
    leaves = "gradient"
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        step = buckets[0].step
        if self.every > 1:
            count = _counted(step, buckets[0].bound.path)
            if step.notes.ask(_rests, count, self.every):
                return buckets
        units = self.units(buckets)
        steps = [bucket.u for bucket in units.buckets]
        weights = [b.params.to(u.dtype) for b, u in zip(units.buckets, steps, strict=True)]
        step_norm = units.norms_of(steps)
        weight_norm = units.norms_of(weights)
        ratio = (step_norm / weight_norm).masked_fill(step_norm == 0, 0)
        metrics = {"step": step_norm, "weights": weight_norm, "ratio": ratio}
        found = [_momentum(bucket) for bucket in units.buckets]
        momenta = [momentum for momentum in found if momentum is not None]
        if len(momenta) == len(steps):
            cosine = units.dot(steps, momenta) / step_norm / units.norms_of(momenta)
            metrics["cosine"] = cosine.masked_fill(cosine.isnan() & step_norm.isfinite(), 0)
        _record(units, metrics)
        return buckets

    def _record_unknown(self, buckets: list[Bucket]) -> None:
        step = buckets[0].step
        path = buckets[0].bound.path
        if self.every > 1 and _rests(counted(step.groups, f"{path}/step", 0), self.every):
            return
        names = ["step", "weights", "ratio"]
        if all([_momentum(bucket) is not None for bucket in buckets]):
            names.append("cosine")
        units = self.units(buckets)
        _record(units, dict.fromkeys(names, units.unknown().norm))

    def _passed_over(self, step: Step, path: str) -> bool:
        if self.every > 1 and path not in step.counted:
            _counted(step, path)
        return True


def _record(units: Units, metrics: Mapping[str, Tensor]) -> None:
    """Store vectors for `metrics()`. Each vector has one element per unit."""
    bucket = units.buckets[0]
    ids = {UNITS: units.division.ids(bucket.step.groups)} if units.count > 1 else {}
    plain = {name: x[0] if len(x) == 1 else x for name, x in metrics.items()}
    bucket.step.record[bucket.bound.path] = {**ids, **plain}


def _counted(step: Step, path: str) -> int:
    """Count a step.

    A step that a guard skips counts as well, because the host may not know yet that it is skipped.
    """
    step.counted.add(path)
    return step.notes.count(step.groups, f"{path}/step", 1)


def _rests(count: int, every: int) -> bool:
    """Return whether a step computes no metrics."""
    return count % every > 0


def _momentum(bucket: Bucket) -> TensorList | None:
    """Return the momentum of the last link that has a momentum, or None if no link has one.

    Only the links of the chain itself count. A link inside another link may keep its state in a
    different basis.
    """
    for path, transform in reversed(bucket.bound.tops):
        for name, kind in transform.state_kinds.items():
            momentum = other_state(bucket, f"{path}/{name}") if kind == "linear" else None
            if momentum is not None:
                return momentum
    return None
