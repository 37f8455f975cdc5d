"""The examples of the pages on rules of your own compute what their docstrings say."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tests.core.test_authors import (
    both,
    both_engines,
    compiled_is_slow,
    drawn,
    give,
    model,
    saved,
)
from tests.helpers import ROOT
from tests.project.test_docs import blocks, interpreter, run
from torchzero_clip import EMA, LR, Adam, ClipNorm, Modular, WeightDecay
from torchzero_clip.testing import check_pure

PAGES = [ROOT / "docs" / f"write_{name}.md" for name in ("your_own", "units", "state", "whole")]

pytestmark = pytest.mark.filterwarnings("ignore:the chain has no learning rate:UserWarning")


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, Any]]:
    """What an interpreter knows that has run the pages."""
    with interpreter("write_your_own") as namespace:
        for path in PAGES:
            for block in blocks(path):
                run(block.code, str(path), namespace)
        yield namespace


def resumed(opt: Modular, make: Any, params: Any) -> Modular:
    """Another optimizer of the same parameters, from the state dict of this one."""
    other: Modular = make(params)
    other.load_state_dict(saved(opt))
    return other


# ---------------------------------------------------------------------- lists


def wary(w: Tensor, grads: list[Tensor], gain: float, power: float) -> Tensor:
    """A parameter after these gradients and LR(0.1)."""
    before, largest, w = torch.zeros_like(w), torch.zeros_like(w), w.clone()
    for g in grads:
        size = (g * g).sum() * (before * before).sum()
        cosine = (g * before).sum() / size.sqrt() if size > 0 else torch.zeros(())
        largest = torch.maximum(largest, g * g)
        ahead = cosine.clamp(min=0) * (g + gain * before) / (1 + largest).sqrt()
        most = g.abs() ** power
        w = w - 0.1 * torch.minimum(torch.maximum(ahead, -most), most)
        before = g
    return w


@compiled_is_slow
def test_lists_are_measured_and_bounded(page: dict[str, Any], compile: bool) -> None:
    params = model(torch.float64)
    begun = {name: p.detach().clone() for name, p in params.items()}
    grads: dict[str, list[Tensor]] = {name: [] for name in params}
    opt = Modular(params.values(), page["Wary"](0.7, 0.4), LR(0.1), compile=compile)
    for step in range(6):
        for i, (name, p) in enumerate(params.items()):
            near = drawn(p.shape, i, p.dtype) + drawn(p.shape, 100 * step + i, p.dtype)
            p.grad = near if step else near.mul_(1e-3)
            grads[name].append(p.grad.clone())
        opt.step()
    for name, p in params.items():
        expected = wary(begun[name], grads[name], 0.7, 0.4)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
    moved = [not torch.equal(p.detach(), begun[name]) for name, p in params.items()]
    assert all(moved)


def test_a_rule_that_measures_lists_is_repeated(page: dict[str, Any]) -> None:
    check_pure(page["Wary"](), LR(0.1))


# ---------------------------------------------------------------------- two lists


@compiled_is_slow
@pytest.mark.parametrize("dim", [None, "global", "layer"])
def test_a_limit_may_hang_on_an_inner_product(
    page: dict[str, Any], compile: bool, dim: Any
) -> None:
    params = model()
    opt = Modular(params.items(), page["ClipToRadial"](2.0, dim), LR(0.1), compile=compile)
    give(params, 0)
    pairs = {name: (p.detach().double(), p.grad.double()) for name, p in params.items()}
    opt.step()
    unit = {None: lambda n: n, "global": lambda n: "", "layer": lambda n: n.rpartition(".")[0]}[dim]
    along: dict[str, Tensor] = {}
    size: dict[str, Tensor] = {}
    for name, (w, g) in pairs.items():
        along[unit(name)] = along.get(unit(name), torch.tensor(0.0)) + (w * g).sum()
        size[unit(name)] = size.get(unit(name), torch.tensor(0.0)) + (w * w).sum()
    expected = torch.stack([2 * along[x].abs() / size[x].sqrt() for x in along]).double()
    found = opt.metrics()["ClipToRadial/limit"].double().view(-1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------------- left out


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def draw(params: dict[str, Parameter], step: int) -> None:
    for i, p in enumerate(params.values()):
        p.grad = drawn(p.shape, 10 * step + i)


@both_engines
def test_parameters_whose_turn_it_is_not_stay_as_those_without_gradient(
    page: dict[str, Any], compile: bool
) -> None:
    params, others = [dict(layers().named_parameters()) for _ in range(2)]
    chain = Adam(), WeightDecay(0.1), LR(0.1)

    def make(named: dict[str, Parameter]) -> Modular:
        return Modular(named.items(), page["InTurns"](), *chain, compile=compile)

    opt, other = make(params), Modular(others.items(), *chain, compile=compile)
    for step in range(7):
        turn = int(step % 3 > 0)
        draw(params, step)
        draw(others, step)
        for name, p in others.items():
            p.grad = p.grad if int(name[0]) // 2 == turn else None
        opt = resumed(opt, make, params) if step == 4 else opt
        opt.param_groups[0]["turn"] = turn
        opt.step()
        other.step()
        assert all(torch.equal(p, others[name]) for name, p in params.items())
    counts = [int(opt.state[p]["Adam/step"]) for p in params.values()]
    assert counts == [3, 3, 4, 4]


# ---------------------------------------------------------------------- the loss


class PlainMoMo:
    """MoMo with its bias correction, as in arXiv 2305.07583, and without decay."""

    def __init__(self, params: list[Parameter], beta: float, least: float, most: float) -> None:
        self.params, self.beta, self.least, self.most = params, beta, least, most
        self.d = [torch.zeros_like(p) for p in params]
        self.f, self.s, self.t = 0.0, 0.0, 0
        self.capped: list[bool] = []

    @torch.no_grad()
    def step(self, loss: float) -> None:
        self.t += 1
        beta, rho = self.beta, 1 - self.beta**self.t
        self.f = beta * self.f + (1 - beta) * loss
        inner = sum((p.grad * p).sum().item() for p in self.params if p.grad is not None)
        self.s = beta * self.s + (1 - beta) * inner
        grads = [p.grad for p in self.params]
        self.d = [beta * d + (1 - beta) * g for d, g in zip(self.d, grads, strict=True)]
        ahead = sum((d * p).sum().item() for d, p in zip(self.d, self.params, strict=True))
        size = sum((d * d).sum().item() for d in self.d)
        rate = max(self.f + ahead - self.s - rho * self.least, 0.0) / size
        self.capped.append(rate > self.most / rho)
        for p, d in zip(self.params, self.d, strict=True):
            p -= min(rate, self.most / rho) * d


@compiled_is_slow
def test_momo_is_the_step_of_polyak_at_an_average_of_lines(
    page: dict[str, Any], compile: bool
) -> None:
    params, others = [model(torch.float64) for _ in range(2)]

    def make(named: dict[str, Parameter]) -> Modular:
        return Modular(named.values(), page["MoMo"](0.8, 0.5, 0.2), LR(1.0), compile=compile)

    opt, plain = make(params), PlainMoMo(list(others.values()), 0.8, 0.5, 0.2)
    for step in range(12):
        for some in (params, others):
            give(some, step)
        loss = 1.0 + 20.0 * (step % 3)
        opt = resumed(opt, make, params) if step == 5 else opt
        opt.report(loss=torch.tensor(loss, dtype=torch.float64))
        opt.step()
        plain.step(loss)
    for name, p in params.items():
        torch.testing.assert_close(p, others[name], rtol=1e-11, atol=1e-11)
    assert {True, False} == set(plain.capped)


# ---------------------------------------------------------------------- what stays outside


@both_engines
def test_a_curvature_that_is_sampled_outside_reaches_a_link_and_a_checkpoint(
    page: dict[str, Any], compile: bool
) -> None:
    weights = [Parameter(torch.tensor([1.0, -2.0])), Parameter(torch.tensor(3.0))]
    scales = [torch.tensor([4.0, -1.0]), torch.tensor(2.0)]

    def make(params: list[Parameter]) -> Modular:
        link = page["ByCurvature"](0.1, 1e-3)
        return Modular(params, EMA(0.5), link, LR(0.25), compile=compile)

    opt = make(weights)
    mean = [torch.zeros_like(p) for p in weights]
    held = [torch.zeros_like(p) for p in weights]
    for step in range(6):
        losses = [0.5 * (s * p * p).sum() for s, p in zip(scales, weights, strict=True)]
        if step % 3 == 0:
            torch.manual_seed(step)
            page["sample"](opt, sum(losses), 0.9)
            torch.manual_seed(step)  # the curvature is diagonal: H v is s · v
            squares = [torch.randn_like(p).square() for p in weights]
            held = [0.9 * h + 0.1 * v * s for h, v, s in zip(held, squares, scales, strict=True)]
        opt = resumed(opt, make, weights) if step == 4 else opt
        before = [p.detach().clone() for p in weights]
        for p, s in zip(weights, scales, strict=True):
            p.grad = s * p.detach()
        opt.step()
        mean = [0.5 * m + 0.5 * p.grad for m, p in zip(mean, weights, strict=True)]
        for p, w, m, h in zip(weights, before, mean, held, strict=True):
            torch.testing.assert_close(opt.state[p]["curvature"], h)
            u = (m / (0.1 * h).clamp(min=1e-3)).clamp(-1, 1)
            torch.testing.assert_close(p.detach(), w - 0.25 * u)


def test_sam_steps_with_the_gradient_of_the_worst_point_near_by(page: dict[str, Any]) -> None:
    net, x, y = page["model"], page["x"], page["y"]
    twin = copy.deepcopy(net)
    other = Modular(twin.parameters(), ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))
    other.load_state_dict(saved(page["base"]))
    names = [name for name, _ in twin.named_parameters()]

    def gradient(at: list[Tensor]) -> list[Tensor]:
        at = [t.detach().requires_grad_() for t in at]
        out = torch.func.functional_call(twin, dict(zip(names, at, strict=True)), x)
        return list(torch.autograd.grad(nn.functional.mse_loss(out, y), at))

    for _ in range(3):
        now = [p.detach() for p in twin.parameters()]
        first = gradient(now)
        norm = torch.cat([g.flatten() for g in first]).norm()
        worst = [w + 0.3 * g / norm for w, g in zip(now, first, strict=True)]
        for p, g in zip(twin.parameters(), gradient(worst), strict=True):
            p.grad = g
        other.step()
        page["sam_step"](0.3)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@compiled_is_slow
def test_polyak_is_bounded_and_moves_by_the_loss(page: dict[str, Any], compile: bool) -> None:
    params = model()
    opt = Modular(params.values(), page["Polyak"](0.5, 0.2), LR(1.0), compile=compile)
    for step, loss in enumerate((0.6, 100.0, 0.2)):
        give(params, step)
        before, grads = both(params)
        opt.report(loss=loss)
        opt.step()
        norm = torch.cat([g.flatten() for g in grads]).norm()
        rate = ((loss - 0.5) / norm**2).clamp(0, 0.2)
        for p, w, g in zip(params.values(), before, grads, strict=True):
            torch.testing.assert_close(p.detach(), w - rate * g)
