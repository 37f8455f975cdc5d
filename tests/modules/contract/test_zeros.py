"""Zero gradients: what every transform promises of them, over the whole table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.helpers import SHAPES, at_once, flow, gradients, parameters, same, set_grads
from tests.modules.contract.common import SICK, growing
from tests.modules.rows.row import with_lr
from tests.table import Case, every, mechanisms
from torchzero_clip import CAME, LR, Modular, Prodigy, Transform


@every()
def test_zero_gradients_give_zero_or_what_the_parameters_add(case):
    params, zeros = parameters(case.shapes), gradients(case.shapes, scale=0.0)
    for out in flow(case.make(), params, [zeros] * 3):
        for name, u in out.items():
            assert u.isfinite().all(), name
            assert case.adds or not u.any(), name


@every()
def test_a_zero_gradient_after_others_gives_finite_values(case):
    steps = [*growing(case, 2), gradients(case.shapes, scale=0.0), *growing(case, 2)]
    for out in flow(case.make(), parameters(case.shapes), steps):
        assert all(u.isfinite().all() for u in out.values())


@every()
def test_one_tensor_of_zeros_among_others_stays_zero(case):
    grads = growing(case, 3)
    for step in grads:
        step[SICK].zero_()
    params = parameters(case.shapes)
    for out in flow(case.make(), params, grads):
        assert all(u.isfinite().all() for u in out.values())
        if not (case.adds or case.nonfinite == "shown"):  # a common mean is taken off zeros too
            assert SICK not in out or not out[SICK].any()


@every()
def test_a_step_with_zero_gradients_and_lr_0_changes_no_parameter(case):
    params = parameters(case.shapes)
    before = {name: p.detach().clone() for name, p in params.items()}
    opt = Modular(params.items(), *with_lr(case.make(), 0.0))
    for group in opt.param_groups:
        group["lr"] = 0.0
    set_grads(params, gradients(case.shapes, scale=0.0))
    opt.step()
    same(params, before)


LEAST = 1e-45  # the smallest number of float32, whose inverse is infinite
SCALED = {CAME: CAME(eps=(1e-30, 1e-38)), Prodigy: Prodigy(eps=1e-38)}
"""What multiplies eps by what is below 1, so that nothing is left of the smallest one, with one of
which something is."""


def has_eps(case: Case) -> bool:
    return "eps" in case.make().live and case.cls not in SCALED


@every(has_eps)
def test_a_zero_gradient_over_the_smallest_eps_is_finite(case):
    """u / x is computed, and not u times 1 / x."""
    check_zeros(with_lr(case.make(), 0.1), case.shapes, {"eps": LEAST})


@mechanisms(has_eps)
def test_in_cpp_a_zero_gradient_over_the_smallest_eps_is_finite(case):
    check_zeros(with_lr(case.make(), 0.1), case.shapes, {"eps": LEAST}, cpp=True)


@at_once("rule", SCALED.values())
def test_a_zero_gradient_over_an_eps_of_which_something_is_left_is_finite(rule: Transform) -> None:
    check_zeros([rule, LR(0.1)], SHAPES, {})


ENGINES: Sequence[dict[str, bool]] = ({"compile": True}, {"fused": False}, {})


def check_zeros(
    chain: list[Transform], shapes: Any, live: dict[str, float], cpp: bool = False
) -> None:
    """Steps with gradients of zeros, with these live values, leave numbers: in every engine, whose
    replays are in Python, or in C++."""
    for how in ENGINES[:1] if cpp else ENGINES:
        params = parameters(shapes)
        opt = Modular(params.items(), *chain, **how)
        if not cpp:
            opt.engine = opt.engine.twin()
        for group in opt.param_groups:
            group.update(live)
        for _ in range(4):
            set_grads(params, gradients(shapes, scale=0.0))
            opt.step()
        assert all(p.isfinite().all() for p in params.values()), how
