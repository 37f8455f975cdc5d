"""Parameters that get their first gradient late, or that have no gradient in some steps.

A step without replay and a replayed step may differ by rounding. So a resumed run is only bitwise
identical if both runs replay their steps, and if both keep their state in memory in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import same
from torchzero_clip import LR, Adam, Group, Modular, State, TensorList, Transform, ZClip

SHAPES = {"a.weight": (4, 3), "a.bias": (3,), "b.weight": (2, 4), "b.bias": (2,)}
ADDED = {"c.weight": (3, 3), "c.bias": (3,)}
CHANGES = 3
SAVED = 16
LAST = 28


class Average(Transform):
    """u ← u / a, where a is a moving average of the norm of each tensor."""

    pure = True

    def init(self, param: torch.Tensor) -> dict[str, Any]:
        return {"average": torch.ones(())}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.div_(state["average"].mul_(0.9).add_(u.dot(u).sqrt() * 0.1))


CHAINS: dict[str, tuple[torch.dtype, Callable[[], Sequence[Transform]]]] = {
    "unit": (torch.float64, lambda: [ZClip(dim=None)]),
    "layer": (torch.float64, lambda: [ZClip(dim="layer")]),
    "group": (torch.float64, lambda: [ZClip(dim="group")]),
    "global": (torch.float64, lambda: [ZClip(dim="global")]),
    "tensorwise": (torch.float32, lambda: [Average()]),
    "count": (torch.float32, lambda: [Adam()]),
    "both": (torch.float64, lambda: [ZClip(dim=None), Adam()]),
}
"""The state of each chain is a value for each unit, or a 0-dim tensor for each parameter."""


def late(name: str, step: int) -> bool:
    return name != "a.bias" or step >= CHANGES


def two_late(name: str, step: int) -> bool:
    return late(name, step) and (name != "b.weight" or step >= CHANGES + 2)


def paused(name: str, step: int) -> bool:
    return name != "a.bias" or not CHANGES <= step < CHANGES + 3


def stopped(name: str, step: int) -> bool:
    return name != "a.bias" or step < CHANGES


def paused_and_late(name: str, step: int) -> bool:
    """One parameter joins while another one pauses, which continues only after the checkpoint."""
    pauses = name == "a.bias" and CHANGES <= step < SAVED + 4
    return not pauses and (name != "b.weight" or step >= CHANGES + 2)


def new_group(name: str, step: int) -> bool:
    return name not in ADDED or step >= CHANGES


EVENTS = {f.__name__: f for f in (late, two_late, paused, stopped, paused_and_late, new_group)}
USUAL = ("late", "new_group")
"""The events that are tried with every chain."""
SCOPES = ("layer", "group", "global")
"""The chains that are slow: their state is a value for each unit too, as in the chain "unit"."""
CASES = [
    pytest.param(chain, event, marks=pytest.mark.slow if chain in SCOPES else ())
    for chain in CHAINS
    for event in EVENTS
    if chain in ("unit", "tensorwise") or event in USUAL
]


class Run:
    """A run of a chain in which an event decides which parameters have a gradient in each step."""

    def __init__(self, chain: str, event: str, compile: bool, step: int = 0) -> None:
        self.dtype, make = CHAINS[chain]
        self.has_gradient = EVENTS[event]
        self.shapes = {**SHAPES, **ADDED} if event == "new_group" else SHAPES
        self.params = {
            name: Parameter(torch.ones(shape, dtype=self.dtype))
            for name, shape in self.shapes.items()
        }
        groups = [{"params": self._named(SHAPES)}]
        if step > CHANGES and event == "new_group":
            groups.append({"params": self._named(ADDED)})
        self.opt = Modular(groups, *make(), LR(0.1), compile=compile)
        self.step = step

    def _named(self, names: Any) -> list[tuple[str, Parameter]]:
        return [(name, self.params[name]) for name in names]

    def train(self, stop: int) -> None:
        """Run the steps before `stop`. A parameter without a gradient is frozen."""
        for step in range(self.step, stop):
            if step == CHANGES and len(self.shapes) > len(SHAPES):
                self.opt.add_param_group({"params": self._named(ADDED)})
            random = torch.Generator().manual_seed(step)
            for name, p in self.params.items():
                grad = torch.randn(p.shape, generator=random, dtype=torch.float64).to(self.dtype)
                active = self.has_gradient(name, step)
                p.requires_grad_(active)
                p.grad = grad * (1 + step % 3) if active else None
            self.opt.step()
        self.step = stop

    def replays(self) -> int:
        """Return how many steps were replays of the last recording."""
        (line,) = [x for x in self.opt.explain().splitlines() if "Steps are replayed" in x]
        return int(line.split(", ")[1].split()[0])


@pytest.mark.parametrize(("chain", "event"), CASES)
def test_a_run_without_compile_resumes_bitwise_identically(chain: str, event: str) -> None:
    resumed(chain, event, compile=False)


@pytest.mark.parametrize(("chain", "event"), CASES)
def test_steps_are_replayed_again_before_and_after_a_resume(chain: str, event: str) -> None:
    replays, run, other = resumed(chain, event, compile=True)
    assert replays >= 3
    assert other.replays() == run.replays() >= 3


def resumed(chain: str, event: str, compile: bool) -> tuple[int, Run, Run]:
    """Resume a run, and check that the result is bitwise identical to the uninterrupted run.

    Return the number of replays before the checkpoint, and both runs.
    """
    run = Run(chain, event, compile)
    run.train(SAVED)
    replays = run.replays() if compile else 0
    saved = copy.deepcopy(run.opt.state_dict())
    other = Run(chain, event, compile, step=SAVED)
    for name, p in other.params.items():
        p.data.copy_(run.params[name])
    other.opt.load_state_dict(saved)
    run.train(LAST)
    other.train(LAST)
    assert other.params.keys() == run.params.keys()
    same(other.params, run.params)
    for name, p in run.params.items():
        same(other.opt.state[other.params[name]], run.opt.state[p])
    for group, other_group in zip(run.opt.param_groups, other.opt.param_groups, strict=True):
        same(other_group["chain"], group["chain"])
    return replays, run, other


@pytest.mark.parametrize("dtypes", ["float32 float64 float32", "bfloat16 float32 bfloat16"])
def test_parameters_of_several_dtypes_are_replayed_also_after_a_resume(dtypes: str) -> None:
    """The state of units is in the order of the buckets, and a loaded state in the group's."""
    params = [Parameter(torch.ones(4, 3, dtype=getattr(torch, x))) for x in dtypes.split()]
    saved = None
    for _ in range(2):
        opt = Modular(params, ZClip(dim=None), LR(0.1), compile=True)
        if saved is not None:
            opt.load_state_dict(saved)
        for step in range(6):
            for p in params:
                p.grad = torch.full_like(p, 1.0 + step)
            opt.step()
        assert any(["Steps are replayed" in x for x in opt.explain().splitlines()])
        saved = copy.deepcopy(opt.state_dict())
