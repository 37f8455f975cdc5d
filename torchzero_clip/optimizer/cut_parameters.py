"""Parts of tensors: which rules are right where a parameter is cut otherwise than torch cuts it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchzero_clip.core.link import Link
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.sharding.layout import refuse_flat
from torchzero_clip.core.transform import TensorwiseTransform, Transform

CUT = "_megatron_fsdp_model"
"""An attribute of the DTensors of Megatron-FSDP, whose ranks have rows as they fit its buffers."""
WHOLE = "layer", "group", "global"
"""The scopes of norms of several tensors."""


def is_entrywise(link: Link) -> bool:
    """Return whether a rule acts on each entry alone, leaves all to rules inside, or is a guard.

    A rule with a scope measures tensors, even if it has rules inside, as `Graft` has.
    """
    tfm = link.transform
    if not link.transforms or getattr(tfm, "place", "") == "first":
        return True
    if hasattr(tfm, "scope"):
        return False
    if tfm.inner or tfm.leaves == "gradient":
        return True
    return type(tfm).step is Transform.step and not isinstance(tfm, TensorwiseTransform)


def has_whole_norms(link: Link) -> bool:
    """Return whether a rule only scales, by norms of whole tensors or of more."""
    tfm = link.transform
    plain = isinstance(tfm, NormRule) and type(tfm).step is NormRule.step
    if not (plain and type(tfm).apply is NormRule.apply) and not tfm.inner:
        return False
    scope = getattr(tfm, "scope", "none")
    return (scope is None or scope in WHOLE) and getattr(tfm, "ord", 2) != "std"


def refuse_cuts(links: Sequence[Link], params: Sequence[Tensor]) -> None:
    """Raise a sentence for flat shards, and where a rule needs more than Megatron-FSDP's tell."""
    refuse_flat(params)
    if any([hasattr(p, CUT) for p in params]):
        for link in links:
            if not (is_entrywise(link) or has_whole_norms(link)):
                raise ValueError(
                    f"{link.path} looks at rows or at more than a norm of whole tensors, and "
                    "Megatron-FSDP cuts parameters at rows of its own: take rules about entries, "
                    "and norms of tensors, layers, groups or all"
                )
