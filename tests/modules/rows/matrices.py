"""Whole matrices: their singular values and their rows."""

from __future__ import annotations

import math

from tests.modules.rows.row import Bad, Row, at_least, number, share, steps
from torchzero_clip import (
    Adam,
    Chain,
    ClipSpectral,
    EqualRows,
    InBasis,
    Lion,
    Momentum,
    NeuronNorm,
    Orthogonalize,
    Rows,
    ScaleByShape,
    SOAPBasis,
)

inf, nan = math.inf, math.nan

STACKS: list[Bad] = [({"stacks": 2}, TypeError, "stacks must be True, False or None, got 2")]

ROWS = [
    Row(
        Orthogonalize,
        good={
            "default": Orthogonalize,
            "original": lambda: Orthogonalize(3, scale="original"),
            "rms": lambda: Orthogonalize(scale="match_rms_adamw"),
            "muon": lambda: Chain(Momentum(0.95, nesterov=True), Orthogonalize()),
            "polar express": lambda: Orthogonalize(5, "polar_express"),
            "blocks": lambda: Orthogonalize(blocks={"conv": 2, r"head\.w": (1, 2)}),
        },
        bad=[
            *number("steps", 0, words="an integer at least 1 or None"),
            *number("steps", 2.5, error=TypeError, words="an integer at least 1 or None"),
            *at_least("eps", 0),
            ({"coefficients": (nan, 0.0, 0.0)}, ValueError, "coefficients must be one of ['quin"),
            ({"coefficients": (1.0, 2.0)}, ValueError, "3 numbers, or 3 numbers for each step"),
            ({"coefficients": ()}, ValueError, "coefficients must be one of ['quintic', 'polar"),
            ({"coefficients": "cubic"}, ValueError, "for each step, got 'cubic'"),
            ({"coefficients": None}, ValueError, "for each step, got None"),
            ({"scale": "muon"}, ValueError, "scale must be one of [None, 'original', 'match_rms"),
            ({"blocks": 3}, TypeError, "blocks must be a dict of name or regular expression and"),
            ({"blocks": {"(": 3}}, ValueError, "the keys of blocks must be names or regular expr"),
            *STACKS,
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
        bad=[*at_least("max_norm", 0), *STACKS],
        loose={"1e9": lambda: ClipSpectral(1e9)},
        complex="refuses",
        matrices=True,
        exact=False,
        loops=30,
    ),
    Row(
        EqualRows,
        good={"default": EqualRows},
        bad=STACKS,
        nonfinite="scaled",
        scope={"default": "tensor"},
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
        bad=[
            *share("beta"),
            ({"neurons": "columns"}, ValueError, "neurons must be one of ['rows', 'longer'], got"),
            *STACKS,
        ],
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
            "blocks": lambda: Rows(1.0, Orthogonalize(), blocks={"conv": 2}),
        },
        args={"share": 0.5, "tfm": Orthogonalize()},
        bad=[
            *number("share", 0.0, -0.5, 1.5, nan, words="a number above 0 and at most 1"),
            *number("share", None, "1", error=TypeError, words="a number above 0 and at most 1"),
            *number("error", -0.1, 1.5, nan, words="a number at least 0 and at most 1"),
            (
                {"lines": "columns"},
                ValueError,
                "lines must be one of ['shorter', 'rows'], got 'co",
            ),
            (
                {"tfm": Adam()},
                TypeError,
                "tfm must be a rule that makes a matrix of a matrix, w",
            ),
            (
                {"tfm": SOAPBasis()},
                TypeError,
                "without state, blocks and target of its own, as O",
            ),
            ({"tfm": Orthogonalize(target="grad")}, TypeError, "target of its own, as Orthogonali"),
            ({"tfm": Orthogonalize(blocks={"a": 2})}, TypeError, "without state, blocks and targe"),
            ({"tfm": None}, TypeError, "as Orthogonalize(), got None"),
            ({"blocks": 3}, TypeError, "blocks must be a dict of name or regular expression and"),
            *STACKS,
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
        bad=[
            *number("factor", nan, words="a number"),
            *number("factor", "1", None, error=TypeError, words="a number"),
            (
                {"by": "rows"},
                ValueError,
                "by must be one of ['sqrt_ratio', 'inverse_columns'], go",
            ),
            *STACKS,
        ],
        complex="turns",
        matrices=True,
    ),
    Row(
        SOAPBasis,
        good={
            "every 2": lambda: SOAPBasis(every=2),
            "short": lambda: SOAPBasis(every=3, max_dim=3, first="step"),
            "blocks": lambda: SOAPBasis(every=2, blocks={"conv": 2}, stagger=True),
        },
        bad=[
            *share("beta"),
            *steps("every", 1),
            *steps("max_dim", 0),
            ({"first": "use"}, ValueError, "first must be one of ['skip', 'step'], got 'use'"),
            ({"blocks": 3}, TypeError, "blocks must be a dict of name or regular expression and"),
            *STACKS,
        ],
        memory="free",
        complex="free",
        matrices=True,
        loops=60,
        traces=False,
    ),
    Row(
        InBasis,
        good={
            "soap": lambda: InBasis(SOAPBasis(every=2), Adam((0.9, 0.95))),
            "first step": lambda: InBasis(SOAPBasis(every=3, first="step"), Adam(eps=1e-3)),
            "blocks": lambda: InBasis(SOAPBasis(every=2, blocks={"conv": 2}), Lion()),
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
