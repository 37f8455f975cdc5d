"""torch's tests of optimizers under torch.compile, on chains."""

from __future__ import annotations

SOURCE = "pytorch/pytorch"
COMMIT = "v2.6.0"
FILES = {"test/dynamo/test_optimizers.py": "614baec1e3dc"}
PATHS = ["test"]
SETTINGS = {"PYTEST_ADDOPTS": "--noconftest"}
LEFT_OUT = {"test_init_group": "the case tests an optimizer of the test file"}
DIFFERS = {
    "over_tensor_with_requires_grad": "the first step creates the state in a third graph, and "
    "the test "
    "expects two",
}


def put_ours() -> None:
    import torch

    from .chains import published

    torch.optim.Adam, torch.optim.Adagrad = published("adam", "Adam"), published("adagrad")
