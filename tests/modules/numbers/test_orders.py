"""The numbers of the specification by hand: orders of norms."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import about, at_once
from tests.modules.numbers.common import inf, once
from torchzero_clip import ClipNorm, Normalize


@at_once(
    "ord, norm",
    [
        (0.5, (1 + math.sqrt(2) + 2) ** 2),
        (1, 7),
        ("l1", 7),
        (2, math.sqrt(21)),
        ("l2", math.sqrt(21)),
        (3, 73 ** (1 / 3)),
        ("l3", 73 ** (1 / 3)),
        ("l4", 273**0.25),
        (7, (1 + 2**7 + 4**7) ** (1 / 7)),
        (inf, 4),
        ("linf", 4),
        ("mad", 7 / 4),
        ("sum", 3),
        ("std", 2.5),
        (0, 3),
        ("l0", 3),
    ],
)
@at_once("dim", [None, 0, "global"])
def test_normalize_divides_by_the_measure(ord, norm, dim):
    grad = torch.tensor([1.0, -2.0, 4.0, 0.0])
    (u,) = once(Normalize(1.0, ord, dim), grad)
    assert u.tolist() == about((grad / norm).tolist())


@pytest.mark.parametrize("dim", [None, 0, "global", "layer", "group"])
def test_var_meets_the_limit_itself(dim):
    grad = torch.tensor([1.0, -2.0, 4.0, 0.0])  # variance 6.25
    for rule in (ClipNorm(1.0, "var", dim), Normalize(1.0, "var", dim)):
        (u,) = once(rule, grad, names=["a.b"])
        assert u.tolist() == about((grad * math.sqrt(1 / 6.25)).tolist())
        assert u.var().item() == about(1.0)
    (u,) = once(Normalize(25.0, "var", dim), grad, names=["a.b"])
    assert u.var().item() == about(25.0)


def test_a_single_element_has_no_spread_to_clip():
    for ord in ("std", "var"):
        assert once(ClipNorm(1e-3, ord), [5.0])[0].tolist() == [5.0]
        assert once(Normalize(1e-3, ord), [5.0])[0].tolist() == [5.0]
        (u,) = once(Normalize(1e-3, ord, 1), [[5.0], [6.0]])
        assert u.tolist() == [[5.0], [6.0]]


@pytest.mark.parametrize("ord", ["std", "var"])
def test_std_and_var_of_several_tensors_are_those_of_all_their_entries(ord):
    gen = torch.Generator().manual_seed(2)
    parts = [torch.randn(n, generator=gen).double() * n + n for n in (1, 3, 50)]
    whole = torch.cat(parts)
    measured = whole.std() if ord == "std" else whole.var()
    factor = 1 / measured if ord == "std" else (1 / measured).sqrt()
    updates = once(Normalize(1.0, ord, "global"), *parts)
    torch.testing.assert_close(torch.cat(updates), whole * factor, rtol=1e-12, atol=0)
