"""torch's tests of its clipping functions, through `compat`."""

from __future__ import annotations

SOURCE = "Ascend/pytorch"  # a copy of the texts of torch 2.1
COMMIT = "5f04b232b4176744e672a1eacb49ad95a94c2f20"
FILES = {"test/test_nn.py": "9e69af068f45"}
PATHS = ["test"]
CHOICE = "clip_grad"
SETTINGS = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"}
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}


def put_ours() -> None:
    import torch
    from torch.testing._internal import common_cuda, common_nn, common_utils

    from torchzero_clip import compat

    torch.nn.utils.clip_grad_norm_ = compat.clip_grad_norm_
    torch.nn.utils.clip_grad_value_ = compat.clip_grad_value_
    # What the file imports, under the names of its time; the chosen tests use none of it.
    vars(common_utils).setdefault("skipIfMps", common_utils.skipIfMPS)
    vars(common_nn).setdefault("new_module_tests", [])
    vars(common_cuda).setdefault("tf32_is_not_fp32", lambda: False)
