"""An engine for parameters that come one at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from torchzero_clip.core import Step
from torchzero_clip.core.engine import Cover, Engine, Records, Session, Through

ANEW = (
    "gradients are released: autograd chooses which parameter steps next, each by its own kernels"
)


class OneAtATime:
    """An engine for one tensor at a time: the next takes over the memory that is kept for it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.fuses = engine.fuses

    def check(self, device: torch.device) -> None:
        self.engine.check(device)

    def __repr__(self) -> str:
        return f"OneAtATime({self.engine!r})"

    def twin(self, watch: Cover | None = None) -> Engine:
        return self.engine.twin(watch)

    def lasting(self) -> list[Tensor]:
        return self.engine.lasting()

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> Session:
        kind = (params[0].device, params[0].dtype)
        return self.engine.open(kind, list(range(len(places))), params, grads)

    def in_turn(self) -> Engine:
        return self.engine.in_turn()

    def step(self, step: Step, through: Through) -> Records:
        return self.engine.step(step, through)

    def forget(self, why: str) -> None:
        self.engine.forget(why)

    def phase(self) -> Callable[[], None]:
        return self.engine.phase()

    def capture(self, devices: set[torch.device]) -> None:
        self.engine.capture(devices)

    def says(self, besides: Sequence[str]) -> list[str]:
        return self.engine.says([*besides, ANEW])
