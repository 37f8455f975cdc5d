"""Captures: a step on a GPU that is captured once, and replayed while its tensors stay in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch

from torchzero_clip.core.outside import warn

MOVES = 3  # steps in a row with gradients elsewhere before it is said
MOVED = (
    "captured: gradients lie elsewhere in every step, so that none is captured: keep their memory "
    "with opt.zero_grad(set_to_none=False), or capture the backward pass as well"
)


class StepCapture:
    """The CUDA graph of a step; where tensors have moved it is done as ever, and captured later."""

    def __init__(self) -> None:
        self._where: Hashable = None
        self._replay: Callable[[], None] | None = None
        self._moves = 0

    def __call__(self, step: Callable[[], None], device: torch.device, where: Hashable) -> None:
        """Do a step on a device, whose tensors lie there."""
        if where != self._where:
            self._where, self._replay, self._moves = where, None, self._moves + 1
            if self._moves == MOVES:
                warn(MOVED)
            step()  # which loads kernels and sends tables, as a capture must not
            return
        self._moves = 0
        if self._replay is None:
            self._replay = capture(step, device)
        self._replay()


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What repeats the kernels of a step on a device; it is not done yet.

    Of other devices nothing is captured, nor of other threads, which may pin memory meanwhile.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.filterwarnings("error", "The CUDA Graph is empty")  # its replays do nothing
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
        except UserWarning as error:
            raise RuntimeError(f"captured: {error} Leave captured(...) out") from error
    return graph.replay
