"""Steps inside of `torch.autocast`, which would round the factors of matrix products."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""The types of devices on which autocast may be enabled."""


def without_autocast() -> AbstractContextManager[Any]:
    """Return a context in which autocast is disabled.

    Closures and hooks may run a step inside of `torch.autocast`. The inputs of its matrix products
    are float32, and autocast would convert them to half precision.
    """
    enabled = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    if not enabled:
        return nullcontext()
    if len(enabled) == 1:  # torch.compile cannot trace an ExitStack
        return torch.autocast(enabled[0], enabled=False)
    stack = ExitStack()
    for device in enabled:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
