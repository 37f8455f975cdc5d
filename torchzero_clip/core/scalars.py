"""Numbers: what a link keeps once for a group or for the model, and the loss of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchzero_clip.core.engine import Group
from torchzero_clip.core.link import numbers_of_model
from torchzero_clip.core.small_tensors import copies, shares
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.core.torch_private import foreach
from torchzero_clip.core.transform import Transform

if TYPE_CHECKING:
    from torchzero_clip.core.bucket import Bucket


class Numbers:
    """The numbers that a link keeps once: 0-dim tensors in float64 on the device.

    They lie in the chain dicts of the groups, those of the model in every one. What is set here is
    kept by `store`, unless the step is skipped.

    Args:
        buckets: Those that the link sees.

    Attributes:
        model: The numbers of the model, by name.
        groups: Those of each group that has a gradient, by its index.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets, self._step, self._link = buckets, buckets[0].step, buckets[0].bound
        tfm = self._link.transform
        self._held: dict[tuple[int, str], Tensor] = {}
        self.model = self._loaded(range(len(self._step.groups)), numbers_of_model(tfm), -1)
        indexes = sorted({bucket.cohort.index for bucket in buckets})
        self.groups = {i: self._loaded([i], tfm.init_group(), i) for i in indexes}

    def of(self, bucket: Bucket) -> dict[str, Tensor]:
        """The numbers of the model and of a bucket's group, on its device."""
        both = {**self.model, **self.groups[bucket.cohort.index]}
        return {name: x.to(bucket.device) for name, x in both.items()}

    def set(self, index: int | None, values: Mapping[str, Any]) -> None:
        """Take new numbers of a group, or of the model."""
        numbers = self.model if index is None else self.groups[index]
        self._link.check_names("numbers that come back", values, numbers)
        numbers.update(values)

    def store(self) -> None:
        """Keep the numbers for the next step."""
        step, path = self._step, self._link.path
        rows: tuple[list[Tensor], list[Tensor]] = [], []
        for (index, name), held in self._held.items():
            new = (self.model if index < 0 else self.groups[index])[name]
            new = new if isinstance(new, Tensor) else torch.full_like(held, new)
            new = (new.reshape(()) if new.dim() else new).to(held.dtype)
            if step.skip:
                new = torch.where(step.skip.on(held.device), held, new)
            if not step.released:
                rows[0].append(held)
                rows[1].append(new)
                continue
            for group in step.groups if index < 0 else [step.groups[index]]:
                group["chain"][f"{path}/{name}"] = new
        if rows[0]:
            foreach("copy_", *rows)  # a write that AOTAutograd sees, unlike copy_
        self.show()

    def show(self) -> None:
        """Leave the numbers for `metrics()` that the transform shows."""
        if shown := self._link.transform.shown:
            self._step.record[self._link.path] = {name: self.model[name] for name in shown}

    def advance(self) -> None:
        """Bring the numbers to this step, as the transform says, and keep them."""
        tfm, kind = self._link.transform, type(self._link.transform)
        for_model = kind.advance_model is not Transform.advance_model
        for_groups = kind.advance_group is not Transform.advance_group
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
        """The live values of a group, floats as tensors: no rule may branch on one."""
        values = self._link.values(self._step.groups[index])
        return {name: _on(device, value) for name, value in values.items()}

    def _loaded(self, groups: Sequence[int], made: Mapping[str, float], index: int) -> Any:
        """Copies of numbers that these groups hold together, made where they are missing."""
        found = {name: self._find(groups, name, start) for name, start in made.items()}
        self._held.update({(index, name): held for name, held in found.items()})
        held = list(found.values())
        copied = copies(held) if held and shares(held) else [x.clone() for x in held]
        return dict(zip(found, copied, strict=True))

    def _find(self, groups: Sequence[int], name: str, start: float) -> Tensor:
        """The tensor of a number, which all of these groups hold."""
        key, chains = f"{self._link.path}/{name}", [self._step.groups[i]["chain"] for i in groups]
        devices = [b.device for b in self._buckets if b.cohort.index in groups]
        held = next((x for x in [chain.get(key) for chain in chains] if x is not None), start)
        if not isinstance(held, Tensor):
            held = torch.full((), held, dtype=wide(devices[0]), device=devices[0])
        if held.device not in devices or held.dtype != wide(held.device):
            held = held.to(devices[0], wide(devices[0]))
        for chain in chains:
            if chain.get(key) is not held:
                self._step.notes.made(f"{key} is made, once")
                chain[key] = held
        return held


def numbered(buckets: Sequence[Bucket], advance: bool) -> None:
    """Give the buckets the numbers of their link, after this step if it is to `advance`."""
    tfm, step = buckets[0].bound.transform, buckets[0].step
    numbers = Numbers(buckets)
    if advance:
        numbers.advance()
    elif step.only_names:  # a skipped step leaves them as they were
        numbers.show()
    for bucket in buckets:
        bucket.numbers = numbers.of(bucket)
        if "loss" in tfm.reads and advance:
            bucket.numbers["loss"] = step.mean_loss(bucket.bound.path, bucket.device)


def _on(device: torch.device, value: Any) -> Any:
    """A live value with its floats as 0-dim tensors on a device."""
    if isinstance(value, tuple):
        return tuple([_on(device, x) for x in value])
    if type(value) is float:
        return torch.full((), value, dtype=wide(device), device=device)
    return value.to(device, wide(device)) if isinstance(value, Tensor) else value
