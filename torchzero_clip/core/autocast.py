"""Steps inside of `torch.autocast`, which would round the factors of matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

R = TypeVar("R")

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""The types of devices on which autocast may be enabled."""


def without_autocast(function: Callable[..., R], *args: Any) -> R:
    """Return function(*args), computed with autocast disabled.

    Closures and hooks may run a step inside of `torch.autocast`. The inputs of its matrix products
    are float32, and autocast would convert them to half precision.
    """
    for device in DEVICES:
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return without_autocast(function, *args)
    return function(*args)
