"""The function `release`, which updates each parameter as soon as its gradient is complete."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchzero_clip.core import Chain, Step, Transform
from torchzero_clip.core.autocast import without_autocast
from torchzero_clip.core.cohort import Roster, label
from torchzero_clip.core.formats.stochastic import DRAWS, ROUNDS, prepare_draws
from torchzero_clip.core.step import evaluate
from torchzero_clip.engines import AT_ONCE, Eager
from torchzero_clip.optimizer import Modular
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.releasing.last_step import LastStep, too_far
from torchzero_clip.releasing.one_at_a_time import OneAtATime
from torchzero_clip.releasing.step_in_progress import StepInProgress, StepOfOne

LIMITS = ("this step", "last step")
HAS_MOVED = (
    "received a second gradient after it was updated in this step: call opt.step() after each "
    "backward(). To accumulate gradients, set opt.last_backward = False before all but the last "
    "backward() of a step. With activation checkpointing, pass use_reentrant=False"
)


def release(
    model: nn.Module | Iterable[Any],
    *transforms: Transform,
    limit: Literal["this step", "last step"] = "this step",
    **options: Any,
) -> Released:
    """Return an optimizer that updates each parameter during `backward`, then drops its gradient.

    The optimizer updates a parameter as soon as the gradient of the parameter is complete. It then
    drops the gradient, so only one gradient exists at a time. The training loop does not change:
    `step()` updates all parameters that still have a gradient, and ends the step.

    Args:
        model: A module, or parameters as for `Modular`.
        *transforms: The chain, first to last. The rules may read only single tensors.
        limit: "last step" also allows norm rules that read several tensors, such as `ClipNorm(1.0,
            dim="global")`. These rules scale by a factor that is computed from the norm of the
            previous step. In the first step, the factor is 1.
        **options: As for `Modular`: fused, compile, rounding, state_dtype, process_group, grad.

    Returns:
        A `Modular` with two more members. Set `last_backward` to False while you sum the gradients
        of several batches. `remove()` removes the hooks from the parameters.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, release
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = release(model, ClipNorm(1.0), Adam(), LR(1e-3))
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> print([p.grad for p in model.parameters()])
        [None, None]
        >>> opt.step()
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "release does not support DistributedDataParallel, because parameters would be updated "
            "before their gradients are averaged over the ranks: use "
            "torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    params = model.named_parameters() if isinstance(model, nn.Module) else model
    return Released(params, *transforms, limit=limit, **options)


RELEASED: weakref.WeakSet[Released] = weakref.WeakSet()
"""All optimizers of this process that release gradients."""


class Released(Modular):
    """The optimizer that `release` returns."""

    _options = {**Modular._options, "limit": "this step"}
    _memory_unit = "the largest parameter"
    last_backward: bool = True
    """Whether gradients are complete after the next backward. Set it to False to sum gradients."""

    def __init__(
        self, params: Iterable[Any], *transforms: Transform, limit: str, **options: Any
    ) -> None:
        if limit not in LIMITS:
            raise ValueError(f"release: limit= must be one of {list(LIMITS)}, got {limit!r}")
        self.limit = limit
        self._watching = True
        self._lock = threading.RLock()  # backward has a thread for each device
        self._hooks: dict[Tensor, Any] = {}
        self._rosters: dict[Tensor, Roster] = {}
        self._in_progress: StepInProgress | None = None
        super().__init__(params, *transforms, **options)
        RELEASED.add(self)

    def _build(
        self, chain: Chain, fused: bool, compile: bool, rounding: str, state_dtype: str, grad: Any
    ) -> None:
        super()._build(chain, fused, compile, rounding, state_dtype, grad)
        if compile:
            self.engine = OneAtATime(self.links)
        else:
            self.engine = Eager(fuses=fused, keeps=False)
        self._late = [LastStep(link) for link in too_far(self.links, self.limit)]

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that still have a gradient, and end the step."""
        loss = None if closure is None else evaluate(closure)
        with self._lock:
            for group in self.param_groups:
                for p in group["params"]:
                    if self.place.of(p) is not None and (self.place.usual or self._is_unmoved(p)):
                        self._release(p)
            self._finish()
            self._watch()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the remaining gradients, and end a step that has begun."""
        super().zero_grad(set_to_none)
        with self._lock:
            if self._in_progress is not None:
                self._finish()

    @torch.no_grad()
    def _release_if_complete(self, p: Tensor) -> None:
        """Update a parameter after backward, unless the gradients of more batches will follow."""
        with self._lock:
            if self.last_backward and self.place.of(p) is not None:
                self._release(p)

    def _is_unmoved(self, p: Tensor) -> bool:
        """Return whether this step has not updated a parameter yet.

        A dropped gradient outside of `.grad` becomes zeros instead of None, so the gradient does
        not show this.
        """
        if self._in_progress is None:
            return True
        index, _ = self._in_progress.places.get(p, (-1, -1))
        return p in self._in_progress.unmoved[index]

    def _release(self, p: Tensor) -> None:
        """Update one parameter, and drop the gradient of this parameter."""
        progress = self._progress(moves=True)
        index, place = progress.places.get(p, (-1, -1))
        if index < 0:
            return  # the parameter was removed from the optimizer
        group = self.param_groups[index]
        if p not in progress.unmoved[index]:
            raise RuntimeError(f"release: {label(index, group, place)} {HAS_MOVED}")
        roster = self._rosters.setdefault(p, Roster())
        step = StepOfOne(progress.groups, self.state, {}, self.engine, None, roster)
        step.where = index, group, place
        step.drawn = progress.drawn
        step.rounding = self._rounds
        step.place = self.place
        with without_autocast():
            record = self._through(step)
        self.place.drop(p)
        progress.drawn = step.drawn
        progress.leave(index, place, p, record)

    def _progress(self, moves: bool) -> StepInProgress:
        """Return the step in progress. If there is none, begin a new step.

        A step that updates no parameter creates no state.
        """
        if self._in_progress is None:
            self._begin()  # checks keys and hyperparameters
            if moves:
                self._prepare_draws()
            self._in_progress = StepInProgress(self.param_groups)
        return self._in_progress

    def _prepare_draws(self) -> None:
        """Create the seeds for stochastic rounding, if the step needs seeds."""
        params = params_of(self)
        if any([link.rounds(p) for link in self.keys.links for p in params]):
            prepare_draws(self.param_groups, DRAWS)
        if self.rounding == "stochastic":
            prepare_draws(self.param_groups, ROUNDS)

    @torch.no_grad()
    def _finish(self) -> None:
        """End the step in progress. `LastStep` rules then compute the divisors of the next step."""
        progress = self._progress(moves=False)
        self._in_progress = None
        self._records = progress.end(self.param_groups)
        for late in self._late:
            arguments = self.param_groups, self.state, self._records, AT_ONCE, self.process_group
            with Step(*arguments) as step:
                late.decide(step)

    # ------------------------------------------------------------------ the hooks

    def _watch(self) -> None:
        """Register a hook on each trained parameter that has no hook."""
        params = set(params_of(self))
        for p in self._hooks.keys() - params:
            self._hooks.pop(p).remove()
        me = weakref.ref(self)  # so that the parameters do not keep the optimizer alive

        def hook(p: Tensor) -> None:
            optimizer = me()
            if optimizer is not None:
                optimizer._release_if_complete(p)

        for p in params - self._hooks.keys():
            if p.requires_grad and self._watching:
                self._hooks[p] = p.register_post_accumulate_grad_hook(hook)
                weakref.finalize(self, self._hooks[p].remove)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `Modular` does, and release its gradients from now on."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for place, p in enumerate(group["params"]):
            if any([p in other._hooks for other in list(RELEASED)]):
                self.param_groups.pop()
                where = label(len(self.param_groups), group, place)
                raise ValueError(
                    f"release: {where} already belongs to another optimizer from release(): "
                    "call the method remove() of the other optimizer first"
                )
        self._watch()

    def remove(self) -> None:
        """Remove the hooks from the parameters. `step()` still works, as for any optimizer."""
        self._watching = False
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    # ------------------------------------------------------------------ reports

    def explain(self, *, parameters: bool = False) -> str:
        """Describe the chain and the plan of a step, as `Modular.explain` does.

        The plan shows a step in which all gradients exist at the same time.
        """
        late = [f"{late.link.path} uses the norm of the previous step." for late in self._late]
        lines = [
            "Each parameter is updated as soon as its gradient is complete.",
            *late,
            super().explain(parameters=parameters),
        ]
        return "\n".join(lines)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # what GradScaler asks before its first step
        raise TypeError(
            "release does not support GradScaler, because parameters are updated before GradScaler "
            "can unscale their gradients: train in bfloat16 without GradScaler instead"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an optimizer from release() cannot be copied or pickled: call release() "
            "for the new model, and pass the state_dict() of the old optimizer to "
            "load_state_dict() of the new optimizer"
        )
