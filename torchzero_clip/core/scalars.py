"""Scalars that a link keeps once per group or once for the model, and the loss of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchzero_clip.core.engine import Group
from torchzero_clip.core.link import scalars_of_model
from torchzero_clip.core.small_tensors import copies, shares
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.core.torch_private import foreach
from torchzero_clip.core.transform import Transform

if TYPE_CHECKING:
    from torchzero_clip.core.bucket import Bucket

MODEL = -1  # stands for the index of a group in the keys of model-wide scalars


class Numbers:
    """The per-group and model-wide scalars of a link: 0-dim tensors in float64 on the device.

    The scalars are stored in the chain dicts of the parameter groups. Each dict also contains the
    model-wide scalars. To change scalars, put new values into `model` or `groups`, and call
    `store`. The new values are kept for the next step, unless a guard skips this step.

    Args:
        buckets: The buckets that the link receives.

    Attributes:
        model: The model-wide scalars, by name.
        groups: For the index of each group that has a gradient, the per-group scalars by name.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._step = buckets[0].step
        self._link = buckets[0].bound
        tfm = self._link.transform
        self._stored: dict[tuple[int, str], Tensor] = {}
        self.model = self._loaded(range(len(self._step.groups)), scalars_of_model(tfm), MODEL)
        indexes = sorted({bucket.cohort.index for bucket in buckets})
        self.groups = {i: self._loaded([i], tfm.init_group(), i) for i in indexes}

    def of(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return the scalars of the model and of a bucket's group, on the bucket's device."""
        both = {**self.model, **self.groups[bucket.cohort.index]}
        return {name: x.to(bucket.device) for name, x in both.items()}

    def set(self, index: int | None, values: Mapping[str, Any]) -> None:
        """Set new scalars of the group at `index`, or model-wide scalars if `index` is None."""
        numbers = self.model if index is None else self.groups[index]
        self._link.check_names("returned values", values, numbers)
        numbers.update(values)

    def store(self) -> None:
        """Keep the values in `model` and `groups` for the next step."""
        step = self._step
        stored: list[Tensor] = []
        values: list[Tensor] = []
        for (index, name), old in self._stored.items():
            new = (self.model if index == MODEL else self.groups[index])[name]
            new = new if isinstance(new, Tensor) else torch.full_like(old, new)
            new = (new.reshape(()) if new.dim() else new).to(old.dtype)
            if step.skip:
                new = torch.where(step.skip.on(old.device), old, new)
            if not step.released:
                stored.append(old)
                values.append(new)
                continue
            for group in step.groups if index == MODEL else [step.groups[index]]:
                group["chain"][f"{self._link.path}/{name}"] = new
        if stored:
            foreach("copy_", stored, values)  # AOTAutograd does not see the write of `Tensor.copy_`
        self.show()

    def show(self) -> None:
        """Record the scalars in `shown` for `metrics()`."""
        if shown := self._link.transform.shown:
            self._step.record[self._link.path] = {name: self.model[name] for name in shown}

    def advance(self) -> None:
        """Compute the scalars of this step with the methods of the transform, and store them."""
        tfm = self._link.transform
        for_model = type(tfm).advance_model is not Transform.advance_model
        for_groups = type(tfm).advance_group is not Transform.advance_group
        if not ("step" in tfm.reads or for_model or for_groups):
            return
        if "step" in tfm.reads:
            self.model["step"] = self.model["step"] + 1
        if self.model and for_model:
            live = self._live(0, self._buckets[0].device)
            self.set(None, tfm.advance_model(dict(self.model), live))
        for index, numbers in self.groups.items():
            if numbers and for_groups:
                live = self._live(index, next(iter(numbers.values())).device)
                self.set(index, tfm.advance_group({**self.model, **numbers}, live))
        self.store()

    def _live(self, index: int, device: torch.device) -> Group:
        """Return the live hyperparameters of a group, with floats as tensors.

        A rule cannot branch on the value of a tensor without a read on the host.
        """
        values = self._link.values(self._step.groups[index])
        return {name: _on(device, value) for name, value in values.items()}

    def _loaded(self, groups: Sequence[int], initial: Mapping[str, float], index: int) -> Any:
        """Return copies of the scalars that all of these groups store. Make missing scalars.

        `index` is the index of the group, or MODEL.
        """
        stored = {name: self._find(groups, name, start) for name, start in initial.items()}
        self._stored.update({(index, name): t for name, t in stored.items()})
        tensors = list(stored.values())
        copied = copies(tensors) if tensors and shares(tensors) else [t.clone() for t in tensors]
        return dict(zip(stored, copied, strict=True))

    def _find(self, groups: Sequence[int], name: str, start: float) -> Tensor:
        """Return the tensor of a scalar, and store it in all of these groups."""
        key = f"{self._link.path}/{name}"
        chains = [self._step.groups[i]["chain"] for i in groups]
        devices = [b.device for b in self._buckets if b.cohort.index in groups]
        value = next((x for x in [chain.get(key) for chain in chains] if x is not None), start)
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=wide(devices[0]), device=devices[0])
        if value.device not in devices or value.dtype != wide(value.device):
            value = value.to(devices[0], wide(devices[0]))
        for chain in chains:
            if chain.get(key) is not value:
                self._step.notes.made(f"{key} is made, once")
                chain[key] = value
        return value


def numbered(buckets: Sequence[Bucket], advance: bool) -> None:
    """Give the buckets the scalars of their link. With `advance`, update the scalars first."""
    tfm = buckets[0].bound.transform
    step = buckets[0].step
    numbers = Numbers(buckets)
    if advance:
        numbers.advance()
    elif step.only_names:  # a skipped step leaves the scalars unchanged
        numbers.show()
    for bucket in buckets:
        bucket.numbers = numbers.of(bucket)
        if "loss" in tfm.reads and advance:
            bucket.numbers["loss"] = step.mean_loss(bucket.bound.path, bucket.device)


def _on(device: torch.device, value: Any) -> Any:
    """Return a live hyperparameter with its floats as 0-dim tensors on a device."""
    if isinstance(value, tuple):
        return tuple([_on(device, x) for x in value])
    if type(value) is float:
        return torch.full((), value, dtype=wide(device), device=device)
    return value.to(device, wide(device)) if isinstance(value, Tensor) else value
