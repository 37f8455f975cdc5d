"""The class `Attached`, the handle that `attach` returns.

The handle is a Clipper that acts before each step of another optimizer. It has the same parameter
groups as this optimizer. The state of the handle is saved next to the optimizer's state or inside
the optimizer's state. The handle can also have links that run after each step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import Self

from torchzero_clip.attach.clipper import Clipper
from torchzero_clip.core import Chain, Step, Transform, bind
from torchzero_clip.core.gradients import Where
from torchzero_clip.core.link import Link
from torchzero_clip.core.step import one_number
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer import averages
from torchzero_clip.optimizer.after_step import PARAMS, AfterStep, take_params
from torchzero_clip.optimizer.chain_meaning import refuse_step
from torchzero_clip.optimizer.keys import SCHEDULER_KEYS, WELL_KNOWN, GroupKeys
from torchzero_clip.optimizer.loading import checked_checkpoint, names_to_keep
from torchzero_clip.optimizer.saving import safe_to_save

KEY = "torchzero_clip"
"""The key of a handle's state in the state dict of its optimizer."""
AFTER = "after"
"""The key, in the state of a handle, for the state of the links after the optimizer."""


class Attached(Clipper):
    """The handle that `attach` returns: a Clipper tied to an optimizer, and a context manager."""

    _how_to_name = (
        "construct the optimizer with names, for example torch.optim.Adam(model.named_parameters())"
    )

    def __init__(
        self,
        optimizer: Optimizer,
        *transforms: Transform,
        compile: bool = False,
        process_group: Any = None,
        in_checkpoint: bool = False,
        after: Transform | None = None,
        grad: Where = "grad",
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.after: AfterStep | None = None
        if after is not None:
            self.after = AfterStep(optimizer.param_groups, after, compile=compile, grad=grad)
        self._in_checkpoint = in_checkpoint
        self._foreign = frozenset(optimizer.defaults)  # keys that the other optimizer reads
        links = bind(Chain(*transforms))
        refuse_step("attach", links)
        names = self._keys_of(links)
        groups = [self._own_keys(group, names) for group in optimizer.param_groups]
        super().__init__(
            groups, *transforms, compile=compile, process_group=process_group, grad=grad
        )
        # GradScaler hands scaled gradients to optimizers that say they can unscale them
        self._scales = optimizer.__dict__.get("_step_supports_amp_scaling")
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.__dict__["_step_supports_amp_scaling"] = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_pre_hook(self._take_out),
        ]
        if self.after is not None:
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        if in_checkpoint:
            self._hooks.append(optimizer.register_state_dict_post_hook(self._put_in))
        optimizer.__dict__["_torchzero_clip"] = weakref.ref(self)
        optimizer.__dict__["__getstate__"] = partial(_state_of_a_copy, self._optimizer)

    def remove(self) -> None:
        """Remove all hooks from the optimizer. Its steps are then the same as before `attach`."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is None:
            return
        handle = optimizer.__dict__.get("_torchzero_clip")
        if handle is not None and handle() is self:
            del optimizer.__dict__["_torchzero_clip"]
            del optimizer.__dict__["__getstate__"]
            optimizer.__dict__.pop("_step_supports_amp_scaling", None)
            if self._scales is not None:
                optimizer.__dict__["_step_supports_amp_scaling"] = self._scales

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _begin(self, name: str = "a step", loss: Any = None) -> Step:
        self._follow()
        return super()._begin(name, loss)

    def _follow(self) -> None:
        """Update the handle after parameters were added to the optimizer, or replaced in it."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(
                "the optimizer of this handle no longer exists: keep a reference to the optimizer"
            )
        if len(optimizer.param_groups) < len(self.param_groups):
            left = {p for group in optimizer.param_groups for p in group["params"]}
            ours = [group for group in self.param_groups if left & set(group["params"])]
            self.param_groups[:] = ours[: len(optimizer.param_groups)]
        for i, theirs in enumerate(optimizer.param_groups):
            if i == len(self.param_groups):
                self.add_param_group(self._own_keys(theirs, self.keys))
            take_params(self.param_groups[i], theirs)
        if self.after is not None:
            self.after.follow(optimizer.param_groups)
            self._pass_on(self.after)

    def _keys_of(self, links: Sequence[Link]) -> GroupKeys:
        """Return the keys of the chain and of the links after the optimizer."""
        return GroupKeys(links, [] if self.after is None else bind(self.after.chain))

    def _pass_on(self, after: AfterStep) -> None:
        """Copy the hyperparameters of the links after the optimizer from the handle's groups."""
        for ours, theirs in zip(self.param_groups, after.param_groups, strict=True):
            for path, key in after.keys.aliases.items():
                theirs[key] = ours.get(self.keys.aliases[path], theirs[key])

    def explain(self, *, parameters: bool = False) -> str:
        """Describe the chain and its plan, as `Clipper.explain` does.

        The text also reports each hyperparameter of the chain that someone set in
        `optimizer.param_groups`. The chain reads hyperparameters only from `handle.param_groups`.
        """
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        unread = [
            f"{key} of the optimizer's group {i} is {theirs[key]!r}, but the transforms use "
            f"{ours[key]!r}: set handle.param_groups[{i}][{key!r}]."
            for i, (theirs, ours) in enumerate(zip(groups, self.param_groups, strict=False))
            for key in self.keys.defaults.keys() & theirs.keys() - self._foreign
            if theirs[key] != ours[key]
        ]
        lines = [*unread, super().explain(parameters=parameters)]
        if optimizer is not None:
            name = type(optimizer).__name__
            lines.append(f"These rules write only gradients. {name} updates the parameters.")
        if self.after is not None:
            lines.append(
                f"After each step of the optimizer, {self.after.chain!r} averages the weights. Use "
                "averaged() to evaluate with the averaged weights."
            )
        return "\n".join(lines)

    def safe_to_save(self, steps: int = 1) -> bool:
        """Return whether a checkpoint of the current state is worth keeping.

        The state of the optimizer is checked too. In a distributed run all ranks must call this
        method, and all ranks get the same answer.
        """
        optimizer = self._optimizer()
        return safe_to_save(self, steps, optimizer.state if optimizer else {})

    # ------------------------------------------------------------------ averaged weights

    def averaged(
        self, name: str | None = None, *, model: Module | None = None
    ) -> AbstractContextManager[None]:
        """Put the averaged weights of `after=` into the parameters, as `Modular.averaged` does."""
        return averages.averaged(self._links_after, name, model)

    def averaged_state_dict(self, model: Module, name: str | None = None) -> dict[str, Any]:
        """Return the model's state dict with the averaged weights of `after=`."""
        return averages.averaged_state_dict(self._links_after, model, name)

    def eval(self, *, model: Module | None = None) -> None:
        """Put the averaged weights of `after=` into the parameters, if there are any."""
        if self.after is not None:
            averages.evaluate(self.after, model)

    def train(self, *, model: Module | None = None) -> None:
        """Put the training weights back into the parameters after `eval()`."""
        if self.after is not None:
            averages.train(self.after, model)

    @property
    def _links_after(self) -> AfterStep:
        if self.after is None:
            raise ValueError(
                "this handle has no averaged weights: call attach with a transform that averages "
                "weights, for example attach(optimizer, after=WeightEMA(0.999))"
            )
        return self.after

    def _after_step(self, *_: Any) -> None:
        """Run the links after the optimizer, on the weights after the optimizer's step."""
        self._follow()
        self._links_after.look()

    # ------------------------------------------------------------------ saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rules. The optimizer saves its own state."""
        if self._optimizer() is not None:
            self._follow()
        state_dict = super().state_dict()
        if self.after is not None:
            state_dict[AFTER] = self.after.state_dict()
        return state_dict

    def load_state_dict(
        self, state_dict: dict[str, Any], *, keep: str | Sequence[str] = ()
    ) -> None:
        """Load a result of `state_dict`. Hyperparameters in `keep` keep their present values."""
        if self._optimizer() is not None:
            self._follow()
        has_after = isinstance(state_dict, Mapping) and AFTER in state_dict
        if has_after is (self.after is None):
            contents = "has" if has_after else "lacks"
            call = "without" if has_after else "with"
            dropped = (
                ". With torch.distributed.checkpoint, save handle.state_dict(), because "
                "get_optimizer_state_dict drops this state"
            )
            raise ValueError(
                f"load_state_dict: the checkpoint {contents} the state of averaged weights, but "
                f"attach was called {call} the argument after=. Pass the same arguments to "
                "attach as in the run that saved the checkpoint" + ("" if has_after else dropped)
            )
        if self.after is not None:
            state_dict = dict(state_dict)
            after_state = state_dict.pop(AFTER)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the call below warns
                # raise an error before the averages change
                checked_checkpoint(self, state_dict, names_to_keep(keep))
            # the handle's own groups have the same hyperparameters, and are loaded below
            own_values = [*self.after.keys.defaults]
            self.after.load_state_dict(after_state, keep=own_values)
        super().load_state_dict(state_dict, keep=keep)
        if self.after is not None:
            self._pass_on(self.after)

    def _put_in(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state dict with the state of the rules added."""
        return {**state_dict, KEY: self.state_dict()}

    def _take_out(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Load the state of the rules from the optimizer's state dict, and return the rest.

        Return None if the state dict does not have to change.
        """
        if KEY in state_dict:
            self.load_state_dict(state_dict[KEY])
            return {key: value for key, value in state_dict.items() if key != KEY}
        if self._in_checkpoint:
            warn(
                f"this checkpoint of {type(optimizer).__name__} has no state for the attached "
                "transforms, so the transforms continue with their current state. To save "
                "the state of the transforms, call attach with in_checkpoint=True",
            )
        return None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "the handle that attach returned cannot be copied or pickled: call attach for "
            "the new optimizer, and pass the state_dict() of the old handle to "
            "load_state_dict() of the new handle"
        )

    def _own_keys(self, group: dict[str, Any], names: GroupKeys) -> dict[str, Any]:
        """Return the parameters and the hyperparameters of the rules in an optimizer's group."""
        known = {*PARAMS, *names.defaults, *names.aliases}
        theirs = {*self._foreign, *SCHEDULER_KEYS, *(WELL_KNOWN.keys() - names.ambiguous.keys())}
        for key in group.keys() - known - theirs:
            names.refuse(key, group[key])
        return {key: group[key] for key in group if key in known - self._foreign}

    def _act(self) -> None:
        """Rewrite the gradients before a step of the optimizer. Do not compute their total norm."""
        self._measures = False
        try:
            self.step()
        finally:
            self._measures = True

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Rewrite the gradients now, or after every call of the closure if there is one."""
        if self.after is not None:
            averages.refuse(self.after, "step()", shown=True)
            self._follow()
            self.after.begin()
        has_self = bool(args) and args[0] is optimizer
        own_args = args[1:] if has_self else args
        closure = kwargs.get("closure", own_args[0] if own_args else None)
        if closure is None:
            self._act()
            return None

        def clipped_closure() -> Any:
            loss = closure()
            self._reported.setdefault("loss", one_number(loss))
            self._act()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": clipped_closure}
        first = args[:1] if has_self else ()
        return (*first, clipped_closure, *own_args[1:]), kwargs


def _state_of_a_copy(original: Callable[[], Optimizer | None]) -> Any:
    """Warn, and return the state for a copy of an optimizer with a handle, without the hooks."""
    optimizer = original()
    assert optimizer is not None, "the optimizer itself holds this function"
    name = type(optimizer).__name__
    warn(
        f"the copy of this {name} does not include the attached transforms. To use the "
        "transforms in the copy, call attach for the copy, and pass the state_dict() of the "
        "old handle to load_state_dict() of the new handle. To copy the optimizer without "
        "transforms, call remove() on the handle first",
    )
    return type(optimizer).__getstate__(optimizer)  # type: ignore[attr-defined, unused-ignore]
