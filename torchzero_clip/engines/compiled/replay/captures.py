"""Captures: put a compiled step on a GPU into a CUDA graph, and replay that graph.

`captured(opt)` gives the engine a `StepCapture`, and `CompiledStep` runs its step through it. A
CUDA graph reads gradients and the loss at the addresses that they had when it was captured. So the
step is captured again after they have moved. It runs without a graph while they move in every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchzero_clip.core.user_warnings import warn
from torchzero_clip.engines.compiled.printers.pointer_tables import TABLES

MOVES_BEFORE_WARNING = 3  # steps in a row whose gradients or loss are at new addresses
KEEP = (
    ("gradients", "keep their memory with opt.zero_grad(set_to_none=False), or capture them too"),
    ("losses", "report one tensor that every step writes, as kept.copy_(loss)"),
)
"""The tensors that a CUDA graph reads at fixed addresses, and how to keep their addresses."""


class StepCapture:
    """The CUDA graph of a step, captured again after its tensors have moved."""

    def __init__(self) -> None:
        self._where: tuple[Any, ...] = None, (), ()  # as in __call__, of the last step
        self._replay: Callable[[], None] | None = None
        self._moves = 0

    def __call__(
        self, step: Callable[[], None], device: torch.device, where: tuple[Any, ...]
    ) -> None:
        """Replay the CUDA graph of a step, or capture the step first.

        Args:
            step: Runs the step without a CUDA graph.
            device: The device of the step.
            where: The compiled step, the addresses of its gradients and the addresses of its loss.
        """
        if where != self._where:
            before = self._where
            self._where = where
            self._replay = None
            self._moves += 1
            moved = [KEEP[i] for i in (0, 1) if where[i + 1] != before[i + 1]]
            if self._moves == MOVES_BEFORE_WARNING and moved:
                names, remedies = [" and ".join(words) for words in zip(*moved, strict=True)]
                warn(
                    f"captured: {names} have other addresses in each step, so no step is "
                    f"captured: {remedies}"
                )
            step()  # which loads kernels and sends tables: neither can happen in a capture
            return
        self._moves = 0
        if self._replay is None:
            self._replay = capture(step, device)
        self._replay()


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture the kernels of a step in a CUDA graph without running them; return its replay.

    Only this thread is captured: other threads may allocate pinned memory in the meantime.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    with TABLES.lock, torch.cuda.stream(stream), warnings.catch_warnings():
        first = len(TABLES.captured)
        warnings.filterwarnings("error", "The CUDA Graph is empty")  # its replay would do nothing
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
        except UserWarning as error:
            raise RuntimeError(f"captured: {error} Leave captured(...) out") from error
        vars(graph)["held"] = TABLES.captured[first:]  # tables live as long as the graph
        del TABLES.captured[first:]
    return graph.replay
