"""Captures: put a compiled step on a GPU into a CUDA graph, and replay this graph.

`captured(opt)` gives the engine a `StepCapture`, and `CompiledStep` calls the `StepCapture` to run
the step. A CUDA graph reads gradients and the loss at fixed addresses. If a gradient or the loss
has a new address, the step runs once without a CUDA graph, and the next step is captured again. If
the addresses differ in every step, no step uses a CUDA graph.
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
    (
        "gradients",
        "keep the memory of gradients with opt.zero_grad(set_to_none=False), or put the "
        "backward pass into the CUDA graph too",
    ),
    ("losses", "copy each loss into the same tensor with kept.copy_(loss), and report kept"),
)
"""The tensors that a CUDA graph reads at fixed addresses, each with advice for users.

The advice explains how to keep the address of the tensor. It is part of a warning.
"""


class StepCapture:
    """The CUDA graph of a step. It is captured again after gradients or the loss have moved."""

    def __init__(self) -> None:
        self._where: tuple[Any, ...] = None, (), ()  # as in __call__, of the last step
        self._replay: Callable[[], None] | None = None
        self._moves = 0

    def __call__(
        self, step: Callable[[], None], device: torch.device, where: tuple[Any, ...]
    ) -> None:
        """Run a step. The CUDA graph is used unless gradients or the loss have new addresses.

        Args:
            step: A function that runs the step without a CUDA graph.
            device: The device of the step.
            where: Three values: the compiled step, the addresses of its gradients, and the address
                of its loss.
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
                    f"captured: no CUDA graph is used, because {names} have a new memory "
                    f"address in each step: {remedies}"
                )
            step()  # which loads kernels and sends tables: neither can happen in a capture
            return
        self._moves = 0
        if self._replay is None:
            self._replay = capture(step, device)
        self._replay()


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture the kernels of a step in a CUDA graph, and return the function that replays it.

    The kernels do not run during the capture. PyTorch captures only this thread, so other threads
    may allocate pinned memory at the same time.
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
            raise RuntimeError(f"captured: {error} Remove the call captured(optimizer)") from error
        vars(graph)["held"] = TABLES.captured[first:]  # tables live as long as the graph
        del TABLES.captured[first:]
    return graph.replay
