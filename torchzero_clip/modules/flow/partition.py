"""Partition: a transform for each kind of parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from torchzero_clip.core import Bucket, Transform, send
from torchzero_clip.modules.flow.masked import check_function, split


class Partition(Transform):
    """u ← transforms[labels(name, p)](u)

    The label is the name of the branch: its hyperparameters are "Partition/matrix/max_norm".

    Args:
        transforms: A transform or Chain for each label.
        labels: The label of a parameter, from its name ("" unless the optimizer was given
            `model.named_parameters()`) and value.

    Example:
        >>> muon = Chain(Momentum(0.95, nesterov=True), Orthogonalize(scale="match_rms_adamw"))
        >>> kind = lambda name, p: "matrix" if p.dim() == 2 else "other"
        >>> opt = Modular(
        ...     model.parameters(), Partition({"matrix": muon, "other": Adam()}, kind), LR(1e-3)
        ... )
    """

    transforms: Mapping[str, Transform]
    labels: Callable[[str, Tensor], str]

    inner = "branches"

    def check(self) -> None:
        super().check()
        check_function(self, "labels")
        inner = self.transforms.values() if isinstance(self.transforms, Mapping) else [None]
        if not all(isinstance(tfm, Transform) for tfm in inner):
            raise TypeError(
                "Partition: transforms must be a dict of label and Transform, got "
                f"{self.transforms!r}"
            )
        if self.target != "update":
            raise ValueError(
                f"Partition: target belongs to the transforms inside, got {self.target!r}"
            )

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return self._send(buckets)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        return self._send(buckets, init=True)

    def _send(self, buckets: list[Bucket], init: bool = False) -> list[Bucket]:
        """Every part through its own transform."""
        out: list[Bucket] = []
        for label, link in zip(self.transforms, buckets[0].bound.children, strict=True):
            part = self._part(buckets, label)
            out += send(link, part, init)
        return out

    def _part(self, buckets: list[Bucket], label: str) -> list[Bucket]:
        return split(buckets, lambda name, p: self._label(name, p) == label)[0]

    def _label(self, name: str, p: Tensor) -> str:
        label = self.labels(name, p)
        if label not in self.transforms:
            raise ValueError(
                f"Partition: labels gave {label!r} for parameter {name!r} of shape "
                f"{tuple(p.shape)}; the labels are {list(self.transforms)}"
            )
        return label
