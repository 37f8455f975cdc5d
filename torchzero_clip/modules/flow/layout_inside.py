"""The layout of the rules inside a rule, for norms of matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchzero_clip.core import Transform
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.logical_matrices import (
    Grid,
    entry_of,
    grid_of,
    matrices_of,
    whole_matrix,
)


def layout_inside(*tfms: Any) -> MatrixLayout:
    """Return the layout of the first rule that has a layout, or None."""
    for top in tfms:
        for tfm in top.walk() if isinstance(top, Transform) else ():
            layout: MatrixLayout = getattr(tfm, "layout", None)
            if layout is not None:
                return layout
    return None


def grid_of_matrices(rule: Any, name: str, param: Tensor) -> Grid:
    """Return the slices of a parameter whose norms give the norm of each matrix.

    A parameter without a layout is one matrix.
    """
    if entry_of(rule, name, param) is None:
        matrices = whole_matrix(param.shape)
    else:
        matrices = matrices_of(rule, name, param, takes_complex=True)
    return grid_of(matrices, "matrix", param)
