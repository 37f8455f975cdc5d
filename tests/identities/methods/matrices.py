"""Methods that treat a weight as a matrix."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.identities.identity import optimizer
from tests.identities.inputs import MATRICES, Inputs
from torchzero_clip import named

GROUPS: Any = (
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.0},
)


def official_muon() -> Any:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon since 2.9")
    return torch.optim.Muon


@optimizer(
    "muon",
    '`Momentum(nesterov=True)`, `Orthogonalize(scale="original")`, `WeightDecay`, `LR` is Muon',
    source="torch.optim.Muon, its iteration in float32",
    groups=GROUPS,
    inputs=Inputs(MATRICES),
    rtol={torch.float32: 1e-5},
)
def muon(groups: Any) -> Any:
    class InFloat32(official_muon()):  # type: ignore[misc]
        """torch's own steps, without the cast to bfloat16 in its iteration."""

        def step(self, closure: Any = None) -> Any:
            with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
                return super().step(closure)

    return InFloat32(groups)


@optimizer(
    "muon_bfloat16",
    "The same chain is Muon as torch ships it, up to the rounding of bfloat16",
    source="torch.optim.Muon",
    ours=lambda **options: named("muon", **options),
    groups=GROUPS,
    inputs=Inputs(MATRICES, zero_start=False),  # such a weight is the sum of roundings alone
    rtol={torch.float32: 3e-2},
)
def muon_bfloat16(groups: Any) -> Any:
    return official_muon()(groups)
