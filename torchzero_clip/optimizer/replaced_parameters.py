"""A warning about an optimizer that was created before `fully_shard` replaced its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchzero_clip.core.sharding.layout import layout_of
from torchzero_clip.core.torch_private import modules_with_sharding
from torchzero_clip.core.user_warnings import warn


def warn_of_replaced_parameters(groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn if the parameters of the groups look like parameters that `fully_shard` has replaced.

    Call this function in a step in which no parameter has a gradient. `fully_shard` gives a model
    new parameters, so an optimizer with the old parameters never receives a gradient. PyTorch keeps
    no record of the old parameters. The function therefore compares shapes: it warns if no
    parameter of the groups is sharded, and sharded modules have parameters of all these shapes.

    Args:
        groups: The parameter groups of an optimizer.
    """
    if torch.compiler.is_compiling():
        return
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    if not trained or any([layout_of(p) is not None for p in trained]):
        return
    modules = modules_with_sharding()
    sharded = {id(p): p.shape for m in modules for p in m.parameters() if layout_of(p) is not None}
    if Counter([p.shape for p in trained]) <= Counter(sharded.values()):
        warn(
            "no parameter of the optimizer has a gradient, and a model that fully_shard() has "
            "sharded has parameters of the same shapes. fully_shard() replaces parameters, so an "
            "optimizer with the old parameters does not train the model: call fully_shard() "
            "before groups(model) or model.parameters(), and pass the new parameters to the "
            "optimizer"
        )
