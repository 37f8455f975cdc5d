"""When: a rule that applies another rule in some steps."""

from __future__ import annotations

from collections.abc import Callable

from torchzero_clip.core import Bucket, Transform, count_step, prepare, run
from torchzero_clip.core.traits import Sometimes
from torchzero_clip.modules.flow.masked import check_inner


class When(Transform, Sometimes):
    """When applies a rule in the steps for which a condition on the step number is true.

    Use it, for example, to clip only at the start of a run. A schedule of a hyperparameter, such
    as `max_norm`, often does the same and can be compiled.

    u ← tfm(u) in steps where condition(step) holds, u in others

    Args:
        condition: A function of the step number that returns True or False. Steps are counted
            from 1.
        tfm: The rule or Chain to apply.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular, When
        >>> model = torch.nn.Linear(10, 1)
        >>> early = When(lambda step: step <= 1000, ClipNorm(0.1, dim="global"))
        >>> opt = Modular(model.parameters(), early, Adam(), LR(1e-3))
    """

    condition: Callable[[int], bool]
    tfm: Transform

    inner = "chain"
    reach = "tensor"
    impure = (
        "its condition is computed in Python in each step: if possible, use a schedule of a "
        "hyperparameter, such as max_norm, instead"
    )

    def check(self) -> None:
        super().check()
        check_inner(self)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return run(buckets) if self.condition(count_step(buckets)) else buckets

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        count_step(buckets, by=0)
        prepare(buckets)
        return buckets
