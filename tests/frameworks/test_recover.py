"""Recover in a callback, as pages show: a run in a framework goes back as one by hand does."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import runpy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.frameworks.common import network, values
from tests.helpers import ROOT, equal
from torchzero_clip import LR, Adam, ClipNorm, Modular

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # those of the frameworks, and the way back
]
LINKS = ClipNorm(0.5, dim="global"), Adam(), LR(1e-2)
QUICK = {"every": 2, "check": 2, "window": 4}
BAD = (5, 6)  # the steps whose loss is no number, between the snapshots behind 4 and the end


def example(name: str) -> Any:
    """A file that a page shows."""
    return types.SimpleNamespace(**runpy.run_path(str(ROOT / f"examples/frameworks/{name}.py")))


def cycle(opt: Modular) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.02, total_steps=16)


def test_the_trainer_goes_back_and_on_without_the_batches(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="see tests/frameworks/README.md")
    pytest.importorskip("transformers", reason="see tests/frameworks/README.md")
    huggingface = importlib.import_module("tests.frameworks.test_huggingface")
    model, batches = huggingface.gpt(dropout=0.0), list[Any]()
    inside = model.forward

    @functools.wraps(inside)  # the Trainer looks at its signature
    def forward(*args: Any, **given: Any) -> Any:
        batches.append({k: v.clone() for k, v in given.items() if isinstance(v, Tensor)})
        out = inside(*args, **given)
        out.loss = out.loss * (math.nan if len(batches) in BAD else 1)
        return out

    model.forward = forward
    opt = Modular(model.named_parameters(), *LINKS)
    callback = example("recover_in_trainer").RecoverCallback(**QUICK)
    made = huggingface.trainer(tmp_path, model, optimizers=(opt, cycle(opt)))
    made.add_callback(callback)
    made.train()
    (back,) = callback.recover.events
    assert (back.step, back.to) == (6, 4)

    plain = huggingface.gpt(dropout=0.0)
    opt = Modular(plain.named_parameters(), *LINKS)
    schedule = cycle(opt)
    for step, batch in enumerate(batches, 1):
        if step not in BAD:
            opt.zero_grad()
            plain(**batch).loss.backward()
            opt.step()
            schedule.step()
    assert equal(values(plain), values(model))


@pytest.mark.parametrize("sums", [1, 2])
def test_lightning_goes_back_and_on_without_the_batches(sums: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="see tests/frameworks/README.md")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(3)
    given = [(torch.randn(4, 10), torch.randn(4, 1)) for _ in range(8 * sums)]

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, i: int) -> Tensor:
            bad = i // sums + 1 in BAD
            return nn.functional.mse_loss(self.net(batch[0]), batch[1]) * (math.nan if bad else 1)

        def configure_optimizers(self) -> Any:
            opt = Modular(self.named_parameters(), *LINKS)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": cycle(opt), "interval": "step"}}

    lit, callback = Lit(), example("recover_in_lightning").RecoverCallback(**QUICK)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        accumulate_grad_batches=sums,
        callbacks=[callback],
    )
    trainer.fit(lit, torch.utils.data.DataLoader(given, batch_size=None))
    (back,) = callback.recover.events
    assert (back.step, back.to) == (6, 4)

    net = network()
    opt = Modular(net.named_parameters(), *LINKS)
    schedule = cycle(opt)
    for step in range(8):
        if step + 1 not in BAD:
            opt.zero_grad()
            for x, y in given[step * sums : (step + 1) * sums]:
                (nn.functional.mse_loss(net(x), y) / sums).backward()
            opt.step()
            schedule.step()
    assert equal(values(net), values(lit.net))
