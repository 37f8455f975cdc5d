"""A stand-in for CUDA on a machine without it: what asks for its types and device gets the CPU's.

Megatron-LM names types of CUDA in its optimizers, as `p.type() == "torch.cuda.FloatTensor"`, and
makes tensors on the device "cuda". Nothing else is changed, and no file of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class AsCuda(TorchFunctionMode):
    """A block in which tensors of the CPU say that they are CUDA's, and "cuda" is the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "type" and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.")
        return out

    def __enter__(self) -> AsCuda:
        self._current = torch.cuda.current_device
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        torch.cuda.current_device = self._current
