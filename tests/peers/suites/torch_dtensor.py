"""torch's tests of optimizers of DTensors, on chains."""

from __future__ import annotations

import torch

SOURCE = "pytorch/pytorch"
COMMIT = "v2.6.0"
FILES = {"test/distributed/_tensor/test_optimizers.py": "a8a86b65fa5d"}
PATHS = ["test"]
SETTINGS = {"PYTEST_ADDOPTS": "--noconftest", "OMP_NUM_THREADS": "1"}
PROCESSES = 0  # each case begins its own
LEFT_OUT = {"foreach_supported_types": "the case tests an internal list of torch"}
DIFFERS: dict[str, str] = {}
OURS = (
    "SGD Adam AdamW Adagrad RMSprop Adadelta NAdam RAdam Adamax ASGD Rprop Adafactor"  # as in torch
)


def put_ours() -> None:
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    from .chains import published

    def fork(self: MultiProcessTestCase) -> None:  # what is made anew would not come by here
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = fork
    vars(torch.optim).update({name: published(name.lower(), name) for name in OURS.split()})
