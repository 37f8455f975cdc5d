"""Adagrad: a rule that divides each gradient by the root of the sum of past squares."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import (
    FusedKernel,
    Group,
    Live,
    State,
    TensorList,
    Transform,
    counter,
    zeros_like_state,
)
from torchzero_clip.core.bounds import NonNegative
from torchzero_clip.core.torch_private import fused


class Adagrad(Transform):
    """Adagrad: divides each element of the gradient by the root of the sum of its past squares.

    Use it for sparse features. Weights that rarely have a gradient take larger steps.

    s ← s + u²;   u ← u / (√s + eps) / (1 + (t - 1) · lr_decay)

    Here t is the step number, counted from 1.

    Args:
        lr_decay: The speed at which the step size also decays with the step number. Default: 0.0.
        initial_accumulator_value: The first value of s. Default: 0.0.
        eps: A small number that is added to the denominator. Default: 1e-10.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adagrad, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adagrad(), LR(1e-2))

    Reference:
        Duchi, Hazan, Singer, "Adaptive subgradient methods for online learning and stochastic
        optimization", JMLR 12 (2011).
    """

    lr_decay: Live[NonNegative] = 0.0
    initial_accumulator_value: NonNegative = 0.0
    eps: Live[NonNegative] = 1e-10

    state_kinds = {"sum": "squares"}
    leaves = "own"
    per_entry = True
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        total = filled_like_state(param, self.initial_accumulator_value)
        return {"step": counter(param), "sum": total}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        t = state["step"].add_(1).stack()
        total = state["sum"].addcmul_(u, u)
        slower = 1 + (t - 1) * group["lr_decay"]
        return u.div_(total.sqrt().add_(group["eps"])).div_(slower)

    def fused(self, group: Group) -> FusedKernel | None:
        kernel = fused("adagrad", lr_decay=group["lr_decay"], eps=group["eps"], maximize=False)
        count = lambda state: state["step"].add_(1)  # noqa: E731
        return FusedKernel(kernel, ("sum", "step"), count, decays=False, devices=("cpu",))


def filled_like_state(param: Tensor, value: float) -> Tensor:
    """Return state filled with one value. For a complex parameter, both parts have this value."""
    return zeros_like_state(param) + (complex(value, value) if param.is_complex() else value)
