"""torch's tests of optimizers of DTensors, on chains."""

from __future__ import annotations

import torch

SOURCE = "pytorch/pytorch"
COMMIT = "3a0a3271ea65bf85ff275232dd3149a17aa205c5"
FILES = {"test/distributed/tensor/test_optimizers.py": "c876f28e165b"}
PATHS = ["test"]
SETTINGS: dict[str, str] = {}
LEFT_OUT = {
    "(adadelta|nadam|radam|adamax|asgd)_1d": "no chain has this name",
    "foreach_supported_types": "about a list of torch's",
}
DIFFERS: dict[str, str] = {}
OURS = {name: name.lower() for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop")}


def put_ours() -> None:
    from suites.chains import published
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def fork(self: MultiProcessTestCase) -> None:  # what is made anew would not come by here
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = fork
    vars(torch.optim).update({name: published(method, name) for name, method in OURS.items()})
