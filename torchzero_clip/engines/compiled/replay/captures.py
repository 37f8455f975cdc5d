"""Captures: a step on a GPU that is captured once, and replayed while its tensors stay in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchzero_clip.core.user_warnings import warn
from torchzero_clip.engines.compiled.printers.pointer_tables import TABLES

MOVES = 3  # steps in a row with gradients or a loss elsewhere before it is said
KEEP = (
    ("gradients", "keep their memory with opt.zero_grad(set_to_none=False), or capture them too"),
    ("losses", "report one tensor that every step writes, as kept.copy_(loss)"),
)
"""What a graph reads where it lay, and how it stays there."""


class StepCapture:
    """The CUDA graph of a step; where tensors have moved it is done as ever, and captured later."""

    def __init__(self) -> None:
        self._where: tuple[Any, ...] = None, (), ()
        self._replay: Callable[[], None] | None = None
        self._moves = 0

    def __call__(
        self, step: Callable[[], None], device: torch.device, where: tuple[Any, ...]
    ) -> None:
        """Do a step on a device: whose it is, and where its gradients and its loss lie."""
        if where != self._where:
            before, self._where = self._where, where
            self._replay, self._moves = None, self._moves + 1
            moved = [KEEP[i] for i in (0, 1) if where[i + 1] != before[i + 1]]
            if self._moves == MOVES and moved:
                what, how = [" and ".join(words) for words in zip(*moved, strict=True)]
                warn(f"captured: {what} lie elsewhere in each step, so none is captured: {how}")
            step()  # which loads kernels and sends tables, as a capture must not
            return
        self._moves = 0
        if self._replay is None:
            self._replay = capture(step, device)
        self._replay()


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays the kernels of a step on a device; it is not done yet.

    Of other devices nothing is captured, nor of other threads, which may pin memory meanwhile.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with TABLES.lock, torch.cuda.stream(stream), warnings.catch_warnings():
        first = len(TABLES.captured)
        warnings.filterwarnings("error", "The CUDA Graph is empty")  # its replays do nothing
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
        except UserWarning as error:
            raise RuntimeError(f"captured: {error} Leave captured(...) out") from error
        vars(graph)["held"] = TABLES.captured[first:]  # what it reads goes with it
        del TABLES.captured[first:]
    return graph.replay
