"""Checks for rules of your own, to be called from tests."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip.core import Description, Transform
from torchzero_clip.core.names import hint
from torchzero_clip.optimizer import Modular

__all__ = ["check_pure"]

Shapes: TypeAlias = Sequence[tuple[int, ...]] | Mapping[str, tuple[int, ...]]
SHAPES = ((5, 4), (4,), (), (3, 4), (1,))
SCALES = (1.0, 2.0, 0.5, 1e-4, 50.0, 1.0, 0.0, 1.0)
ROUNDS = 4
"""How often a run goes through the scales before a live value is said to have no effect."""


def check_pure(
    *transforms: Transform,
    shapes: Shapes = SHAPES,
    idle: Collection[str] = (),
) -> None:
    """Raise an AssertionError unless replayed steps of this chain equal steps without replay.

    Gradients and live values change from step to step. Nothing is compiled.

    It also raises if a live value has no effect, that is, if parameters, state and metrics stay the
    same whatever this value is in `param_groups`. The usual reason is a rule that reads `self.gain`
    instead of `group["gain"]`.

    Args:
        *transforms: The chain.
        shapes: The shapes of the parameters that the chain is tried on, or a dict of names and
            shapes if the chain selects parameters by name.
        idle: Live values that have no effect in this chain on purpose, by their key in
            `param_groups`: for example "percentile" of an `AutoClip` whose mode does not use it.

    Example:
        >>> from torchzero_clip import LR, Adam, ClipNorm
        >>> from torchzero_clip.testing import check_pure
        >>> check_pure(ClipNorm(1.0), Adam(), LR(1e-3))
    """
    replayed = _replaying(transforms, shapes)
    anew = _replaying(transforms, shapes)
    for step, scale in enumerate(SCALES):
        for opt in (replayed, anew):
            _change(opt, step, scale)
        replayed.step()
        anew.engine = anew.engine.twin()  # which knows of no step before
        anew.step()
        for ours, theirs in zip(_all(replayed), _all(anew), strict=True):
            same = torch.equal(ours.nan_to_num(), theirs.nan_to_num())
            assert same, (
                f"step {step + 1} is not the same where it is replayed: {ours} and {theirs}"
            )
    replays: Any = replayed.engine
    assert replays.replays.count, f"no step was replayed: {replays.replays.why}"
    _check_effects(transforms, shapes, idle)


def _check_effects(transforms: Sequence[Transform], shapes: Shapes, idle: Collection[str]) -> None:
    """Raise an AssertionError for a live value that changes nothing and is not declared idle."""
    keys = _optimizer(transforms, shapes).keys
    for key in idle:
        if key not in keys.defaults:
            raise ValueError(
                f"check_pure: idle names {key!r}, which is no live value of this chain"
                f"{hint(key, keys.defaults)}; it has {list(keys.defaults)}"
            )
    usual = list(_steps(transforms, shapes, {}))
    for link in keys.links:
        for name, key in link.keys.items():
            value = getattr(link.transform, name)
            tried = [other for other in alternatives(value) if accepts(link.transform, name, other)]
            runs = [_steps(transforms, shapes, {key: other}) for other in tried]
            if key in idle or not tried or any(_differ(usual, run) for run in runs):
                continue
            *most, last = map(repr, [value, *tried])
            raise AssertionError(
                f"{link.path}: the live value {key!r} has no effect: with {', '.join(most)} and "
                f"{last} the steps are the same; let the rule read group[{name!r}], pass shapes= "
                f"of parameters that reach the rule, or pass idle=[{key!r}] if this chain does not "
                "use it"
            )


def _steps(
    transforms: Sequence[Transform], shapes: Shapes, values: dict[str, Any]
) -> Iterator[list[Tensor]]:
    """Yield copies of what each step leaves, with these live values in the group."""
    opt = _optimizer(transforms, shapes, fused=False)
    opt.param_groups[0].update(values)
    for step, scale in enumerate(SCALES * ROUNDS):
        _give_gradients(opt, step, scale)
        opt.step()
        yield [t.nan_to_num() for t in _all(opt)]


def _differ(some: Iterable[list[Tensor]], others: Iterable[list[Tensor]]) -> bool:
    """Whether two runs differ, compared step by step up to the first difference."""
    for one, other in zip(some, others, strict=True):
        if len(one) != len(other) or not all(map(torch.equal, one, other)):
            return True
    return False


def alternatives(value: Any) -> list[Any]:
    """List other values to try in the place of a live value: close ones, then extreme ones."""
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
    """Whether a transform accepts the value in one of its fields."""
    try:
        transform.with_values({name: value})
    except (TypeError, ValueError):
        return False
    return True


def _optimizer(transforms: Sequence[Transform], shapes: Shapes, **options: Any) -> Modular:
    """Make an optimizer over parameters that are the same at every call."""
    if not isinstance(shapes, Mapping):
        shapes = {f"layer{i // 2}.{i}": shape for i, shape in enumerate(shapes)}
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    opt = Modular([(name, Parameter(t)) for name, t in drawn.items()], *transforms, **options)
    opt._is_trial = True  # this rank alone checks the chain
    return opt


def _replaying(transforms: Sequence[Transform], shapes: Shapes) -> Modular:
    """Make an optimizer that replays its steps, and compiles nothing."""
    opt = _optimizer(transforms, shapes, compile=True)
    opt.engine = opt.engine.twin()
    return opt


def _change(opt: Modular, step: int, scale: float) -> None:
    """Other gradients, and other live values that are allowed where these are."""
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
    """Move a live value, up where it stands at its lower bound."""
    value = group[key]
    for by in (0.99, 1.01, 1.0):
        group[key] = by * value if type(value) is float else value
        if type(value) is tuple:
            group[key] = tuple([by * x if type(x) is float else x for x in value])
        try:
            opt.keys.check_groups(opt.param_groups)
            return
        except ValueError:
            continue


def _all(opt: Modular) -> list[Tensor]:
    """All that a step may change."""
    groups = opt.param_groups
    states = [opt.state[p] for group in groups for p in group["params"]]
    held = itertools.chain(
        *[state.values() for state in states], *[g["chain"].values() for g in groups]
    )
    made = [*[p for g in groups for p in g["params"]], *held, *opt.metrics().values()]
    return [t.detach() for t in made if isinstance(t, Tensor)]
