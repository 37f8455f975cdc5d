"""Masked: a rule that applies another rule to some parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torchzero_clip.core import Bucket, Transform, prepare, run
from torchzero_clip.core.traits import Routing
from torchzero_clip.core.transform import dropping
from torchzero_clip.modules.flow.choice import split


class Masked(Transform, Routing):
    """Masked applies a rule to the parameters that a function chooses.

    Use it, for example, for weight decay on matrices only.

    u ← tfm(u) where where(name, p) holds, u elsewhere

    In the inner rule, `dim="global"` means all parameters that the function chooses.

    Args:
        tfm: The rule or Chain to apply.
        where: A function `where(name, p)` of the name and value of a parameter. It returns True for
            the parameters that `tfm` receives. If the function uses the name, pass
            `model.named_parameters()` to the optimizer.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Masked, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> matrices = lambda name, p: p.dim() >= 2
        >>> decay = Masked(WeightDecay(0.1), matrices)
        >>> opt = Modular(model.parameters(), Adam(), decay, LR(1e-3))
    """

    tfm: Transform
    where: Callable[[str, Tensor], bool]

    inner = "chain"
    reach = "tensor"
    pure = True
    asks = ("where",)

    def check(self) -> None:
        super().check()
        check_inner(self)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        inside, outside = split(buckets, self.where)
        return outside + run(inside)

    def ways(self, name: str, param: Tensor) -> Sequence[int]:
        return [0] if self.where(name, param) else []

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        inside, outside = split(buckets, self.where)
        return outside + prepare(inside)


def check_inner(rule: Transform) -> None:
    """Raise an error unless `tfm` is a Transform and the outer rule has the default `target`."""
    inner = getattr(rule, "tfm", None)
    if not isinstance(inner, Transform):
        raise TypeError(f"{type(rule).__name__}: tfm must be a Transform, got {inner!r}")
    check_outer(rule)


def check_outer(rule: Transform) -> None:
    """Raise ValueError if the outer rule sets `target`. Only inner transforms may set `target`."""
    if rule.target != "update":
        raise ValueError(
            f"{type(rule).__name__}: target= must be 'update', got {rule.target!r}: pass "
            f"target= to the transforms that {type(rule).__name__} contains"
        )


def check_keeps(rule: Transform, name: str, tfm: Transform) -> None:
    """Raise ValueError if an inner transform may return fewer updates than it receives."""
    if dropping(tfm):
        raise ValueError(
            f"{type(rule).__name__}: {name} must return an update for every parameter in "
            f"every step, got {getattr(rule, name)!r}: put guards, Freeze, Accumulate, "
            f'and all transforms with target="grad", before {type(rule).__name__}'
        )
