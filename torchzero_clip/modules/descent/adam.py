"""Adam: momentum divided by the root of the second moment."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import FusedKernel, Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.core.state import averages_of
from torchzero_clip.core.torch_private import fused


class Adam(Transform):
    """Adam: momentum divided by the root of the average squared gradient.

    `Adam` is the usual choice for most models. With `WeightDecay` after it, this is AdamW
    (tested against torch).

    m ← β₁ m + (1 - β₁) u;   v ← β₂ v + (1 - β₂) u²;   u ← m̂ / (√v̂ + eps)

    Here m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ), where t is the step number of each parameter.

    Args:
        betas: The decay rates of the averages m and v. Default: (0.9, 0.999).
        eps: A small number that is added to the denominator. Default: 1e-8.
        amsgrad: If True, divide by the largest v so far. Default: False.
        bias_correction: If False, use m and v in place of m̂ and v̂, as in the optimizer of BERT.
            Default: True.
        momentum: If False, β₁ counts as 0, so there is no momentum. Use `momentum=False` before a
            link that replaces the momentum, such as `ScheduleFree`. Default: True.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), WeightDecay(0.01), LR(1e-3))

    Reference:
        Kingma, Ba, "Adam: a method for stochastic optimization", arXiv 1412.6980.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.999)
    eps: Live[NonNegative] = 1e-8
    amsgrad: bool = False
    bias_correction: bool = True
    momentum: bool = True

    state_kinds = {"exp_avg": "linear", "exp_avg_sq": "squares", "max_exp_avg_sq": "squares"}
    leaves = "ones"
    per_entry = True
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        names = ["exp_avg", "exp_avg_sq"]
        if self.amsgrad:
            names.append("max_exp_avg_sq")
        return averages_of(param, *names)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        beta1 = beta1 if self.momentum else 0.0
        t = state["step"].add_(1).stack()
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(u, u, 1 - beta2)
        if self.amsgrad:
            v = state["max_exp_avg_sq"].maximum_(v)
        # the result is computed in the memory of u, so the step allocates no temporary tensors
        if not self.bias_correction:
            return u.copy_(v).sqrt_().add_(group["eps"]).div_(m).reciprocal_()
        u = u.copy_(v).sqrt_().div_((1 - beta2**t).sqrt()).add_(group["eps"])
        # not m · (1 / u), which would be 0 · ∞ if m is 0 and u a tiny eps
        return u.div_(m).reciprocal_().div_(1 - beta1**t)

    def fused(self, group: Group) -> FusedKernel | None:
        if not (self.bias_correction and self.momentum):
            return None
        beta1, beta2 = group["betas"]
        kernel = fused(
            "adamw", beta1=beta1, beta2=beta2, eps=group["eps"], amsgrad=self.amsgrad,
            maximize=False,
        )  # fmt: skip
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
        return FusedKernel(kernel, names, advance=lambda state: state["step"].add_(1))
