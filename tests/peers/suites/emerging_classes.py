"""Chains with the arguments, refusals and names of state of NVIDIA's scalar optimizers."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from torchzero_clip import EMA, LR, Adam, Hyperball, Lion, Modular, Sign, Transform, WeightDecay

REFUSED = {  # what begins our sentence, and what theirs would say
    "LR: lr ": "Invalid learning rate",
    "WeightDecay: weight_decay ": "Invalid weight_decay",
    "Adam: eps ": "Invalid epsilon",
    r"Lion: betas .* got \(1.0, 0.99": "Invalid beta at index 0",
    r"(Lion|Adam): betas .* got \(\d.\d, 1.0\)": "Invalid beta at index 1",
    "EMA: beta ": "Invalid momentum, or Invalid beta at index 0",
}


class Held(dict[str, Any]):
    """The state of a parameter, where entries are found under their names too."""

    theirs: dict[str, str]

    def __missing__(self, name: str) -> Any:
        return self[self.theirs[name]]


class Scalar(Modular):
    """A chain with the arguments, and in their words the refusals, of their optimizers."""

    theirs: ClassVar[dict[str, str]] = {}

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param, state in list(self.state.items()):
            self.state[param] = Held(state)
            self.state[param].theirs = self.theirs
        return loss

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        weight_decay: float = 0.0,
        weight_decay_method: str = "decoupled",
        frob_normalize: bool = False,
        **arguments: Any,
    ) -> None:
        try:
            chain = [*self.rules(**arguments), LR(lr)]
            place = {"l2": 0, "decoupled": -1, "independent": len(chain)}[weight_decay_method]
            chain[place:place] = [WeightDecay(weight_decay)]
            super().__init__(params, *chain, *[Hyperball()] * frob_normalize)
        except ValueError as error:
            said = [words for ours, words in REFUSED.items() if re.match(ours, str(error))]
            raise ValueError(*said) from error


class OurLion(Scalar):
    theirs: ClassVar[dict[str, str]] = {"exp_avg": "Lion/exp_avg"}

    def rules(self, betas: tuple[float, float] = (0.9, 0.99)) -> list[Transform]:
        return [Lion(betas)]


class OurSignum(Scalar):
    def rules(self, momentum: float = 0.9, nesterov: bool = False, **_: Any) -> list[Transform]:
        return [EMA(momentum, nesterov=nesterov), Sign()]


class OurLaProp(Scalar):
    theirs: ClassVar[dict[str, str]] = {"exp_avg": "EMA/ema", "exp_avg_sq": "Adam/exp_avg_sq"}

    def rules(self, betas: Any = (0.9, 0.99), eps: float = 1e-8, **_: Any) -> list[Transform]:
        return [Adam((0.0, betas[1]), eps), EMA(betas[0], debias=True)]
