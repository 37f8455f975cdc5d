"""Tensors on the CPU, worked on as if they lay on an accelerator: in packs and parts, unread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torchzero_clip.core import small_tensors
from torchzero_clip.core.norms import readable
from torchzero_clip.engines import Eager, pieces, tail


@contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """Nothing is read, small is what has less than ten entries, and parts have seven."""
    asks = [m for name, m in sys.modules.items() if name.startswith("torchzero_clip.")]
    with ExitStack() as stack:
        for name, value in {"HOSTS": (), "LARGE": 10, "ROOM": 24}.items():
            stack.enter_context(patch.object(small_tensors, name, value))
        stack.enter_context(patch.object(pieces, "PIECE", 7))
        stack.enter_context(patch.object(tail, "LARGEST", 11))
        for module in [m for m in asks if vars(m).get("readable") is readable]:
            stack.enter_context(patch.object(module, "readable", lambda x: False))
        yield


class Accelerated(Eager):
    """The default engine, as it does a step on an accelerator."""

    def step(self, step: Any, through: Any) -> Any:
        with as_on_an_accelerator():
            return super().step(step, through)
