"""schedule: any number in param_groups, by a function of the step or by torch's schedulers."""

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

    The first value is set at once, the next by each `step()`, which comes after `optimizer.step()`.

    Args:
        optimizer: Any torch optimizer, a `Clipper`, or the handle of `attach`.
        key: A key of its `param_groups`, such as "max_norm"; the long form "ClipNorm_2/max_norm"
            is accepted as well.
        value: A function of the step, counted from 0, that gives the value; or a list of functions,
            one for each group; or one of torch's scheduler classes, or a partial of it.
        scheduler: Instead of `value`, a function that makes a scheduler of torch's kind for the
            optimizer it is given, whose "lr" is then the value of the key.
        index: Which entry of a tuple changes; None for all of it.

    Returns:
        What has `step`, `last_value`, `state_dict` and `load_state_dict`.

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
        raise TypeError(f"schedule: takes a torch.optim.Optimizer, got {optimizer!r}")
    if (value is None) == (scheduler is None):
        raise TypeError(
            "schedule: give either a function of the step (or a scheduler class of torch's), or "
            "scheduler=, a function of the optimizer; not both, not neither"
        )
    made = value.func if isinstance(value, functools.partial) else value
    if isinstance(made, type) and issubclass(made, LRScheduler):
        value, scheduler = None, value
    return Schedule(optimizer, key, value, scheduler, index)


class Schedule:
    """What `schedule` returns: it takes a step after each step of its optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        key: str,
        functions: Any,
        scheduler: Callable[[Optimizer], Any] | None,
        index: int | None,
    ) -> None:
        self.optimizer, self.index = optimizer, index
        self.key = _key_in_use(optimizer, key)
        for value in self._held():
            self._check_place(value)
            if scheduler is not None and isinstance(value, (tuple, list)) and index is None:
                raise TypeError(
                    f"schedule: {self.key!r} is {value!r}, and torch's schedulers change one "
                    "number: say which with index=, or give a function of the step"
                )
        self._stand_in = _StandIn(self._read())
        if scheduler is None:
            self._scheduler: Any = _Values(self._stand_in, self.key, functions)
        else:
            self._scheduler = scheduler(self._stand_in)
        if not hasattr(self._scheduler, "step"):
            raise TypeError(
                f"schedule: scheduler must make a scheduler, it gave {self._scheduler!r}"
            )
        self._write([group["lr"] for group in self._stand_in.param_groups])
        if isinstance(optimizer, ChainRunner):
            optimizer._scheduled.add(self.key)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Set the next value. Arguments go on to a scheduler that takes some, as a loss."""
        self._stand_in.take(self._read(), self._scheduler)
        self._stand_in.step()  # torch's schedulers warn where the optimizer takes none
        self._scheduler.step(*args, **kwargs)
        self._write([group["lr"] for group in self._stand_in.param_groups])

    @property
    def last_value(self) -> list[Any]:
        """The value now, one for each group."""
        return [_copy(value) for value in self._read()]

    def state_dict(self) -> dict[str, Any]:
        """The values now and the state of the scheduler; functions are not saved."""
        return {"values": self.last_value, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, before or after the optimizer loads its own."""
        if not isinstance(state_dict, Mapping) or state_dict.keys() != {"values", "scheduler"}:
            given = list(state_dict) if isinstance(state_dict, Mapping) else state_dict
            raise ValueError(
                "schedule: load_state_dict takes what state_dict of a schedule gave, a dict of "
                f"'values' and 'scheduler', got {given!r}"
            )
        values, mine = state_dict["values"], self._read()
        if len(values) != len(mine):
            raise ValueError(
                f"schedule: the checkpoint has {len(values)} values of {self.key!r}, the optimizer "
                f"has {len(mine)} groups"
            )
        self._scheduler.load_state_dict(state_dict["scheduler"])
        pairs = zip(mine, values, strict=True)
        self._write([_placed(old, new, f"the checkpoint has {new!r}") for old, new in pairs])

    def __repr__(self) -> str:
        place = "" if self.index is None else f"[{self.index}]"
        return f"Schedule({self.key}{place}: {self.last_value})"

    def _held(self) -> list[Any]:
        """What the groups have under the key."""
        for i, group in enumerate(self.optimizer.param_groups):
            if self.key not in group:
                raise ValueError(f"schedule: group {i} has no {self.key!r}: give it one")
        return [group[self.key] for group in self.optimizer.param_groups]

    def _read(self) -> list[Any]:
        return self._held() if self.index is None else [held[self.index] for held in self._held()]

    def _write(self, values: list[Any]) -> None:
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            held = group[self.key]
            if self.index is None:
                group[self.key] = value
            else:
                entries = list(held)
                entries[self.index] = value
                group[self.key] = type(held)(entries)
            if isinstance(self.optimizer, ChainRunner):
                _check(self.optimizer, group, self.key)

    def _check_place(self, held: Any) -> None:
        """Raise a sentence unless a number can stand where the key and the index say."""
        there, where = held, self.key
        if self.index is not None:
            inside = isinstance(held, (tuple, list)) and -len(held) <= self.index < len(held)
            there, where = held[self.index] if inside else None, f"{self.key}[{self.index}]"
        if not all(map(_is_number, there if isinstance(there, (tuple, list)) else [there])):
            raise TypeError(
                f"schedule: {where} must be a number, a tensor of one, or a tuple of them; "
                f"{self.key!r} is {held!r}"
            )


class _StandIn(Optimizer):
    """An optimizer whose "lr" is the value of a key of another, for schedulers to work on."""

    def __init__(self, values: Sequence[Any]) -> None:
        # CyclicLR and OneCycleLR want a momentum to cycle as well
        super().__init__([{"params": [], "lr": v} for v in values], {"momentum": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: it owns no parameters."""

    def take(self, values: Sequence[Any], scheduler: Any) -> None:
        """Follow the other: its values, and its groups where the scheduler can."""
        if len(values) != len(self.param_groups):
            if not getattr(scheduler, "follows", False):
                raise ValueError(
                    f"schedule: the optimizer has {len(values)} groups now, and had "
                    f"{len(self.param_groups)}: make the schedule again, or give one function of "
                    "the step for all groups"
                )
            self.param_groups[:] = [{"params": []} for _ in values]
        for group, value in zip(self.param_groups, values, strict=True):
            group["lr"] = value


class _Values:
    """Functions of the step, as a scheduler."""

    def __init__(self, optimizer: Optimizer, key: str, functions: Any) -> None:
        self.groups, self.key = optimizer.param_groups, key
        self.follows = callable(functions)  # one for all groups, however many
        self.functions = [functions] if self.follows else functions
        if not (is_row(self.functions) and all(map(callable, self.functions))):
            raise TypeError(
                "schedule: takes a function of the step, a list of functions, or a scheduler class "
                f"of torch's, got {functions!r}"
            )
        if not self.follows and len(self.functions) != len(self.groups):
            raise ValueError(
                f"schedule: {len(self.functions)} functions for {len(self.groups)} groups: give "
                "one for each, or a single one for all"
            )
        rate = key.rpartition("/")[2] in ("lr", "weight_decay")
        self.rates = [group["lr"] for group in self.groups] if rate else []  # as they were given
        self.count = -1
        self.step()

    def step(self) -> None:
        self.count += 1
        functions = self.functions * len(self.groups) if self.follows else self.functions
        for group, function in zip(self.groups, functions, strict=True):
            value = function(self.count)
            said = f"the function for {self.key!r} gave {value!r} at step {self.count}"
            group["lr"] = _placed(group["lr"], value, said)
        self._warn_of_factors()

    def _warn_of_factors(self) -> None:
        """Warn once where a function seems to give factors, as LambdaLR takes them."""
        for given, group in zip(self.rates, self.groups, strict=False):
            value = group["lr"]
            if not (isinstance(given, float) and isinstance(value, (int, float)) and given > 0):
                continue
            if value >= max(0.1, 30 * given):
                warn(
                    f"schedule: the function for {self.key!r} gave {value} at step {self.count}, "
                    f"where {given} was given: it gives the value itself; for factors, as those of "
                    "LambdaLR, write partial(LambdaLR, lr_lambda=...)",
                )
                self.rates = []
                return

    def state_dict(self) -> dict[str, int]:
        return {"step": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["step"]


def _key_in_use(optimizer: Optimizer, key: str) -> str:
    """The key that the groups have for a name, or a sentence that says what there is."""
    names = optimizer.keys if isinstance(optimizer, ChainRunner) else None
    if names is not None:
        key = names.aliases.get(key, key)
    keys = [k for k in optimizer.param_groups[0] if k not in RESERVED]
    if key in keys:
        return key
    if names is not None and key in names.ambiguous:
        raise ValueError(f"schedule: {key!r} is ambiguous here: use one of {names.ambiguous[key]}")
    if names is not None and key in WELL_KNOWN:
        raise ValueError(f"schedule: no link reads {key!r}: add {WELL_KNOWN[key]} to the chain")
    known = keys + list(names.aliases if names is not None else ())
    near = nearest(key, known)
    hint = f"there are {keys}" if near is None else f"did you mean {near!r}?"
    raise ValueError(f"schedule: the groups have no key {key!r}: {hint}")


def _check(optimizer: ChainRunner, group: dict[str, Any], key: str) -> None:
    """Raise the sentence of the link that owns the key if it cannot have such a value."""
    for link in optimizer.keys.links:
        if key in link.keys.values():
            link.transform.with_values({name: group[k] for name, k in link.keys.items()})


def _placed(old: Any, new: Any, said: str) -> Any:
    """The new value in the form of the old: tensors are filled, tuples keep their length."""
    if isinstance(old, (tuple, list)):
        if not isinstance(new, (tuple, list)) or len(new) != len(old):
            raise ValueError(f"schedule: {said}, where {len(old)} numbers belong")
        return type(old)([_placed(a, b, said) for a, b in zip(old, new, strict=True)])
    if not isinstance(old, Tensor) and hasattr(new, "item"):  # a tensor, or a number of numpy's
        new = new.item()
    if not _is_number(new):
        raise TypeError(f"schedule: {said}, where a number belongs")
    if isinstance(old, Tensor):
        with torch.no_grad():  # a graph that was compiled or captured reads this memory
            return old.copy_(new.reshape(())) if isinstance(new, Tensor) else old.fill_(new)
    return float(new) if isinstance(old, float) else new


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _copy(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_copy(x) for x in value])
    return value.detach().clone() if isinstance(value, Tensor) else value
