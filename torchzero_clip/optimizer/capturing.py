"""The function `captured`, which makes the steps of an optimizer replay a CUDA graph."""

from __future__ import annotations

from typing import TypeVar

from torchzero_clip.core.tensor_kinds import is_sharded
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.optimizer.modular import Modular

M = TypeVar("M", bound=Modular)


def captured(opt: M) -> M:
    """Make the steps of an optimizer replay one CUDA graph, and return the optimizer.

    The first steps run as usual. A step is captured if it is like the previous two steps. Learning
    rates and other hyperparameters may change, because the graph reads them from memory on the GPU.

    The optimizer captures a new graph after any change of the things that the graph contains. Such
    changes are new groups, other parameters with gradients, other addresses of gradients, and a
    state dict that was loaded or saved. Gradients must keep their memory, so call
    `opt.zero_grad(set_to_none=False)`.

    Args:
        opt: An optimizer with `compile=True`, and parameters on one GPU.

    Example:
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular, captured
        >>> def make(model):  # on a GPU
        ...     links = ClipNorm(1.0, dim="global"), Adam(), LR(1e-3)
        ...     return captured(Modular(model.parameters(), *links, compile=True))
    """
    if not isinstance(opt, Modular):
        raise TypeError(f"captured: opt must be a Modular, got {type(opt).__name__}")
    params = params_of(opt)
    if opt.process_group is not None or any(map(is_sharded, params)):
        raise ValueError(
            "captured: sharded parameters and process_group are not supported, because a step "
            "that communicates with other ranks cannot be captured: use compile=True "
            "without captured"
        )
    opt.engine.capture({p.device for p in params})
    return opt
