"""ScheduleFree: an average of weights in the place of a schedule."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Within
from torchzero_clip.modules.averages.following import begun


class ScheduleFree(Transform):
    """z ← z - u;   x ← (1 - c) x + c z;   w ← beta · x + (1 - beta) z

    Put it behind LR, where the update is the step that is subtracted. Gradients are taken at w, and
    x are the weights for evaluation, which `with opt.averaged():` has in the place of w. Of each z
    the weight in x is tʳ · (largest lr so far)ᵖ, and c its share in the sum of all so far. There is
    no schedule but a warm-up of lr, and no momentum before it.

    Args:
        beta: How near to x gradients are taken: what momentum is elsewhere. None as the first of
            `betas` of the nearest link that has some, as `Adam(momentum=False)`.
        r: The power of the step in the weight of z.
        weight_lr_power: The power p of the learning rate in it.
        rectified: Have the first steps, and the weights of their z, as short as those of RAdam, by
            the second of `betas` of an `Adam` before it: no warm-up is needed.

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
        step, sum_ = numbers["step"] + 1, numbers["weight_sum"]
        rate = torch.zeros_like(step) + group["lr"] * self._rectified(step, group)
        largest = numbers["lr_max"].maximum(rate)
        weight = _weight(step, largest, group)
        return {"step": step, "lr_max": largest, "weight_sum": sum_ + weight}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta, total = group["beta"], group["weight_sum"]
        c = torch.where(total > 0, _weight(group["step"], group["lr_max"], group) / total, 0.0)
        if self.rectified:
            u = u.mul_(self._rectified(group["step"], group))
        z = state["z"].sub_(u)
        u = u.mul_((1 - c) * (1 - beta)).add_(group["params"], alpha=c)
        return u.add_(z, alpha=-c)

    def _rectified(self, step: Tensor, group: Group) -> Any:
        """The factor of RAdam, 0 as long as too few gradients are in the second moment."""
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
    """The weight of z in the average, after so many steps and at the largest rate so far."""
    return step ** group["r"] * largest ** group["weight_lr_power"]
