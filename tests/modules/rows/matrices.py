"""Whole matrices: their singular values and their rows."""

from __future__ import annotations

import math

from torch import Tensor

from tests.modules.rows.row import Row
from torchzero_clip import (
    Adam,
    Chain,
    ClipRMS,
    ClipSpectral,
    EqualRows,
    Graft,
    InBasis,
    KLBasis,
    Kron,
    Lion,
    Momentum,
    NeuronNorm,
    Orthogonalize,
    Rows,
    ScaleByShape,
    Shampoo,
    SOAPBasis,
)

inf, nan = math.inf, math.nan


def halves(name: str, t: Tensor) -> list[int] | None:
    """Two matrices, one after the other, in every parameter with an even number of rows."""
    return [len(t) // 2] * 2 if t.dim() > 1 and len(t) % 2 == 0 and len(t) else None


ROWS = [
    Row(
        Orthogonalize,
        good={
            "default": Orthogonalize,
            "original": lambda: Orthogonalize(3, scale="original"),
            "rms": lambda: Orthogonalize(scale="match_rms_adamw"),
            "muon": lambda: Chain(Momentum(0.95, nesterov=True), Orthogonalize()),
            "polar express": lambda: Orthogonalize(5, "polar_express"),
            "layout": lambda: Orthogonalize(layout=halves),
        },
        bad=[
            ({"coefficients": (nan, 0.0, 0.0)}, ValueError, "coefficients must be one of ['quin"),
            ({"coefficients": (1.0, 2.0)}, ValueError, "3 numbers, or 3 numbers for each step"),
            ({"coefficients": ()}, ValueError, "coefficients must be one of ['quintic', 'polar"),
            ({"coefficients": "cubic"}, ValueError, "for each step, got 'cubic'"),
            ({"coefficients": None}, ValueError, "for each step, got None"),
        ],
        complex="refuses",
        matrices=True,
        exact=False,
        loops=30,
    ),
    Row(
        ClipSpectral,
        good={"0.5": lambda: ClipSpectral(0.5)},
        args={"max_norm": 1.0},
        loose={"1e9": lambda: ClipSpectral(1e9)},
        complex="refuses",
        matrices=True,
        exact=False,
        loops=30,
    ),
    Row(
        EqualRows,
        good={"default": EqualRows, "layout": lambda: EqualRows(layout=halves)},
        nonfinite="scaled",
        scope={"default": "tensor", "layout": "slices"},
        complex="turns",
        matrices=True,
        loops=12,
    ),
    Row(
        NeuronNorm,
        good={
            "default": NeuronNorm,
            "longer": lambda: NeuronNorm(0.5, neurons="longer"),
        },
        memory="guarded",
        scope={"default": "tensor", "longer": "tensor"},
        complex="turns",
        matrices=True,
        loops=20,
    ),
    Row(
        Rows,
        good={
            "dion2": lambda: Rows(0.25, Orthogonalize()),
            "dion3": lambda: Chain(Rows(0.5, Orthogonalize(), 0.9, lines="rows"), NeuronNorm()),
            "spectral": lambda: Rows(0.4, ClipSpectral(0.5), error=0.0),
            "layout": lambda: Rows(1.0, Orthogonalize(), layout=halves),
        },
        args={"share": 0.5, "tfm": Orthogonalize()},
        bad=[
            (
                {"tfm": Adam()},
                TypeError,
                "tfm= must be a transform of matrices without state, layout=",
            ),
            (
                {"tfm": SOAPBasis()},
                TypeError,
                "matrices without state, layout= or target=, such as O",
            ),
            ({"tfm": Orthogonalize(target="grad")}, TypeError, "or target=, such as Orthogonal"),
            (
                {"tfm": Orthogonalize(layout={"a": [2]})},
                TypeError,
                "matrices without state, layout= or target=, such",
            ),
            ({"tfm": None}, TypeError, "as Orthogonalize(), got None"),
        ],
        memory="free",
        complex="refuses",
        matrices=True,
        exact=False,
        adds=True,
        loops=110,
        traces=False,
    ),
    Row(
        ScaleByShape,
        good={
            "ratio": ScaleByShape,
            "columns": lambda: ScaleByShape(0.5, "inverse_columns"),
        },
        complex="turns",
        matrices=True,
    ),
    Row(
        SOAPBasis,
        good={
            "every 2": lambda: SOAPBasis(every=2),
            "short": lambda: SOAPBasis(every=3, max_dim=3, first="step"),
            "layout": lambda: SOAPBasis(every=2, layout=halves, stagger=True),
            "use": lambda: SOAPBasis(every=2, first="use"),
        },
        memory="free",
        complex="free",
        matrices=True,
        loops=60,
        traces=False,
    ),
    Row(
        KLBasis,
        good={
            "every 2": lambda: KLBasis(every=2),
            "short": lambda: KLBasis(every=3, max_dim=3, first="step", initial=1.0),
            "layout": lambda: KLBasis(every=2, layout=halves, stagger=True),
        },
        memory="free",
        complex="free",
        matrices=True,
        loops=100,
        traces=False,
    ),
    Row(
        Shampoo,
        good={
            "every 2": lambda: Shampoo(every=2),
            "short": lambda: Shampoo((0.5, 0.9), 1e-6, 0.5, every=3, max_dim=3),
            "layout": lambda: Shampoo(every=2, layout=halves, stagger=True),
            "grafted": lambda: Graft(Adam(), Shampoo(every=2)),
        },
        memory="free",
        complex="refuses",
        matrices=True,
        exact=False,
        loops=120,
        traces=False,
    ),
    Row(
        Kron,
        good={
            "default": Kron,
            "every 2": lambda: Kron(0.5, every=2, diagonal="longer"),
            "short": lambda: Kron(precond_lr=0.5, every=3, max_dim=3, initial=2.0),
            "layout": lambda: Kron(every=2, diagonal="one", layout=halves),
            "clipped": lambda: Chain(Kron(diagonal="all", eps=0.0), ClipRMS(1.1)),
        },
        memory="free",
        complex="refuses",
        matrices=True,
        exact=False,
        loops=150,
        traces=False,
    ),
    Row(
        InBasis,
        good={
            "soap": lambda: InBasis(SOAPBasis(every=2), Adam((0.9, 0.95))),
            "first step": lambda: InBasis(SOAPBasis(every=3, first="step"), Adam(eps=1e-3)),
            "layout": lambda: InBasis(SOAPBasis(every=2, layout=halves), Lion()),
            "use": lambda: InBasis(SOAPBasis(every=2, first="use"), Adam(bias_correction=False)),
            "kl": lambda: InBasis(KLBasis(every=2), Adam(bias_correction=False)),
        },
        memory="free",
        complex="refuses",
        matrices=True,
        exact=False,
        squares=True,
        adds=True,
        loops=90,
        traces=False,
    ),
]
