"""The class `Clipper`: a chain that rewrites gradients, for training loops that you write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Step, Transform, Units, in_buckets
from torchzero_clip.core.autocast import without_autocast
from torchzero_clip.core.engine import Records
from torchzero_clip.core.gradients import Where
from torchzero_clip.core.norms import NAMED
from torchzero_clip.core.sharding.layout import local
from torchzero_clip.core.step import evaluate
from torchzero_clip.core.torch_private import traced
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer.chain_meaning import refuse_step
from torchzero_clip.optimizer.chain_runner import ChainRunner
from torchzero_clip.optimizer.construction_warnings import warn_of_construction
from torchzero_clip.optimizer.explain import explain
from torchzero_clip.optimizer.replaced_parameters import warn_of_replaced_parameters

TOTAL_NORM = "total norm"
"""The key, in the records of a step, for the norm of all gradients before the chain."""
UNWRITTEN = "unwritten"
"""The key, in the records of a step, for the parameters whose gradients the chain dropped."""


class Clipper(ChainRunner):
    """A chain that rewrites gradients and does not change parameters.

    Use a `Clipper` in a training loop that you write, or in a hook of a framework. Like an
    optimizer, a `Clipper` has state, `param_groups` with hyperparameters, `state_dict` and
    `metrics`. The chain can end early, because a guard skips the step or an accumulator waits. In
    this case the gradients become None, so the next step of the optimizer does nothing.

    Args:
        params: Parameters, named parameters, or groups of either.
        *transforms: The chain, first to last.
        compile: Compile the operators of links between two norms into one kernel, as `Modular`
            does.
        process_group: The processes that hold other parameters of the same model, as for `Modular`.
        grad: Where gradients are stored, as for `Modular`. Gradients outside of `.grad` become
            zeros instead of None.

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

    def __init__(
        self,
        params: Iterable[Any],
        *transforms: Transform,
        compile: bool = False,
        process_group: Any = None,
        grad: Where = "grad",
    ) -> None:
        super().__init__(
            params, *transforms, compile=compile, process_group=process_group, grad=grad
        )
        refuse_step(type(self).__name__, self.links)
        warn_of_construction(self)

    @torch.no_grad()
    @traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Rewrite the gradients, and return their total norm before the chain, a 0-dim tensor.

        If you pass a closure, the method calls the closure first. It then returns the loss of the
        closure instead of the norm.
        """
        loss = None if closure is None else evaluate(closure)
        step = self._given(loss)
        with without_autocast():
            self._records = step.engine.step(step, self._through)
        total: Tensor = self._records.pop(TOTAL_NORM).clone()  # the next step may reuse its memory
        return total if closure is None else loss

    def _through(self, step: Step) -> Records:
        """Send the gradients through the chain. Drop gradients that the chain does not return."""
        record = super()._through(step)
        if unwritten := record.pop(UNWRITTEN):
            step.notes.host("some gradients are removed: use p.requires_grad_(False) instead")
        for p in unwritten:
            self.place.drop(p)
        return record

    def _start(self, step: Step) -> list[Bucket]:
        """Return buckets with the gradients, and record the total norm of the gradients."""
        buckets = in_buckets(step)
        if not buckets:
            warn_of_replaced_parameters(self.param_groups)
        reads = any(["grads" in getattr(link.transform, "reads", ()) for link in self.keys.links])
        for bucket in buckets:
            if bucket.grads.dtype == bucket.state_dtype and not reads:
                bucket.update = bucket.writable_grads()  # links may change the gradients in place
        if self._measures and not buckets:
            self._warn_of_none()
        total = torch.zeros(())
        if buckets and self._measures:
            units = Units(buckets, "global", NAMED["l2"])
            total = units.norms_of([bucket.grads for bucket in units.buckets])[0]
        step.record[TOTAL_NORM] = total.to(torch.float32)
        step.record[UNWRITTEN] = {p for bucket in buckets for p in bucket.originals}
        return buckets

    def _end(self, step: Step, buckets: list[Bucket]) -> None:
        """Write the update that the last link returns into the gradients."""
        step.skip.read("gradients can be removed")
        for bucket in buckets:
            step.gradients.write(bucket.originals)
            parts = zip(bucket.originals, bucket.cohort.layouts, bucket.update, strict=True)
            for p, layout, u in parts:
                step.record[UNWRITTEN].discard(p)
                if (grad := self.place.of(p)) is None:
                    step.notes.made("a gradient is created in this step")
                    new = u.to(p.dtype, copy=True)
                    p.grad = new if layout is None else layout.wrap(new)
                elif u is not (part := local(grad)):
                    part.copy_(u)

    def explain(self, *, parameters: bool = False) -> str:
        """Describe anything about the chain that might surprise you, and the plan of a step.

        Args:
            parameters: Add a table of the groups and links of parameters, as `Modular.explain`
                does.
        """
        return explain(self, TrialClipper, parameters)

    def _warn_of_none(self) -> None:
        """Warn that no parameter has a gradient, unless another process may have some."""
        has_params = any([group["params"] for group in self.param_groups])
        if has_params and self.process_group is None and not torch.compiler.is_compiling():
            warn(
                "Clipper: no parameter has a gradient, so nothing was clipped: call Clipper.step() "
                "after backward() and before the step() of the optimizer",
            )


class TrialClipper(Clipper):
    """A Clipper that `explain` runs on one rank alone, with some of the parameters."""

    _is_trial = True
    _measures = False
