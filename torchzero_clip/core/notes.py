"""Notes: what a step tells of itself to whoever may do it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class Notes:
    """They listen to nothing: the step is done once. An engine that repeats steps has its own."""

    def made(self, why: str) -> None:
        """Something comes to be, or begins anew, in this step alone."""

    def host(self, why: str) -> None:
        """Something is decided on the host, so that no step could be done again."""

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """The answer of a function, which must be the same where the step is repeated."""
        return function(*args)

    def number(self, device: torch.device, function: Callable[..., float], *args: Any) -> Any:
        """The answer of a function; where the step is repeated a tensor that is filled anew."""
        return function(*args)

    def count(self, groups: Sequence[Mapping[str, Any]], key: str, by: int) -> int:
        """A count of steps that every group keeps, this one included."""
        now = counted(groups, key, by)
        for group in groups:
            group["chain"][key] = now
        return now


def counted(groups: Sequence[Mapping[str, Any]], key: str, by: int) -> int:
    """The count of the step that comes."""
    return int(groups[0]["chain"].get(key, 0)) + by


UNHEARD = Notes()
