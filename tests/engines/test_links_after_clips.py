"""Chains of a rule that clips gradients, two links and a tail: the default engine computes what the
plain formulas compute, whatever the links borrow, keep or replace while a division is pending.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch.nn import Parameter

from tests.engines.accelerated import Accelerated
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Carry,
    Cautious,
    Centralize,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipValue,
    Graft,
    Group,
    Identity,
    Masked,
    Modular,
    Momentum,
    Normalize,
    Parallel,
    RMSprop,
    Scale,
    Sign,
    State,
    Steepest,
    TensorList,
    Transform,
    WeightDecay,
    ZClip,
)
from torchzero_clip.engines import Eager

SHAPES = [(4, 4), (5,), (3, 4)]
SCALES = (1.0, 3.0, 0.01)
SAMPLE = 40  # the chains that are among the quick tests, of all


class BecomesWeights(Transform):
    """u ← w, in the memory of u, which nobody has read before"""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.copy_(group["params"])


class AddsGradients(Transform):
    """u ← u + p.grad"""

    reads = ("grads",)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.add_(group["grads"])


def first(lists: Mapping[str, TensorList]) -> TensorList:
    return lists["a"]


def mean(lists: Mapping[str, TensorList]) -> TensorList:
    return lists["a"].add_(lists["b"]).mul_(0.5)


def is_matrix(name: str, p: torch.Tensor) -> bool:
    return p.dim() > 1


Make = Callable[[], Transform]
CLIPS: dict[str, Make] = {
    "clip all": lambda: ClipNorm(0.5, dim="global", target="grad"),
    "clip a group": lambda: ClipNorm(0.5, dim="group", target="grad"),
    "within the limit": lambda: ClipNorm(1e6, dim="global", target="grad"),
    "normalize all": lambda: Normalize(0.5, dim="global", target="grad"),
    "normalize a group": lambda: Normalize(0.5, dim="group", target="grad"),
    "z-clip": lambda: ZClip(dim="global", target="grad", warmup_steps=2),
}
LINKS: dict[str, Make] = {
    "identity": Identity,
    "ema": lambda: EMA(0.9),
    "ema, nesterov": lambda: EMA(0.9, nesterov=True),
    "ema, debiased": lambda: EMA(0.9, debias=True),
    "momentum": lambda: Momentum(0.9),
    "rmsprop": lambda: RMSprop(eps=0.1),
    "clip values": lambda: ClipValue(0.1),
    "clip values of gradients": lambda: ClipValue(0.1, target="grad"),
    "centralize": Centralize,
    "clip": lambda: ClipNorm(0.3),
    "clip by average": lambda: ClipNormByEMA(0.5),
    "cautious": Cautious,
    "carry": lambda: Carry(ClipValue(0.01)),
    "one branch": lambda: Parallel({"a": Identity()}, first),
    "two branches": lambda: Parallel({"a": ClipValue(0.1), "b": Identity()}, mean),
    "graft": lambda: Graft(Identity(), Momentum(0.9)),
    "steepest": lambda: Steepest(Normalize()),
    "some": lambda: Masked(Chain(Centralize(), Scale(0.5)), is_matrix),
    "scale": lambda: Scale(0.5),
    "decay": lambda: WeightDecay(0.1),
    "weights": BecomesWeights,
    "gradients": AddsGradients,
}
TAILS: dict[str, Callable[[], list[Transform]]] = {
    "rate": lambda: [LR(0.1)],
    "momentum": lambda: [Momentum(0.9), LR(0.1)],
    "nesterov": lambda: [Momentum(0.9, nesterov=True), WeightDecay(0.1), LR(0.1)],
    "adam": lambda: [Adam(eps=0.1), LR(0.1)],
    "branch": lambda: [Parallel({"a": Identity()}, first), LR(0.1)],
    "graft": lambda: [Graft(Identity(), Sign()), LR(0.1)],
}
LATER = [name for name in LINKS if name != "clip values of gradients"]  # which is refused there
Names = tuple[str, str, str, str]
EVERY: list[Names] = list(itertools.product(CLIPS, LINKS, LATER, TAILS))


def trained(
    names: Names, dtype: torch.dtype, engine: Eager | None = None, **options: bool
) -> list[torch.Tensor]:
    """Return the gradients and weights after some steps of a chain."""
    clip, link, other, tail = names
    chain = [CLIPS[clip](), LINKS[link](), LINKS[other](), *TAILS[tail]()]
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    params = [Parameter(drawn(shape)) for shape in SHAPES]
    opt = Modular(params, *chain, **options)
    opt.engine = opt.engine if engine is None else engine
    for scale in SCALES:
        for p in params:
            p.grad = scale * drawn(p.shape)
        opt.step()
    return [t.detach().double() for p in params for t in (p, p.grad) if t is not None]


def differing(chains: Iterable[Names], engine: type[Eager]) -> list[tuple[Names, str]]:
    """Return the chains in which an engine is further from the plain formulas than rounding."""
    found: list[tuple[Names, str]] = []
    for names in chains:
        default = trained(names, torch.float32, engine())
        others = {
            "fused=False": trained(names, torch.float32, fused=False),
            "float64": trained(names, torch.float64),
        }
        for name, tensors in others.items():
            pairs = zip(default, tensors, strict=True)
            if not all([torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs]):
                found.append((names, name))
    return found


def test_chains_after_a_clipping_of_gradients_are_the_plain_ones() -> None:
    assert differing(random.Random(0).sample(EVERY, SAMPLE), Eager) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", [Eager, Accelerated])
@pytest.mark.parametrize("clip", CLIPS)
def test_every_chain_after_a_clipping_of_gradients_is_the_plain_one(
    clip: str, engine: type[Eager]
) -> None:
    assert differing([names for names in EVERY if names[0] == clip], engine) == []
