"""torch's tests of its schedulers, on chains."""

from __future__ import annotations

SOURCE = "Ascend/pytorch"  # a copy of the texts of torch 2.1
COMMIT = "0653b139589c316a0dabb56f6c1a62b34a742fd2"
FILES = {"test/optim/test_lrscheduler.py": "aafd0b2364e5"}
PATHS = ["test"]
SETTINGS: dict[str, str] = {}
LEFT_OUT = {
    "fail_with_momentumless_optimizer": "torch itself does not pass it any more: its CyclicLR "
    "takes Adam's β₁ for a momentum",
}
DIFFERS: dict[str, str] = {}


def put_ours() -> None:
    import torch
    from suites import torch_classes

    torch.optim.SGD, torch.optim.Adam = torch_classes.SGD, torch_classes.Adam
