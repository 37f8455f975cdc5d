"""Inside: what may stand in a basis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchzero_clip.core import TensorwiseTransform, Transform
from torchzero_clip.core.transform import dropping
from torchzero_clip.modules.matrices.soap_basis import SOAPBasis


def check_links(links: Sequence[Transform]) -> None:
    """Raise unless links are a basis and transforms whose state can be moved to another basis."""
    if len(links) < 2 or not isinstance(links[0], SOAPBasis):
        raise TypeError(
            "InBasis: links must be a basis and transforms, as InBasis(SOAPBasis(), Adam()), "
            f"got {links!r}"
        )
    for link in links[1:]:
        _check_inside(link)


def _check_inside(link: Transform) -> None:
    """Raise if a link drops parameters, or keeps state that cannot be moved to another basis."""
    if not isinstance(link, Transform):
        raise TypeError(f"InBasis: links must be transforms, such as Adam(), got {link!r}.")
    for drops in dropping(link):
        raise ValueError(
            "InBasis: links must return an update for every parameter in every step: put "
            f"{type(drops).__name__} in front of it"
        )
    for tfm in link.walk():
        if isinstance(tfm, Transform):
            _check_state(tfm)


def _check_state(tfm: Transform) -> None:
    """Raise if a transform keeps state that cannot be moved to another basis."""
    example = torch.empty(3, 5, device="meta")
    like = [n for n, t in tfm.init(example).items() if getattr(t, "shape", ()) == example.shape]
    lost: Any = [name for name in like if tfm.state_kinds.get(name) not in ("linear", "squares")]
    if lost or (isinstance(tfm, TensorwiseTransform) and tfm.keeps_matrices):
        raise TypeError(
            f"InBasis: {type(tfm).__name__} keeps {lost or 'state of matrices'}, which a new basis "
            "would leave in the old one: a class says in state_kinds = {name: kind} which of its "
            'state is "linear" in the update, and which has an entry for each of its "squares"'
        )
