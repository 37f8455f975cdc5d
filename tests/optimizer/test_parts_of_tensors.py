"""Parameters that are cut otherwise than torch would: rules that need more refuse them by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import at_once
from torchzero_clip import (
    AGC,
    LR,
    Adafactor,
    AdaGC,
    Adam,
    Centralize,
    ClipNorm,
    Guard,
    Masked,
    Modular,
    Orthogonalize,
    Standardize,
    Transform,
    ZClip,
)
from torchzero_clip.optimizer.cut_parameters import CUT

RIGHT: list[Callable[[], Transform]] = [
    Adam,
    Guard,
    ZClip,
    AdaGC,
    lambda: ClipNorm(1.0),
    lambda: ClipNorm(1.0, dim="global"),
    lambda: Masked(ClipNorm(1.0), lambda name, p: p.dim() > 1),
]
WRONG: list[Callable[[], Transform]] = [
    AGC,
    Adafactor,
    Orthogonalize,
    Standardize,
    Centralize,
    lambda: ClipNorm(1.0, dim=1),
    lambda: ClipNorm(1.0, ord="std"),
    lambda: Masked(AGC(), lambda name, p: p.dim() > 1),
]


def cut() -> Parameter:
    p = Parameter(torch.ones(4, 3))
    vars(p)[CUT] = True
    return p


@at_once("make", RIGHT)
def test_entries_and_norms_of_whole_tensors_are_taken(make: Callable[[], Transform]) -> None:
    Modular([("w", cut())], make(), LR(1.0))


@at_once("make", WRONG)
def test_what_looks_at_rows_or_more_is_refused_by_name(make: Callable[[], Transform]) -> None:
    rule = make()
    name = "Masked/AGC" if isinstance(rule, Masked) else type(rule).__name__
    chain = [rule, LR(1.0)]
    with pytest.raises(ValueError, match=f"^{name} needs rows or whole matrices, which"):
        Modular([("w", cut())], *chain)
    Modular([("w", Parameter(torch.ones(4, 3)))], *chain)
