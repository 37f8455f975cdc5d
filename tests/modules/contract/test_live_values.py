"""Every live value of every rule has an effect, and rules read it from `param_groups`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers import equal, gradients, parameters, set_grads
from tests.table import GOOD, Case, by_class
from torchzero_clip import LR, Chain, DAdaptAdam, Modular, NanToNum, Prodigy, Transform
from torchzero_clip.core import bind
from torchzero_clip.testing import accepts, alternatives

STEPS, MORE = 8, 32  # nearly every value has an effect in the first steps
CLASSES = by_class([case for case in GOOD if case.cls.live])
QUICK = list(CLASSES)[::6]


def runs_of(case: Case, tfm: Transform, values: dict[str, Any], fused: bool) -> Iterator[list[Any]]:
    """What each step leaves, with these live values in the group."""
    params = parameters(case.shapes)
    chain = [tfm] if owns_lr(tfm) or case.row.last else [tfm, LR(0.1)]
    opt = Modular(params.items(), *chain, fused=fused)
    opt.param_groups[0].update(values)
    for step in range(MORE):
        scale = (1.0, 2.0, 0.5, 1e-4, 50.0, 1.0, 0.0, 1.0)[step % 8]
        if case.cls in (Prodigy, DAdaptAdam):  # their distance grows while gradients agree
            grads = gradients(case.shapes)
        else:
            grads = gradients(case.shapes, step, scale=scale)
        if case.cls is NanToNum:
            for grad in grads.values():
                grad.view(-1)[0] = (torch.nan, torch.inf, -torch.inf)[step % 3]
        set_grads(params, grads)
        opt.step()
        kept = [dict(opt.state[p]) for p in params.values()]
        kept += [group["chain"] for group in opt.param_groups]
        found = [value for values in (params, *kept, opt.metrics()) for value in values.values()]
        yield [t.detach().nan_to_num() for t in found if isinstance(t, torch.Tensor)]


def owns_lr(tfm: Transform) -> bool:
    return any("lr" in inner.live for inner in tfm.walk())


def with_values(case: Case, tfm: Transform, values: dict[str, Any]) -> Transform:
    """The construction of the row with other arguments, which may stand in a chain."""
    if isinstance(tfm, case.cls):
        return tfm.with_values(values)
    assert isinstance(tfm, Chain)
    return Chain(*[with_values(case, link, values) if has(case, link) else link for link in tfm])


def has(case: Case, tfm: Transform) -> bool:
    return any(isinstance(inner, case.cls) for inner in tfm.walk())


def differ(some: list[list[Any]], others: Iterator[list[Any]]) -> bool:
    return any(not equal(one, other) for one, other in zip(some, others, strict=False))


def check_values(case: Case, names: set[str], steps: int) -> set[str]:
    """Check the values that have an effect in this construction; returns those that have none."""
    idle, tfm = set(), case.make()
    rule = next(inner for inner in tfm.walk() if isinstance(inner, case.cls))
    usual = list(itertools.islice(runs_of(case, tfm, {}, fused=False), steps))
    for name in sorted(names):
        tried = [x for x in alternatives(getattr(rule, name)) if accepts(rule, name, x)]
        key = key_of(case, tfm, name)
        effects = (x for x in tried if differ(usual, runs_of(case, tfm, {key: x}, fused=False)))
        other = next(effects, None)
        if other is None:
            idle.add(name)
            continue
        changed = with_values(case, tfm, {name: other})
        for fused in (False, True):
            in_group = runs_of(case, tfm, {key: other}, fused)
            made_with = runs_of(case, changed, {}, fused)
            for ours, theirs in itertools.islice(zip(in_group, made_with, strict=True), STEPS):
                assert equal(ours, theirs), f"{case}: {name}={other!r} is not read from the group"
    return idle


def key_of(case: Case, tfm: Transform, name: str) -> str:
    """The name in `param_groups` that is always accepted."""
    links = bind(Chain(tfm))
    inner = next(x for top in links for x in top.walk() if isinstance(x.transform, case.cls))
    return f"{inner.path}/{name}"


@pytest.mark.filterwarnings("ignore:Momentum. momentum should be below 1.*:UserWarning")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(cases, id=cls.__name__, marks=() if cls in QUICK else pytest.mark.slow)
        for cls, cases in CLASSES.items()
    ],
)
def test_every_live_value_has_an_effect_and_is_read_from_the_group(cases: list[Case]) -> None:
    """In one of the constructions of each class: some have a mode that does not use a value."""
    left = set(cases[0].cls.live)
    for steps, case in itertools.product((STEPS, MORE), cases):
        left = check_values(case, left, steps)
        if not left:
            return
    pytest.fail(f"{cases[0].cls.__name__}: {sorted(left)} change nothing")
