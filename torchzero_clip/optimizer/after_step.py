"""Behind: links that run behind the step of another optimizer, at the weights that it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.bucket import Bucket, in_buckets
from torchzero_clip.core.description import ON_NORMS
from torchzero_clip.core.gradients import Where
from torchzero_clip.core.link import read_elsewhere
from torchzero_clip.core.step import Step
from torchzero_clip.core.tensor_kinds import is_sharded
from torchzero_clip.core.torch_private import traced
from torchzero_clip.core.transform import Transform, averages
from torchzero_clip.optimizer.modular import Modular

PARAMS = ("params", "param_names", *ON_NORMS)


class Behind(Modular):
    """Links with weights for evaluation that see the weights as a step has left them, and an update
    of zero.

    Args:
        groups: The groups of the optimizer that steps.
        *transforms: The links.
        compile, grad: As for `Modular`.
    """

    _makes_steps = None

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        *transforms: Transform,
        compile: bool = False,
        grad: Where = "grad",
    ) -> None:
        flat = [tfm for top in transforms for tfm in top.walk() if isinstance(tfm, Transform)]
        for tfm in flat:
            if read_elsewhere(tfm) or not (averages(tfm) or tfm.inner in ("chain", "branches")):
                raise ValueError(
                    f"attach: after= takes links that see nothing but the weights that a step has "
                    f"left, as WeightEMA(0.999), got {tfm!r}: it needs the step itself, in the "
                    "chain of a Modular"
                )
        more: Any = {"compile": compile, "grad": grad}
        super().__init__(list(map(_shared, groups)), *transforms, fused=False, **more)

    def follow(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Have the parameters that the optimizer has now."""
        del self.param_groups[len(groups) :]
        for i, group in enumerate(groups):
            if i == len(self.param_groups):
                self.add_param_group(_shared(group))
            take_params(self.param_groups[i], group)

    def begin(self) -> None:
        """Make the state of new parameters, some of which begins at the weights before a step."""
        params = [p for group in self.param_groups for p in group["params"]]
        if any([p.requires_grad and p not in self.state for p in params]):
            self.init_state()

    @torch.no_grad()
    @traced
    def look(self) -> None:
        """Take in the weights of the parameters that have had a gradient."""
        step = self._given(None)
        self._records = step.engine.step(step, self._through)

    def _start(self, step: Step) -> list[Bucket]:
        """An update of zero."""
        buckets = in_buckets(step, None if self.compile else self._nothing)
        for bucket in buckets if self.compile else ():  # zero takes no memory in a kernel
            bucket.update = bucket.params.sub(bucket.params)
        return buckets

    def _nothing(self, p: Tensor) -> Tensor | None:
        """An update of zero, in the memory of one number, where a parameter has had a gradient."""
        if self.place.of(p) is None:
            return None
        return torch.zeros_like(p) if is_sharded(p) else p.new_zeros(()).expand(p.shape)

    def _end(self, step: Step, buckets: list[Bucket]) -> None:
        if any([link.transform.leaves != "gradient" for link in self.links]):
            super()._end(step, buckets)
        buckets.clear()  # or the step would keep the update


def take_params(ours: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Give our group the parameters of another optimizer's group, and what it says on norms."""
    for key in ON_NORMS:
        if key not in theirs:
            ours.pop(key, None)
    ours.update(_shared(theirs))


def _shared(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in PARAMS if key in group}
