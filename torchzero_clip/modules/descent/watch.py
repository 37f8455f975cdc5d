"""Watch: how large the steps are beside the weights, and which way they go."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchzero_clip.core import Bucket, NormRule, Scope, Step, TensorList, Units
from torchzero_clip.core.bounds import Count
from torchzero_clip.core.chain import other_state
from torchzero_clip.core.division import UNITS
from torchzero_clip.core.step import counted


class Watch(NormRule):
    """u ← u, and `metrics()` has ‖u‖, ‖w‖, ‖u‖ / ‖w‖ and cos(u, momentum)

    Put it last, where u is the step that is subtracted from the weights w: it is measured in
    float32, before the weights round it, and of sharded weights as a whole. The host waits for
    nothing. The momentum is that of the last link of the chain that keeps one: state that the
    link's class calls "linear" in `state_kinds`.

    Args:
        dim: What is measured together, as in `ClipNorm`: None each tensor, "layer", "group",
            "global", or dims of slices.
        inverse_dims: Take all dims except those given.
        every: The steps from one measurement to the next; others have none of these metrics. Steps
            that a guard skips count as well.

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
    reach = "model"  # what it says is of one step
    place = "end"
    leaves = "gradient"
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        step, path = buckets[0].step, buckets[0].bound.path
        if self.every > 1:
            count = _counted(step, path)
            if step.notes.ask(_rests, count, self.every):
                return buckets
        units = self.units(buckets)
        steps = [bucket.u for bucket in units.buckets]
        weights = [b.params.to(u.dtype) for b, u in zip(units.buckets, steps, strict=True)]
        size, norm = units.norms_of(steps), units.norms_of(weights)
        found = {"step": size, "weights": norm, "ratio": (size / norm).masked_fill(size == 0, 0)}
        momenta = [m for bucket in units.buckets if (m := _momentum(bucket)) is not None]
        if len(momenta) == len(steps):
            along = units.dot(steps, momenta) / size / units.norms_of(momenta)
            found["cosine"] = along.masked_fill(along.isnan() & size.isfinite(), 0)
        _record(units, found)
        return buckets

    def _record_unknown(self, buckets: list[Bucket]) -> None:
        step, path = buckets[0].step, buckets[0].bound.path
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


def _record(units: Units, found: Mapping[str, Tensor]) -> None:
    """Leave vectors with an entry for each unit for `metrics()`."""
    bucket = units.buckets[0]
    ids = {UNITS: units.division.ids(bucket.step.groups)} if units.count > 1 else {}
    plain = {name: x[0] if len(x) == 1 else x for name, x in found.items()}
    bucket.step.record[bucket.bound.path] = {**ids, **plain}


def _counted(step: Step, path: str) -> int:
    """Count a step, whether or not a guard skips it, because the host may not know that yet."""
    step.counted.add(path)
    return step.notes.count(step.groups, f"{path}/step", 1)


def _rests(count: int, every: int) -> bool:
    return count % every > 0


def _momentum(bucket: Bucket) -> TensorList | None:
    """Return the momentum of the last link that keeps one; None if no link does.

    Only the links of the chain itself count. The state of a link inside another one may be in
    another basis than the weights.
    """
    for link in reversed(bucket.bound.tops):
        for name, kind in link.transform.state_kinds.items():
            momentum = other_state(bucket, f"{link.path}/{name}") if kind == "linear" else None
            if momentum is not None:
                return momentum
    return None
