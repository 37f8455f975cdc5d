"""torch's tests of its clipping functions, through `compat`."""

from __future__ import annotations

SOURCE = "pytorch/pytorch"
COMMIT = "v2.6.0"
FILES = {"test/test_nn.py": "0af76d427e2e"}
PATHS = ["test"]
CHOICE = "clip_grad"
SETTINGS = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu", "PYTEST_ADDOPTS": "--noconftest"}
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}


def put_ours() -> None:
    import torch

    from torchzero_clip import compat

    from .older import put_absent

    vars(torch.nn.utils).update({name: getattr(compat, name) for name in compat.__all__})
    put_absent("test/test_nn.py")
