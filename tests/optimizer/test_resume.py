"""A run that is saved, loaded in a fresh process and continued is the same run, to the last bit."""

from __future__ import annotations

import copy
import functools
import itertools
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import Named, Tensors, gradients, parameters, same, set_grads
from tests.modules.rows.row import with_lr
from tests.processes.launch import python
from tests.table import GOOD, Case, by_class, over
from torchzero_clip import (
    CAME,
    EMA,
    LR,
    Adam,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    ClipValueByEMA,
    Modular,
    Momentum,
    Scale,
    Transform,
    named,
    take_over,
)
from torchzero_clip.published import NAMES

pytestmark = pytest.mark.xdist_group("resume")  # one worker makes the runs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# All that remember something; of the others, whose state is their live values, one each.
CASES = [c for c in GOOD if c.memory != "none" or c.adds or c.label == next(iter(c.good))]
HEADLINES = [next(case for case in CASES if case.cls is cls) for cls in by_class(CASES)]
OTHERS = [case for case in CASES if case not in HEADLINES]
MECHANISMS = {
    "ClipValue-0.5",  # elements alone
    "ClipNorm-tensor",  # norms
    "ClipNormGrowth-tensor",  # state for each norm
    "AutoClip-tensor",  # a window of norms
    "Adam-default",  # averages in the shape of the parameters
    "Adafactor-default",  # averages of rows and columns
    "Prodigy-default",  # scalars of the whole model
    "Accumulate-2",  # steps without an update
    "Guard-zero",  # steps that are skipped
    "InBasis-soap",  # matrices
    "ScheduleFree-default",  # averaged weights
}
"""Constructions whose state, taken together, is of every kind."""
COMPILED = {
    "ClipNormGrowth-tensor",
    "Adam-default",
    "Prodigy-default",
    "Guard-zero",
    "InBasis-soap",
    "ScheduleFree-default",
}
"""Of these the constructions whose compiled steps are quick tests."""
BREAK, END = 3, 6


def start(case: Case, dtype: torch.dtype) -> tuple[Named, Modular]:
    """A model in two groups, one of which has its own lr, and its optimizer."""
    params = parameters(case.shapes, dtype)
    pairs = list(params.items())
    owns_lr = any("lr" in tfm.live for tfm in case.make().walk())
    groups: list[dict[str, Any]] = [{"params": pairs[::2]}, {"params": pairs[1::2], "lr": 0.02}]
    rate = [] if owns_lr else [LR(0.05)]
    return params, Modular(groups, case.make(), *rate, rounding="nearest")


def train(case: Case, params: Named, opt: Modular, steps: range) -> None:
    """Steps with their own gradients and a changing lr; a parameter is missing now and then."""
    dtype = next(iter(params.values())).dtype
    for i in steps:
        grads: dict[str, Any] = gradients(case.shapes, i, dtype, scale=1 + i % 7)
        if i % 3 == 2:
            grads["head.weight"] = None
        set_grads(params, grads)
        opt.step()
        for group in opt.param_groups:
            group["lr"] = group["lr"] * 0.99


def key(case: Case, dtype: str) -> str:
    return f"{CASES.index(case)}-{dtype}"


def resume(folder: str) -> None:
    """What the fresh process does: continue every checkpoint of a folder."""
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", "lr: .* from the checkpoint replaces"
    )  # `train` sets it by hand
    torch.set_num_threads(1)
    saved = torch.load(Path(folder) / "saved.pt", weights_only=True)
    results: dict[str, Any] = {}
    for case, dtype in itertools.product(CASES, DTYPES):
        if key(case, dtype) not in saved:
            continue
        try:
            results[key(case, dtype)] = continued(case, DTYPES[dtype], saved[key(case, dtype)])
        except Exception:  # the test of this case shows it
            results[key(case, dtype)] = traceback.format_exc()
    torch.save(results, Path(folder) / "results.pt")


def continued(case: Case, dtype: torch.dtype, saved: dict[str, Any]) -> dict[str, Any]:
    """Parameters and optimizer at the end of a run that goes on from a checkpoint."""
    params, opt = start(case, dtype)
    for name, p in params.items():
        p.data.copy_(saved["params"][name])
    opt.load_state_dict(saved["optimizer"])
    train(case, params, opt, range(BREAK, END))
    return snapshot(params, opt)


def snapshot(params: Named, opt: Modular) -> dict[str, Any]:
    """Copies of all there is to save."""
    held = {name: p.detach() for name, p in params.items()}
    return copy.deepcopy({"params": held, "optimizer": opt.state_dict()})


Runs = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    quick = [(case, "bfloat16") for case in HEADLINES]
    quick += [(case, "float32") for case in HEADLINES if str(case) in MECHANISMS]
    return made(quick, tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def other_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    others = [(case, "float32") for case in HEADLINES if str(case) not in MECHANISMS]
    others += itertools.product(OTHERS, DTYPES)
    return made(others, tmp_path_factory.mktemp("resume"))


def made(cases: list[tuple[Case, str]], folder: Path) -> Runs:
    """Every run without a break, and the same resumed in its middle by one fresh process."""
    saved, straight = {}, {}
    for case, dtype in cases:
        params, opt = start(case, DTYPES[dtype])
        train(case, params, opt, range(BREAK))
        saved[key(case, dtype)] = snapshot(params, opt)
        train(case, params, opt, range(BREAK, END))
        straight[key(case, dtype)] = snapshot(params, opt)
    torch.save(saved, folder / "saved.pt")
    code = f"from tests.optimizer.test_resume import resume; resume({str(folder)!r})"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr[-3000:]
    return straight, torch.load(folder / "results.pt", weights_only=True)


@over(HEADLINES)
def test_a_run_resumed_in_a_fresh_process_is_the_run_without_a_break(case, runs):
    check(case, runs)


@pytest.mark.slow
@over([case for case in CASES if str(case) not in MECHANISMS])
def test_every_other_run_resumed_is_the_run_without_a_break(case, other_runs):
    check(case, other_runs)


def check(case: Case, runs: Runs) -> None:
    dtypes = [dtype for dtype in DTYPES if key(case, dtype) in runs[0]]
    assert dtypes  # a quick test and a slow test share the dtypes of some cases
    for dtype in dtypes:
        straight, resumed = (results[key(case, dtype)] for results in runs)
        assert isinstance(resumed, dict), resumed
        same(resumed["params"], straight["params"])
        assert flat(resumed["optimizer"]) == flat(straight["optimizer"]), dtype


def test_every_row_is_resumed_and_moves_its_parameters(runs):
    assert {case.cls for case in CASES} == {case.cls for case in GOOD}
    assert {str(case) for case in HEADLINES} >= MECHANISMS >= COMPILED
    assert len(runs[0]) == len(HEADLINES) + len(MECHANISMS)
    for case in HEADLINES:
        before, after = start(case, torch.bfloat16)[0], runs[0][key(case, "bfloat16")]["params"]
        still = str(case) == "ClipValue-zero"
        assert still or any(not p.equal(after[name]) for name, p in before.items()), case


def flat(value: Any) -> Any:
    """Nested state as plain values, with the dtype of every tensor."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), repr(value.tolist()))
    if isinstance(value, dict):
        return {k: flat(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [flat(v) for v in value]
    return value


# ---------------------------------------------------------------------- compiled


SMALL = {f"{n}x{m}.{i}.weight": (n, m) for n, m in [(8, 5), (3, 3)] for i in range(5)}
SAVED, LAST = 5, 11


def missing(params: Named, opt: Modular) -> None:
    params[next(iter(params))].grad = None


def other_rate(params: Named, opt: Modular) -> None:
    opt.param_groups[0]["lr"] *= 0.5


def as_ever(params: Named, opt: Modular) -> None:
    """Every step is like the one before."""


EVENTS: dict[str, Callable[[Named, Modular], None]] = {
    f.__name__: f for f in (as_ever, missing, other_rate)
}


def compiled(
    make: Callable[[], Sequence[Transform]], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[Named, Modular]:
    """A model in two groups."""
    params = parameters(shapes, dtype)
    pairs = list(params.items())
    groups = [{"params": pairs[::2]}, {"params": pairs[1::2]}]
    return params, Modular(groups, *make(), compile=True)


def check_compiled(
    make: Callable[[], Sequence[Transform]],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    event: str,
) -> list[int]:
    """A run that saved goes on as one that loads that; returns how many steps each replayed."""

    def go_on(params: Named, opt: Modular, steps: range) -> int:
        for i in steps:
            set_grads(params, gradients(shapes, i, dtype, scale=1 + i % 3))
            if i == SAVED + 2:
                EVENTS[event](params, opt)
            opt.step()
        engine: Any = opt.engine
        return 0 if engine.replays is None else engine.replays.count

    params, opt = compiled(make, shapes, dtype)
    go_on(params, opt, range(SAVED))
    saved = snapshot(params, opt)
    others, other = compiled(make, shapes, dtype)
    for name, p in others.items():
        p.data.copy_(saved["params"][name])
    other.load_state_dict(saved["optimizer"])
    counts = [go_on(*run, range(SAVED, LAST)) for run in ((params, opt), (others, other))]
    same(others, params)
    assert flat(other.state_dict()) == flat(opt.state_dict())
    return counts


WIDE = (torch.float32, torch.float64)


@pytest.mark.parametrize("name", sorted(NAMES)[::30])  # all of them among the slow ones
def test_a_compiled_name_that_is_resumed_goes_on_bit_for_bit(name: str) -> None:
    """Its replays differ from steps done anew by rounding, and so neither run may be ahead."""
    first, second = check_compiled(lambda: [named(name)], SMALL, torch.float64, "as_ever")
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_compiled_name_goes_on_bit_for_bit_whatever_happens(name: str) -> None:
    for dtype, event in itertools.product(WIDE, EVENTS):
        check_compiled(lambda: [named(name)], SMALL, dtype, event)


@over([case for case in GOOD if str(case) in COMPILED])  # all of them among the slow ones
def test_a_compiled_run_that_is_resumed_goes_on_bit_for_bit(case: Case) -> None:
    first, second = check_compiled(
        lambda: with_lr(case.make(), 0.05), case.shapes, torch.float64, "as_ever"
    )
    assert first == second


@pytest.mark.slow
@over(GOOD)
def test_a_compiled_run_goes_on_bit_for_bit_whatever_happens(case: Case) -> None:
    for dtype, event in itertools.product(WIDE, EVENTS):
        first, second = check_compiled(
            lambda: with_lr(case.make(), 0.05), case.shapes, dtype, event
        )
        if dtype == torch.float64 and event == as_ever.__name__:
            assert first == second


@pytest.mark.parametrize("rule", [Adam(), pytest.param(CAME(), marks=pytest.mark.slow)], ids=repr)
def test_loading_into_a_compiled_run_that_is_on_its_way_is_loading_into_a_new_one(
    rule: Transform,
) -> None:
    (params, opt), (fresh, new) = (
        compiled(lambda: (rule, LR(0.05)), SMALL, torch.float64) for _ in range(2)
    )
    for i in range(SAVED):
        set_grads(params, gradients(SMALL, i, torch.float64))
        opt.step()
    saved = snapshot(params, opt)
    for i in range(SAVED, LAST):  # it replays again
        set_grads(params, gradients(SMALL, i, torch.float64))
        opt.step()
    for ps, o in ((params, opt), (fresh, new)):
        for name, p in ps.items():
            p.data.copy_(saved["params"][name])
        o.load_state_dict(copy.deepcopy(saved["optimizer"]))
        for i in range(SAVED, LAST):
            set_grads(ps, gradients(SMALL, i, torch.float64))
            o.step()
    same(params, fresh)


# ---------------------------------------------------------------------- other checkpoints


def trained(
    *links: Transform, shapes: dict[str, tuple[int, ...]] | None = None, groups: int = 1
) -> tuple[Named, Modular]:
    """An optimizer that has made two steps."""
    params = parameters(shapes or {"a.weight": (3, 2), "b.weight": (2, 3), "b.bias": (3,)})
    pairs = list(params.items())
    parts = [{"params": pairs[i::groups]} for i in range(groups)]
    opt = Modular(parts, *links)
    for i in range(2):
        set_grads(params, gradients({name: tuple(p.shape) for name, p in params.items()}, i))
        opt.step()
    return params, opt


def ours() -> tuple[Transform, ...]:
    return ClipNormGrowth(), Momentum(), LR(0.1)


FOREIGN = {
    "another chain": (
        lambda: trained(ClipNorm(1.0), Adam(), LR(0.1)),
        "saved with different transforms",
    ),
    "a longer chain": (lambda: trained(*ours(), Scale(1.0)), "saved with different transforms"),
    "the links in another order": (
        lambda: trained(Momentum(), ClipNormGrowth(), LR(0.1)),
        "saved with different transforms",
    ),
    "another name": (
        lambda: trained(ClipNormGrowth(name="growth"), Momentum(), LR(0.1)),
        "saved with different transforms",
    ),
    "another shape": (
        lambda: trained(*ours(), shapes={"a.weight": (3, 2), "b.weight": (2, 4), "b.bias": (3,)}),
        r"shape \(2, 4\) for 'Momentum/momentum_buffer' of parameter 1, but .* shape \(2, 3\)",
    ),
    "parameters in another order": (
        lambda: trained(*ours(), shapes={"b.weight": (2, 3), "a.weight": (3, 2), "b.bias": (3,)}),
        "parameter 0 of group 0 is 'b.weight' in the checkpoint, but 'a.weight' in this optimizer: "
        "pass the param",
    ),
    "fewer parameters": (
        lambda: trained(*ours(), shapes={"a.weight": (3, 2), "b.weight": (2, 3)}),
        r"groups of sizes \[2\], but this optimizer has groups of sizes \[3\]",
    ),
    "two groups": (
        lambda: trained(*ours(), groups=2),
        r"groups of sizes \[2, 1\], .* of sizes \[3\]",
    ),
}


def everything(params: Named, opt: Modular) -> Any:
    """All that loading could have changed."""
    return flat([{n: p.detach() for n, p in params.items()}, opt.state_dict(), repr(opt.chain)])


def test_named_parameters_in_other_groups_raise_an_error():
    shapes = {"a.weight": (3, 2), "b.weight": (3, 2)}
    swapped = dict(reversed(shapes.items()))
    saved = trained(*ours(), shapes=shapes, groups=2)[1].state_dict()
    params, opt = trained(*ours(), shapes=swapped, groups=2)
    before = everything(params, opt)
    for load in (opt.load_state_dict, functools.partial(take_over, opt)):
        with pytest.raises(ValueError, match=r"parameter 0 of group 0 is 'a.weight' in the check"):
            load(saved)
    assert everything(params, opt) == before


def test_parameters_with_other_names_load_by_position():
    shapes = {"a.weight": (3, 2), "b.weight": (3, 2)}
    renamed = {f"module.{name}": shape for name, shape in shapes.items()}
    params, opt = trained(*ours(), shapes=shapes, groups=2)
    other_params, other = trained(*ours(), shapes=renamed, groups=2)
    other.state.clear()
    other.load_state_dict(opt.state_dict())
    for p, q in zip(params.values(), other_params.values(), strict=True):
        same(list(opt.state[p].values()), list(other.state[q].values()))


@pytest.mark.parametrize("other", FOREIGN)
def test_the_checkpoint_of_something_else_raises_a_sentence_and_changes_nothing(other):
    make, sentence = FOREIGN[other]
    params, opt = trained(*ours())
    before = everything(params, opt)
    with pytest.raises(ValueError, match=sentence):
        opt.load_state_dict(make()[1].state_dict())
    assert everything(params, opt) == before
    twin, same_opt = trained(*ours())
    for m, o in ((params, opt), (twin, same_opt)):  # and it trains on as if nothing had been
        set_grads(m, gradients({name: tuple(p.shape) for name, p in m.items()}, 5))
        o.step()
    assert everything(params, opt) == everything(twin, same_opt)


def test_a_checkpoint_of_torch_says_what_it_is_not():
    params, opt = trained(*ours())
    before = everything(params, opt)
    other = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="was not saved by torchzero_clip"):
        opt.load_state_dict(other.state_dict())
    assert everything(params, opt) == before


TAMPERED = {
    "a missing tensor": (
        lambda s: s["state"][1].pop("Momentum/momentum_buffer"),
        "has no state 'Mom",
    ),
    "a tensor too many": (
        lambda s: s["state"][1].update({"LR/x": torch.ones(1)}),
        r"x'\].*no transform",
    ),
    "a number for a tensor": (
        lambda s: s["state"][1].update({"Momentum/momentum_buffer": 1.0}),
        "has 1.0 for 'Momentum/momentum_buffer' of parameter 1, but this optimizer needs a tensor",
    ),
    "another dtype": (
        lambda s: s["state"][1].update(
            {"Momentum/momentum_buffer": torch.zeros(2, 3, dtype=torch.float64)}
        ),
        "dtype torch.float64 for 'Momentum/momentum_buffer' of parameter 1",
    ),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_checkpoint_that_was_tampered_with_raises_and_changes_nothing(how):
    tamper, sentence = TAMPERED[how]
    params, opt = trained(*ours())
    before = everything(params, opt)
    checkpoint = copy.deepcopy(opt.state_dict())
    tamper(checkpoint)
    with pytest.raises(ValueError, match=sentence):
        opt.load_state_dict(checkpoint)
    assert everything(params, opt) == before


def test_other_fixed_arguments_warn_and_load():
    params, opt = trained(Momentum(nesterov=True), LR(0.1))
    _, other = trained(Momentum(), LR(0.1))
    with pytest.warns(UserWarning, match="with different arguments of the transforms"):
        opt.load_state_dict(other.state_dict())
    buffers = [opt.state[p]["Momentum/momentum_buffer"] for p in params.values()]
    theirs = [m["Momentum/momentum_buffer"] for m in other.state_dict()["state"].values()]
    for a, b in zip(buffers, theirs, strict=True):
        assert a.equal(b)


def test_other_live_values_are_taken_from_the_checkpoint_and_named_in_one_warning():
    _, opt = trained(*ours())
    _, other = trained(ClipNormGrowth(mul=3.0), Momentum(0.5), LR(0.7))
    with pytest.warns(UserWarning, match="from the checkpoint replaces") as caught:
        opt.load_state_dict(other.state_dict())
    assert [str(warning.message) for warning in caught] == [
        "mul: 3.0 from the checkpoint replaces 1.5; momentum: 0.5 from the checkpoint replaces "
        "0.9; lr: 0.7 from the checkpoint replaces 0.1. To keep the values of this optimizer, call "
        "load_state_dict(state_dict, keep=('mul', 'momentum', 'lr'))"
    ]
    assert caught[0].filename == __file__
    group = opt.param_groups[0]
    assert (group["mul"], group["momentum"], group["lr"]) == (3.0, 0.5, 0.7)


def test_a_number_stands_for_a_0_dim_tensor():
    params, opt = trained(*ours())
    checkpoint = copy.deepcopy(opt.state_dict())
    expected = opt.state[params["a.weight"]]["ClipNormGrowth/previous"].clone()
    checkpoint["state"][0]["ClipNormGrowth/previous"] = expected.item()
    opt.load_state_dict(checkpoint)
    found = opt.state[params["a.weight"]]["ClipNormGrowth/previous"]
    assert found.dtype == torch.float32
    assert found.equal(expected)


@pytest.mark.parametrize("nested", [False, True])
def test_a_state_dict_before_the_first_step_loads(nested):
    inner = Chain(EMA(0.5), Scale(2.0))
    links = [ClipValueByEMA(ema_tfm=inner)] if nested else [*ours()[:2]]
    params = parameters({"a": (3,)})
    opt = Modular(params.items(), *links, LR(0.1))
    opt.load_state_dict(Modular(params.items(), *links, LR(0.1)).state_dict())
    assert not opt.state
    set_grads(params, gradients({"a": (3,)}))
    opt.step()
    assert opt.state[params["a"]]


def test_state_made_early_loads_and_shifts_nothing():
    def run(early: bool) -> Tensors:
        params, opt = start(CASE, torch.float32)
        if early:
            opt.init_state()
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        train(CASE, params, opt, range(5))
        return {name: p.detach() for name, p in params.items()}

    same(run(True), run(False))


CASE = next(case for case in GOOD if case.cls is Adam)
