"""Skip: a flag on the device that tells whether a guard skips the step.

A guard is a link that can skip a step, for example because a gradient is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import shared_memory
from torchzero_clip.core.torch_private import foreach


class Skipped(Exception):
    """An exception that ends a step whose flag is set. `Step` catches it, so users never see it."""


class Skip:
    """The flag of a step that a guard may skip.

    A `Skip` is true as soon as a guard has added a flag. A skipped step must not change state,
    gradients or parameters. Code that writes such tensors has three ways to ensure this:

    - `on`: Use the flag on the device.
    - `hold`: Save the old values, so that `put_back` restores them if the flag is set.
    - `read`: Synchronize, and read the flag on the host.
    """

    def __init__(self) -> None:
        self.flag: Tensor | None = None
        self.why: str | None = None  # the reason for which the host has read the flag
        self._on: dict[torch.device, Tensor] = {}
        self._saved: list[tuple[list[Tensor], list[Tensor]]] = []  # tensors, and copies of them

    def __bool__(self) -> bool:
        return self.flag is not None

    def add(self, flag: Tensor) -> None:
        """Add a flag. If this flag or an earlier flag is set, the rest of the step is skipped."""
        self.flag = flag if self.flag is None else self.flag | flag.to(self.flag.device)
        self.why = None
        self._on.clear()

    def on(self, device: torch.device) -> Tensor:
        """Return the flag on a device."""
        assert self.flag is not None
        if device not in self._on:
            self._on[device] = self.flag.to(device)
        return self._on[device]

    def read(self, why: str) -> None:
        """Read the flag on the host, at most once per step, and end the step if it is set.

        Args:
            why: The reason for the synchronization. It is stored for reports.
        """
        if self.flag is not None and self.why is None:
            self.why = why
            if self.flag.item():
                raise Skipped

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Save the values of tensors that are about to be written, for `put_back`.

        Nothing is saved if the step is certain to run. This is the case if no flag exists, or if
        the host has read that the flag is not set.
        """
        if self and self.why is None:
            memory = shared_memory(tensors)
            saved = list(tensors) if memory is None else [memory]
            self._saved.append((saved, [t.clone() for t in saved]))

    def put_back(self) -> None:
        """Restore the saved values if the flag is set.

        The values that were saved first are restored last, in case a tensor was saved twice.
        """
        saved = self._saved
        self._saved = []
        for tensors, before in reversed(saved):
            flag = self.on(tensors[0].device)
            pairs = zip(before, tensors, strict=True)
            foreach("copy_", tensors, [torch.where(flag, old, t) for old, t in pairs])
