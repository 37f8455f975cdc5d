"""torch's tests of averages of weights and of batch norm's statistics, over ours.

There is no optimizer in the text, which moves the weights by hand and then tells an
`AveragedModel`: here a step of nothing follows, of a chain that is an average alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim import swa_utils

from torchzero_clip import Modular, WeightAverage, WeightEMA, fresh_batch_norm

SOURCE = "pytorch/pytorch"
COMMIT = "v2.6.0"
FILES = {"test/optim/test_swa_utils.py": "560316fe3ae6"}
PATHS = ["test"]
SETTINGS = {"PYTEST_ADDOPTS": "--noconftest", "OMP_NUM_THREADS": "1"}
LEFT_OUT = {"use_multi_avg_fn_False": "the case passes its own averaging function"}
DIFFERS: dict[str, str] = {}


class Averaged(swa_utils.AveragedModel):
    def __init__(self, model: Any, *args: Any, multi_avg_fn: Any = None, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.rule, self.told = multi_avg_fn or WeightAverage(), None

    def update_parameters(self, model: Any) -> None:
        theirs, ours = self.tensors(model), self.tensors(self.module)
        self.told = self.told or Modular(theirs, self.rule)
        for tensor in theirs:
            tensor.grad = torch.zeros_like(tensor)
        self.told.step()
        with self.told.averaged(), torch.no_grad():
            for old, new in zip(ours, theirs, strict=True):
                old.copy_(new)
        if not self.use_buffers:
            for old, new in zip(self.module.buffers(), model.buffers(), strict=True):
                old.copy_(new)
        self.n_averaged += 1

    def tensors(self, model: Any) -> list[Any]:
        counted = list(model.buffers()) if self.use_buffers else []
        return [*model.parameters(), *(b for b in counted if b.is_floating_point())]


def put_ours() -> None:
    def update_bn(loader: Any, model: Any, device: Any = None) -> None:
        with fresh_batch_norm(model, loader):
            found = copy.deepcopy(model.state_dict())
        model.load_state_dict(found)

    ours = {"AveragedModel": Averaged, "update_bn": update_bn}
    ours |= {"get_ema_multi_avg_fn": WeightEMA, "get_swa_multi_avg_fn": WeightAverage}
    vars(swa_utils).update(ours)
