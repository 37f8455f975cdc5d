"""torch's tests of its clipping functions, through `compat`."""

from __future__ import annotations

SOURCE = "pytorch/pytorch"
COMMIT = "cf30153c4c131c8164ee7798e5022d810682e2cb"  # v2.13.0
FILES = {"test/test_nn.py": ""}
PATHS = ["test"]
CHOICE = "clip_grad"
SETTINGS: dict[str, str] = {}
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}


def put_ours() -> None:
    import torch

    from torchzero_clip import compat

    torch.nn.utils.clip_grad_norm_ = compat.clip_grad_norm_
    torch.nn.utils.clip_grad_value_ = compat.clip_grad_value_
