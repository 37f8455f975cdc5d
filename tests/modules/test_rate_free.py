"""Prodigy and DAdaptAdam: d by hand, and that it is one number for the whole model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import about, equal, gradients, parameters, same, saved, set_grads, train
from torchzero_clip import LR, DAdaptAdam, Guard, Modular, Prodigy, WeightDecay

CHAINS: dict[str, Any] = {
    "Prodigy": lambda: (Prodigy(d0=0.01, weight_decay=0.1, use_bias_correction=True), LR(1.0)),
    "DAdaptAdam": lambda: (DAdaptAdam(d0=0.01, weight_decay=0.1, use_bias_correction=True),),
}
each = pytest.mark.parametrize("name", CHAINS)
engines = pytest.mark.parametrize("compile", [False, True])


def optimizer(params: Any, *links: Any, compile: bool = False, **options: Any) -> Modular:
    """An optimizer; a compiled one replays its steps in Python."""
    opt = Modular(params, *links, compile=compile, **options)
    if compile:
        opt.engine = opt.engine.twin()
    return opt


def numbers(opt: Modular) -> dict[str, Any]:
    """What is kept once for the model."""
    return {k: x for k, x in opt.param_groups[0]["chain"].items() if "/" in k}


def everything(opt: Modular) -> Any:
    return [{k: x.clone() for k, x in held.items()} for held in opt.state.values()]


def downhill(opt: Modular, w: Parameter, steps: int) -> list[tuple[float, float]]:
    """d and the weight after each step of a gradient that is 1."""
    seen = []
    for _ in range(steps):
        w.grad = torch.ones_like(w)
        opt.step()
        ((key, d),) = opt.metrics().items()
        assert key.endswith("/d")
        seen.append((d.item(), w.item()))
    return seen


def test_prodigy_by_hand():
    """s is 1/2, 3/4, 7/8; r is 0, 1/4, 5/8; steps are as long as d is."""
    w = Parameter(torch.zeros(1, dtype=torch.float64))
    opt = Modular([w], Prodigy((0.0, 0.0), 0.5, 1e-30, d0=0.5), LR(1.0))
    assert downhill(opt, w, 4) == [
        about((0.5, -0.5)),
        about((0.5, -1.0)),
        about((5 / 7, -1 - 5 / 7)),
        about((_fourth(), -1 - 5 / 7 - _fourth())),
    ]


def _fourth() -> float:
    """d² is 25 / 49, of which s and r are times 2, that is over d0."""
    s, r = 7 / 16 + 2 * 25 / 49, 5 / 16 + 2 * 25 / 49 * (1 + 5 / 7)
    return r / s


def test_dadapt_adam_by_hand():
    w = Parameter(torch.zeros(1, dtype=torch.float64))
    opt = Modular([w], DAdaptAdam(1.0, (0.0, 0.25), 1e-30, d0=0.5))
    first, second = 3 / 4, 15 / 16  # v
    r = [0.0, 0.5 * 0.5 * 0.25 / math.sqrt(first)]
    r.append(0.5 * r[1] + 0.5 * 0.5 * 0.375 / math.sqrt(second))
    found = downhill(opt, w, 3)
    assert [d for d, _ in found] == about([0.5, 0.5, 2 * r[2] / 0.4375])
    assert found[1][1] == about(-0.5 / math.sqrt(first) - 0.5 / math.sqrt(second))


@each
@engines
def test_a_parameter_that_is_unfrozen_late_goes_on_with_the_same_d(name, compile):
    early, late = Parameter(torch.zeros(3)), Parameter(torch.full((2,), 5.0))
    opt = optimizer([{"params": [early]}, {"params": [late]}], *CHAINS[name](), compile=compile)
    for _ in range(15):
        early.grad = torch.ones_like(early)
        opt.step()
    d = opt.metrics()[f"{name}/d"].item()
    assert d > 20 * 0.01
    late.grad = torch.ones_like(late)
    opt.step()
    moved = (5.0 - late.detach()) / d
    assert ((moved > 0.1) & (moved < 2)).all(), "a step of the d that there was, not of d0"
    for key, held in numbers(opt).items():
        assert opt.param_groups[1]["chain"][key] is held
    if name == "Prodigy":
        assert opt.state[late]["Prodigy/start"].tolist() == [5.0, 5.0]


@each
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"compile": True}], ids=str)
def test_a_step_that_a_guard_skips_leaves_d_and_all_state(name, options):
    params = parameters()
    opt = optimizer(params.items(), Guard(), *CHAINS[name](), **options)
    train(params, opt, range(3))
    kept = [{k: x.clone() for k, x in numbers(opt).items() if k.startswith(name)}]
    kept += [everything(opt), [p.detach().clone() for p in params.values()]]
    grads = gradients(seed=9)
    grads["head.scale"] = torch.full_like(grads["head.scale"], torch.nan)
    set_grads(params, grads)
    opt.step()
    assert opt.metrics()["Guard/skipped"] == 1
    now = [{k: x for k, x in numbers(opt).items() if k.startswith(name)}, everything(opt)]
    assert equal([*now, [p.detach() for p in params.values()]], kept)


@each
@engines
def test_a_run_that_is_resumed_goes_on_bit_for_bit(name, compile):
    params, others = parameters(), parameters()
    opt = optimizer(params.items(), *CHAINS[name](), compile=compile)
    train(params, opt, range(4))
    other = optimizer(others.items(), *CHAINS[name](), compile=compile)
    with torch.no_grad():
        for key, p in others.items():
            p.copy_(params[key])
    other.load_state_dict(saved(opt.state_dict()))
    train(params, opt, range(4, 8)), train(others, other, range(4, 8))
    same(params, others)
    assert equal(numbers(opt), numbers(other))


@each
@engines
def test_a_step_without_a_learning_rate_leaves_everything_as_it_was(name, compile):
    params = parameters()
    opt = optimizer(params.items(), *CHAINS[name](), compile=compile)
    for start in (0, 3):
        kept = [{k: x.clone() for k, x in numbers(opt).items()}, everything(opt)]
        before = {key: p.detach().clone() for key, p in params.items()}
        opt.param_groups[0]["lr"] = 0.0
        train(params, opt, [start])
        same(params, before)
        assert not kept[1] or equal([numbers(opt), everything(opt)], kept)
        opt.param_groups[0]["lr"] = 1.0
        train(params, opt, range(start + 1, start + 3))
    assert numbers(opt)[f"{name}/step"] == 4


@each
def test_a_group_without_a_learning_rate_has_no_part_in_d(name):
    """Its authors' code moves such a group by its old momentum."""
    params, others = parameters(), parameters()
    rest = params.pop("embed.weight")
    others.pop("embed.weight")
    groups = [{"params": list(params.values())}, {"params": [rest], "lr": 0.0}]
    before = rest.detach().clone()
    opt, other = Modular(groups, *CHAINS[name]()), Modular(others.values(), *CHAINS[name]())
    for step in range(5):
        rest.grad = torch.full_like(rest, 1e3)
        train(params, opt, [step]), train(others, other, [step])
    same(params, others)
    assert equal(numbers(opt), numbers(other))
    assert rest.equal(before)


@each
def test_d_does_not_depend_on_how_parameters_are_divided_into_groups(name):
    params, others = parameters(), parameters()
    rows = list(others.values())
    opt = Modular(params.values(), *CHAINS[name]())
    other = Modular([{"params": rows[::2]}, {"params": rows[1::2]}], *CHAINS[name]())
    for _ in range(8):
        for some, one in ((params, opt), (others, other)):
            for i, p in enumerate(some.values()):
                p.grad = torch.full_like(p, i + 1.0)
            one.step()
        d, same_d = [one.metrics()[f"{name}/d"].item() for one in (opt, other)]
        assert d == about(same_d)
    assert d > 2 * 0.01


def test_the_start_of_prodigy_is_as_exact_as_the_weights_where_state_is_small():
    w = Parameter(torch.tensor([1.001, 2.0]))
    opt = Modular([w], *CHAINS["Prodigy"](), state_dtype="bfloat16", compile=True)
    w.grad = torch.ones(2)
    before = w.detach().clone()
    opt.step()
    assert opt.state[w]["Prodigy/s"].dtype == torch.bfloat16
    assert opt.state[w]["Prodigy/start"].equal(before)


def test_prodigy_asks_for_a_learning_rate_behind_it():
    with pytest.raises(ValueError, match="Prodigy"):
        Modular([Parameter(torch.zeros(1))], Prodigy())


def test_a_decay_that_d_does_not_scale_is_warned_of():
    w = Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match="remove WeightDecay, and pass weight_decay to Prodigy"):
        Modular([w], Prodigy(), WeightDecay(0.01), LR(1.0))
    Modular([w], WeightDecay(0.01), Prodigy(), LR(1.0))
