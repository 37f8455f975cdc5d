"""torch's tests of its gradient scaler, on chains.

The defaults of torch's helpers are bound when these are imported, so ours come first.
"""

from __future__ import annotations

SOURCE = "pytorch/pytorch"
COMMIT = "cf30153c4c131c8164ee7798e5022d810682e2cb"  # v2.13.0
FILES = {"test/test_torch.py": ""}
PATHS = ["test"]
CHOICE = (
    "grad_scaling and not unscale and not update_scale and not state_dict"
    " or clipping_separate_unscale"
)
SETTINGS: dict[str, str] = {}
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}


def put_ours() -> None:
    import torch
    from suites import torch_classes as ours

    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW = ours.SGD, ours.Adam, ours.AdamW
