"""Settings of frameworks and the links that do the same, as docs/coming_from.md says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.frameworks.common import need
from torchzero_clip import (
    AGC,
    LR,
    Adam,
    ClipNorm,
    Clipper,
    ClipRMS,
    ClipValue,
    Lion,
    Modular,
    Momentum,
    StableAdam,
    Transform,
    WeightDecay,
)

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


def heavyball(name: str, value: float) -> Callable[[list[Parameter]], Any]:
    def clip(params: list[Parameter]) -> None:
        utils = need("heavyball.utils")
        utils.compile_mode = None
        getattr(utils, name)([p.grad for p in params], value)

    return clip


CLIPPED: dict[str, tuple[Callable[[list[Parameter]], Any], Transform]] = {
    "timm norm": (timm("norm", 0.5), ClipNorm(0.5, dim="global")),
    "timm value": (timm("value", 0.5), ClipValue(0.5)),
    "timm agc": (timm("agc", 0.01), AGC(0.01)),
    "Lightning norm": (lightning("norm", 0.5), ClipNorm(0.5, dim="global")),
    "Lightning value": (lightning("value", 0.5), ClipValue(0.5)),
    "heavyball l2_clip_": (heavyball("l2_clip_", 0.5), ClipNorm(0.5)),
    "heavyball rmsnorm_clip_": (heavyball("rmsnorm_clip_", 0.5), ClipRMS(0.5)),
    "heavyball global_l2norm_clip": (
        heavyball("global_l2norm_clip", 0.5),
        ClipNorm(0.5, dim="global"),
    ),
    "heavyball global_rmsnorm_clip": (
        heavyball("global_rmsnorm_clip", 0.5),
        ClipNorm(0.5, ord="rms", dim="global"),
    ),
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


def optimi(name: str, **kwargs: Any) -> Callable[[list[Parameter]], Any]:
    return lambda params: getattr(need("optimi"), name)(params, lr=1e-2, **kwargs)


TRAINED: dict[str, tuple[Callable[[list[Parameter]], Any], list[Transform]]] = {
    "optimi AdamW": (
        optimi("AdamW", weight_decay=0.1),
        [Adam((0.9, 0.99), eps=1e-6), WeightDecay(0.1), LR(1e-2)],
    ),
    "optimi AdamW decoupled": (
        optimi("AdamW", weight_decay=1e-3, decouple_lr=True),
        [Adam((0.9, 0.99), eps=1e-6), LR(1e-2), WeightDecay(1e-3)],
    ),
    "optimi StableAdamW": (
        optimi("StableAdamW", weight_decay=0.1),
        [StableAdam(weight_decay=0.1), LR(1e-2)],
    ),
    "optimi Lion": (optimi("Lion", weight_decay=0.1), [Lion(), WeightDecay(0.1), LR(1e-2)]),
    "optimi SGD": (optimi("SGD", momentum=0.9), [Momentum(0.9), LR(1e-2)]),
}


@pytest.mark.parametrize("row", TRAINED)
def test_an_optimizer_and_its_chain_take_the_same_steps(row):
    theirs, links = TRAINED[row]
    ends: list[list[Tensor]] = []
    for make in (theirs, lambda params: Modular(params, *links)):
        params = parameters()
        opt, rng = make(params), torch.Generator().manual_seed(1)
        for _ in range(20):
            for p in params:
                p.grad = torch.randn(p.shape, generator=rng)
            opt.step()
        ends.append([p.detach() for p in params])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
