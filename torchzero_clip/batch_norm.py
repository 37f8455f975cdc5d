"""Batch norm statistics for averaged weights. Training computes no such statistics."""

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
    """Recompute the running statistics of batch norm for the current weights, inside a context.

    `torch.optim.swa_utils.update_bn` passes the batches through the model. At the end of the
    context, all buffers get their old values back.

    Args:
        model: The model. A model without batch norm is not changed.
        loader: An iterable of batches. A batch is a tensor, or a tuple or list whose first element
            is the input of the model.
        device: The device to which each batch is moved before it passes the model. By default
            batches are not moved.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, WeightEMA, fresh_batch_norm
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.BatchNorm1d(8))
        >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), WeightEMA(0.999))
        >>> loader = [torch.randn(64, 10) for _ in range(4)]
        >>> with opt.averaged(), fresh_batch_norm(model, loader):
        ...     out = model.eval()(torch.randn(64, 10))
    """
    buffers = list(model.buffers())  # all of them, because a batch may change other buffers too
    former = [buffer.clone() for buffer in buffers]
    try:
        update_bn(loader, model, device)
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, former, strict=True):
                buffer.copy_(before)
