"""AdaptiveClip: past norms set the limit of this step."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from torchzero_clip.core import Group, NormRule, Scope, UnitState, from_config
from torchzero_clip.modules.adaptive.adaptive_rule import AdaptiveRule
from torchzero_clip.modules.adaptive.criterion import Criterion

CLIP_TO_ONE = ("ClipNorm", {"max_norm": 1.0, "dim": "global"})


class AdaptiveClip(AdaptiveRule):
    """u ← u · min(1, limit / ‖u‖), the limit set by a criterion from past norms

    A spike cannot raise its own limit: it is judged first and observed after. During a unit's first
    `warmup_steps` norms `warmup` acts instead; the criterion then starts from their mean and variance.
    A norm that is NaN or infinite is not observed.

    Args:
        criterion: `ZStat`, `EMARatio`, `Quantile`, `P2Quantile`, or your own.
        dim: What is measured together: "global", "group", "layer", or None for each tensor.
        warmup: A norm rule without memory, at the same scope or global, or None; by default
            ClipNorm(1.0, dim="global").
        warmup_steps: How long it acts.
        observe: Whether the criterion sees norms "clipped" or "raw"; None for its own default.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AdaptiveClip, Modular, ZStat
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AdaptiveClip(ZStat()), Adam(), LR(1e-3))
    """  # noqa: E501

    criterion: Criterion
    warmup: NormRule | None
    dim: Scope = "global"
    warmup_steps: int = 20
    observes: str | None = None

    pure = True

    def __init__(
        self,
        criterion: Criterion,
        dim: Scope = "global",
        warmup: NormRule | tuple[str, dict[str, Any]] | None = CLIP_TO_ONE,
        warmup_steps: int = 20,
        observe: Literal["clipped", "raw"] | None = None,
        *,
        target: Literal["update", "grad"] = "update",
        name: str | None = None,
    ) -> None:
        self.criterion, self.dim, self.warmup_steps = criterion, dim, warmup_steps
        self.warmup = from_config(warmup) if isinstance(warmup, tuple) else warmup
        self.observes, self.target, self.name = observe, target, name

    def judge(self) -> Criterion:
        return self.criterion

    def values(self, group: Group) -> Group:
        return group[type(self.criterion).__name__]

    def seen(self, norm: Tensor, clipped: Tensor, state: UnitState, values: Group) -> Tensor:
        return norm if (self.observes or self.criterion.observes) == "raw" else clipped

    def arguments(self) -> dict[str, Any]:
        given = {**super().arguments(), "warmup": self.warmup}
        if repr(self.warmup) == repr(from_config(CLIP_TO_ONE)):
            del given["warmup"]
        return {"observe" if key == "observes" else key: v for key, v in given.items()}

    def check(self) -> None:
        if not isinstance(self.criterion, Criterion):
            raise TypeError(f"AdaptiveClip: criterion must be a Criterion, got {self.criterion!r}")
        if self.observes not in (None, "clipped", "raw"):
            raise ValueError(
                f"AdaptiveClip: observe must be 'clipped', 'raw' or None, got {self.observes!r}"
            )
        super().check()
