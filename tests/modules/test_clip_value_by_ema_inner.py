"""What may make the bound of ClipValueByEMA: nothing that drops parameters or ends the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from torchzero_clip import (
    Accumulate,
    Chain,
    ClipValueByEMA,
    Freeze,
    Guard,
    Masked,
    Modular,
    Partition,
    Scale,
    SkipLarge,
    Transform,
    When,
)


def first(name: str, p: Any) -> bool:
    return p.dim() == 1


DROPS: dict[str, Callable[[], Transform]] = {
    "Freeze": lambda: Freeze(first),
    "Accumulate": lambda: Accumulate(2),
    "Guard": Guard,
    "SkipLarge": lambda: SkipLarge(1.0),
    "Chain": lambda: Chain(Scale(2.0), Freeze(first)),
    "When": lambda: When(bool, Accumulate(2)),
    "Masked": lambda: Masked(Freeze(first), first),
    "Partition": lambda: Partition({"a": Guard(), "b": Scale(2.0)}, lambda name, p: "a"),
    "ClipValueByEMA in Chain": lambda: Chain(ClipValueByEMA(), Freeze(first)),
}


@pytest.mark.parametrize("name", DROPS)
def test_what_drops_parameters_is_refused_at_construction(name: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"^ClipValueByEMA: ema_tfm must return a value .* in every step, got ",
    ):
        ClipValueByEMA(ema_tfm=DROPS[name]())


class Forget(Transform):
    """Drops the last bucket, and does not say so."""

    def step(self, buckets: list[Any]) -> list[Any]:
        return buckets[:-1]


def test_a_class_that_drops_parameters_unannounced_is_named_in_the_step() -> None:
    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    opt = Modular([p], ClipValueByEMA(ema_tfm=Forget()))
    with pytest.raises(
        RuntimeError, match=r"ClipValueByEMA: .*Forget.* at least one parameter has no update"
    ):
        opt.step()


class Quiet(Forget):
    """Drops the last bucket, and says so."""

    drops = True


def test_a_class_may_say_that_it_drops_parameters() -> None:
    with pytest.raises(ValueError, match=r"Quiet\(\)"):
        ClipValueByEMA(ema_tfm=Quiet())
