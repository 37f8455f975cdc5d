"""Clipper: a chain that rewrites gradients, for training loops written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Step, Transform, Units, in_buckets
from torchzero_clip.core.gradients import Where
from torchzero_clip.core.norms import NAMED
from torchzero_clip.core.sharding.layout import local
from torchzero_clip.core.step import evaluate
from torchzero_clip.core.torch_private import traced
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer import Modular

TOTAL, WAITING = "total norm", "waiting"  # among what the links of a Clipper measured


class Clipper(Modular):
    """A chain that rewrites gradients and leaves parameters alone.

    For training loops written by hand and framework hooks. It has the state, `param_groups` with
    live values, `state_dict` and `metrics` of an optimizer. Where the chain ends early (a guard
    skips the step, an accumulator waits) the gradients become None, so that the optimizer that
    steps next does nothing.

    Args:
        params: Parameters, named parameters, or groups of either.
        *transforms: The chain, first to last.
        compile: As for `Modular`: one kernel for what stands between two norms.
        process_group: Processes that hold other parameters of the same model, as for `Modular`.
        grad: Where gradients are, as for `Modular`. Those that become None in `.grad` become zeros
            elsewhere.

    Example:
        >>> import torch
        >>> from torchzero_clip import Clipper, ZClip
        >>> model = torch.nn.Linear(10, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> clipper = Clipper(model.parameters(), ZClip())
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> norm = clipper.step()
        >>> optimizer.step()
    """

    _options: Mapping[str, Any] = {"compile": False, "grad": "grad"}
    _makes_steps = False

    def __init__(
        self,
        params: Iterable[Any],
        *transforms: Transform,
        compile: bool = False,
        process_group: Any = None,
        grad: Where = "grad",
    ) -> None:
        more: Any = {"compile": compile, "process_group": process_group, "grad": grad}
        super().__init__(params, *transforms, fused=False, **more)

    @torch.no_grad()
    @traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Rewrite the gradients; returns their total norm before, a 0-dim tensor.

        With a closure it is called first, and its loss returned.
        """
        loss = None if closure is None else evaluate(closure)
        step = self._given(loss)
        self._records = step.engine.step(step, self._through)
        total: Tensor = self._records.pop(TOTAL).clone()  # the next step may write its memory
        return total if closure is None else loss

    def _through(self, step: Step) -> dict[str, Any]:
        """Send the gradients of a step through the chain; those that do not come back are None."""
        record = super()._through(step)
        if waiting := record.pop(WAITING):
            step.notes.host("gradients are left out on the host: p.requires_grad_(False)")
        for p in waiting:
            self.place.drop(p)
        return record

    def _start(self, step: Step) -> list[Bucket]:
        buckets = in_buckets(step)
        reads = any(["grads" in getattr(link.transform, "reads", ()) for link in self.keys.links])
        for bucket in buckets:
            if bucket.grads.dtype == bucket.state_dtype and not reads:
                bucket.update = bucket.writable_grads()  # it may as well flow there
        if self._measures and not buckets:
            self._warn_of_none()
        total = torch.zeros(())
        if buckets and self._measures:
            units = Units(buckets, "global", NAMED["l2"])
            total = units.norms_of([bucket.grads for bucket in units.buckets])[0]
        step.record[TOTAL] = total.to(torch.float32)
        step.record[WAITING] = {p for bucket in buckets for p in bucket.originals}
        return buckets

    def _end(self, step: Step, buckets: list[Bucket]) -> None:
        """Write what the last link returns into the gradients."""
        step.skip.read("gradients are left out on the host")
        for bucket in buckets:
            step.gradients.write(bucket.originals)
            rows = zip(bucket.originals, bucket.cohort.layouts, bucket.update, strict=True)
            for p, layout, u in rows:
                step.record[WAITING].discard(p)
                if (grad := self.place.of(p)) is None:
                    step.notes.made("a gradient is made, once")
                    new = u.to(p.dtype, copy=True)
                    p.grad = new if layout is None else layout.wrap(new)
                elif u is not (part := local(grad)):
                    part.copy_(u)

    def _warn_of_none(self) -> None:
        given = any([group["params"] for group in self.param_groups])
        if given and self.process_group is None and not torch.compiler.is_compiling():
            warn(
                "Clipper: no parameter has a gradient, so nothing is clipped: call step() between "
                "backward() and the optimizer's step()",
            )
