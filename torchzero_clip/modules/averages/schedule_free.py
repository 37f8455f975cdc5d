"""ScheduleFree: a rule with an average of the weights in place of a schedule."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Within
from torchzero_clip.modules.averages.following import begun


class ScheduleFree(Transform):
    """Schedule-free training: an average of the weights replaces the decay of the learning rate.

    Use it if you don't know in advance how long the run will be. Put it after `LR`, where the
    update is the step that is subtracted from the weights. The rules before it should have no
    momentum. Use no schedule except a warm-up.

    z ← z - u;   x ← (1 - c) x + c z;   w ← beta · x + (1 - beta) z

    Here z are the weights that receive the steps, x are the averaged weights, and w are the weights
    of the model, where gradients are computed. Inside `with opt.averaged():`, the model has the
    weights x. The average x is weighted: in step t, z has the weight tʳ · (largest lr so far)ᵖ. The
    factor c is this weight divided by the sum of the weights of all steps so far.

    Args:
        beta: The position of w between z (0) and x (1), which acts as momentum. None uses the first
            value of `betas` of the nearest link that has `betas`, such as `Adam(momentum=False)`.
            Default: 0.9.
        r: The power of the step number in the weight of z. Default: 0.0.
        weight_lr_power: p, the power of the learning rate in the weight of z. Default: 2.0.
        rectified: If True, the first steps are short and count less in the average, as in RAdam, so
            no warm-up is needed. `rectified` needs an `Adam` before this link, because it reads the
            second value of `betas`. Default: False.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular, ScheduleFree, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> adamw = Adam((0.0, 0.999)), WeightDecay(0.01), LR(2.5e-3)
        >>> opt = Modular(model.parameters(), ClipNorm(1.0), *adamw, ScheduleFree())

    Reference:
        Defazio et al., "The road less scheduled", arXiv 2405.15682.
    """

    beta: Live[Annotated[float, Within(above=0, below=1)] | None] = 0.9
    r: Live[NonNegative] = 0.0
    weight_lr_power: Live[NonNegative] = 2.0
    rectified: bool = False

    borrows = (("beta", "betas", 0),)
    place = "end"
    pure = True
    per_entry = True

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("lr", "betas") if self.rectified else ("lr",)

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"z": begun(param)}

    def init_group(self) -> dict[str, float]:
        return {"step": 0.0, "lr_max": 0.0, "weight_sum": 0.0}

    def advance_group(self, numbers: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
        step = numbers["step"] + 1
        rate = torch.zeros_like(step) + group["lr"] * self._rectified(step, group)
        largest = numbers["lr_max"].maximum(rate)
        weight = _weight(step, largest, group)
        return {"step": step, "lr_max": largest, "weight_sum": numbers["weight_sum"] + weight}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta = group["beta"]
        total = group["weight_sum"]
        c = torch.where(total > 0, _weight(group["step"], group["lr_max"], group) / total, 0.0)
        if self.rectified:
            u = u.mul_(self._rectified(group["step"], group))
        z = state["z"].sub_(u)
        u = u.mul_((1 - c) * (1 - beta)).add_(group["params"], alpha=c)
        return u.add_(z, alpha=-c)

    def _rectified(self, step: Tensor, group: Group) -> Any:
        """Return the factor of RAdam, or 0 as long as the second moment has too few gradients."""
        if not self.rectified:
            return 1.0
        beta2 = group["betas"][1]
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * beta2**step / (1 - beta2**step)
        share = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return torch.where(length > 4, share, 0.0).sqrt()

    def averaged(self, param: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        z = state["z"]
        return z + (param.to(z.dtype) - z) / group["beta"]


def _weight(step: Tensor, largest: Tensor, group: Group) -> Tensor:
    """Return the weight of z in the average, from the step number and the largest lr so far."""
    return step ** group["r"] * largest ** group["weight_lr_power"]
