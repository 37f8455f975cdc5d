"""Keys of state and metrics are the same in every engine, whether or not a guard skips the step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.helpers import SHAPES, Named, gradients, parameters, set_grads
from tests.modules.rows.row import with_lr
from tests.table import Case, sampled
from torchzero_clip import (
    LR,
    Accumulate,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    Clipper,
    Guard,
    InBasis,
    Modular,
    Momentum,
    Noise,
    Normalize,
    SkipLarge,
    SOAPBasis,
    Transform,
    Watch,
    ZClip,
    release,
)

Links = Callable[[], Sequence[Transform]]

ENGINES: dict[str, dict[str, bool]] = {
    "fused=False": {"fused": False},
    "default": {},
    "compile": {"compile": True},
}
SKIPPED, HAPPENED = 1e8, 1.0  # what gradients are multiplied by
CHAINS: dict[str, Links] = {
    "Adam": lambda: [Adam(), LR(0.1)],
    "Momentum": lambda: [Momentum(), LR(0.1)],
    "SOAP that skips": lambda: [InBasis(SOAPBasis(), Adam()), LR(0.1)],
    "SOAP that steps": lambda: [InBasis(SOAPBasis(first="step"), Adam()), LR(0.1)],
    "ZClip": lambda: [ZClip(), Adam(), LR(0.1)],
    "ClipNormGrowth": lambda: [ClipNormGrowth(), LR(0.1)],
    "ClipNormGrowth of all": lambda: [Momentum(), ClipNormGrowth(dim="global"), LR(0.1)],
    "Accumulate": lambda: [Accumulate(2), ClipNorm(1.0), Adam(), LR(0.1)],
    "Normalize": lambda: [Normalize(), LR(0.1)],
    "Normalize after Momentum": lambda: [Momentum(), Normalize(), LR(0.1)],
    "Noise": lambda: [Noise(0.1), ClipNorm(1.0), Adam(), LR(0.1)],
    "Watch": lambda: [Momentum(), LR(0.1), Watch("global")],
    "Watch now and then": lambda: [Adam(), LR(0.1), Watch(every=2)],
}
KINDS = [
    ("nearest", torch.float32),
    ("nearest", torch.bfloat16),
    ("exact", torch.bfloat16),
    ("kahan", torch.bfloat16),
    ("stochastic", torch.bfloat16),
]
TURNS = [  # each chain with one of the kinds, and Adam with all, are quick
    pytest.param(
        name,
        *kind,
        marks=() if name == "Adam" or i % len(KINDS) == j else pytest.mark.slow,
        id=f"{name}-{kind[0]}-{kind[1]}",
    )
    for i, name in enumerate(CHAINS)
    for j, kind in enumerate(KINDS)
]
IN_CPP = ("Adam", "ClipNormGrowth of all", "Watch now and then")


def made(
    links: Sequence[Transform],
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    cpp: bool = False,
    **options: Any,
) -> tuple[Named, Modular]:
    """Parameters and their optimizer, whose metrics are read from the first step on.

    A compiled step is replayed in Python unless `cpp` asks for the program in C++, which a compiler
    needs a fifth of a second for.
    """
    params = parameters(shapes, dtype)
    opt = Modular(list(params.items()), SkipLarge(1e4), *links, **options)
    if options.get("compile") and not cpp:
        opt.engine = opt.engine.twin()
    opt.metrics()
    return params, opt


def take(params: Named, opt: Modular, scale: float, number: int = 0) -> None:
    dtype = next(iter(params.values())).dtype
    shapes = {name: tuple(p.shape) for name, p in params.items()}
    set_grads(params, gradients(shapes, seed=number, dtype=dtype, scale=scale))
    opt.report(loss=1.0)
    opt.step()


def keys(params: Named, opt: Modular) -> dict[str, Any]:
    """The keys of the state, of the state dict and of the metrics, with the forms of metrics."""
    state_dict = opt.state_dict()
    return {
        "state": {name: set(opt.state[p]) for name, p in params.items()},
        "saved": {i: set(held) for i, held in state_dict["state"].items()},
        "groups": [set(group["chain"]) for group in state_dict["param_groups"]],
        "metrics": {name: tuple(value.shape) for name, value in opt.metrics().items()},
    }


def keys_of_steps(params: Named, opt: Modular) -> list[dict[str, Any]]:
    """The keys after each of four steps, of which one happens."""
    found = []
    for number, scale in enumerate([SKIPPED, SKIPPED, HAPPENED, SKIPPED]):
        take(params, opt, scale, number)
        found.append(keys(params, opt))
    return found


@pytest.mark.parametrize(("name", "rounding", "dtype"), TURNS)
def test_every_engine_has_the_same_keys_after_each_step(name, rounding, dtype):
    found = {}
    for engine, options in ENGINES.items():
        found[engine] = keys_of_steps(*made(CHAINS[name](), dtype, rounding=rounding, **options))
    assert found["fused=False"] == found["compile"]
    assert found["default"] == found["compile"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_CPP else pytest.mark.slow) for n in CHAINS]
)
def test_a_step_in_cpp_has_the_keys_of_its_replay(name):
    wide = {"dtype": torch.float32, "compile": True}
    program = keys_of_steps(*made(CHAINS[name](), cpp=True, **wide))
    assert program == keys_of_steps(*made(CHAINS[name](), **wide))


@sampled(one_in=2)
def test_every_rule_has_the_same_keys_after_skipped_steps(case: Case):
    found = {}
    for engine, options in ENGINES.items():
        links = with_lr(case.make(), 0.1)
        found[engine] = keys_of_steps(*made(links, torch.float32, case.shapes, **options))
    assert found["fused=False"] == found["compile"]
    assert found["default"] == found["compile"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("links", CHAINS.values(), ids=CHAINS)
def test_the_state_of_a_skipped_first_step_is_that_of_init_state(links, engine):
    params, opt = made(links(), torch.bfloat16, rounding="kahan", **ENGINES[engine])
    others, fresh = made(links(), torch.bfloat16, rounding="kahan", **ENGINES[engine])
    fresh.init_state()
    take(params, opt, SKIPPED)
    for name, p in params.items():
        assert opt.state[p].keys() == fresh.state[others[name]].keys()
        for key, value in fresh.state[others[name]].items():
            assert torch.equal(torch.as_tensor(opt.state[p][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("loading", ENGINES)
@pytest.mark.parametrize("saving", ENGINES)
@pytest.mark.parametrize(
    "name", ["Adam", "SOAP that skips", "ZClip", "ClipNormGrowth of all", "Accumulate"]
)
def test_a_checkpoint_after_a_skipped_first_step_loads_in_every_engine(name, saving, loading):
    links = CHAINS[name]
    params, opt = made(links(), torch.float32, **ENGINES[saving])
    take(params, opt, SKIPPED)
    saved = copy.deepcopy(opt.state_dict())
    others, loaded = made(links(), torch.float32, **ENGINES[loading])
    loaded.load_state_dict(saved)
    assert keys(others, loaded)["state"] == keys(params, opt)["state"]
    for number in (1, 2):
        take(params, opt, HAPPENED, number)
        take(others, loaded, HAPPENED, number)
        for name, p in params.items():
            torch.testing.assert_close(others[name], p, rtol=2e-4, atol=2e-4)


def test_metrics_that_a_skipped_step_did_not_measure_are_nan():
    params, opt = made([Momentum(), ClipNorm(1.0), LR(0.1)], torch.float32, fused=False)
    take(params, opt, SKIPPED)
    found = opt.metrics()
    assert found["SkipLarge/skipped"] == 1
    for name in ("norm", "limit", "factor"):
        assert found[f"ClipNorm/{name}"].isnan().all()
    assert not found["ClipNorm/clipped"].any()
    take(params, opt, HAPPENED)
    assert opt.metrics()["ClipNorm/norm"].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_metrics_that_a_skipped_step_measured_stay(engine):
    links = [ClipNorm(1.0, dim="global"), Adam(), LR(0.1)]
    params, opt = made(links, torch.float32, **ENGINES[engine])
    take(params, opt, SKIPPED)
    norm = math.sqrt(sum([p.grad.double().square().sum().item() for p in params.values()]))
    assert opt.metrics()["ClipNorm/norm"].item() == pytest.approx(norm, rel=1e-5)


def test_a_parameter_whose_first_gradient_is_skipped_later_gets_its_state():
    for options in ENGINES.values():
        params, opt = made([Momentum(), LR(0.1)], torch.float32, **options)
        late = params["head.one"]
        late.requires_grad_(False)
        set_grads(params, gradients() | {"head.one": None})
        opt.step()
        assert not opt.state[late]
        late.requires_grad_(True)
        take(params, opt, SKIPPED, 1)
        assert set(opt.state[late]) == {"Momentum/momentum_buffer", "Momentum/started"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rounding", ["nearest", "exact", "kahan", "stochastic"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_release_without_a_gradient_has_the_keys_of_a_plain_optimizer(
    engine, rounding, state_dtype
):
    found = []
    for make in (Modular, release):
        params = parameters(dtype=torch.bfloat16)
        options = {"rounding": rounding, "state_dtype": state_dtype, **ENGINES[engine]}
        opt = make(list(params.items()), ClipNorm(1.0), Adam(), LR(0.1), **options)
        opt.metrics()
        opt.step()
        found.append(keys(params, opt))
    assert found[0] == found[1]


@pytest.mark.parametrize("compile", [False, True])
def test_a_clipper_has_the_same_metrics_in_a_skipped_step_as_in_others(compile):
    params = parameters(dtype=torch.bfloat16)
    links = [SkipLarge(1e4), Momentum(), ClipNorm(1.0)]
    clipper = Clipper(list(params.values()), *links, compile=compile)
    clipper.metrics()
    found = []
    for number, scale in enumerate([SKIPPED, HAPPENED, SKIPPED]):
        take(params, clipper, scale, number)
        found.append(set(clipper.metrics()))
    assert found[0] == found[1] == found[2]


def test_two_guards_and_a_spike_in_the_second():
    found = {}
    for engine, options in ENGINES.items():
        params = parameters()
        links = [Guard(), SkipLarge(1e4), Momentum(), Normalize(), LR(0.1)]
        opt = Modular(list(params.items()), *links, **options)
        take(params, opt, SKIPPED)
        found[engine] = keys(params, opt)
    assert found["fused=False"] == found["compile"]
    assert found["default"] == found["compile"]
