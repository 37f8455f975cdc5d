"""Chains inside links: what comes back, and what may not be lost on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from torchzero_clip import LR, Chain, ClipNorm, Graft, Modular, Scale, Transform


class Drops(Transform):
    """Ends the step for all."""

    def step(self, buckets: list[Any]) -> list[Any]:
        return []


def test_a_branch_that_drops_a_parameter_is_a_sentence() -> None:
    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    opt = Modular([("w", p)], Graft(Scale(2.0), Drops()), LR(0.1))
    words = r"Graft: the transforms \['Graft/norm_of', .* at least one parameter has no update"
    with pytest.raises(RuntimeError, match=words):
        opt.step()


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ((ClipNorm,), r"write ClipNorm\(\.\.\.\)"),
        (([ClipNorm(1.0), LR(0.1)],), r"unpack the list with \*"),
        ((0.1,), r"did you mean LR\(0\.1\)\?"),
    ],
)
def test_what_is_no_transform_is_told_what_to_write(links: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Chain(*links)
