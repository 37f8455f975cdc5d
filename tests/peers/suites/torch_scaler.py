"""torch's tests of its gradient scaler, on chains.

The defaults of torch's helpers are bound when these are imported, so ours come first.
"""

from __future__ import annotations

SOURCE = "pytorch/pytorch"
COMMIT = "v2.6.0"
FILES = {"test/test_torch.py": "523afdc4b3aa"}
PATHS = ["test"]
CHOICE = "grad_scal or grads_invalidated"
SETTINGS = {
    "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu",
    "PYTEST_ADDOPTS": "--noconftest",
    "OMP_NUM_THREADS": "1",
}
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}


def put_ours() -> None:
    import torch

    from .chains import published
    from .older import put_absent

    for name in ("SGD", "Adam", "AdamW"):
        setattr(torch.optim, name, published(name.lower(), name))
    put_absent("test/test_torch.py")
