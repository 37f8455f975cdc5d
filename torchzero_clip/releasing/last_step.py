"""Norm rules that read several tensors, and scale by the factor of the previous step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule, Step, in_buckets, norms
from torchzero_clip.core.link import Link
from torchzero_clip.core.scalars import numbered
from torchzero_clip.core.traits import Gate


class LastStep:
    """A norm rule that reads several tensors, although gradients arrive one at a time.

    The rule divides by a divisor that it computed from the norm of the previous step. It also
    collects the norm of this step, for the divisor of the next step.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.rule = link.transform
        self.columns: dict[Tensor, Tensor] = {}  # the statistics of each update in this step
        link.acts = self

    def init(self, param: Tensor) -> dict[str, Any]:
        return {**self.rule.init(param), "divisor": 1.0}

    def _init_named(self, name: str, param: Tensor) -> dict[str, Any]:
        return {**self.rule._init_named(name, param), "divisor": 1.0}

    def per_parameter(self, param: Tensor, name: str = "") -> dict[str, Any]:
        return {**self.rule.per_parameter(param, name), "divisor": 1.0}

    def per_group(self) -> dict[str, Any]:
        return self.rule.per_group()

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        return self.rule.prepare(buckets)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        measure = norms.measure(self.rule.ord)
        for bucket in buckets:
            columns = bucket.u.statistics(measure).unbind(1)
            self.columns.update(zip(bucket.originals, columns, strict=True))
            u = bucket.u.to(bucket.state_dtype)
            ratio = bucket.state["divisor"].stack()
            bucket.u = bucket.session.divide(u, ratio)
        return buckets

    def decide(self, step: Step) -> None:
        """Compute the divisors for the next step from all updates of this step."""
        if not self.columns:
            return
        moved = in_buckets(step, lambda p: p if p in self.columns else None)
        buckets = [part for bucket in moved for part in bucket.seen_by(self.link).alike()]
        if self.link.numbered:
            numbered(buckets, advance=False)
        units = self.rule.units(buckets)
        columns = [self.columns[p] for bucket in units.buckets for p in bucket.originals]
        units.take(torch.stack([column.to(units.home) for column in columns], dim=1))
        for members, ratio in zip(units.groups, self.rule.decide(units).divisors, strict=True):
            for bucket in members:
                divisor = bucket.state["divisor"]
                new = units.as_list(bucket, ratio)
                divisor.copy_(new.where(new.isfinite(), divisor))  # a NaN affects one step only
        self.columns = {}


def too_far(links: Iterable[Link], limit: str) -> list[Link]:
    """Return the links that read more than one tensor.

    Raise an error for a link that cannot use the norm of the previous step.
    """
    late: list[Link] = []
    for link in links:
        rule = link.transform
        plain = isinstance(rule, NormRule) and type(rule).step is NormRule.step
        if link.transforms and "loss" in rule.reads:
            raise ValueError(
                f"release: {link.path} is not supported, because {link.path} needs the loss "
                "of each step. An optimizer from release() updates the parameters during "
                "backward(), and a loss can only be reported before backward()"
            )
        scales = plain and type(rule).apply is NormRule.apply
        if link.transforms and rule.reach != "tensor":
            if not scales or limit != "last step":
                raise ValueError(_refusal(link, scales))
            late.append(link)
        if not plain:  # a rule inside of a norm rule only computes a limit
            late += too_far(link.children, limit)
    return late


def _refusal(link: Link, scales: bool) -> str:
    """Return the error message for a rule that `release` does not support, with two remedies."""
    reach = link.transform.reach
    if isinstance(link.transform, Gate):
        return (
            f"release: {link.path} is not supported, because the optimizer from release() sums "
            f"gradients itself: remove {link.path}, set opt.last_backward = False before the "
            "first batch of a step, and opt.last_backward = True before its last batch"
        )
    late = "pass limit='last step', which uses the norm of the previous step"
    if not scales:
        late = "use a transform that only rescales, such as ClipNorm(1.0, dim='global'), with "
        late += "limit='last step'"
    message = (
        f"release: {link.path} combines all parameters of a {reach}, but each gradient is freed "
        "before the next gradient is computed: use a transform of single tensors, such as "
        f"ClipNorm(1.0), or {late}"
    )
    if type(link.transform).__module__.partition(".")[0] != __name__.partition(".")[0]:
        message += (
            f". If {type(link.transform).__name__} processes each tensor separately, set "
            'reach = "tensor" in the class'
        )
    return message
