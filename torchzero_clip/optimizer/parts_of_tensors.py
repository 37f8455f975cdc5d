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


def is_entrywise(link: Link) -> bool:
    """Whether a rule acts on each entry alone, leaves that to rules inside, or is a guard."""
    tfm = link.transform
    if not link.transforms or tfm.inner or getattr(tfm, "place", "") == "first":
        return True
    return type(tfm).step is Transform.step and not isinstance(tfm, TensorwiseTransform)


def has_whole_norms(link: Link) -> bool:
    """Whether a rule only scales, by norms of whole tensors or of more."""
    tfm = link.transform
    plain = isinstance(tfm, NormRule) and type(tfm).step is NormRule.step
    whole = plain and (tfm.scope is None or isinstance(tfm.scope, str)) and tfm.ord != "std"
    return whole and type(tfm).apply is NormRule.apply


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
