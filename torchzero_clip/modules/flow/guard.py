"""Guard: a rule that skips steps with NaN or infinite gradients."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Reach, State, TensorList, UnitState
from torchzero_clip.core.bounds import Count
from torchzero_clip.core.norms import finite, largest
from torchzero_clip.core.torch_private import assert_async
from torchzero_clip.modules.flow.step_guard import NONFINITE, _Seen, _StepGuard


class Guard(_StepGuard):
    """A guard against NaN: skips the step if a gradient is NaN or infinite.

    Use it as the first link, so that a broken batch does no harm. A skipped step does not change
    parameters, and does not change the state and step counts of other links. Only the metrics
    "Guard/skipped", "Guard/consecutive" and "Guard/why" change. If one rank skips a step, all ranks
    skip the step.

    The guard does not synchronize with the GPU, except with `on_nonfinite="raise"`, which reads one
    number per step.

    Args:
        on_nonfinite: What to do if a gradient is NaN or infinite. "skip" skips the step. "zero"
            replaces NaN and infinite elements with zeros. "raise" raises `RuntimeError` with the
            names of the parameters. "assert" stops the program by a device-side assert.
            Default: "skip".
        max_consecutive: Raise `RuntimeError` after `max_consecutive` skipped steps in a row. The
            guard reads the count only every `max_consecutive` steps, so the error may come up to
            `max_consecutive - 1` steps late. None never raises. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Guard, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Guard(), ClipNorm(1.0), Adam(), LR(1e-3))
    """

    on_nonfinite: Literal["skip", "zero", "raise", "assert"] = "skip"
    max_consecutive: Count | None = None

    reason = "NaN or infinite gradients"
    pure = True

    @property
    def leaves(self) -> Literal["update", "gradient"]:  # type: ignore[override]
        return "update" if self.on_nonfinite == "zero" and self.target == "update" else "gradient"

    @property
    def reach(self) -> Reach:
        return "tensor" if self.on_nonfinite == "zero" else "model"

    def init_unit(self) -> dict[str, Any]:
        return super().init_unit() if self.on_nonfinite == "skip" else {}

    def judge(self, seen: _Seen, state: UnitState, group: Group) -> Tensor:
        return torch.where(finite(seen.norm), 0, NONFINITE)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        if self.on_nonfinite == "skip":
            return super().step(buckets)
        if self.on_nonfinite == "assert":
            fine = torch.isfinite(self.seen(self.units(buckets)).norm[0])
            assert_async(fine, f"Guard: {self.reason}")
        elif self.on_nonfinite == "raise":
            self._raise(buckets)
        else:
            for bucket in buckets:
                bucket.u = bucket.view(_finite)
        return buckets

    def _raise(self, buckets: list[Bucket]) -> None:
        """Raise an error with the names of parameters that have NaN or infinity on any rank."""
        step = buckets[0].step
        step.notes.host("Guard('raise') synchronizes in each step: use 'skip' or 'assert' instead")
        bad = ~torch.isfinite(torch.cat([largest(bucket.u.tensors) for bucket in buckets]))
        if not _anywhere(bad.any(), step.world_size):
            return
        names = [
            name or f"parameter {place} of group {bucket.cohort.index}"
            for bucket in buckets
            for name, place in zip(bucket.names, bucket.cohort.places, strict=True)
        ]
        wrong = [name for name, is_bad in zip(names, bad.tolist(), strict=True) if is_bad]
        raise RuntimeError(f"Guard: {self.reason} in {wrong or 'parameters of a different rank'}")


def _finite(u: TensorList, state: State, group: Group) -> TensorList:
    """Return u with zeros in place of NaN and infinity."""
    return u.where(u.isfinite(), 0.0)


def _anywhere(flag: Tensor, world_size: int) -> bool:
    """Return whether a flag is set on any rank."""
    if world_size > 1:
        flag = flag.to(torch.int32)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)
