"""AdaptiveClip: a rule that limits the norm. A criterion computes the limit from past norms."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from torchzero_clip.core import Group, NormRule, Scope, UnitState, from_config
from torchzero_clip.modules.adaptive.adaptive_rule import AdaptiveRule
from torchzero_clip.modules.adaptive.criterion import Criterion

CLIP_TO_ONE = ("ClipNorm", {"max_norm": 1.0, "dim": "global"})


class AdaptiveClip(AdaptiveRule):
    """Norm clipping with a limit that a criterion computes from past norms.

    Use it with one of the criteria, or with a custom criterion. `ZClip`, `ZScoreClip` and
    `AutoClip` are rules with a built-in criterion.

    u ← u · min(1, limit / ‖u‖), the limit set by a criterion from past norms

    The criterion computes the limit before it observes the norm of the step, so a spike cannot
    raise its own limit. The warm-up covers the first `warmup_steps` norms of a tensor. During the
    warm-up, the rule in `warmup` clips instead. The criterion then starts from the mean and
    variance of the norms of the warm-up. The criterion does not observe norms that are NaN or
    infinite.

    Args:
        criterion: The criterion: `ZStat`, `EMARatio`, `Quantile`, `EMAQuantile`,
            `GeometricQuantile`, `P2Quantile`, or a custom subclass of `Criterion`.
        dim: The tensors that share one norm: "global", "group", "layer", or None for a separate
            norm per tensor. Default: "global".
        warmup: The rule that clips during the warm-up, or None for no clipping. The rule must have
            no state, clip the 2-norm, and have the same `dim` or `dim="global"`.
            Default: `ClipNorm(1.0, dim="global")`.
        warmup_steps: The number of norms that the warm-up covers. Default: 20.
        observe: The norms that the criterion observes: "clipped" for norms after clipping, "raw"
            for norms before clipping, or None for the default of the criterion. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AdaptiveClip, Modular, ZStat
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AdaptiveClip(ZStat()), Adam(), LR(1e-3))
    """

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
        self.criterion = criterion
        self.dim = dim
        self.warmup_steps = warmup_steps
        self.warmup = from_config(warmup) if isinstance(warmup, tuple) else warmup
        self.observes = observe
        self.target = target
        self.name = name

    def judge(self) -> Criterion:
        return self.criterion

    def values(self, group: Group) -> Group:
        return group[type(self.criterion).__name__]

    def seen(self, norm: Tensor, clipped: Tensor, state: UnitState, values: Group) -> Tensor:
        return norm if (self.observes or self.criterion.observes) == "raw" else clipped

    def arguments(self) -> dict[str, Any]:
        arguments = {**super().arguments(), "warmup": self.warmup}
        if repr(self.warmup) == repr(from_config(CLIP_TO_ONE)):
            del arguments["warmup"]
        return {"observe" if key == "observes" else key: v for key, v in arguments.items()}

    def check(self) -> None:
        if not isinstance(self.criterion, Criterion):
            raise TypeError(f"AdaptiveClip: criterion must be a Criterion, got {self.criterion!r}")
        if self.observes not in (None, "clipped", "raw"):
            raise ValueError(
                f"AdaptiveClip: observe must be 'clipped', 'raw' or None, got {self.observes!r}"
            )
        super().check()
