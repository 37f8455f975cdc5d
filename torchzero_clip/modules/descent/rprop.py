"""Rprop: a separate step size for every element, computed from the signs of its gradients."""

from __future__ import annotations

import math

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter, zeros_like_state
from torchzero_clip.core.bounds import NonNegative, Positive, Threshold


class Rprop(Transform):
    """Rprop: a separate step size for every element, computed only from the signs of its gradients.

    Use it for full-batch training. With small batches, the signs of gradients are too noisy.

    s ← s · η⁺ where u · p > 0, s · η⁻ where u · p < 0;   u ← s · sign(u)

    Here s is the step size of an element, and p is its gradient in the previous step. If the sign
    of the gradient has changed, the update of the element is zero, and p is zero in the next step.

    Args:
        lr: The first step size of every element. If you change `lr` later, the change affects only
            parameters without state. Default: 1e-2.
        etas: (η⁻, η⁺): η⁻ shrinks a step size, and η⁺ increases a step size. Default: (0.5, 1.2).
        step_sizes: The smallest and the largest step size. The largest may be `math.inf`.
            Default: (1e-6, 50.0).

    Example:
        >>> import torch
        >>> from torchzero_clip import Modular, Rprop
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Rprop(1e-2))

    Reference:
        Riedmiller, Braun, "A direct adaptive method for faster backpropagation learning: the RPROP
        algorithm", ICNN 1993.
    """

    lr: Live[NonNegative] = 1e-2
    etas: Live[tuple[Positive, Positive]] = (0.5, 1.2)
    step_sizes: Live[tuple[Threshold, Threshold]] = (1e-6, 50.0)

    leaves = "own"
    pure = True
    per_entry = True

    def check(self) -> None:
        super().check()
        # reading a tensor would synchronize with the device
        numbers = [x for x in self.etas if isinstance(x, (int, float))]
        if len(numbers) == 2 and not numbers[0] < 1 < numbers[1]:
            raise ValueError(
                "Rprop: etas must be a pair (low, high) with low below 1 and high above 1, "
                f"got {self.etas!r}"
            )
        sizes = [x for x in self.step_sizes if isinstance(x, (int, float))]
        if len(sizes) == 2 and (sizes[0] > sizes[1] or sizes[0] == math.inf):
            raise ValueError(
                "Rprop: step_sizes must be a pair (low, high) with low finite and at most high, "
                f"got {self.step_sizes!r}"
            )

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {
            "step": counter(param),
            "prev": zeros_like_state(param),
            "step_size": zeros_like_state(param),
        }

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        shorter, longer = group["etas"]
        low, high = group["step_sizes"]
        t = state["step"].add_(1).stack()
        size = state["step_size"]
        turn = u.sign().mul_(state["prev"]).sign_()  # -1 for elements whose sign has changed
        factor = turn.maximum(0.0).mul_(longer - 1)
        factor.add_(turn.neg().maximum_(0.0), alpha=shorter - 1).add_(1)
        size.add_((2 - t).clamp(min=0) * group["lr"]).mul_(factor).clamp_(low, high)
        u = u.where(turn.add_(1).positive(), 0.0)
        state["prev"].copy_(u)
        return u.sign_().mul_(size)
