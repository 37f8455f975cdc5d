"""captured(opt): steps that are replays of a CUDA graph."""

from __future__ import annotations

from typing import TypeVar

from torchzero_clip.core.tensor_kinds import is_sharded
from torchzero_clip.optimizer.modular import Modular

M = TypeVar("M", bound=Modular)


def captured(opt: M) -> M:
    """The optimizer, whose steps are from now on one CUDA graph that is replayed.

    The first steps are done as ever, and one that is like the two before it is captured. Rates and
    other live values may change: the graph reads them where they are sent. It is captured anew
    after a change of what it holds: which parameters have gradients and where these lie, groups,
    a state that was loaded or saved. Gradients must keep their memory:
    `opt.zero_grad(set_to_none=False)`.

    Args:
        opt: With `compile=True`, and parameters on one GPU.

    Example:
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular, captured
        >>> def make(model):  # on a GPU
        ...     links = ClipNorm(1.0, dim="global"), Adam(), LR(1e-3)
        ...     return captured(Modular(model.parameters(), *links, compile=True))
    """
    if not isinstance(opt, Modular):
        raise TypeError(f"captured takes a Modular, got {type(opt).__name__}")
    params = [p for group in opt.param_groups for p in group["params"]]
    if opt.process_group is not None or any(map(is_sharded, params)):
        raise ValueError(
            "captured: steps of sharded parameters, and of stages with a process_group, wait for "
            "other ranks, which no graph of one GPU does: leave captured out, they are replayed"
        )
    opt.engine.capture({p.device for p in params})
    return opt
