"""Recover as a callback for the Trainer of transformers, and for its subclasses."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from torchzero_clip import Recover


class RecoverCallback(TrainerCallback):
    """Roll back if the run diverges, judged by the model's loss. The data loader continues."""

    def __init__(self, **options: Any) -> None:
        self.options, self.losses = options, list[Any]()

    def on_train_begin(self, args, state, control, model, optimizer, lr_scheduler, **_):
        chain = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        self.recover = Recover(chain, model, parts=[lr_scheduler], **self.options)
        self.hook = model.register_forward_hook(self.note)

    def note(self, model, inputs, outputs):
        if model.training:
            self.losses.append(outputs.loss.detach())

    def on_step_end(self, *args, **kwargs):
        self.recover.step(torch.stack(self.losses).mean())
        self.losses.clear()

    def on_train_end(self, *args, **kwargs):
        self.hook.remove()
