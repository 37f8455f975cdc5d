"""ClipPercentile over all groups at once, each group with a percentile of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import ClipPercentile, Modular, Scale

ROWS = ([1.0, -2.0, 30.0, -40.0, 50.0], [0.5, 6.0, -7.0, 8.0, -9.0])
PERCENTILES = (20.0, 80.0)


def moved(order: list[int], links: list[Any], **ways: Any) -> list[list[float]]:
    """What each group is moved by, with the groups handed over in this order."""
    params = [Parameter(torch.zeros(5)) for _ in ROWS]
    for p, row in zip(params, ROWS, strict=True):
        p.grad = torch.tensor(row)
    groups = [{"params": [params[i]], "percentile": PERCENTILES[i]} for i in order]
    Modular(groups, *links, **ways).step()
    return [(-p.detach()).tolist() for p in params]


def clamped(row: list[float], bound: float) -> list[float]:
    return [max(min(x, bound), -bound) for x in row]


@pytest.mark.parametrize("ways", [{}, {"fused": False}], ids=str)
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
@pytest.mark.parametrize(
    "links",
    [
        [ClipPercentile(50, dim="global")],
        [ClipPercentile(50, dim="global", target="grad")],
        [Scale(1.0), ClipPercentile(50, dim="global")],
    ],
    ids=["update", "grad", "second"],
)
def test_the_bound_of_a_group_is_that_of_what_all_groups_held_before(
    links: list[Any], order: list[int], ways: dict[str, Any]
) -> None:
    sizes: Tensor = torch.tensor(ROWS).abs().flatten().sort().values
    bounds = [sizes[int(p * 9 / 100)].item() for p in PERCENTILES]
    wanted = [clamped(row, bound) for row, bound in zip(ROWS, bounds, strict=True)]
    assert moved(order, links, **ways) == wanted
