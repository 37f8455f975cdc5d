"""Accumulate: a rule that averages the gradients of several small batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchzero_clip.core import (
    Bucket,
    Step,
    TensorList,
    Transform,
    count_step,
    in_buckets,
    zeros_like_state,
)
from torchzero_clip.core.bounds import Count
from torchzero_clip.core.torch_private import foreach
from torchzero_clip.core.traits import Gate

FIRST = 1  # the sum has gradients of the first large batch of its parameter
LATER = 2  # the sum has gradients of a later batch: the links after it have met the parameter


class Accumulate(Transform, Gate):
    """Gradient accumulation: makes one update from the gradients of `steps` calls of `step()`.

    Use it if a large batch does not fit into memory. A simpler way is to divide the loss by n, call
    `backward()` on n small batches, and then call `step()` once. Prefer this way if you can.

    s ← s + u;   every `steps`-th step u ← s / steps, s ← 0; in between nothing after it runs

    The rules after this link also receive the mean as `group["grads"]`. If a parameter has no
    gradient in one of the calls, the missing gradient counts as zero.

    Args:
        steps: The number of calls of `step()` that make one update.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Accumulate, Adam, ClipNorm, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Accumulate(4), ClipNorm(1.0), Adam(), LR(1e-3))
    """

    steps: Count

    leaves = "gradient"
    drops = True
    impure = (
        "most of its steps only add gradients: instead, call backward() several times before one "
        "step(), with the loss divided by the number of these calls"
    )

    def check(self) -> None:
        super().check()
        if self.target != "update":
            raise ValueError(f"Accumulate: target= must be 'update', got {self.target!r}")

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"sum": zeros_like_state(param)}

    def per_parameter(self, param: Tensor, name: str = "") -> dict[str, Any]:
        return {**self.init(param), "begun": 0}  # 0 for an empty sum, else FIRST or LATER

    def passed(self, state: Mapping[str, Any]) -> bool:
        return "sum" in state and state.get("begun") in (0, LATER)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        count_step(buckets, by=0)
        for bucket in buckets:
            for state in bucket.param_states:
                state.setdefault(f"{bucket.bound.path}/begun", 0)
        return buckets

    def _passed_over(self, step: Any, path: str) -> bool:
        return False  # a skipped step adds nothing, so it must not count toward `steps`

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        count = count_step(buckets)
        for bucket in buckets:
            self._add(bucket)
        if count % self.steps:
            return []
        return self._means(buckets[0].step, buckets[0].bound.path)

    def _add(self, bucket: Bucket) -> None:
        """Add the update to the sums. The first call after an update restarts the sum at zero."""
        key = f"{bucket.bound.path}/begun"
        sums = bucket.state["sum"]
        begun = [bool(state.get(key)) for state in bucket.param_states]
        in_first = [state.get(key, FIRST) == FIRST for state in bucket.param_states]
        if not all(begun):
            foreach("zero_", [t for t, has_sum in zip(sums, begun, strict=True) if not has_sum])
        sums.add_(bucket.u)
        for state, first in zip(bucket.param_states, in_first, strict=True):
            state[key] = FIRST if first else LATER

    def _means(self, step: Step, path: str) -> list[Bucket]:
        """Return buckets with the mean for each parameter that had a gradient in any call."""
        states = step.states or {}

        def total(p: Tensor) -> Tensor | None:
            state = states.get(p, {})
            return state[f"{path}/sum"] if state.get(f"{path}/begun") else None

        buckets = in_buckets(step, total)
        for bucket in buckets:
            TensorList(bucket.grads.tensors, owned=True).div_(self.steps)
            for state in bucket.param_states:
                state[f"{path}/begun"] = 0
        return buckets
