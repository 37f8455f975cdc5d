"""What the tests of frameworks share: chains, a model, and where to find a framework."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

# nothing is downloaded, and the CPU will do; both are read when the libraries are imported
os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}

import pytest
import torch
from torch import Tensor, nn

from tests.processes.launch import on_ranks
from torchzero_clip import (
    LR,
    Adam,
    AutoClip,
    ClipNorm,
    Guard,
    Modular,
    ScheduleFree,
    Transform,
    Warmup,
    WeightDecay,
    ZClip,
)

CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "clip": lambda: [ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.01), LR(1e-2)],
    # state in param_groups: averages, a history of norms, counts of steps
    "adaptive": lambda: [
        Guard(),
        ZClip(warmup_steps=2),
        AutoClip("percentile", 50.0, warmup_steps=2),
        Adam(),
        Warmup(6),
        LR(1e-2),
    ],
}

# one with weights for evaluation
FREE = {"free": lambda: [ClipNorm(0.5, dim="global"), Adam((0.0, 0.999)), LR(1e-2), ScheduleFree()]}

# Distributed checkpoints load what they find, so these must have all state from the start; one has
# none for single parameters.
DISTRIBUTED = {**CHAINS, "thresholds": lambda: [Guard(), ZClip(warmup_steps=2), LR(1e-1)]}


def need(name: str) -> Any:
    """The framework, or a skip that says what to do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            name, reason=f"{name} is not installed: see tests/frameworks/README.md"
        )


def network() -> nn.Sequential:
    """The same small model every time."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


def data(batches: int = 8, seed: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Batches that differ in scale, so that thresholds have something to do."""
    rng = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(16, 10, generator=rng), (1 + i % 3) * torch.randn(16, 1, generator=rng))
        for i in range(batches)
    ]


def values(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def averaged(opt: Modular, model: nn.Module) -> dict[str, Tensor]:
    """The parameters as they are in an evaluation."""
    found = opt.averaged_state_dict(model)
    return {name: found[name] for name, _ in model.named_parameters()}


def blank(model: nn.Module) -> nn.Module:
    """The model with zeros for parameters: only what is loaded can make up for it."""
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


def processes(script: str, world: int, *args: object) -> list[list[str]]:
    """What each of several processes printed, which form a group; they have a minute."""
    ends = on_ranks(world, script, *args)
    return [[line for line in out.splitlines() if line.startswith("→ ")] for out in ends]


def leave() -> None:
    """End a process of a group: gloo's threads may abort one that ends in the usual way."""
    sys.stdout.flush()
    torch.distributed.barrier()
    os._exit(0)
