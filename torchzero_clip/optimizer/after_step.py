"""The class `AfterStep`: links such as `WeightEMA` that run after another optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.autocast import without_autocast
from torchzero_clip.core.bucket import Bucket, in_buckets
from torchzero_clip.core.description import ON_NORMS
from torchzero_clip.core.gradients import Where
from torchzero_clip.core.link import read_elsewhere
from torchzero_clip.core.step import Step
from torchzero_clip.core.tensor_kinds import is_sharded
from torchzero_clip.core.torch_private import traced
from torchzero_clip.core.transform import Transform, averages
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.optimizer.chain_runner import ChainRunner
from torchzero_clip.optimizer.construction_warnings import warn_of_construction

PARAMS = ("params", "param_names", *ON_NORMS)
"""The keys of a group that name its parameters and its norm settings."""


class AfterStep(ChainRunner):
    """Links with averaged weights that run after each step of another optimizer.

    The links receive the weights after the step, and an update of zero.

    Args:
        groups: The parameter groups of the other optimizer.
        *transforms: The links.
        compile, grad: As for `Modular`.
    """

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
                    "attach: after= accepts only transforms that average weights, such as "
                    f"WeightEMA(0.999), got {tfm!r}"
                )
        own_groups = list(map(_params_of_group, groups))
        super().__init__(own_groups, *transforms, compile=compile, process_group=None, grad=grad)
        warn_of_construction(self)

    def follow(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Use the parameters that the groups of the other optimizer have now."""
        del self.param_groups[len(groups) :]
        for i, group in enumerate(groups):
            if i == len(self.param_groups):
                self.add_param_group(_params_of_group(group))
            take_params(self.param_groups[i], group)

    def begin(self) -> None:
        """Create the state of new parameters before a step. Averages begin at these weights."""
        if any([p.requires_grad and p not in self.state for p in params_of(self)]):
            self.init_state()

    @torch.no_grad()
    @traced
    def look(self) -> None:
        """Update the averages with the weights of all parameters that have a gradient."""
        step = self._given(None)
        with without_autocast():
            self._records = step.engine.step(step, self._through)

    def _start(self, step: Step) -> list[Bucket]:
        """Return buckets with an update of zero."""
        if not self.compile:
            return in_buckets(step, self._zero_update)
        buckets = in_buckets(step)
        for bucket in buckets:
            bucket.update = bucket.params.sub(bucket.params)  # a kernel stores no zeros in memory
        return buckets

    def _zero_update(self, p: Tensor) -> Tensor | None:
        """Return zeros if a parameter has a gradient. The zeros share the memory of one element."""
        if self.place.of(p) is None:
            return None
        return torch.zeros_like(p) if is_sharded(p) else p.new_zeros(()).expand(p.shape)

    def _end(self, step: Step, buckets: list[Bucket]) -> None:
        """Subtract the update if a link such as `Lookahead` has changed the update."""
        if any([link.transform.leaves != "gradient" for link in self.links]):
            for bucket in buckets:
                bucket.subtract()
        buckets.clear()  # otherwise the step would keep the memory of the update


def take_params(ours: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Copy the parameters and the norm settings of another optimizer's group into our group."""
    for key in ON_NORMS:
        if key not in theirs:
            ours.pop(key, None)
    ours.update(_params_of_group(theirs))


def _params_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters and the norm settings of a group, without hyperparameters."""
    return {key: group[key] for key in PARAMS if key in group}
