"""WeightDecay: a rule that pulls the parameters toward zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative
from torchzero_clip.core.state import statistic


class WeightDecay(Transform):
    """Weight decay: adds a multiple of the parameter to the update, so that parameters shrink.

    The position in the chain decides the kind of decay. Before `Adam`, the decay is L2
    regularization, also called coupled decay (tested against torch). Between `Adam` and `LR`, the
    decay is decoupled, as in AdamW (tested against torch).

    u ← u + weight_decay · w

    Args:
        weight_decay: The factor that multiplies the parameter in the formula.
        cautious: If True, only elements with u · w ≥ 0 decay. These are the elements that the
            update shrinks anyway. Default: False.
        follows_lr: If True, the decay is multiplied by lr / (the largest lr so far). `LR` also
            multiplies the decay by lr. If a schedule reduces lr, the decay therefore falls with the
            square of lr. Default: False.
        afterwards: If True, the weights decay after the step, as with AdamW in older libraries:
            u ← (1 - lr · weight_decay) u + weight_decay · w. The learning rate comes from `LR`.
            Default: False.
        proximal: If True, the decay is proximal, as in Adan:
            u ← (u + weight_decay · w) / (1 + lr · weight_decay). The learning rate comes from
            `LR`. Default: False.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), WeightDecay(0.01), LR(1e-3))

    Reference:
        Loshchilov, Hutter, "Decoupled weight decay regularization", arXiv 1711.05101. Cautious:
        Chen et al., arXiv 2510.12402. With the learning rate: Defazio, "Why gradients rapidly
        increase near the end of training", arXiv 2506.02285.
    """

    weight_decay: Live[NonNegative]
    cautious: bool = False
    follows_lr: bool = False
    afterwards: bool = False
    proximal: bool = False

    place = "step"
    per_entry = True
    pure = True

    def check(self) -> None:
        super().check()
        kinds = [name for name in ("afterwards", "proximal") if getattr(self, name)]
        if kinds and (len(kinds) > 1 or self.cautious or self.follows_lr):
            others = [x for x in ("proximal", "cautious", "follows_lr") if getattr(self, x)]
            raise ValueError(
                f"WeightDecay: {kinds[0]}=True cannot be combined with {others[-1]}=True"
            )

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("lr",) if self.follows_lr or self.afterwards or self.proximal else ()

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"largest_lr": statistic(0.0, param)} if self.follows_lr else {}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        decay = group["weight_decay"]
        w = group["params"]
        if self.follows_lr:
            largest = state["largest_lr"].maximum_(group["lr"]).stack()
            share = (group["lr"] / largest).clamp(max=1)
            decay = decay * torch.where(largest > 0, share, torch.ones_like(share))
        if self.cautious:
            signs = u.sign().mul_(w.to(u.dtype).sign())
            w = signs.add_(1).minimum_(1).mul_(w)  # w if the signs agree or one is 0, else 0
        if self.afterwards:
            u = u.mul_(1 - group["lr"] * decay)
        u = u.add_(w, alpha=decay)
        if self.proximal:
            u = u.div_(1 + group["lr"] * decay)
        return u

    def affine(self, group: Group) -> tuple[Any, Any] | None:
        if self.cautious or self.follows_lr:
            return None
        decay = group["weight_decay"]
        if self.afterwards:
            return 1 - group["lr"] * decay, decay
        if self.proximal:
            return 1 / (1 + group["lr"] * decay), decay / (1 + group["lr"] * decay)
        return 1.0, decay
