"""A helper's call that is done again from a tape is, bit for bit, the call done anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import equal
from torchzero_clip import (
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_percentile_,
    clip_grad_value_,
    grads,
    normalize_grads_,
)
from torchzero_clip.engines import AT_ONCE
from torchzero_clip.engines.repeated import Repeated
from torchzero_clip.optimizer.by_form import ByForm

SHAPES = [(5, 4), (4,), (), (3, 4), (0,), (1,), (70, 70), (40, 7)]
SIZES = (1.0, 1e-4, 1e4, 0.0, 1.0, 1e30, 1e-30, float("nan"), 1.0, float("inf"), 3.0)
CALLS: dict[str, Callable[[list[Parameter]], Any]] = {
    "global": partial(clip_grad_norm_, max_norm=1.0, dim="global"),
    "each": partial(clip_grad_norm_, max_norm=1.0),
    "slices": partial(clip_grad_norm_, max_norm=1.0, dim=0),
    "l1": partial(clip_grad_norm_, max_norm=1.0, ord=1, dim="global"),
    "linf": partial(clip_grad_norm_, max_norm=1.0, ord="linf"),
    "std": partial(clip_grad_norm_, max_norm=1.0, ord="std", dim="global"),
    "no limit": partial(clip_grad_norm_, max_norm=float("inf"), dim="global"),
    "between": partial(clip_grad_norm_, max_norm=2.0, min_norm=1.0, dim="global"),
    "normalize": partial(normalize_grads_, norm_value=1.0),
    "value": partial(clip_grad_value_, value=0.5),
    "centralize": centralize_grads_,
    "percentile": partial(clip_grad_percentile_, percentile=0.9),
}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> ByForm:
    """Helpers that have not been called yet."""
    fresh = ByForm()
    monkeypatch.setattr(grads, "_CALLS", fresh)
    return fresh


def model(
    size: float, seed: int, dtype: torch.dtype = torch.float32, shapes: Sequence[Any] = SHAPES
) -> list[Parameter]:
    """Parameters with gradients of a size."""
    gen = torch.Generator().manual_seed(seed)
    params = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for p in params:
        p.grad = (torch.randn(p.shape, generator=gen) * size).to(dtype)
    return params


def anew(call: Callable[..., Any], params: list[Parameter], patch: pytest.MonkeyPatch) -> Any:
    with patch.context() as here:
        here.setattr(grads, "_CALLS", lambda kind, params, work: work(AT_ONCE))
        return call(params)


def repeats(calls: ByForm) -> int:
    return sum([isinstance(known, Repeated) for known in calls._known.values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_from_a_tape_is_the_call_anew(
    name: str, dtype: torch.dtype, calls: ByForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CALLS[name]
    for i, size in enumerate((1.0, 2.0, 3.0, *SIZES)):
        here, there = model(size, i, dtype), model(size, i, dtype)
        total, expected = call(here), anew(call, there, monkeypatch)
        if isinstance(expected, Tensor):
            assert equal(total, expected)
            assert total.dtype == expected.dtype
        assert all([equal(p.grad, q.grad) for p, q in zip(here, there, strict=True)])
    assert repeats(calls) == 1


def test_forms_have_tapes_of_their_own(calls: ByForm) -> None:
    forms = [SHAPES, SHAPES[:2], [(2, 2)], [(4,)]]
    for i in range(4):
        for shapes in forms:
            params = model(10.0, i, shapes=shapes)
            clip_grad_norm_(params, 1.0, dim="global")
            total = torch.cat([p.grad.flatten() for p in params if p.grad is not None]).norm()
            assert total.item() == pytest.approx(1, rel=1e-6)
    assert repeats(calls) == len(forms)


def test_a_parameter_without_gradient_is_none_of_the_form(calls: ByForm) -> None:
    for i in range(6):
        params = model(10.0, i, shapes=[(4,), (4,)])
        params[i % 2].grad = None
        clip_grad_norm_(params, 1.0)
        assert params[i % 2].grad is None
        grad = params[1 - i % 2].grad
        assert grad is not None
        assert grad.norm().item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("kind", ["strided", "twice", "two dtypes", "subclass"])
def test_what_is_of_another_kind_is_done_anew(kind: str, calls: ByForm) -> None:
    class Named(Tensor):
        pass

    for i in range(4):
        params = model(10.0, i, shapes=[(4, 4), (4, 4)])
        if kind == "strided":
            params[0].grad = torch.randn(4, 4).t()
        elif kind == "twice":
            params = [params[0], params[0]]
        elif kind == "two dtypes":
            params[0] = Parameter(torch.zeros(4, 4, dtype=torch.float64))
            params[0].grad = torch.ones(4, 4, dtype=torch.float64)
        else:
            params[0].grad = torch.randn(4, 4).as_subclass(Named)  # type: ignore[arg-type]
        clip_grad_norm_(params, 1.0, dim="global")
    assert not repeats(calls)


def test_nothing_keeps_parameters(calls: ByForm) -> None:
    for i in range(4):
        params = model(10.0, i)
        clip_grad_norm_(params, 1.0, dim="global")
        normalize_grads_(params, 1.0)
        centralize_grads_(params)
    assert repeats(calls) == 3
    gone = [weakref.ref(x) for p in params for x in (p, p.grad)]
    params.clear()
    gc.collect()
    assert not any([ref() is not None for ref in gone])


def test_an_error_is_raised_in_every_call(calls: ByForm) -> None:
    for _ in range(4):
        params = model(float("nan"), 0)
        with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
            clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def test_tapes_are_not_kept_without_end(calls: ByForm) -> None:
    for n in range(1, 200):
        for i in range(2):
            clip_grad_norm_(model(10.0, i, shapes=[(n,)]), 1.0)
    assert len(calls._known) <= 64
