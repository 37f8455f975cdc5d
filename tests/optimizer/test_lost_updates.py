"""The meter of updates that rounding loses, and the warning where nobody chose."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import torchzero_clip as tz
from torchzero_clip import LR, Adam, ClipNorm, Guard, Modular, WeightDecay, release
from torchzero_clip.core.formats.nearest import STAYED, Nearest
from torchzero_clip.optimizer import construction_warnings

ENGINES = {"default": {}, "plain": {"fused": False}, "compiled": {"compile": True}}
EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES)
SHAPES = ((40, 30), (33,), ())


def model(dtype: torch.dtype = torch.bfloat16) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(params: list[Parameter], i: int) -> None:
    generator = torch.Generator().manual_seed(i)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if p.dim() == 2:
            p.grad[::2] = 0  # whose update is none


@EVERY_ENGINE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [1e-2, 1e-5])
def test_it_is_the_share_of_entries_that_float32_would_have_moved(
    rate: float, dtype: torch.dtype, engine: str
) -> None:
    params = model(dtype)
    opt = Modular(params, LR(rate), rounding="nearest", **ENGINES[engine])
    assert "rounding/lost" not in opt.metrics()  # from the first call on
    for i in range(5):
        gradients(params, i)
        before = [p.detach().clone() for p in params]
        meant = [p.detach().float() - rate * p.grad.float() for p in params if p.grad is not None]
        opt.step()
        rows = list(zip(before, meant, params, strict=True))
        moving = sum([int((x != w.float()).sum()) for w, x, _ in rows])
        stayed = sum([int(((x != w.float()) & (p == w)).sum()) for w, x, p in rows])
        found = opt.metrics()
        assert found["rounding/moving"].item() == pytest.approx(moving, abs=2)
        assert found["rounding/lost"].item() == pytest.approx(stayed / moving, abs=2e-3)
    if engine == "compiled":
        assert opt.engine.replays.count


@EVERY_ENGINE
def test_the_meter_changes_no_step(engine: str) -> None:
    ends = []
    for measured in (False, True):
        params = model()
        links = ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.1), LR(1e-3)
        opt = Modular(params, *links, rounding="nearest", **ENGINES[engine])
        for i in range(6):
            gradients(params, i)
            opt.step()
            if measured:
                opt.metrics()
        ends.append([p.detach().clone() for p in params])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("form", ["exact", "kahan", "stochastic"])
def test_what_loses_nothing_has_no_meter(form: str) -> None:
    params = model()
    opt = Modular(params, Adam(), LR(1e-3), rounding=form)
    for i in range(2):
        gradients(params, i)
        opt.step()
        assert not [name for name in opt.metrics() if name.startswith("rounding/")]


def test_float32_has_no_meter_either() -> None:
    params = model(torch.float32)
    opt = Modular(params, Adam(), LR(1e-3))
    for i in range(2):
        gradients(params, i)
        opt.step()
        assert not [name for name in opt.metrics() if name.startswith("rounding/")]


def test_a_step_that_moves_nothing_has_lost_nothing() -> None:
    params = model()
    opt = Modular(params, LR(1e-3), rounding="nearest")
    opt.metrics()
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert opt.metrics()["rounding/lost"] == 0


@EVERY_ENGINE
def test_a_skipped_step_is_no_trouble(engine: str) -> None:
    params = model()
    opt = Modular(params, Guard(), LR(1e-2), rounding="nearest", **ENGINES[engine])
    opt.metrics()
    for i in range(4):
        gradients(params, i)
        if i == 2:
            assert params[0].grad is not None
            params[0].grad[0, 0] = torch.nan
        before = [p.detach().clone() for p in params]
        opt.step()
        assert (i == 2) == all(map(torch.equal, before, params))
        opt.metrics()


def test_released_gradients_are_counted_together() -> None:
    ends = []
    for released in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4)).bfloat16()
        given: Any = net if released else net.parameters()
        opt = (release if released else Modular)(given, Adam(), LR(1e-4), rounding="nearest")
        opt.metrics()
        for i in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).bfloat16()
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        ends.append(opt.metrics())
    for name in ("rounding/lost", "rounding/moving"):
        assert ends[1][name].item() == pytest.approx(ends[0][name].item(), rel=1e-6)
    assert ends[0]["rounding/moving"] == 6 * 5 + 5 + 5 * 4 + 4


def test_what_kernels_add_up_says_both_counts() -> None:
    """Of tensors with more entries than that, all are taken for such that move."""
    form = Nearest(meter=torch.zeros(2, dtype=torch.float64))
    sums = torch.tensor([3 + 2.0 * STAYED, 0, 5 * STAYED + 7.0], dtype=torch.float64)
    form.count(sums, [100, 50, 2 * STAYED])
    assert form.meter is not None
    assert form.meter.tolist() == [3 + 2 + 2 * STAYED, 2 + 5]


# ---------------------------------------------------------------------- the warning


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(construction_warnings, "WARNED", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_chain_over_half_precision_warns_once_where_nobody_chose() -> None:
    with pytest.warns(UserWarning, match=r"updates are lost .*rounding='exact', .*'nearest' to"):
        Modular(model(), LR(0.1))
    Modular(model(), LR(0.1))  # once a process


def test_a_group_in_half_precision_that_comes_later_warns_as_well() -> None:
    opt = Modular(model(torch.float32), LR(0.1))
    with pytest.warns(UserWarning, match="small updates are lost in rounding"):
        opt.add_param_group({"params": model()})
    chosen = Modular(model(torch.float32), LR(0.1), rounding="nearest")
    chosen.add_param_group({"params": model()})  # whoever chose hears nothing


@pytest.mark.parametrize("form", ["nearest", "stochastic", "kahan", "exact"])
def test_whoever_chose_hears_nothing(form: str) -> None:
    opt = Modular(model(), LR(0.1), rounding=form)
    assert opt.rounding == form


def test_where_nothing_is_lost_nobody_hears_anything() -> None:
    Modular(model(torch.float32), LR(0.1))
    frozen = model()
    for p in frozen:
        p.requires_grad_(False)
    Modular(frozen, LR(0.1))
    tz.attach(torch.optim.SGD(model(), lr=0.1), ClipNorm(1.0))  # which makes no step
