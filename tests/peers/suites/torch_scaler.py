"""torch's tests of its gradient scaler, on chains.

The text is torch's as a backend for another device keeps it; here it runs on the CPU. The
defaults of torch's helpers are bound when these are imported, so ours come first.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import MagicMock

SOURCE = "Ascend/pytorch"
COMMIT = "d0eda223895538a954512f13d3ef5f1c0e4166fa"
FILES = {"test/test_torch.py": "ad3c4c232b52"}
PATHS = ["test"]
CHOICE = (
    "grad_scaling and not unscale and not update_scale and not state_dict"
    " or clipping_separate_unscale"
)
SETTINGS = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"}
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}


def put_ours() -> None:
    import torch
    from suites import torch_classes as ours

    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW = ours.SGD, ours.Adam, ours.AdamW
    from torch.testing._internal import common_device_type as devices

    for_devices = devices.instantiate_device_type_tests

    def for_the_cpu(cls: Any, scope: Any, only_for: Any = None) -> None:
        for_devices(cls, scope, only_for="cpu")

    devices.instantiate_device_type_tests = for_the_cpu
    absent = MagicMock(is_available=lambda: False, npu=MagicMock(is_available=lambda: False))
    sys.modules.update({"torch_npu": absent, "torch_npu.testing": absent, "url": absent})
    torch.npu = absent
