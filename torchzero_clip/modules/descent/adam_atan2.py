"""AdamAtan2: Adam without eps."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.core.state import averages_of


class AdamAtan2(Transform):
    """AdamAtan2: Adam with an arctangent in place of the division, so that no eps is needed.

    Use it if gradients may be very small. The result does not depend on the scale of the gradients.

    u ← a · atan2(m̂, b √v̂)

    Here m̂ and v̂ are the averages of `Adam`. If m̂ is small compared with b √v̂, the result is
    close to a · m̂ / (b √v̂). The result is at most a · π / 2. If m̂ and v̂ are 0, the result is 0.

    Args:
        betas: The decay rates of the averages m and v. Default: (0.9, 0.99).
        a: The factor of the angle. Default: 1.27.
        b: The factor of √v̂. Default: 1.0.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, AdamAtan2, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AdamAtan2(), WeightDecay(0.01), LR(1e-3))

    Reference:
        Everett et al., "Scaling exponents across parameterizations and optimizers",
        arXiv 2407.05872.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.99)
    a: Live[NonNegative] = 1.27
    b: Live[NonNegative] = 1.0

    state_kinds = {"exp_avg": "linear", "exp_avg_sq": "squares"}
    leaves = "ones"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return averages_of(param, "exp_avg", "exp_avg_sq")

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        t = state["step"].add_(1).stack()
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(u, u, 1 - beta2)
        # the root goes into the memory of u, which saves a temporary tensor
        root = u.copy_(v).sqrt_().mul_(group["b"] * (1 - beta1**t) / (1 - beta2**t).sqrt())
        return m.atan2(root).mul_(group["a"])
