"""The norms of the atlas' gradients as traces: what goes wrong is marked."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.atlas.gradients import BEFORE, PARTS, STEPS, TROUBLES, gradients
from torchzero_clip import Trace

SIGNS = str.maketrans({" ": "_", "×": "x", "÷": "d"})


def troubles() -> Iterator[tuple[str, Trace]]:
    """The name of a file for every trouble, and its trace."""
    names, rows = gradients()
    for name, trouble in TROUBLES.items():
        parts = rows[:, names.index(name)].split(PARTS, dim=-1)
        norms = torch.stack([torch.linalg.vector_norm(part, dim=-1) for part in parts], 1)
        spike = torch.zeros(STEPS)
        spike[BEFORE : BEFORE + (trouble.lasts or 0)] = 1.0
        spike[-1] = 1.0
        yield (
            f"atlas_{name.translate(SIGNS).replace('10⁶', '1e6')}",
            Trace(norms, logged={"spike": spike}),
        )
