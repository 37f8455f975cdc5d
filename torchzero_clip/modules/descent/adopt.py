"""ADOPT: Adam that divides each gradient by the second moment of earlier gradients only."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Positive, Share
from torchzero_clip.core.state import averages_of


class ADOPT(Transform):
    """ADOPT: Adam that divides each gradient by the second moment of earlier gradients only.

    `ADOPT` converges with any β₂. `Adam` does not.

    m ← β₁ m + (1 - β₁) clip(u / max(√v, eps));   v ← β₂ v + (1 - β₂) u²;   u ← m

    In the formula, clip limits the magnitude of each element to (t - 1)^clip_power, where t is the
    step number. The first step only sets v = u². The update of the first step is zero.

    Args:
        betas: The decay rates of the averages m and v. Default: (0.9, 0.9999).
        eps: The smallest √v. Default: 1e-6.
        clip_power: The power in the limit of an element, (t - 1)^clip_power, or None for no limit.
            Default: 0.25.
        weight_decay: The factor of the weight decay: `weight_decay` · w is added to the update,
            except in the first step. Default: 0.0.
        decouple: If False, the weight decay is added to the gradient (L2 regularization) instead of
            the update. Default: True.

    Example:
        >>> import torch
        >>> from torchzero_clip import ADOPT, LR, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ADOPT(weight_decay=0.01), LR(1e-3))

    Reference:
        Taniguchi et al., "ADOPT: modified Adam can converge with any β₂ with the optimal rate",
        arXiv 2411.02853.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.9999)
    eps: Live[Positive] = 1e-6
    clip_power: Live[NonNegative | None] = 0.25
    weight_decay: Live[NonNegative] = 0.0
    decouple: bool = True

    leaves = "ones"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return averages_of(param, "exp_avg", "exp_avg_sq")

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        power = group["clip_power"]
        before = state["step"].add_(1).stack() - 1
        later = before.clamp(max=1)  # 0 in the first step, then 1
        if not self.decouple:
            u = u.add_(group["params"], alpha=group["weight_decay"])
        v = state["exp_avg_sq"]
        ratio = u.div(v.sqrt().maximum_(group["eps"]))
        if power is not None:
            ratio.clamp_(-(before**power), before**power)
        m = state["exp_avg"].lerp_(ratio, (1 - beta1) * later)
        v.mul_(beta2).addcmul_(u, u, 1 - beta2 * later)
        if not self.decouple:
            return u.copy_(m)
        return u.copy_(m).add_(group["params"], alpha=group["weight_decay"] * later)
