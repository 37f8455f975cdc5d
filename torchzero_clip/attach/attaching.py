"""The function `attach`: rules that rewrite gradients before each step of any optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from torchzero_clip.attach.handle import KEY, Attached
from torchzero_clip.core import Transform
from torchzero_clip.core.gradients import Where
from torchzero_clip.modules.flow.identity import Identity
from torchzero_clip.optimizer.chain_runner import ChainRunner


def attach(
    optimizer: Optimizer,
    *transforms: Transform,
    compile: bool = False,
    process_group: Any = None,
    in_checkpoint: bool = False,
    after: Transform | None = None,
    grad: Where = "grad",
) -> Attached:
    """Make transforms rewrite `.grad` before each step of any optimizer.

    With a closure, the transforms run after every evaluation of the closure. Under GradScaler, the
    transforms receive unscaled gradients. They do not run if GradScaler skips the step.

    A copy of the optimizer (`copy.deepcopy` or `pickle`) has no transforms, because torch does not
    copy hooks. In this case, a warning appears.

    Args:
        optimizer: Any torch optimizer except SparseAdam.
        *transforms: The chain, first to last.
        compile: Compile the operators of links between two norms into one kernel, as `Modular`
            does.
        process_group: The processes that hold other parameters of the same model, as for `Modular`.
        in_checkpoint: Put the state of the transforms into `optimizer.state_dict()`, under the key
            "torchzero_clip". If False, save `handle.state_dict()` as well.
            `optimizer.load_state_dict()` loads state under this key in both cases.
        after: A link with averaged weights, such as `WeightEMA(0.999)`, or a Chain of such links.
            The link runs after each step of the optimizer, on the new weights. Its hyperparameters
            are in the groups of the handle. With `compile`, the link is a separate kernel.
        grad: Where the optimizer's gradients are stored, as for `Modular`.

    Returns:
        A handle with `param_groups`, `state_dict`, `load_state_dict`, `metrics`, `skipped`,
        `explain`, `averaged` and `remove`. The handle has one group of hyperparameters for each
        group of the optimizer. It is also a context manager.

    Example:
        >>> import torch
        >>> from torchzero_clip import ZClip, attach
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = torch.optim.AdamW(model.parameters())
        >>> handle = attach(opt, ZClip())
    """
    if isinstance(optimizer, ChainRunner):
        raise TypeError(
            f"attach: a {type(optimizer).__name__} already contains transforms: pass the new "
            "transforms to the constructor of this optimizer instead"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"attach: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            "attach: transforms do not support the sparse gradients that SparseAdam needs: "
            "use SparseAdam without attach, or construct the layer with sparse=False and use "
            "torch.optim.Adam"
        )
    if "_torchzero_clip" in optimizer.__dict__:
        raise ValueError(
            f"attach: this {type(optimizer).__name__} already has attached transforms: call "
            "remove() on the handle that attach returned, or pass all transforms in one call "
            "of attach"
        )
    if after is not None and not isinstance(after, Transform):
        raise TypeError(f"attach: after= must be a Transform or a Chain, got {after!r}")
    if not transforms and after is not None:
        transforms = (Identity(),)
    if not transforms:
        raise ValueError(
            "attach: at least one transform is required, for example attach(optimizer, ZClip())"
        )
    handle = Attached(
        optimizer,
        *transforms,
        compile=compile,
        process_group=process_group,
        in_checkpoint=in_checkpoint,
        after=after,
        grad=grad,
    )
    if in_checkpoint and KEY not in optimizer.state_dict():
        handle.remove()
        raise TypeError(
            f"attach: in_checkpoint=True is not supported for {type(optimizer).__name__}, "
            "because its state_dict() cannot store the state of the transforms: pass "
            "in_checkpoint=False, and save both optimizer.state_dict() and "
            "handle.state_dict()"
        )
    return handle
