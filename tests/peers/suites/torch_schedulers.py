"""torch's tests of its schedulers, on chains."""

from __future__ import annotations

SOURCE = "pytorch/pytorch"
COMMIT = "cf30153c4c131c8164ee7798e5022d810682e2cb"  # v2.13.0
FILES = {"test/optim/test_lrscheduler.py": ""}
PATHS = ["test"]
SETTINGS: dict[str, str] = {}
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}


def put_ours() -> None:
    import torch
    from suites import torch_classes

    torch.optim.SGD, torch.optim.Adam = torch_classes.SGD, torch_classes.Adam
