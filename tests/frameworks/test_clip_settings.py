"""Settings of frameworks and the links that do the same, as docs/coming_from.md says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.frameworks.common import need
from torchzero_clip import AGC, ClipNorm, Clipper, ClipValue, Transform

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]
SHAPES = [(8, 4), (8,), (2, 8), (2,), (3, 2, 2, 2)]


def parameters(seed: int = 0) -> list[Parameter]:
    rng = torch.Generator().manual_seed(seed)
    made = [Parameter(torch.randn(shape, generator=rng)) for shape in SHAPES]
    for i, p in enumerate(made):
        p.grad = (1 + 3 * i) * torch.randn(p.shape, generator=rng)
    return made


def timm(mode: str, value: float) -> Callable[[list[Parameter]], Any]:
    return lambda params: need("timm.utils").dispatch_clip_grad(params, value, mode=mode)


def lightning(algorithm: str, value: float) -> Callable[[list[Parameter]], Any]:
    def clip(params: list[Parameter]) -> None:
        plugin = need("lightning.pytorch.plugins.precision").Precision()
        kind = need("lightning.pytorch.utilities").GradClipAlgorithmType(algorithm)
        plugin.clip_gradients(torch.optim.SGD(params, lr=0.1), value, kind)

    return clip


CLIPPED: dict[str, tuple[Callable[[list[Parameter]], Any], Transform]] = {
    "timm norm": (timm("norm", 0.5), ClipNorm(0.5, dim="global")),
    "timm value": (timm("value", 0.5), ClipValue(0.5)),
    "timm agc": (timm("agc", 0.01), AGC(0.01)),
    "Lightning norm": (lightning("norm", 0.5), ClipNorm(0.5, dim="global")),
    "Lightning value": (lightning("value", 0.5), ClipValue(0.5)),
}


@pytest.mark.parametrize("row", CLIPPED)
def test_a_setting_and_its_link_leave_the_same_gradients(row):
    theirs, link = CLIPPED[row]
    one, other = parameters(), parameters()
    theirs(one)
    Clipper(other, link).step()
    ours = [p.grad for p in other]
    torch.testing.assert_close([p.grad for p in one], ours, rtol=1e-5, atol=1e-6)
    assert not all(map(torch.equal, ours, [p.grad for p in parameters()]))
