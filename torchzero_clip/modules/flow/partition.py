"""Partition: a rule that applies a different rule to each kind of parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from torchzero_clip.core import Bucket, Transform, send
from torchzero_clip.core.names import by_name, check_patterns
from torchzero_clip.core.traits import Routing
from torchzero_clip.modules.flow.choice import split
from torchzero_clip.modules.flow.masked import check_outer


class Partition(Transform, Routing):
    """Partition applies a different rule to each kind of parameter.

    Use it, for example, for Muon on matrices and Adam on all other parameters.

    u ← transforms[labels(name, p)](u)

    The keys of hyperparameters contain the label, for example "Partition/matrix/max_norm".

    Args:
        transforms: A dict that maps each label to a rule or Chain.
        labels: A function `labels(name, p)` that returns the label of a parameter, or a dict that
            maps a name or a pattern of names, such as "*.bias | *.norm.*", to a label. A key that
            is the name of the parameter wins, then the first pattern that matches the name. If
            names are used, pass `model.named_parameters()` to the optimizer.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Adam, Chain, Modular, Orthogonalize, Partition
        >>> from torchzero_clip import matrices_and_rest
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Linear(32, 1))
        >>> muon = Chain(EMA(0.95, nesterov=True), Orthogonalize(scale="match_rms_adamw"))
        >>> kinds = matrices_and_rest(model)
        >>> two = Partition({"matrices": muon, "rest": Adam()}, kinds)
        >>> opt = Modular(model.named_parameters(), two, LR(1e-3))
    """

    transforms: Mapping[str, Transform]
    labels: Callable[[str, Tensor], str] | Mapping[str, str]

    inner = "branches"
    one_way = False
    reach = "tensor"
    pure = True
    asks = ("labels",)

    def check(self) -> None:
        super().check()
        if isinstance(self.labels, Mapping):
            check_patterns(self, "labels")
        elif not callable(self.labels):
            raise TypeError(f"Partition: labels= must be a function or a dict, got {self.labels!r}")
        inner = self.transforms.values() if isinstance(self.transforms, Mapping) else [None]
        if not all(isinstance(tfm, Transform) for tfm in inner):
            raise TypeError(
                "Partition: transforms must be a dict from labels to transforms, got "
                f"{self.transforms!r}"
            )
        check_outer(self)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return self._send(buckets)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        return self._send(buckets, init=True)

    def _send(self, buckets: list[Bucket], init: bool = False) -> list[Bucket]:
        """Apply the transform of each label to the parameters with this label."""
        results: list[Bucket] = []
        for label, link in zip(self.transforms, buckets[0].bound.children, strict=True):
            part = self._part(buckets, label)
            results += send(link, part, init)
        return results

    def ways(self, name: str, param: Tensor) -> Sequence[int]:
        return [list(self.transforms).index(self._label(name, param))]

    def _part(self, buckets: list[Bucket], label: str) -> list[Bucket]:
        """Return buckets with only the parameters that have this label."""
        return split(buckets, lambda name, p: self._label(name, p) == label)[0]

    def _label(self, name: str, p: Tensor) -> str:
        """Return the label of a parameter, or raise ValueError if no transform has it."""
        if isinstance(self.labels, Mapping):
            label = self._label_by_name(name, p)
        else:
            label = self.labels(name, p)
        if label not in self.transforms:
            raise ValueError(
                f"Partition: labels= must assign one of {list(self.transforms)} to each "
                f"parameter, got {label!r} for parameter {name!r} of shape {tuple(p.shape)}"
            )
        return label

    def _label_by_name(self, name: str, p: Tensor) -> str:
        """Return the label for a name, if `labels` is a dict."""
        assert isinstance(self.labels, Mapping)
        if (key := by_name(self.labels, name)) is not None:
            return self.labels[key]
        way = "pass model.named_parameters() to the optimizer"
        if name:
            way = f"add a key for this name; the keys are {_first_keys(self.labels)}"
        raise ValueError(
            f"Partition: no key of labels= matches the name {name!r} of a parameter of shape "
            f"{tuple(p.shape)}: {way}"
        )


def _first_keys(labels: Mapping[str, str]) -> str:
    """Return the first keys of a dict as text, for an error message."""
    keys = ", ".join(map(repr, list(labels)[:5]))
    return f"{keys}, ..." if len(labels) > 5 else keys
