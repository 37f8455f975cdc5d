"""Parallel: a rule that applies several rules to the same update and combines the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchzero_clip.core import Bucket, TensorList, Transform, send, transformed
from torchzero_clip.core.tensorlist import call_user
from torchzero_clip.modules.flow.masked import check_keeps, check_outer


class Parallel(Transform):
    """Parallel applies several rules to the same update and combines their results.

    Use it, for example, for the mean of a fast and a slow momentum.

    u ← merge({name: tfm(u) for each of the transforms})

    Every branch receives the same update. The keys of hyperparameters contain the name of the
    branch, for example "Parallel/fast/beta".

    Args:
        transforms: A dict that maps a name to a rule or Chain. The branches must not contain
            guards, `Freeze` or `Accumulate`.
        merge: A function that receives a dict with the TensorList of each branch, and returns one
            TensorList. It may change the lists in place. Each element of the result may depend only
            on the same element of each list. Call `t.reshape(...)`, not `t.view(...)`, because the
            strides of the tensors may vary.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Modular, Parallel
        >>> model = torch.nn.Linear(10, 1)
        >>> both = {"fast": EMA(0.9), "slow": EMA(0.999)}
        >>> mean = Parallel(both, lambda u: u["fast"].add_(u["slow"]).mul_(0.5))
        >>> opt = Modular(model.parameters(), mean, LR(0.1))
    """

    transforms: Mapping[str, Transform]
    merge: Callable[[Mapping[str, TensorList]], TensorList]

    inner = "branches"
    widens = True
    reach = "tensor"
    pure = True

    def check(self) -> None:
        super().check()
        inner = self.transforms.items() if isinstance(self.transforms, Mapping) else []
        if not inner or not all(isinstance(tfm, Transform) for _, tfm in inner):
            raise TypeError(
                "Parallel: transforms must be a dict from names to transforms, got "
                f"{self.transforms!r}"
            )
        check_outer(self)
        for _, tfm in inner:
            check_keeps(self, "transforms", tfm)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        for link in buckets[0].bound.children:
            send(link, buckets, init=True)
        return buckets

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        updates = [bucket.u for bucket in buckets]
        branches = {
            name: transformed(buckets, [u.borrow() for u in updates], [link])
            for name, link in zip(self.transforms, buckets[0].bound.children, strict=True)
        }
        for i, bucket in enumerate(buckets):
            results = {name: lists[i] for name, lists in branches.items()}
            u = call_user("Parallel: merge", self.merge, results)
            if not isinstance(u, TensorList):
                raise TypeError(
                    "Parallel: the function that was passed as merge= must return a TensorList, "
                    f"got {type(u).__name__}"
                )
            bucket.u = u
        return buckets
