"""Audits of sound optimizers of other libraries find nothing."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from torchzero_clip.audit import audit_update

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # they warn a lot
WIDTH = 64
SOUND = [
    ("timm.optim", "Lamb", "sign"),
    ("timm.optim", "Lion", "sign"),
    ("timm.optim", "NAdamW", "sign"),
    ("timm.optim", "Mars", "sign"),
    ("bitsandbytes.optim", "AdamW8bit", "sign"),
    ("bitsandbytes.optim", "Lion8bit", "sign"),
    ("schedulefree", "AdamWScheduleFree", "sign"),
    ("pytorch_optimizer", "AdaBelief", "sign"),
    ("pytorch_optimizer", "Adan", "sign"),
    ("pytorch_optimizer", "StableAdamW", "sign"),
]


@pytest.mark.parametrize(("module", "name", "kind"), SOUND)
def test_a_sound_optimizer_of_another_library_has_no_finding(
    module: str, name: str, kind: str
) -> None:
    pytest.importorskip(module.partition(".")[0], exc_type=ImportError)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    made: Any = getattr(importlib.import_module(module), name)
    optimizer = made(model.parameters(), lr=1e-3)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(3):
        expect = {"*": kind} if step == 0 else None
        with audit_update(model, optimizer, expect=expect) as report:
            optimizer.zero_grad()
            model(torch.randn(2 * WIDTH, WIDTH)).square().mean().backward()
            optimizer.step()
        assert report.findings == [], f"step {step}\n{report}"
