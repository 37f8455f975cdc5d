"""Batch norm for weights for evaluation: its statistics are of other weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.optim.swa_utils import update_bn


@contextmanager
def fresh_batch_norm(
    model: Module, loader: Iterable[Any], device: torch.device | None = None
) -> Iterator[None]:
    """Batch norm whose running statistics are those of the weights as they are, while it lasts.

    The batches are passed through the model by `torch.optim.swa_utils.update_bn`; at the end of the
    context all buffers are what they were.

    Args:
        model: A model; one without batch norm stays as it is.
        loader: Batches, or tuples and lists whose first entry is one.
        device: Where they are brought first, if anywhere.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, WeightEMA, fresh_batch_norm
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.BatchNorm1d(8))
        >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), WeightEMA(0.999))
        >>> loader = [torch.randn(64, 10) for _ in range(4)]
        >>> with opt.averaged(), fresh_batch_norm(model, loader):
        ...     out = model.eval()(torch.randn(64, 10))
    """
    buffers = list(model.buffers())  # a batch may change those of other layers as well
    kept = [buffer.clone() for buffer in buffers]
    try:
        update_bn(loader, model, device)
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
