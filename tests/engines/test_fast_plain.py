"""One step of a fast path is one step of the plain path, for every rule and for random chains.

`Modular(fused=False)` runs every link by its own formula; `fused=True` may run kernels instead, on
an accelerator in packs and parts, and `compile=True` records and runs kernels of its own, here as
they are before they are compiled.
From equal state all must come to the same parameters, gradients and state, to the rounding of
float32.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from tests.engines.accelerated import Accelerated
from tests.helpers import Named, at_once, gradients, parameters, run_each, set_grads
from tests.table import GOOD, Case, by_class, sampled
from torchzero_clip import (
    LR,
    AdaClip,
    Adam,
    Cautious,
    ClipNorm,
    ClipNormByEMA,
    Clippy,
    Guard,
    Hyperball,
    Lion,
    MaxNorm,
    Modular,
    Momentum,
    Orthogonalize,
    OrthoGrad,
    Transform,
    WeightDecay,
)

TOLERANCE = 1e-6
NUDGES = 5  # how often inputs are nudged before a difference counts
WARM = 2  # steps before the one that is compared: what is kept, and the memory for it, are there
Chain = Sequence[Transform]


WAYS = ("fused", "parts", "recorded", pytest.param("native", marks=pytest.mark.slow))


def pair(
    chain: Chain, shapes: Any, device: str = "cpu", way: str = "fused", split: int = 2
) -> list[tuple[Named, Modular]]:
    """The same model twice: fast, then plain. The first group has so many of its parameters.

    Its entries are about as large as a step, or the rounding of what is large would hide the step.
    """
    made = []
    eager = way in ("fused", "parts")
    for options in ({} if eager else {"compile": True}, {"fused": False}):
        small = {name: p.detach() / 100 for name, p in parameters(shapes).items()}
        params = {name: Parameter(p.to(device)) for name, p in small.items()}
        named = list(params.items())
        groups = [{"params": named[:split]}, {"params": named[split:]}]
        opt = Modular([g for g in groups if g["params"]], *chain, **options)
        if way == "recorded":
            opt.engine = opt.engine.twin()
        if way == "parts" and not made:
            opt.engine = Accelerated()
        if way == "triton" and options == {"compile": True}:
            opt.engine.backend = "triton"
        made.append((params, opt))
    return made


SCALES = (1.0, 0.5, 3.0, 0.25)  # the last two are compared: beyond the limits and within


def compare(
    chain: Chain, shapes: Any, device: str = "cpu", way: str = "fused", split: int = 2
) -> None:
    """Step both; before a step that is compared, the fast one loads all that the plain one has."""
    (fast_params, fast), (plain_params, slow) = pair(chain, shapes, device, way, split)
    for i, scale in enumerate(SCALES):
        grads = {name: g.to(device) for name, g in gradients(shapes, i, scale=scale).items()}
        set_grads(fast_params, {name: g.clone() for name, g in grads.items()})
        set_grads(plain_params, grads)
        if i < WARM:
            fast.step()
            slow.step()
            continue
        with torch.no_grad():
            for name, p in fast_params.items():
                p.copy_(plain_params[name])
        before = snapshot(plain_params, slow)
        fast.load_state_dict({key: copy.deepcopy(before[key]) for key in ("state", "param_groups")})
        fast.step()
        slow.step()
        ours, after = held(fast_params, fast), held(plain_params, slow)
        agrees(ours, after, before, partial(nudged, chain, shapes, device, split, before), i)


def agrees(ours: Any, after: Any, before: Any, nudge: Callable[[int], Any], i: int) -> None:
    """Equal numbers, or as near as what comes of inputs that differ in the last place."""
    try:
        close(ours, after, before, after, f"step {i}")
    except AssertionError:
        for seed in range(NUDGES - 1):
            with contextlib.suppress(AssertionError):
                return close(ours, after, before, nudge(seed), f"step {i}")
        close(ours, after, before, nudge(NUDGES - 1), f"step {i}")


def nudged(
    chain: Chain, shapes: Any, device: str, split: int, before: Any, seed: int
) -> dict[str, Any]:
    """What the plain step makes of the same to a unit in the last place.

    Where it takes differences of what is nearly equal, as the deviations of a row of two or a sum
    of both signs, it moves by far more, and so may the fast one.
    """
    params, opt = pair(chain, shapes, device, split=split)[1]
    generator = torch.Generator().manual_seed(seed)

    def nudge(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() < 2:
            return copy.deepcopy(x)
        return x * (1 + 2e-7 * torch.randn(x.shape, generator=generator).sign().to(x.device))

    with torch.no_grad():
        for name, p in params.items():
            p.copy_(before["value"][name])
    set_grads(params, {name: nudge(grad) for name, grad in before["grad"].items()})
    state = {i: {k: nudge(v) for k, v in held.items()} for i, held in before["state"].items()}
    opt.load_state_dict({"state": state, "param_groups": copy.deepcopy(before["param_groups"])})
    opt.step()
    return held(params, opt)


def held(params: Named, opt: Modular) -> dict[str, Any]:
    """All that a step may change."""
    values = {name: p.detach() for name, p in params.items()}
    grads = {name: p.grad for name, p in params.items()}
    return {"value": values, "grad": grads, **opt.state_dict()}


def snapshot(params: Named, opt: Modular) -> dict[str, Any]:
    """The same, apart from what it will change next."""
    return copy.deepcopy(held(params, opt))


def close(a: Any, b: Any, before: Any, moved: Any, what: str) -> None:
    """The same keys, kinds, dtypes and shapes all the way down, and equal numbers.

    Equal to 1e-6 of each entry, or of the largest of its tensor before or after the step: where
    entries cancel, as in w - u, what is left has their rounding. `moved` is what `b` could be.
    """
    assert type(a) is type(b), f"{what}: {a} is not of the kind of {b}"
    if isinstance(a, dict):
        assert list(a) == list(b), what
        for key in a:
            old = before[key] if key in before else b[key]
            close(a[key], b[key], old, moved[key], f"{what}, {key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), what
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            close(x, y, before[i], moved[i], f"{what}, {i}")
    elif not isinstance(a, Tensor):
        assert a == b, what
    else:
        assert (a.dtype, a.shape) == (b.dtype, b.shape), what
        slack = 10 * largest(moved.double() - b.double())
        torch.testing.assert_close(
            a,
            b,
            rtol=TOLERANCE,
            atol=TOLERANCE * max(largest(b), largest(torch.as_tensor(before))) + slack,
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )


def largest(x: Tensor) -> float:
    """The largest magnitude that is a number."""
    sizes = x.detach()[x.detach().isfinite()].abs()
    return sizes.max().item() if sizes.numel() else 0.0


# ---------------------------------------------------------------------- every rule


def tail(tfm: Transform) -> list[Transform]:
    """Adam and a learning rate, unless the rule has its own."""
    owns_lr = any("lr" in link.live for link in tfm.walk())
    return [Adam()] if owns_lr else [Adam(), LR(0.01)]


def with_adam(case: Case) -> list[Transform]:
    """The rule in front of Adam, or behind it where it must see the step that is subtracted."""
    tfm = case.make()
    return [*tail(tfm), tfm] if case.last else [tfm, *tail(tfm)]


PLACES: dict[str, Callable[[Transform], Chain]] = {
    "alone": lambda tfm: [tfm],
    "before Adam": lambda tfm: [tfm, *tail(tfm)],
    "right after Adam": lambda tfm: [Adam(), tfm, *tail(tfm)[1:]],
    "after Adam": lambda tfm: [*tail(tfm), tfm],
}


QUICK = (  # kernels of torch stand at the end, recorded lists anywhere
    ("fused", "before Adam"),
    ("fused", "right after Adam"),
    ("parts", "before Adam"),
    ("recorded", "right after Adam"),
)
EVERYWHERE = {ClipNorm, ClipNormByEMA, Guard, Lion, Orthogonalize}
"""Rules of each kind, which quick tests put in every one of these places."""


def placed() -> Iterator[Any]:
    """Yield constructions, a place and a way; quick tests have each class in one of QUICK."""
    for i, (cls, cases) in enumerate(by_class(GOOD).items()):
        own = QUICK if cls in EVERYWHERE else (QUICK[i % len(QUICK)],)
        for way, place in itertools.product(("fused", "parts", "recorded", "native"), PLACES):
            quick = () if (way, place) in own else pytest.mark.slow
            yield pytest.param(cases[:1], place, way, marks=quick, id=f"{cases[0]}-{place}-{way}")
            if cases[1:]:
                id = f"other {cls.__name__}-{place}-{way}"
                yield pytest.param(cases[1:], place, way, marks=pytest.mark.slow, id=id)


@pytest.mark.parametrize(("cases", "place", "way"), [*placed()])
def test_a_fast_step_of_every_rule_is_the_plain_step(
    cases: Sequence[Case], place: str, way: str
) -> None:
    run_each(partial(is_plain_in, place=place, way=way), "case", cases)


def is_plain_in(case: Case, place: str, way: str) -> None:
    """Compare a chain with a rule in this place, if there is such a chain."""
    chain = PLACES[place](case.make())
    if refused(chain, case.shapes):  # a guard stands first, or sees what another link has made
        assert case.make().place == "first" if place.endswith("after Adam") else case.last
        return
    split = len(case.shapes) if (way, place) in QUICK else 2  # a group takes half the time of two
    compare(chain, case.shapes, way=way, split=split)


ODD = {"a": (0, 4), "b": (), "c": (5,), "d": (), "e": (0, 4), "f": (3, 4), "g": (0,), "h": (1,)}
ODD_MATRICES = {"a": (0, 4), "b": (3, 4), "c": (0, 4), "d": (1, 4), "e": (4, 1), "f": (4, 0)}


@sampled(one_in=3)
def test_tensors_without_entries_and_single_numbers_go_in_packs_too(case: Case) -> None:
    """Shards are often empty; packs, parts and stacks know such tensors by their forms."""
    chain, shapes = PLACES["before Adam"](case.make()), ODD_MATRICES if case.matrices else ODD
    if refused(chain, shapes):
        return
    (ours, fast), (theirs, slow) = pair(chain, shapes, way="parts")
    for i in range(2):
        for params, opt in ((ours, fast), (theirs, slow)):
            set_grads(params, gradients(shapes, i))
            opt.step()
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name], rtol=1e-4, atol=1e-6, equal_nan=True)


def refused(chain: Chain, shapes: Any) -> bool:
    """Whether there is no such chain."""
    try:
        Modular(list(parameters(shapes).items()), *chain)
    except ValueError:
        return True
    return False


# ---------------------------------------------------------------------- random chains


@st.composite
def links(draw: Any) -> Transform:
    """A construction of the table with other live values, aimed at the update or the gradient."""
    case = draw(st.sampled_from(GOOD))
    tfm = case.make()
    for name in tfm.live:
        factor = draw(st.sampled_from([0.25, 0.5, 0.8, 1.0, 1.25, 2.0]))
        try:
            tfm = tfm.with_values({name: times(getattr(tfm, name), factor)})
        except (TypeError, ValueError):
            continue  # such a value is out of its bounds: the rule keeps its own
    if case.aims and type(tfm) is case.cls and draw(st.booleans()):
        tfm = tfm.with_values({"target": "grad"})
    return tfm


def times(value: Any, factor: float) -> Any:
    if isinstance(value, tuple):
        return tuple(times(v, factor) for v in value)
    return value if value is None or isinstance(value, int) else value * factor


@st.composite
def chains(draw: Any) -> list[Transform]:
    """One to five links, then perhaps an optimizer, decay and a learning rate.

    None stands right behind itself: the second of two limits carries nothing but rounding.
    """
    chain = draw(st.lists(links(), min_size=1, max_size=5))
    chain = [tfm for i, tfm in enumerate(chain) if not i or repr(tfm) != repr(chain[i - 1])]
    chain += draw(st.sampled_from([[], [Adam()], [Momentum(0.9)], [Adam(amsgrad=True)]]))
    chain += draw(st.sampled_from([[], [WeightDecay(0.1)]]))
    return chain + draw(st.sampled_from([[], [LR(0.01)], [LR(torch.tensor(0.01))]]))


MATRICES = {"a.weight": (4, 3), "a.scale": (2, 5), "b.weight": (2, 3, 2, 2), "b.last": (3, 4)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:Momentum. momentum should be below 1")
@settings(max_examples=settings.default.max_examples // 3)
@given(chain=chains())
def test_a_fast_step_of_a_random_chain_is_the_plain_step(chain: list[Transform], way: str) -> None:
    is_plain(chain, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:Momentum. momentum should be below 1")
@settings(max_examples=400)
@given(chain=chains())
def test_a_fast_step_of_many_random_chains(chain: list[Transform], way: str) -> None:
    is_plain(chain, way)


@at_once("rule", [MaxNorm(0.01), Hyperball(), Clippy(0.001), Cautious(), OrthoGrad(), AdaClip()])
def test_what_a_rule_measures_and_returns_in_parts_is_of_one_update(rule: Transform) -> None:
    """What is behind Adam writes state, and so is computed once."""
    compare([Adam(), LR(0.1), rule], MATRICES, way="parts")


def is_plain(chain: list[Transform], way: str, shapes: Any = MATRICES) -> None:
    note(", ".join(map(repr, chain)))
    assume(not refused(chain, shapes))
    compare(chain, shapes, way=way)
