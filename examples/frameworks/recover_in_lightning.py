"""Recover as a callback for a Lightning Trainer with one optimizer."""

from __future__ import annotations

from typing import Any

import lightning
import torch

from torchzero_clip import Recover


class RecoverCallback(lightning.Callback):
    """Roll back if the run diverges. The data loader continues with the next batch."""

    def __init__(self, **options: Any) -> None:
        self.options, self.losses, self.steps = options, list[Any](), 0

    def on_train_start(self, trainer, module):
        (opt,), self.steps = trainer.optimizers, trainer.global_step
        schedules = [each.scheduler for each in trainer.lr_scheduler_configs]
        self.recover = Recover(opt, module, parts=schedules, **self.options)

    def on_train_batch_end(self, trainer, module, outputs, *args):
        self.losses.append(outputs["loss"].detach())
        if trainer.global_step > self.steps:  # else batches are summed
            self.recover.step(torch.stack(self.losses).mean())
            self.losses.clear()
            self.steps = trainer.global_step
