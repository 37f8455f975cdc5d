"""Accumulate: several small batches as one large."""

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

FIRST = 1  # gradients of the first large batch of a parameter are in its sum
LATER = 2  # those of a later one are, so that the links after this one have seen the parameter


class Accumulate(Transform, Gate):
    """s ← s + u;   every `steps`-th step u ← s / steps, s ← 0; in between nothing after it runs

    Links after it see the mean in `group["grads"]` too. A gradient that is missing in one of the
    steps counts as zero.

    Args:
        steps: How many steps make one.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Accumulate, Adam, ClipNorm, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Accumulate(4), ClipNorm(1.0), Adam(), LR(1e-3))
    """

    steps: Count

    leaves = "gradient"  # of the large batch
    drops = True
    impure = (
        "most of its steps do less than others, which the host decides: where memory allows call "
        "backward() several times, of the loss over their number, before one step()"
    )

    def check(self) -> None:
        super().check()
        if self.target != "update":
            raise ValueError(f"Accumulate: target must be 'update', got {self.target!r}")

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"sum": zeros_like_state(param)}

    def per_parameter(self, param: Tensor) -> dict[str, Any]:
        return {**self.init(param), "begun": 0}  # with gradients in the sum FIRST or LATER

    def passed(self, state: Mapping[str, Any]) -> bool:
        return "sum" in state and state.get("begun") in (0, LATER)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        count_step(buckets, by=0)
        for bucket in buckets:
            for state in bucket.param_states:
                state.setdefault(f"{bucket.bound.path}/begun", 0)
        return buckets

    def _passed_over(self, step: Any, path: str) -> bool:
        return False  # whether a sum is complete depends on the steps that happen

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        count = count_step(buckets)
        for bucket in buckets:
            self._add(bucket)
        if count % self.steps:
            return []
        return self._means(buckets[0].step, buckets[0].bound.path)

    def _add(self, bucket: Bucket) -> None:
        """Take the update into the sums; those of the last large step begin anew."""
        key, sums = f"{bucket.bound.path}/begun", bucket.state["sum"]
        begun = [bool(state.get(key)) for state in bucket.param_states]
        in_first = [state.get(key, FIRST) == FIRST for state in bucket.param_states]
        if not all(begun):
            foreach("zero_", [t for t, on in zip(sums, begun, strict=True) if not on])
        sums.add_(bucket.u)
        for state, first in zip(bucket.param_states, in_first, strict=True):
            state[key] = FIRST if first else LATER

    def _means(self, step: Step, path: str) -> list[Bucket]:
        """Buckets of all parameters that have had a gradient, which may be None by now."""
        states = step.states or {}

        def total(p: Tensor) -> Tensor | None:
            held = states.get(p, {})
            return held[f"{path}/sum"] if held.get(f"{path}/begun") else None

        buckets = in_buckets(step, total)
        for bucket in buckets:
            TensorList(bucket.grads.tensors, owned=True).div_(self.steps)
            for state in bucket.param_states:
                state[f"{path}/begun"] = 0
        return buckets
