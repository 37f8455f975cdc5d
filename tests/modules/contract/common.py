"""What the contracts share: gradients that grow, and with a bad entry."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import Tensors, gradients
from tests.table import Case

inf, nan = math.inf, math.nan

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def growing(case: Case, steps: int, **kwargs: Any) -> list[Tensors]:
    """Gradients that grow from step to step, so that every limit is met."""
    scale = kwargs.pop("scale", 1.0)
    return [gradients(case.shapes, i, scale=scale * (i + 1), **kwargs) for i in range(steps)]


def owns_lr(case: Case) -> bool:
    return any("lr" in tfm.live for tfm in case.make().walk())


def with_bad(grads: Tensors, name: str, value: float) -> Tensors:
    """The gradients with one bad entry."""
    grads = {n: g.clone() for n, g in grads.items()}
    grads[name].view(-1)[0] = value
    return grads


SICK = "embed.weight"


def on_devices(case: Case) -> bool:
    """Whether the rule can run on a device without values: a fake one has no random numbers."""
    return not case.reads_host and not case.draws


class NoCopyToHost(TorchDispatchMode):
    """Raises where an accelerator's tensor is copied to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[-1] if func is torch.ops.aten.copy_.default else args[0]
            assert out.device == source.device or out.device.type != "cpu", func
        return out


class Count(TorchDispatchMode):
    """Counts operator calls by name, without views and numbers on the host, which start nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.scalar_tensor.default:
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))
