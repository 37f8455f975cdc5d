"""Functions of users: they may return views, and the tensors that they see may have any strides.

Every engine computes the same, or raises the same error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.engines.accelerated import Accelerated
from tests.helpers import at_once
from torchzero_clip import (
    EMA,
    LR,
    Bucket,
    ClipNorm,
    Identity,
    Lambda,
    Modular,
    Momentum,
    Parallel,
    Scale,
    TensorList,
    Transform,
    WeightDecay,
)

Function = Callable[[Tensor], Tensor]
Chain = list[Transform]
ENGINES = ["default", "plain", "recorded", "native", "accelerated"]
FUNCTIONS: dict[str, Function] = {
    "itself": lambda t: t,
    "transposed": lambda t: t.t(),
    "the last row": lambda t: t[-1:].expand_as(t),
    "the first row": lambda t: t[:1].expand_as(t),
    "another form": lambda t: t.reshape(-1).reshape(t.shape),
    "new": lambda t: t.flip(0),
}


def mapped(function: Function) -> Chain:
    return [Parallel({"a": EMA(0.5)}, lambda o: o["a"].map(function))]


def listed(function: Function) -> Chain:
    return [Parallel({"a": Identity()}, lambda o: TensorList([function(t) for t in o["a"]]))]


PLACES: dict[str, Callable[[Function], Chain]] = {
    "a function": lambda function: [Lambda(function)],
    "a function after state": lambda function: [EMA(0.5), Lambda(function)],
    "map in a merge": mapped,
    "a list in a merge": listed,
}
TAILS: dict[str, Callable[[], Chain]] = {
    "clip": lambda: [ClipNorm(0.1), LR(0.1)],
    "momentum": lambda: [Scale(0.5), Momentum(0.9), LR(0.1)],
}


def trained(
    chain: Chain, engine: str, params_turned: bool = False, grads_turned: bool = False
) -> list[Tensor]:
    """Return the weights after some steps; those that are `turned` have their columns in order."""
    generator = torch.Generator().manual_seed(0)

    def drawn(n: int, turned: bool) -> Tensor:
        matrix = torch.randn((n, n), generator=generator)
        return matrix.t().contiguous().t() if turned else matrix

    params = [Parameter(drawn(n, params_turned)) for n in (4, 3)]
    options: dict[str, Any] = {}
    if engine == "plain":
        options["fused"] = False
    if engine in ("recorded", "native"):
        options["compile"] = True
    opt = Modular(params, *chain, **options)
    if engine == "recorded":  # torch runs what is recorded, so that nothing is compiled
        opt.engine = opt.engine.twin()
    if engine == "accelerated":
        opt.engine = Accelerated()
    for _ in range(3):
        for p in params:
            p.grad = drawn(len(p), grads_turned)
        opt.step()
    return [p.detach() for p in params]


@functools.cache
def by_copies(place: str, name: str, tail: str) -> list[Tensor]:
    """Return the weights of a plain chain whose function copies what it sees and returns."""
    copies = lambda t: FUNCTIONS[name](t.clone()).clone()  # noqa: E731
    return trained([ClipNorm(0.3), *PLACES[place](copies), *TAILS[tail]()], "plain")


@pytest.mark.parametrize(
    ("engine", "inference"),
    [
        *[(engine, False) for engine in ENGINES if engine != "native"],
        *[(engine, True) for engine in ("default", "recorded")],
        *[
            pytest.param(engine, True, marks=pytest.mark.slow)
            for engine in ("plain", "accelerated")
        ],
    ],
)
def test_a_function_may_return_a_view(engine: str, inference: bool) -> None:
    wrong: list[tuple[str, str, str]] = []
    for place, chain in PLACES.items():
        for name, function in FUNCTIONS.items():
            for tail, end in TAILS.items():
                expected = by_copies(place, name, tail)
                with torch.inference_mode() if inference else nullcontext():
                    made = trained([ClipNorm(0.3), *chain(function), *end()], engine)
                    close = torch.testing.assert_close
                    try:
                        close(made, expected, rtol=1e-5, atol=1e-6)
                    except AssertionError:
                        wrong.append((place, name, tail))
    assert wrong == []


@at_once("place", PLACES)
def test_a_function_may_return_a_view_in_compiled_kernels(place: str) -> None:
    chains = [
        [ClipNorm(0.3), *PLACES[place](function), ClipNorm(0.1), LR(0.1)]
        for function in (FUNCTIONS["transposed"], lambda t: t.t().clone())
    ]
    made = trained(chains[0], "native")
    torch.testing.assert_close(made, trained(chains[1], "plain"), rtol=1e-5, atol=1e-6)


def flattened(t: Tensor) -> Tensor:
    return t.view(-1).view(t.shape)


@pytest.mark.parametrize("engine", ENGINES)
@at_once("place", PLACES)
def test_a_view_that_strides_do_not_allow_is_an_error_that_says_what_to_do(
    engine: str, place: str
) -> None:
    chain = [ClipNorm(0.3), *PLACES[place](flattened), LR(0.1)]
    name = {"map in a merge": "TensorList.map: fn", "a list in a merge": "Parallel: merge"}
    told = f"^{name.get(place, 'Lambda.update_tensor')} calls view.*call reshape"
    with pytest.raises(RuntimeError, match=told):
        trained(chain, engine, params_turned=True, grads_turned=True)


@pytest.mark.parametrize("engine", ["recorded", "native"])
def test_the_error_is_the_same_if_one_engine_alone_has_such_strides(engine: str) -> None:
    """Compiled steps keep results in the strides of the parameters."""
    chain = [*listed(flattened), Scale(0.5), LR(0.1)]
    assert trained(chain, "plain", params_turned=True)
    chain = [Scale(0.5), *listed(flattened), LR(0.1)]
    with pytest.raises(RuntimeError, match=r"^Parallel: merge calls view.*call reshape"):
        trained(chain, engine, params_turned=True)


@pytest.mark.parametrize("engine", ENGINES)
@at_once("turned", [(False, True), (True, False), (True, True)])
def test_reshape_works_with_all_strides(engine: str, turned: tuple[bool, bool]) -> None:
    for place in PLACES.values():
        chain = lambda place=place: [*place(FUNCTIONS["another form"]), LR(0.1)]  # noqa: E731
        made = trained(chain(), engine, *turned)
        expected = trained(chain(), "plain")
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)


def test_another_error_of_a_function_stays_as_it_is() -> None:
    def fails(t: Tensor) -> Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        trained([Lambda(fails), LR(0.1)], "default")


class KeepsWhatFlowed(Transform):
    """What flows, of which a first list is kept while a second one moves to memory of its own"""

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            kept = bucket.u.mul_(2.0)
            bucket.u = TensorList(bucket.grads.tensors)
            bucket.u = bucket.u.mul_(3.0).add_(kept)
        return buckets


@pytest.mark.parametrize("engine", ENGINES)
def test_a_list_that_a_step_keeps_is_not_written_over(engine: str) -> None:
    made = trained([KeepsWhatFlowed(), LR(0.1)], engine)
    torch.testing.assert_close(made, trained([Scale(5.0), LR(0.1)], "plain"))


@pytest.mark.parametrize("engine", ENGINES)
@at_once("end", [lambda: [WeightDecay(0.1), LR(0.01)], lambda: [Momentum(0.9), LR(0.01)]])
def test_an_empty_parameter_changes_no_bit_of_the_others(
    end: Callable[[], Chain], engine: str
) -> None:
    compiles = engine in ("recorded", "native")
    options = {"fused": False} if engine == "plain" else {"compile": compiles}
    seen: list[Tensor] = []
    for empty in (False, True):
        torch.manual_seed(0)
        w = Parameter(torch.randn(40, 30))
        w.grad = torch.randn(40, 30)
        params = [w]
        if empty:
            params.insert(0, Parameter(torch.empty(0)))
            params[0].grad = torch.empty(0)
        opt = Modular(params, *end(), **options)
        if engine == "accelerated":
            opt.engine = Accelerated()
        for _ in range(2):
            opt.step()
        seen.append(w.detach())
    assert torch.equal(*seen)
