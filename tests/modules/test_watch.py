"""Watch: norms of steps and weights, their ratio, and the cosine with the momentum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import at_once, gradients, param, parameters
from torchzero_clip import (
    LR,
    Accumulate,
    Adam,
    Chain,
    ClipNorm,
    ClipValueByEMA,
    Group,
    Guard,
    Lion,
    Modular,
    Momentum,
    Noise,
    Recorder,
    State,
    TensorList,
    Transform,
    Watch,
    WeightDecay,
    WeightEMA,
)
from torchzero_clip.audit import Ledger, fake_cuda, twin

BETAS, EPS, DECAY, RATE = (0.9, 0.99), 1e-8, 0.1, 0.01
UNITS: dict[Any, list[list[int]]] = {  # of the six tensors of `parameters`, which follow each other
    None: [[0], [1], [2], [3], [4], [5]],
    "layer": [[0, 1], [2], [3, 4, 5]],
    "group": [[0, 1, 2, 3, 4, 5]],
    "global": [[0, 1, 2, 3, 4, 5]],
}


class Oracle:
    """AdamW in float64, of weights that are given anew in each step."""

    def __init__(self) -> None:
        self.m: list[Any] = [0.0] * 6
        self.v: list[Any] = [0.0] * 6
        self.t = 0

    def step(self, weights: list[Tensor], grads: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """The step, the weights and the momentum of each tensor."""
        self.t += 1
        out = []
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            w, g = w.detach().double(), g.double()
            self.m[i] = BETAS[0] * self.m[i] + (1 - BETAS[0]) * g
            self.v[i] = BETAS[1] * self.v[i] + (1 - BETAS[1]) * g * g
            m, v = self.m[i] / (1 - BETAS[0] ** self.t), self.v[i] / (1 - BETAS[1] ** self.t)
            u = RATE * (m / (v.sqrt() + EPS) + DECAY * w)
            out.append((u, w, self.m[i].clone()))
        return out


def joined(rows: list[tuple[Tensor, ...]], unit: list[int]) -> list[Tensor]:
    return [torch.cat([rows[i][k].flatten() for i in unit]) for k in range(3)]


def wanted(rows: list[tuple[Tensor, ...]], units: list[list[int]]) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {"step": [], "weights": [], "ratio": [], "cosine": []}
    for unit in units:
        u, w, m = joined(rows, unit)
        out["step"].append(u.norm().item())
        out["weights"].append(w.norm().item())
        out["ratio"].append((u.norm() / w.norm()).item())
        out["cosine"].append(((u @ m) / u.norm() / m.norm()).item())
    return out


def chain(params: Any, *links: Any, **options: Any) -> Modular:
    first = Adam(BETAS, EPS), WeightDecay(DECAY), LR(RATE)
    return Modular(params.items(), *first, *links, **options)


def replayed(opt: Modular) -> Modular:
    """The optimizer; a compiled one replays steps in Python, for which no compiler is needed."""
    opt.engine = opt.engine.twin()
    return opt


WAYS = [
    (dim, dtype, compile)
    for dim in UNITS
    for dtype in (torch.float32, torch.bfloat16)
    for compile in (False, True)
]


def check_watched(dim: Any, dtype: torch.dtype, compile: bool, cpp: bool) -> None:
    """What Watch reports in five steps is what AdamW in float64 does."""
    params = parameters(dtype=dtype)
    opt, oracle = chain(params, Watch(dim), compile=compile, rounding="nearest"), Oracle()
    if not cpp:
        replayed(opt)
    for step in range(5):
        grads = list(gradients(seed=step, dtype=dtype).values())
        for p, g in zip(params.values(), grads, strict=True):
            p.grad = g.clone()
        rows = oracle.step(list(params.values()), grads)
        opt.step()
        found = opt.metrics()
        for name, values in wanted(rows, UNITS[dim]).items():
            mine = torch.as_tensor(found[f"Watch/{name}"]).double().view(-1)
            assert torch.allclose(mine, torch.tensor(values, dtype=torch.float64), rtol=2e-5)


@at_once("dim, dtype, compile", WAYS)
def test_it_is_what_float64_says_before_the_weights_are_rounded(
    dim: Any, dtype: torch.dtype, compile: bool
) -> None:
    check_watched(dim, dtype, compile, cpp=False)


@pytest.mark.parametrize(
    "dim", ["layer", *[pytest.param(d, marks=pytest.mark.slow) for d in UNITS if d != "layer"]]
)
def test_in_cpp_it_is_what_float64_says(dim: Any) -> None:
    check_watched(dim, torch.float32, compile=True, cpp=True)


def test_the_difference_of_rounded_weights_is_another_thing() -> None:
    """Why it looks at the step: of a bfloat16 weight of 1 a step of 0.001 leaves nothing."""
    w = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    opt = Modular([("w", w)], LR(0.001), Watch(), rounding="nearest")
    w.grad = torch.ones_like(w)
    before = w.detach().clone()
    opt.step()
    assert (w - before).norm() == 0
    assert opt.metrics()["Watch/step"].item() == pytest.approx(0.008, rel=1e-2)


def test_slices_are_units_as_well() -> None:
    w = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
    opt = Modular([("w", w)], LR(0.1), Watch(1))
    w.grad = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    opt.step()
    found = opt.metrics()
    assert found["Watch/step"].tolist() == pytest.approx([0.1, 0.2])
    assert found["Watch/weights"].tolist() == pytest.approx([5.0, 0.5])


def test_nothing_that_flows_is_changed() -> None:
    sides = [parameters() for _ in range(2)]
    opts = [chain(sides[0]), chain(sides[1], Watch())]
    for step in range(3):
        for side, opt in zip(sides, opts, strict=True):
            for p, g in zip(side.values(), gradients(seed=step).values(), strict=True):
                p.grad = g.clone()
            opt.step()
    for a, b in zip(*[side.values() for side in sides], strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


@at_once("compile", [False, True])
def test_it_measures_in_every_so_many_steps_alone(compile: bool) -> None:
    params = parameters()
    opt = chain(params, Watch("global", every=3), compile=compile)
    seen = []
    for step in range(12):
        for p, g in zip(params.values(), gradients(seed=step).values(), strict=True):
            p.grad = g.clone()
        opt.step()
        seen.append("Watch/ratio" in opt.metrics())
    assert seen == [False, False, True] * 4


def test_without_a_momentum_there_is_no_cosine_and_with_two_it_is_of_the_last() -> None:
    w = param(1.0, 1.0)
    plain = Modular([("w", w)], LR(0.1), Watch())
    w.grad = torch.tensor([1.0, 0.0])
    plain.step()
    assert [*plain.metrics()] == ["Watch/step", "Watch/weights", "Watch/ratio"]
    two = Modular([("w", w)], Momentum(0.9), Momentum(0.5, name="last"), LR(0.1), Watch())
    two.step()
    two.step()
    assert two.metrics()["Watch/cosine"].item() == pytest.approx(1.0)


def last_cosine(*links: Any, **options: Any) -> float:
    """The cosine that Watch reports in the fifth step of a chain."""
    params = parameters()
    opt = replayed(Modular(params.items(), *links, **options))
    for step in range(5):
        for p, g in zip(params.values(), gradients(seed=step).values(), strict=True):
            p.grad = g.clone()
        opt.step()
    return float(opt.metrics()["Watch/cosine"])


class Halves(Transform):
    """A rule whose state has the name of a momentum, and is none."""

    state_kinds = {"exp_avg": "weights"}

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": torch.ones_like(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul(0.5)


class Slow(Transform):
    """A rule whose momentum has a name that no other class knows."""

    state_kinds = {"slow": "linear"}

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"slow": torch.zeros_like(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return state["slow"].lerp_(u, 0.1)


@at_once("options", [{}, {"fused": False}, {"compile": True}])
def test_state_that_merely_has_the_name_of_a_momentum_is_none(options: dict[str, Any]) -> None:
    """`WeightEMA` keeps an "ema" of weights, and `EMA` one of updates."""
    alone = last_cosine(Adam(), LR(0.1), Watch("global"), **options)
    assert alone > 0.9
    averaged = last_cosine(Adam(), LR(0.1), Watch("global"), WeightEMA(0.9), **options)
    assert averaged == pytest.approx(alone, abs=1e-6)
    halved = last_cosine(Adam(), Halves(), LR(0.1), Watch("global"), **options)
    assert halved == pytest.approx(alone, abs=1e-6)


def test_an_average_of_absolute_values_is_no_momentum() -> None:
    w = param(1.0, -1.0)
    opt = Modular([("w", w)], ClipValueByEMA(0.9), LR(0.1), Watch())
    w.grad = torch.tensor([1.0, 0.5])
    opt.step()
    assert "Watch/cosine" not in opt.metrics()


@at_once("options", [{}, {"fused": False}, {"compile": True}])
def test_the_momentum_of_a_class_of_your_own_is_found(options: dict[str, Any]) -> None:
    assert last_cosine(Slow(), LR(0.1), Watch("global"), **options) == pytest.approx(1.0)


def test_a_step_of_zero_is_zero_times_the_weights_and_goes_nowhere() -> None:
    w = param(0.0, 0.0)
    opt = Modular([("w", w)], Momentum(), LR(0.1), Watch())
    w.grad = torch.zeros(2)
    opt.step()
    assert [x.item() for x in opt.metrics().values()] == [0.0] * 4


def test_a_recorder_writes_it_by_the_names_of_units(tmp_path: Any) -> None:
    params = parameters()
    opt = chain(params, Watch("layer"))
    recorder = Recorder(opt)
    for p, g in zip(params.values(), gradients().values(), strict=True):
        p.grad = g.clone()
    opt.step()
    assert recorder.units("Watch/ratio") == ["embed", "conv", "head"]
    recorder.to_csv(tmp_path / "run.csv")
    header = (tmp_path / "run.csv").read_text().splitlines()[0].split(",")
    assert {"Watch/ratio/0", "Watch/ratio/2", "Watch/cosine/1"} < {*header}


@at_once("every", [1, 2])
def test_the_host_reads_nothing(every: int) -> None:
    with fake_cuda():
        params = twin(list(parameters().values()))
        opt = Modular(params, ClipNorm(1.0, dim="global"), Adam(), LR(0.1), Watch(every=every))
        for p in params:
            p.grad = torch.zeros_like(p)
        opt.step()
        with Ledger() as ledger:
            opt.step()
            opt.step()
        assert ledger.of("read", "copy") == []


def test_steps_are_repeated_and_those_that_measure_are_done_anew() -> None:
    params = parameters()
    opt = chain(params, Watch("global", every=5), compile=True)
    for step in range(20):
        for p, g in zip(params.values(), gradients(seed=step).values(), strict=True):
            p.grad = g.clone()
        opt.step()
    assert "Steps are replayed" in opt.explain()


COUNTED: list[tuple[list[Transform], int]] = [
    ([Adam(), LR(0.1)], 10),
    ([ClipNorm(1.0, dim="global"), Momentum(0.9), LR(0.1)], 10),
    ([Lion(), LR(0.1)], 10),
    ([Chain(Lion(), LR(0.1), name="step")], 10),
    ([Noise(0.1), LR(0.1)], 10),  # which waits for the flag in every engine
    ([Momentum(0.9), Accumulate(2), LR(0.1)], 3),  # of seven steps that happen
]


@at_once("links, count", COUNTED)
def test_steps_that_a_guard_skips_count_alike_in_every_engine(
    links: list[Transform], count: int
) -> None:
    found = []
    for options in ({}, {"fused": False}, {"compile": True}):
        w = param(1.0, 2.0)
        opt = Modular([("w", w)], Guard(), *links, Watch("global", every=2), **options)
        replayed(opt)
        seen = []
        for i in range(10):
            skipped = i in (0, 3, 6)
            w.grad = torch.full_like(w, float("nan") if skipped else 1.0)
            opt.step()
            if not skipped:
                seen.append("Watch/ratio" in opt.metrics())
        assert opt.param_groups[0]["chain"]["Watch/step"] == count
        found.append(seen)
    assert found[0] == found[1] == found[2]
    assert any(found[0])


def test_a_step_that_a_guard_skips_leaves_the_state_of_the_rest() -> None:
    w = param(1.0)
    opt = Modular([("w", w)], Guard(), Momentum(), LR(0.1), Watch(every=2), compile=True)
    for grad in (1.0, float("nan"), 1.0):
        w.grad = torch.tensor([grad])
        opt.step()
    assert opt.param_groups[0]["chain"]["Watch/step"] == 3
