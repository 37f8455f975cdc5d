"""torch's tests of its schedulers, on chains."""

from __future__ import annotations

SOURCE = "pytorch/pytorch"
COMMIT = "v2.6.0"
FILES = {"test/optim/test_lrscheduler.py": "316d639a6b5d"}
PATHS = ["test"]
SETTINGS = {"PYTEST_ADDOPTS": "--noconftest", "OMP_NUM_THREADS": "1"}
LEFT_OUT = {"verbose_deprecation_warning": "the case tests an argument that torch has removed"}
DIFFERS = {
    "test_cycle_lr_with_adam": "the test sets β₁ to 22, and `Adam` raises an error for it",
}


def put_ours() -> None:
    import torch

    from . import torch_classes
    from .older import put_absent

    torch.optim.SGD, torch.optim.Adam = torch_classes.SGD, torch_classes.Adam
    put_absent("test/optim/test_lrscheduler.py")
