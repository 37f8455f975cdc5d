"""Skip: a flag on the device, set where a step must leave everything as it was."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import shared_memory
from torchzero_clip.core.torch_private import foreach


class Skipped(Exception):
    """Raised where the flag was read and is set: it ends the step, and nobody else sees it."""


class Skip:
    """The flag of a step that a guard may have skipped; true once there is one.

    Whoever writes state, gradients or parameters looks at it on the device (`on`), has the values
    that it is about to write come back (`hold`), or waits for it on the host (`read`).
    """

    def __init__(self) -> None:
        self.flag: Tensor | None = None
        self.why: str | None = None  # the host has read it
        self._on: dict[torch.device, Tensor] = {}
        self._held: list[tuple[list[Tensor], list[Tensor]]] = []

    def __bool__(self) -> bool:
        return self.flag is not None

    def add(self, flag: Tensor) -> None:
        """Leave everything as it was where this flag is set, from here to the end of the step."""
        self.flag = flag if self.flag is None else self.flag | flag.to(self.flag.device)
        self.why = None
        self._on.clear()

    def on(self, device: torch.device) -> Tensor:
        """The flag on a device."""
        assert self.flag is not None
        if device not in self._on:
            self._on[device] = self.flag.to(device)
        return self._on[device]

    def read(self, why: str) -> None:
        """Wait for the flag, once a step, and end the step where it is set."""
        if self.flag is not None and self.why is None:
            self.why = why
            if self.flag.item():
                raise Skipped

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Keep values of tensors that are about to be written; in a skipped step they come back."""
        if self and self.why is None:  # otherwise the step is known to happen
            memory = shared_memory(tensors)
            held = list(tensors) if memory is None else [memory]
            self._held.append((held, [t.clone() for t in held]))

    def put_back(self) -> None:
        """Give held tensors their values back where the flag is set; the first ones last."""
        held, self._held = self._held, []
        for tensors, before in reversed(held):
            flag = self.on(tensors[0].device)
            rows = zip(before, tensors, strict=True)
            foreach("copy_", tensors, [torch.where(flag, old, t) for old, t in rows])
