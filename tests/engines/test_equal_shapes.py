"""Parameters of equal shapes lie side by side in a compiled step; each keeps its own numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.helpers import Named, close, gradients, parameters, set_grads, some
from torchzero_clip import Modular, Transform, named
from torchzero_clip.published import NAMES

# as many matrices as a row has entries, and fewer
SHAPES = {
    f"{n}x{m}.{i}.weight": (n, m) for n, m, count in [(8, 5, 3), (5, 5, 5)] for i in range(count)
}
STEPS = 4  # of which the last two are replays


def trained(links: Sequence[Transform], **options: Any) -> Named:
    params = parameters(SHAPES, torch.float64)
    opt = Modular(list(params.items()), *links, **options)
    for i in range(STEPS):
        set_grads(params, gradients(SHAPES, i, torch.float64))
        opt.step()
    return params


def check(make: Callable[[], Sequence[Transform]]) -> None:
    compiled, plain = trained(make(), compile=True), trained(make(), fused=False)
    close(compiled, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", some(sorted(NAMES), one_in=11))
def test_a_compiled_name_is_the_plain_one(name: str) -> None:
    check(lambda: [named(name)])
