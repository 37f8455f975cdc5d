"""Functions that check the links inside `InBasis`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchzero_clip.core import TensorwiseTransform, Transform
from torchzero_clip.core.transform import dropping
from torchzero_clip.modules.matrices.soap_basis import SOAPBasis


def check_links(links: Sequence[Transform]) -> None:
    """Raise an error unless the links are a basis and rules whose state can be rotated."""
    if len(links) < 2 or not isinstance(links[0], SOAPBasis):
        raise TypeError(
            "InBasis: pass a basis and at least one transform, such as InBasis(SOAPBasis(), "
            f"Adam()), got {links!r}"
        )
    for link in links[1:]:
        _check_inside(link)


def _check_inside(link: Transform) -> None:
    """Raise an error if a link drops parameters, or has state that cannot be rotated."""
    if not isinstance(link, Transform):
        raise TypeError(
            "InBasis: all arguments after the basis must be transforms, such as Adam(), got "
            f"{link!r}"
        )
    for drops in dropping(link):
        raise ValueError(
            "InBasis: the transforms inside must return an update for every parameter in "
            f"every step, got {type(drops).__name__}: put {type(drops).__name__} before "
            "InBasis"
        )
    for tfm in link.walk():
        if isinstance(tfm, Transform):
            _check_state(tfm)


def _check_state(tfm: Transform) -> None:
    """Raise TypeError if a rule has state that cannot be rotated into another basis."""
    example = torch.empty(3, 5, device="meta")
    state = tfm.init(example)
    elementwise = [name for name, t in state.items() if getattr(t, "shape", ()) == example.shape]
    kinds = tfm.state_kinds
    fixed: Any = [name for name in elementwise if kinds.get(name) not in ("linear", "squares")]
    if fixed or (isinstance(tfm, TensorwiseTransform) and tfm.keeps_matrices):
        raise TypeError(
            f"InBasis: {type(tfm).__name__} has the state {fixed or 'of matrices'}, which "
            "cannot be rotated to a new basis. Set state_kinds = {name: kind} in the "
            'class. Use the kind "linear" for an average of updates, and the kind "squares" '
            "for an average of squared updates"
        )
