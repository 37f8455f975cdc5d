"""Checks for custom rules. Authors of rules call these checks from tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip.core import Description, NormRule, Transform
from torchzero_clip.core.names import hint
from torchzero_clip.optimizer import Modular

__all__ = ["check_pure"]

Shapes: TypeAlias = Sequence[tuple[int, ...]] | Mapping[str, tuple[int, ...]]
SHAPES = ((5, 4), (4,), (), (3, 4), (1,))
SCALES = (1.0, 2.0, 0.5, 1e-4, 50.0, 1.0, 0.0, 1.0)
"""The factors of the gradients, step by step."""
ROUNDS = 4
"""How often a run repeats the scales to find an effect of a live value."""


def check_pure(
    *transforms: Transform,
    shapes: Shapes = SHAPES,
    idle: Collection[str] = (),
) -> None:
    """Raise an AssertionError unless replayed steps of this chain equal steps without replay.

    Call this function in a test of a custom rule that has `pure = True`. The function runs a few
    steps of the chain twice, with replay and without it, and compares all parameters, state and
    metrics. Gradients and hyperparameters change from step to step. Nothing is compiled.

    The function also raises an error if the method `limit` of a rule about norms returns a negative
    number, or NaN for a norm above zero.

    It also raises an error if a live value (a hyperparameter in `param_groups`) has no
    effect. A live value has no effect if several values lead to the same parameters, state and
    metrics. The usual reason is a rule that reads `self.gain` instead of `group["gain"]`.

    Args:
        *transforms: The transforms of the chain, from first to last.
        shapes: The shapes of the parameters on which the chain runs. If the chain selects
            parameters by name, a dict from names to shapes.
        idle: The keys in `param_groups` of live values that have no effect in this chain on
            purpose, for example "percentile" of an `AutoClip` whose mode does not use it.

    Raises:
        AssertionError: If a replayed step differs, if no step is replayed, if a limit is negative
            or NaN, or if a live value has no effect.
        ValueError: If `idle` names a key that the chain does not have.

    Example:
        >>> from torchzero_clip import LR, Adam, ClipNorm
        >>> from torchzero_clip.testing import check_pure
        >>> check_pure(ClipNorm(1.0), Adam(), LR(1e-3))
    """
    replayed = _replaying(transforms, shapes)
    without_replay = _replaying(transforms, shapes)
    for step, scale in enumerate(SCALES):
        for opt in (replayed, without_replay):
            _change(opt, step, scale)
        replayed.step()
        without_replay.engine = without_replay.engine.twin()  # a new engine has no recorded step
        without_replay.step()
        _check_limits(replayed)
        for ours, theirs in zip(_tensors(replayed), _tensors(without_replay), strict=True):
            same = torch.equal(ours.nan_to_num(), theirs.nan_to_num())
            assert same, (
                f"check_pure: step {step + 1} gives {ours} if it is replayed from a recording, but "
                f"{theirs} otherwise"
            )
    replays: Any = replayed.engine
    assert replays.replays.count, (
        f"check_pure: no step was replayed from a recording: {replays.replays.why}"
    )
    _check_effects(transforms, shapes, idle)


def _check_limits(opt: Modular) -> None:
    """Raise an AssertionError if a rule about norms returned a limit that is negative or NaN."""
    measured = opt.metrics()
    for link in opt.keys.links:
        norm = measured.get(f"{link.path}/norm")
        limit = measured.get(f"{link.path}/limit")
        if not isinstance(link.transform, NormRule) or norm is None or limit is None:
            continue
        bad = (limit < 0) | (limit.isnan() & (norm > 0))
        assert not bad.any(), (
            f"check_pure: {link.path}.limit must return numbers of at least 0, got "
            f"{limit[bad].tolist()} for the norms {norm[bad].tolist()}"
        )


def _check_effects(transforms: Sequence[Transform], shapes: Shapes, idle: Collection[str]) -> None:
    """Raise an AssertionError if a live value has no effect and is not declared idle."""
    keys = _optimizer(transforms, shapes).keys
    for key in idle:
        if key not in keys.defaults:
            raise ValueError(
                "check_pure: idle= must contain only hyperparameters of this chain, which "
                f"are {list(keys.defaults)}, got {key!r}{hint(key, keys.defaults)}"
            )
    usual = list(_steps(transforms, shapes, {}))
    for link in keys.links:
        for name, key in link.keys.items():
            value = getattr(link.transform, name)
            tried = [other for other in alternatives(value) if accepts(link.transform, name, other)]
            runs = [_steps(transforms, shapes, {key: other}) for other in tried]
            if key in idle or not tried or any(_differ(usual, run) for run in runs):
                continue
            *others, last = map(repr, [value, *tried])
            raise AssertionError(
                f"{link.path}: the hyperparameter {key!r} has no effect: steps with "
                f"{', '.join(others)} and {last} are equal. The class must read "
                f"group[{name!r}]. If the class uses {name} only for certain parameters, pass "
                f"shapes= of such parameters. If this chain does not use {name}, pass "
                f"idle=[{key!r}]"
            )


def _steps(
    transforms: Sequence[Transform], shapes: Shapes, values: dict[str, Any]
) -> Iterator[list[Tensor]]:
    """Yield copies of all tensors after each step. The group has the given live values."""
    opt = _optimizer(transforms, shapes, fused=False)
    opt.param_groups[0].update(values)
    for step, scale in enumerate(SCALES * ROUNDS):
        _give_gradients(opt, step, scale)
        opt.step()
        yield [t.nan_to_num() for t in _tensors(opt)]


def _differ(first_run: Iterable[list[Tensor]], second_run: Iterable[list[Tensor]]) -> bool:
    """Return whether two runs differ. Steps are compared up to the first difference."""
    for first, second in zip(first_run, second_run, strict=True):
        if len(first) != len(second) or not all(map(torch.equal, first, second)):
            return True
    return False


def alternatives(value: Any) -> list[Any]:
    """List values to try in place of a live value: first close values, then extreme values."""
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [0.5, 1e-3]
    if isinstance(value, tuple):
        changed = [(i, other) for i, entry in enumerate(value) for other in alternatives(entry)]
        return [(*value[:i], other, *value[i + 1 :]) for i, other in changed]
    if isinstance(value, int):
        return [other for other in (value + 1, 1, 2, 0, 50) if other != value]
    if isinstance(value, float):
        close = (0.5 * value, 2 * value, 1.02, 0.5)
        return [other for other in (*close, 1e-3, 1e3, 0.0) if other != value]
    return []  # a function, for example, or a name


def accepts(transform: Description, name: str, value: Any) -> bool:
    """Return whether a transform accepts a value for one of its fields."""
    try:
        transform.with_values({name: value})
    except (TypeError, ValueError):
        return False
    return True


def _optimizer(transforms: Sequence[Transform], shapes: Shapes, **options: Any) -> Modular:
    """Return an optimizer over parameters that are the same at every call."""
    if not isinstance(shapes, Mapping):
        shapes = {f"layer{i // 2}.{i}": shape for i, shape in enumerate(shapes)}
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    opt = Modular([(name, Parameter(t)) for name, t in values.items()], *transforms, **options)
    opt._is_trial = True  # this rank alone checks the chain
    return opt


def _replaying(transforms: Sequence[Transform], shapes: Shapes) -> Modular:
    """Return an optimizer that replays its steps and compiles nothing."""
    opt = _optimizer(transforms, shapes, compile=True)
    opt.engine = opt.engine.twin()
    return opt


def _change(opt: Modular, step: int, scale: float) -> None:
    """Change the gradients, and change the live values to other values that the chain accepts."""
    _give_gradients(opt, step, scale)
    for group in opt.param_groups:
        for key in opt.keys.defaults:
            _move(opt, group, key)


def _give_gradients(opt: Modular, step: int, scale: float) -> None:
    """Give every parameter the gradient of this step."""
    generator = torch.Generator().manual_seed(step)
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = scale * torch.randn(p.shape, generator=generator)


def _move(opt: Modular, group: dict[str, Any], key: str) -> None:
    """Decrease a live value by one percent. If the chain refuses the new value, increase it."""
    value = group[key]
    for factor in (0.99, 1.01, 1.0):
        group[key] = factor * value if type(value) is float else value
        if type(value) is tuple:
            group[key] = tuple([factor * x if type(x) is float else x for x in value])
        try:
            opt.keys.check_groups(opt.param_groups)
            return
        except ValueError:
            continue


def _tensors(opt: Modular) -> list[Tensor]:
    """Return all tensors that a step may change: parameters, state and metrics."""
    groups = opt.param_groups
    params = [p for group in groups for p in group["params"]]
    values: list[Any] = [*params]
    for p in params:
        values += opt.state[p].values()
    for group in groups:
        values += group["chain"].values()
    values += opt.metrics().values()
    return [x.detach() for x in values if isinstance(x, Tensor)]
