"""NAdam: Adam with Nesterov momentum and with a β₁ that grows."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Share, Within
from torchzero_clip.core.state import averages_of, statistic


class NAdam(Transform):
    """NAdam: Adam with Nesterov momentum and with a β₁ that grows over the first steps.

    u ← (μₜ₊₁ m / (1 - Πμ μₜ₊₁) + (1 - μₜ) u / (1 - Πμ)) / (√v̂ + eps)

    Here m and v̂ are the averages of `Adam`, and t is the step number. The momentum of step t is
    μₜ = β₁ (1 - 0.96^(t · momentum_decay) / 2), and Πμ is the product of all μ so far.

    Args:
        betas: The decay rates of the averages m and v. Default: (0.9, 0.999).
        eps: A small number that is added to the denominator. Default: 1e-8.
        momentum_decay: The speed at which μ grows from about β₁ / 2 to β₁. With `math.inf`, μ is β₁
            from the first step. Default: 4e-3.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, NAdam, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), NAdam(), WeightDecay(0.01), LR(2e-3))

    Reference:
        Dozat, "Incorporating Nesterov momentum into Adam", ICLR 2016 workshop.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.999)
    eps: Live[NonNegative] = 1e-8
    momentum_decay: Live[Annotated[float, Within(at_least=0)]] = 4e-3

    state_kinds = {"exp_avg": "linear", "exp_avg_sq": "squares"}
    leaves = "ones"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        averages = averages_of(param, "exp_avg", "exp_avg_sq")
        return {**averages, "mu_product": statistic(1.0, param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        t = state["step"].add_(1).stack()
        mu = _momentum(t, group)
        next_mu = _momentum(t + 1, group)
        product = state["mu_product"].mul_(mu).stack()
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(u, u, 1 - beta2)
        ahead = u.mul((1 - mu) / (1 - product)).add_(m, alpha=next_mu / (1 - product * next_mu))
        # the denominator goes into the memory of u, which saves a temporary tensor
        u = u.copy_(v).sqrt_().div_((1 - beta2**t).sqrt()).add_(group["eps"])
        return u.div_(ahead).reciprocal_()


def _momentum(t: Tensor, group: Group) -> Any:
    """Return μ of step t: the decay rate of the average in this step."""
    return group["betas"][0] * (1 - 0.5 * 0.96 ** (t * group["momentum_decay"]))
