"""Checks of rules for parameters that are cut into other parts than torch's shards."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchzero_clip.core.link import Link
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.sharding.layout import refuse_flat
from torchzero_clip.core.transform import TensorwiseTransform, Transform

CUT = "_megatron_fsdp_model"
"""An attribute of DTensors from Megatron-FSDP, whose shards are cut to fit its buffers."""
SCOPES_OF_WHOLE_TENSORS = "layer", "group", "global"
"""The scopes of norms that cover several tensors."""


def is_entrywise(link: Link) -> bool:
    """Return whether a rule is a guard, acts on single elements, or only runs rules inside it.

    A rule with a scope measures tensors, even if it has rules inside it, such as `Graft`.
    """
    tfm = link.transform
    if not link.transforms or link.is_guard:
        return True
    if hasattr(tfm, "scope"):
        return False
    if tfm.inner or tfm.leaves == "gradient":
        return True
    return type(tfm).step is Transform.step and not isinstance(tfm, TensorwiseTransform)


def has_whole_norms(link: Link) -> bool:
    """Return whether a rule only scales tensors, by norms of one or more whole tensors."""
    tfm = link.transform
    plain = isinstance(tfm, NormRule) and type(tfm).step is NormRule.step
    if not (plain and type(tfm).apply is NormRule.apply) and not tfm.inner:
        return False
    scope = getattr(tfm, "scope", "none")
    covers_whole_tensors = scope is None or scope in SCOPES_OF_WHOLE_TENSORS
    return covers_whole_tensors and getattr(tfm, "ord", 2) != "std"


def refuse_cuts(links: Sequence[Link], params: Sequence[Tensor]) -> None:
    """Raise an error for flat shards, and for rules that cannot use shards of Megatron-FSDP."""
    refuse_flat(params)
    if any([hasattr(p, CUT) for p in params]):
        for link in links:
            if not (is_entrywise(link) or has_whole_norms(link)):
                raise ValueError(
                    f"{link.path} needs rows or whole matrices, which Megatron-FSDP splits between "
                    "ranks: use only elementwise transforms, and norms with dim=None, 'layer', "
                    "'group' or 'global'"
                )
