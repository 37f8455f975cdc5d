"""Parameters without a gradient, with a sparse one, or none at all, over the whole table."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import flow, gradients, parameters, same, set_grads
from tests.modules.contract.common import growing
from tests.table import every, sampled
from torchzero_clip import Modular


@sampled(lambda case: not case.draws, one_in=2)
def test_the_default_device_does_not_matter(case):
    steps = growing(case, 4)
    expected = flow(case.make(), parameters(case.shapes), steps)
    rule, params = case.make(), parameters(case.shapes)
    with torch.device("meta"):
        found = flow(rule, params, steps)
    same(found, expected)


@every()
def test_parameters_without_a_gradient_are_untouched_and_have_no_state(case):
    params = parameters(case.shapes)
    frozen = params["head.weight"].requires_grad_(False)
    missing = params["conv.weight"]
    before = {name: p.detach().clone() for name, p in params.items()}
    opt = Modular(params.items(), case.make())
    for step in growing(case, 2):
        set_grads(
            params, {n: g for n, g in step.items() if n not in ("head.weight", "conv.weight")}
        )
        opt.step()
    for name, p in (("head.weight", frozen), ("conv.weight", missing)):
        assert p.equal(before[name])
        assert p.grad is None
        assert p not in opt.state or not opt.state[p]


@every()
def test_a_parameter_without_a_gradient_counts_for_nobody(case):
    names = [name for name in case.shapes if name != "conv.weight"]
    few = {name: case.shapes[name] for name in names}
    steps = [{n: g for n, g in step.items() if n in few} for step in growing(case, 3)]
    turns = any(getattr(tfm, "stagger", False) for tfm in case.make().walk())
    last = {**few, "conv.weight": case.shapes["conv.weight"]}  # a turn is that of its place
    out = flow(case.make(), parameters(last if turns else case.shapes), steps)
    for a, b in zip(out, flow(case.make(), parameters(few), steps), strict=True):
        same(a, b)


@every()
def test_no_gradients_at_all_is_a_step_that_does_nothing(case):
    params = parameters(case.shapes)
    before = {name: p.detach().clone() for name, p in params.items()}
    opt = Modular(params.items(), case.make())
    opt.step()
    same(params, before)
    assert not opt.state


@every()
def test_a_sparse_gradient_raises_a_sentence_and_changes_nothing(case):
    params = parameters(case.shapes)
    opt = Modular(params.items(), case.make())
    set_grads(params, gradients(case.shapes))
    params["conv.weight"].grad = params["conv.weight"].grad.to_sparse()
    before = {name: p.detach().clone() for name, p in params.items()}
    place = list(case.shapes).index("conv.weight")
    sentence = rf"sparse gradients.*\(2, 3, 2, 2\).*parameter {place} of group 0"
    with pytest.raises(TypeError, match=sentence):
        opt.step()
    same(params, before)
    assert not opt.state
