"""Inside: what may stand in a basis."""

from __future__ import annotations

from typing import Any

import torch

from torchzero_clip.core import TensorwiseTransform, Transform


def check_inside(tfm: Transform) -> None:
    """Raise a sentence for a transform that drops parameters, or keeps what no basis can turn."""
    if tfm.target == "grad" or tfm.goes_first or tfm.drops or tfm.starts_with_state:
        raise ValueError(
            "InBasis: links must return an update for every parameter in every step: put "
            f"{type(tfm).__name__} in front of it"
        )
    example = torch.empty(3, 5, device="meta")
    like = [n for n, t in tfm.init(example).items() if getattr(t, "shape", ()) == example.shape]
    lost: Any = [name for name in like if name not in (*tfm.turns, *tfm.permutes)]
    if lost or (isinstance(tfm, TensorwiseTransform) and tfm.keeps_matrices):
        raise TypeError(
            f"InBasis: {type(tfm).__name__} keeps {lost or 'state of matrices'}, which a new basis "
            "would leave in the old one: a class says in turns = (...) which of its state is "
            "linear in the update, and in permutes = (...) which has an entry for each square"
        )
