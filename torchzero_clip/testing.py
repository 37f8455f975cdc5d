"""Checks for rules of your own, to be called from tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip.core import Transform
from torchzero_clip.optimizer import Modular

__all__ = ["check_pure"]

SHAPES = ((5, 4), (4,), (), (3, 4), (1,))
SCALES = (1.0, 2.0, 0.5, 1e-4, 50.0, 1.0, 0.0, 1.0)


def check_pure(*transforms: Transform, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
    """Raise an AssertionError unless steps of this chain are repeated, and as they are anew.

    Gradients and live values change from step to step. Nothing is compiled for it.

    Args:
        *transforms: The chain.
        shapes: Those of the parameters that it is tried on.

    Example:
        >>> from torchzero_clip import LR, Adam, ClipNorm
        >>> from torchzero_clip.testing import check_pure
        >>> check_pure(ClipNorm(1.0), Adam(), LR(1e-3))
    """
    repeated, anew = [_optimizer(transforms, shapes) for _ in range(2)]
    for step, scale in enumerate(SCALES):
        for opt in (repeated, anew):
            _change(opt, step, scale)
        repeated.step()
        anew.engine = anew.engine.twin()  # which knows of no step before
        anew.step()
        for ours, theirs in zip(_all(repeated), _all(anew), strict=True):
            same = torch.equal(ours.nan_to_num(), theirs.nan_to_num())
            assert same, (
                f"step {step + 1} is not the same where it is repeated: {ours} and {theirs}"
            )
    repeats: Any = repeated.engine
    assert repeats.repeats.count, f"no step was repeated: {repeats.repeats.why}"


def _optimizer(transforms: Sequence[Transform], shapes: Sequence[tuple[int, ...]]) -> Modular:
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    named = [(f"layer{i // 2}.{i}", p) for i, p in enumerate(params)]
    opt = Modular(named, *transforms, compile=True)
    opt.engine = opt.engine.twin()  # nothing is compiled
    opt._is_trial = True  # this rank alone checks the chain
    return opt


def _change(opt: Modular, step: int, scale: float) -> None:
    """Other gradients, and other live values that are allowed where these are."""
    generator = torch.Generator().manual_seed(step)
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = scale * torch.randn(p.shape, generator=generator)
        for key in opt.keys.defaults:
            _move(opt, group, key)


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
