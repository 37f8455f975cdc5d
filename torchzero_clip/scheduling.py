"""Schedules for any hyperparameter, from a function of the step or a scheduler of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchzero_clip.core.argument_values import is_row
from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer.chain_runner import ChainRunner
from torchzero_clip.optimizer.keys import WELL_KNOWN, nearest

Function = Callable[[int], Any]


def schedule(
    optimizer: Optimizer,
    key: str,
    value: Function | Sequence[Function] | Callable[..., LRScheduler] | None = None,
    *,
    scheduler: Callable[[Optimizer], Any] | None = None,
    index: int | None = None,
) -> Schedule:
    """Change a hyperparameter during training, as torch's schedulers change the learning rate.

    The first value is set immediately. Each call of `step()` sets the next value. Call `step()`
    after `optimizer.step()`.

    Args:
        optimizer: Any torch optimizer, a `Clipper`, or the handle that `attach` returns.
        key: A key of its `param_groups`, such as "max_norm". The long form "ClipNorm_2/max_norm"
            is accepted as well.
        value: A function that returns the value for a step, counted from 0. It can also be a list
            of functions, one for each group, or a scheduler class of torch, or a partial of one.
        scheduler: An alternative to `value`: a function that receives an optimizer and returns a
            scheduler of torch for it. In this optimizer, "lr" is the value of the key.
        index: The index in a tuple, such as 1 for the second of the `betas`. None means that the
            whole value changes.

    Returns:
        A `Schedule`, which has the methods `step`, `state_dict` and `load_state_dict`, and the
        property `last_value`.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular, schedule
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipNorm(10.0), Adam(), LR(1e-3))
        >>> limit = schedule(opt, "max_norm", lambda step: 1.0 + 9.0 * 0.99**step)
        >>> opt.step()
        >>> limit.step()
        >>> print(limit.last_value)
        [9.91]
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"schedule: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    if (value is None) == (scheduler is None):
        raise TypeError(
            "schedule: pass either value= or scheduler=, and not both. value= accepts a "
            "function of the step, or a class of torch.optim.lr_scheduler. scheduler= accepts a "
            "function of an optimizer"
        )
    function = value.func if isinstance(value, functools.partial) else value
    if isinstance(function, type) and issubclass(function, LRScheduler):
        scheduler_class: Any = value
        return Schedule(optimizer, key, None, scheduler_class, index)
    return Schedule(optimizer, key, value, scheduler, index)


class Schedule:
    """The object that `schedule` returns: the schedule of one hyperparameter."""

    def __init__(
        self,
        optimizer: Optimizer,
        key: str,
        functions: Any,
        scheduler: Callable[[Optimizer], Any] | None,
        index: int | None,
    ) -> None:
        self.optimizer = optimizer
        self.index = index
        self.key = _key_in_use(optimizer, key)
        for value in self._group_values():
            self._check_place(value)
            if scheduler is not None and isinstance(value, (tuple, list)) and index is None:
                raise TypeError(
                    f"schedule: {self.key!r} is {value!r}, but torch's schedulers change one "
                    "number: select one with index=, or pass a function of the step"
                )
        self._stand_in = _StandIn(self._read())
        if scheduler is None:
            self._scheduler: Any = _FunctionScheduler(self._stand_in, self.key, functions)
        else:
            self._scheduler = scheduler(self._stand_in)
        if not hasattr(self._scheduler, "step"):
            raise TypeError(
                "schedule: the function that was passed as scheduler= must return a torch "
                f"scheduler, but returned {self._scheduler!r}"
            )
        self._write([group["lr"] for group in self._stand_in.param_groups])
        if isinstance(optimizer, ChainRunner):
            optimizer._scheduled.add(self.key)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Set the next value.

        Arguments are passed to the scheduler, for example the loss for `ReduceLROnPlateau`.
        """
        self._stand_in.follow(self._read(), self._scheduler)
        self._stand_in.step()  # torch's schedulers warn unless the optimizer takes a step
        self._scheduler.step(*args, **kwargs)
        self._write([group["lr"] for group in self._stand_in.param_groups])

    @property
    def last_value(self) -> list[Any]:
        """The current value, as a list with one element for each group."""
        return [_copy(value) for value in self._read()]

    def state_dict(self) -> dict[str, Any]:
        """Return the current values and the state of the scheduler. Functions are not saved."""
        return {"values": self.last_value, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`. The optimizer may load its state before or after this."""
        if not isinstance(state_dict, Mapping) or state_dict.keys() != {"values", "scheduler"}:
            shown = list(state_dict) if isinstance(state_dict, Mapping) else state_dict
            raise ValueError(
                "schedule: load_state_dict needs the result of a schedule's state_dict(), a dict "
                f"with the keys 'values' and 'scheduler', got {shown!r}"
            )
        values = state_dict["values"]
        current = self._read()
        if len(values) != len(current):
            raise ValueError(
                f"schedule: the checkpoint has values of {self.key!r} for "
                f"{counted(len(values), 'parameter group')}, but the optimizer has {len(current)}"
            )
        self._scheduler.load_state_dict(state_dict["scheduler"])
        pairs = zip(current, values, strict=True)
        self._write([_converted(old, new, f"the checkpoint has {new!r}") for old, new in pairs])

    def __repr__(self) -> str:
        place = "" if self.index is None else f"[{self.index}]"
        return f"Schedule({self.key}{place}: {self.last_value})"

    def _group_values(self) -> list[Any]:
        """Return the value of the key in each group. Such a value may be a tuple."""
        for i, group in enumerate(self.optimizer.param_groups):
            if self.key not in group:
                raise ValueError(
                    f"schedule: parameter group {i} has no key {self.key!r}: add the key "
                    f"{self.key!r} to this group"
                )
        return [group[self.key] for group in self.optimizer.param_groups]

    def _read(self) -> list[Any]:
        """Return the scheduled value of each group: the key's value, or its element at `index`."""
        values = self._group_values()
        if self.index is None:
            return values
        return [value[self.index] for value in values]

    def _write(self, values: list[Any]) -> None:
        """Set the scheduled value of each group. If a number is invalid, restore all numbers."""
        before = self._group_values()
        try:
            for group, value in zip(self.optimizer.param_groups, values, strict=True):
                self._write_in(group, value)
        except (TypeError, ValueError):
            for group, old in zip(self.optimizer.param_groups, before, strict=True):
                group[self.key] = old
            raise

    def _write_in(self, group: dict[str, Any], value: Any) -> None:
        """Set the scheduled value of a group, and check the value if the optimizer is ours."""
        if self.index is None:
            group[self.key] = value
        else:
            before = group[self.key]
            entries = list(before)
            entries[self.index] = value
            group[self.key] = type(before)(entries)
        if isinstance(self.optimizer, ChainRunner):
            _check(self.optimizer, group, self.key)

    def _check_place(self, value: Any) -> None:
        """Raise an error unless the key and the index name a number, or a tuple of numbers."""
        if self.index is None:
            place = self.key
            scheduled = value
        else:
            place = f"{self.key}[{self.index}]"
            inside = isinstance(value, (tuple, list)) and -len(value) <= self.index < len(value)
            scheduled = value[self.index] if inside else None
        numbers = scheduled if isinstance(scheduled, (tuple, list)) else [scheduled]
        if not all(map(_is_number, numbers)):
            raise TypeError(
                f"schedule: {place} must be a number, a tensor with one element, or a tuple "
                f"of numbers, but {self.key!r} is {value!r}"
            )


class _StandIn(Optimizer):
    """A stand-in optimizer for torch's schedulers. Its "lr" is a value of another optimizer.

    Args:
        values: The value of each group.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        # CyclicLR and OneCycleLR require a momentum, which they cycle by default
        super().__init__([{"params": [], "lr": v} for v in values], {"momentum": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing, because there are no parameters."""

    def follow(self, values: Sequence[Any], scheduler: Any) -> None:
        """Copy the values of the other optimizer, and new groups if the scheduler allows them."""
        if len(values) != len(self.param_groups):
            if not getattr(scheduler, "follows", False):
                raise ValueError(
                    "schedule: the optimizer has "
                    f"{counted(len(values), 'parameter group')}, but had "
                    f"{len(self.param_groups)} when the schedule was created: create a new "
                    "schedule, or pass one function instead of a list of functions"
                )
            self.param_groups[:] = [{"params": []} for _ in values]
        for group, value in zip(self.param_groups, values, strict=True):
            group["lr"] = value


class _FunctionScheduler:
    """A scheduler that computes each value with a function of the step.

    Args:
        optimizer: The stand-in, whose "lr" the scheduler sets.
        key: The name of the hyperparameter, for messages.
        functions: A function for all groups, or a list with a function for each group.
    """

    def __init__(self, optimizer: Optimizer, key: str, functions: Any) -> None:
        self.groups = optimizer.param_groups
        self.key = key
        self.follows = callable(functions)  # one function serves any number of groups
        self.functions = [functions] if self.follows else functions
        if not (is_row(self.functions) and all(map(callable, self.functions))):
            raise TypeError(
                "schedule: value= must be a function of the step, a list of such functions, "
                f"or a scheduler class from torch.optim.lr_scheduler, got {functions!r}"
            )
        if not self.follows and len(self.functions) != len(self.groups):
            raise ValueError(
                f"schedule: got {counted(len(self.functions), 'function')} for "
                f"{counted(len(self.groups), 'parameter group')}: pass one function for each "
                "group, or a single function for all groups"
            )
        is_rate = key.rpartition("/")[2] in ("lr", "weight_decay")
        self.first_rates = [group["lr"] for group in self.groups] if is_rate else []
        self.count = -1
        self.step()

    def step(self) -> None:
        """Set the value of the next step in every group."""
        self.count += 1
        functions = self.functions * len(self.groups) if self.follows else self.functions
        for group, function in zip(self.groups, functions, strict=True):
            value = function(self.count)
            source = f"the function for {self.key!r} returned {value!r} at step {self.count}"
            group["lr"] = _converted(group["lr"], value, source)
        self._warn_of_factors()

    def _warn_of_factors(self) -> None:
        """Warn once if a function seems to return factors, as functions for LambdaLR do."""
        for first, group in zip(self.first_rates, self.groups, strict=False):
            value = group["lr"]
            if not (isinstance(first, float) and isinstance(value, (int, float)) and first > 0):
                continue
            if value >= max(0.1, 30 * first):
                warn(
                    f"schedule: the function for {self.key!r} returned {value} at step "
                    f"{self.count}, but the value in the parameter group was {first}: the "
                    "function must return the new value itself. For a function that returns a "
                    "multiplier, pass partial(LambdaLR, lr_lambda=...)",
                )
                self.first_rates = []
                return

    def state_dict(self) -> dict[str, int]:
        """Return the number of the step."""
        return {"step": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Load the number of the step."""
        self.count = state_dict["step"]


def _key_in_use(optimizer: Optimizer, key: str) -> str:
    """Return the key that groups use for a name, or raise an error with a suggestion."""
    names = optimizer.keys if isinstance(optimizer, ChainRunner) else None
    if names is not None:
        key = names.aliases.get(key, key)
    keys = [k for k in optimizer.param_groups[0] if k not in RESERVED]
    if key in keys:
        return key
    if names is not None and key in names.ambiguous:
        raise ValueError(
            f"schedule: the key {key!r} is ambiguous, because several transforms have this "
            f"hyperparameter: use one of {names.ambiguous[key]}"
        )
    if names is not None and key in WELL_KNOWN:
        raise ValueError(f"schedule: no transform uses {key!r}: add {WELL_KNOWN[key]} to the chain")
    known = keys + list(names.aliases if names is not None else ())
    near = nearest(key, known)
    hint = f"the keys are {keys}" if near is None else f"did you mean {near!r}?"
    raise ValueError(f"schedule: the parameter groups have no key {key!r}: {hint}")


def _check(optimizer: ChainRunner, group: dict[str, Any], key: str) -> None:
    """Raise the error of the link that owns the key if the link does not accept the value."""
    for link in optimizer.keys.links:
        if key in link.keys.values():
            link.transform.with_values({name: group[k] for name, k in link.keys.items()})


def _converted(old: Any, new: Any, source: str) -> Any:
    """Return the new value in the form of the old value. Tensors are filled in place.

    Args:
        old: The value before, such as a float, a tensor or a tuple of them.
        new: The value after.
        source: The first words of an error message, which say where the new value comes from.
    """
    if isinstance(old, (tuple, list)):
        if not isinstance(new, (tuple, list)) or len(new) != len(old):
            raise ValueError(f"schedule: {source}, but {len(old)} numbers are required")
        return type(old)([_converted(a, b, source) for a, b in zip(old, new, strict=True)])
    if not isinstance(old, Tensor) and hasattr(new, "item"):  # a tensor, or a NumPy scalar
        new = new.item()
    if not _is_number(new):
        raise TypeError(f"schedule: {source}, but a number is required")
    if isinstance(old, Tensor):
        with torch.no_grad():  # a compiled or captured step reads this memory
            return old.copy_(new.reshape(())) if isinstance(new, Tensor) else old.fill_(new)
    return float(new) if isinstance(old, float) else new


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or a tensor with one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _copy(value: Any) -> Any:
    """Return a copy of a value, so later changes of a tensor do not change the copy."""
    if isinstance(value, (tuple, list)):
        return type(value)([_copy(x) for x in value])
    return value.detach().clone() if isinstance(value, Tensor) else value
