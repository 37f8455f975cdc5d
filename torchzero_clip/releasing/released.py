"""release: each parameter steps as soon as its gradient is whole, which is then dropped."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchzero_clip.core import Chain, Step, Transform
from torchzero_clip.core.cohort import Roster, label
from torchzero_clip.core.formats.stochastic import DRAWS, ROUNDS, prepare_draws
from torchzero_clip.core.step import evaluate
from torchzero_clip.engines import AT_ONCE, Compiled, Eager
from torchzero_clip.optimizer import Modular
from torchzero_clip.releasing.last_step import LastStep, too_far
from torchzero_clip.releasing.one_at_a_time import OneAtATime
from torchzero_clip.releasing.step_in_progress import Running, StepOfOne

LIMITS = ("this step", "last step")
AGAIN = (
    "has a gradient again in a step in which it has moved already: call opt.step() after each "
    "backward(), set opt.last_backward = False before all but the last backward of a step, and "
    "use use_reentrant=False where activations are checkpointed"
)


def release(
    model: nn.Module | Iterable[Any],
    *transforms: Transform,
    limit: Literal["this step", "last step"] = "this step",
    **options: Any,
) -> Released:
    """An optimizer whose parameters step during `backward`, each as soon as its gradient is whole.

    The gradient is dropped then, so that one is alive at a time. The loop stays as it is: `step()`
    ends the step, and takes that of parameters which still have a gradient.

    Args:
        model: A module, or parameters as `Modular` takes them.
        *transforms: The chain, first to last, of rules that look at no more than a tensor.
        limit: "last step" lets rules about norms look further, as `ClipNorm(1.0, dim="global")`:
            they scale by the factor that the norm of the step before asks for, in the first step
            by 1.
        **options: As for `Modular`: fused, compile, rounding, state_dtype, process_group, grad.

    Returns:
        A `Modular` with two more members: `last_backward`, False while the gradients of several
        batches are summed as usual, and `remove()`, which takes its hooks off the parameters.

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
            "release: DistributedDataParallel averages gradients over ranks in buckets, after "
            "these would have been used: shard the model with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    params = model.named_parameters() if isinstance(model, nn.Module) else model
    return Released(params, *transforms, limit=limit, **options)


RELEASED: weakref.WeakSet[Released] = weakref.WeakSet()
"""The optimizers that release gradients."""


class Released(Modular):
    """The optimizer that `release` returns."""

    _options: Mapping[str, Any] = {**Modular._options, "limit": "this step"}
    _keeps_like = "the largest parameter's"
    last_backward: bool = True
    """Whether gradients are whole after the next backward; False while they are still summed."""

    def __init__(
        self, params: Iterable[Any], *transforms: Transform, limit: str, **options: Any
    ) -> None:
        if limit not in LIMITS:
            raise ValueError(f"release: limit must be one of {list(LIMITS)}, got {limit!r}")
        self.limit, self._watching = limit, True
        self._lock = threading.RLock()  # tensors of several devices have a thread each
        self._hooks: dict[Tensor, Any] = {}
        self._rosters: dict[Tensor, Roster] = {}
        self._running: Running | None = None
        super().__init__(params, *transforms, **options)
        RELEASED.add(self)

    def _build(
        self, chain: Chain, fused: bool, compile: bool, rounding: str, state_dtype: str, grad: Any
    ) -> None:
        super()._build(chain, fused, compile, rounding, state_dtype, grad)
        self.engine = (
            OneAtATime(Compiled(self.links)) if compile else Eager(fuses=fused, keeps=False)
        )
        self._late = [LastStep(link) for link in too_far(self.links, self.limit)]

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that still have a gradient, and end the step."""
        loss = None if closure is None else evaluate(closure)
        with self._lock:
            for group in self.param_groups:
                for p in group["params"]:
                    if self.place.of(p) is not None and (self.place.usual or self._is_left(p)):
                        self._release(p)
            self._finish()
            self._watch()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that are left; a step that has begun ends."""
        super().zero_grad(set_to_none)
        with self._lock:
            if self._running is not None:
                self._finish()

    @torch.no_grad()
    def _whole(self, p: Tensor) -> None:
        """The gradient of this parameter is whole, unless more batches are to come."""
        with self._lock:
            if self.last_backward and self.place.of(p) is not None:
                self._release(p)

    def _is_left(self, p: Tensor) -> bool:
        """Whether a parameter has not moved in this step; where zeros are its gradient it has."""
        running = self._running
        return running is None or p in running.left[running.places.get(p, (-1, -1))[0]]

    def _release(self, p: Tensor) -> None:
        """The step of one parameter, whose gradient goes."""
        running = self._running_step(moves=True)
        index, place = running.places.get(p, (-1, -1))
        if index < 0:
            return  # it has left the optimizer
        group = self.param_groups[index]
        if p not in running.left[index]:
            raise RuntimeError(f"release: {label(index, group, place)} {AGAIN}")
        roster = self._rosters.setdefault(p, Roster())
        step = StepOfOne(running.groups, self.state, {}, self.engine, None, roster)
        step.where = index, group, place
        step.drawn, step.rounding, step.place = running.drawn, self._rounds, self.place
        record = self._through(step)
        self.place.drop(p)
        running.drawn = step.drawn
        running.leave(index, place, p, record)

    def _running_step(self, moves: bool) -> Running:
        """The step on its way, begun if none is; one that moves no parameter makes no state."""
        if self._running is None:
            self._begin()  # checks keys and live values
            if moves:
                self._prepare_draws()
            self._running = Running(self.param_groups)
        return self._running

    def _prepare_draws(self) -> None:
        """Make the seeds of stochastic rounding, where the step will draw."""
        params = [p for group in self.param_groups for p in group["params"]]
        if any([link.rounds(p) for link in self.keys.links for p in params]):
            prepare_draws(self.param_groups, DRAWS)
        if self.rounding == "stochastic":
            prepare_draws(self.param_groups, ROUNDS)

    @torch.no_grad()
    def _finish(self) -> None:
        running, self._running = self._running_step(moves=False), None
        self._records = running.end(self.param_groups)
        for late in self._late:
            given = self.param_groups, self.state, self._records, AT_ONCE, self.process_group
            with Step(*given) as step:
                late.decide(step)

    # ------------------------------------------------------------------ the hooks

    def _watch(self) -> None:
        """Put hooks on the parameters that have none, and need gradients."""
        found = {p for group in self.param_groups for p in group["params"]}
        for p in self._hooks.keys() - found:
            self._hooks.pop(p).remove()
        me = weakref.ref(self)
        for p in found - self._hooks.keys():
            if p.requires_grad and self._watching:
                self._hooks[p] = p.register_post_accumulate_grad_hook(Hook(me))
                weakref.finalize(self, self._hooks[p].remove)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `Modular` does; its gradients are released from now on."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for place, p in enumerate(group["params"]):
            if any([p in other._hooks for other in list(RELEASED)]):
                self.param_groups.pop()
                where = label(len(self.param_groups), group, place)
                raise ValueError(
                    f"release: {where} has an optimizer already that releases its gradients: "
                    "remove() that one first"
                )
        self._watch()

    def remove(self) -> None:
        """Take the hooks off the parameters; `step()` goes on as that of any optimizer."""
        self._watching = False
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    # ------------------------------------------------------------------ what else is said

    def explain(self, *, parameters: bool = False) -> str:
        """The plan of a step in words, as if the gradients of all parameters were there."""
        late = [f"{late.link.path}: the factor of the step before" for late in self._late]
        lines = [
            "Each parameter by itself, when its gradient is whole",
            *late,
            super().explain(parameters=parameters),
        ]
        return "\n".join(lines)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # what GradScaler asks before its first step
        raise TypeError(
            "GradScaler divides gradients by its scale before the step, and released ones have "
            "been used by then: take bfloat16, which needs no GradScaler"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an optimizer that releases gradients belongs to its parameters and is neither copied "
            "nor pickled: release the copy of the model, and load this one's state_dict"
        )


class Hook:
    """What a parameter calls when its gradient is whole; an optimizer that is gone does nothing."""

    def __init__(self, optimizer: Callable[[], Released | None]) -> None:
        self.optimizer = optimizer

    def __call__(self, p: Tensor) -> None:
        optimizer = self.optimizer()
        if optimizer is not None:
            optimizer._whole(p)
