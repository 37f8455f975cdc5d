"""What a handle has learned rides through checkpoints that have the optimizer alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.frameworks.common import data, need, network
from tests.helpers import equal, state_of
from torchzero_clip import ZClip, attach

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


def start() -> tuple[nn.Module, Any, Any]:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, opt, attach(opt, ZClip(warmup_steps=2), in_checkpoint=True)


def steps(handle: Any) -> float:
    count: torch.Tensor = handle.param_groups[0]["chain"]["ZClip/count"]
    return count.item()


def test_lightning(tmp_path):
    lightning = need("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.opt, self.handle = start()

        def training_step(self, batch: Any) -> Any:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return self.opt

    def trainer(epochs: int) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        keep = {"enable_checkpointing": False, "default_root_dir": tmp_path}
        return lightning.Trainer(max_epochs=epochs, accelerator="cpu", **quiet, **keep)

    loader = torch.utils.data.DataLoader(data(), batch_size=None)
    first, second = Lit(), Lit()
    run = trainer(1)
    run.fit(first, loader)
    run.save_checkpoint(tmp_path / "one.ckpt")
    trainer(2).fit(second, loader, ckpt_path=tmp_path / "one.ckpt")
    assert steps(first.handle) == 8
    assert steps(second.handle) == 16


def test_accelerate(tmp_path):
    def prepared() -> tuple[Any, ...]:
        model, opt, handle = start()
        accelerator = need("accelerate").Accelerator(cpu=True)
        return (accelerator, *accelerator.prepare(model, opt), handle)

    accelerator, model, opt, handle = prepared()
    for x, y in data():
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        opt.step()
        opt.zero_grad()
    accelerator.save_state(tmp_path)
    other, _, _, fresh = prepared()
    other.load_state(tmp_path)
    assert steps(handle) == 8
    assert equal(state_of(fresh), state_of(handle))


def test_the_trainer_of_transformers(tmp_path):
    transformers = need("transformers")
    from tests.frameworks.test_huggingface import STEPS, gpt, trainer

    def begin(**kwargs: Any) -> tuple[Any, Any]:
        model = gpt()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = attach(opt, ZClip(warmup_steps=2), in_checkpoint=True)
        constant = transformers.get_constant_schedule(opt)
        return trainer(tmp_path, model, optimizers=(opt, constant), **kwargs), handle

    first, handle = begin(save_strategy="steps", save_steps=STEPS // 2)
    first.train()
    second, other = begin()
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert steps(handle) == steps(other) == STEPS
