"""attach: any rule in front of any optimizer, and what it refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from torchzero_clip.attach.handle import KEY, Attached
from torchzero_clip.core import Transform
from torchzero_clip.core.gradients import Where
from torchzero_clip.modules.flow.identity import Identity
from torchzero_clip.optimizer import Modular


def attach(
    optimizer: Optimizer,
    *transforms: Transform,
    compile: bool = False,
    process_group: Any = None,
    in_checkpoint: bool = False,
    after: Transform | None = None,
    grad: Where = "grad",
) -> Attached:
    """Put transforms in front of any optimizer: they rewrite `.grad` before each of its steps.

    With a closure they act after every evaluation of it; under GradScaler they see unscaled
    gradients, and nothing runs in a step that is skipped. A copy of the optimizer (`copy.deepcopy`,
    `pickle`) has no transforms, as it has no hooks in torch, and a warning says so.

    Args:
        optimizer: Any torch optimizer but SparseAdam.
        *transforms: The chain, first to last.
        compile: As for `Modular`: one kernel for what stands between two norms.
        process_group: Processes that hold other parameters of the same model, as for `Modular`.
        in_checkpoint: Put the state of the transforms into `optimizer.state_dict()`, under the key
            "torchzero_clip"; otherwise save `handle.state_dict()` beside it. Loading takes it from
            there in any case.
        after: A link with weights for evaluation, as `WeightEMA(0.999)`, or a Chain of such: it
            runs behind each step of the optimizer, at the weights that this has left; compiled in
            one kernel of its own.
        grad: Where the gradients are that the optimizer reads, as for `Modular`.

    Returns:
        A handle with `param_groups` (live values, one group for each of the optimizer's),
        `state_dict`, `metrics` and `remove`; also a context manager.

    Example:
        >>> import torch
        >>> from torchzero_clip import ZClip, attach
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = torch.optim.AdamW(model.parameters())
        >>> handle = attach(opt, ZClip())
    """
    if isinstance(optimizer, Modular):
        raise TypeError(
            f"attach: a {type(optimizer).__name__} is a chain already; put the transforms into it"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"attach: takes a torch.optim.Optimizer, got {optimizer!r}")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            "attach: SparseAdam takes sparse gradients, which no transform can rewrite: leave it "
            "as it is, or make the layer with sparse=False and attach to another optimizer"
        )
    if "_torchzero_clip" in optimizer.__dict__:
        raise ValueError(
            f"attach: this {type(optimizer).__name__} has transforms attached already; remove() "
            "their handle first, or attach all in one call"
        )
    if after is not None and not isinstance(after, Transform):
        raise TypeError(f"attach: after must be a Transform or a Chain, got {after!r}")
    if not transforms and after is not None:
        transforms = (Identity(),)
    if not transforms:
        raise ValueError("attach: give at least one transform, as in attach(optimizer, ZClip())")
    more: Any = {"process_group": process_group, "in_checkpoint": in_checkpoint, "after": after}
    more["grad"] = grad
    handle = Attached(optimizer, *transforms, compile=compile, **more)
    if in_checkpoint and KEY not in optimizer.state_dict():
        handle.remove()
        raise TypeError(
            f"attach: {type(optimizer).__name__}.state_dict() has a format of its own, in which "
            "the state of the transforms has no place: leave in_checkpoint=False, and save "
            "handle.state_dict() beside it"
        )
    return handle
