"""Choice: the parameters for which a function of name and value holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from torchzero_clip.core import Bucket


def split(
    buckets: list[Bucket], where: Callable[[Any, Tensor], bool]
) -> tuple[list[Bucket], list[Bucket]]:
    """The parts of the buckets where a condition holds, and the rest."""
    inside: list[Bucket] = []
    outside: list[Bucket] = []
    for bucket in buckets:
        rows = zip(bucket.names, bucket.originals, strict=True)
        chosen = [bool(bucket.step.notes.ask(where, n or _NoName(), p)) for n, p in rows]
        for part, kind in ((inside, True), (outside, False)):
            places = [i for i, choice in enumerate(chosen) if choice is kind]
            if places:
                part.append(bucket if len(places) == len(chosen) else bucket.select(places))
    return inside, outside


class _NoName:
    """The name of a parameter that came without one: equal to "", and to look into it is an error.

    An empty string would belong to no choice by name, and nothing would say so.
    """

    def __getattr__(self, method: str) -> NoReturn:
        if method.startswith("__"):
            raise AttributeError(method)
        raise _nameless()

    def __getitem__(self, place: Any) -> NoReturn:
        raise _nameless()

    def __contains__(self, part: str) -> NoReturn:
        raise _nameless()

    def __hash__(self) -> NoReturn:
        raise _nameless()

    def __eq__(self, other: object) -> bool:
        if other == "":
            return True
        raise _nameless()

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "''"


def _nameless() -> ValueError:
    return ValueError(
        "a parameter is chosen by its name, but has none: pass model.named_parameters() to the "
        "optimizer instead of model.parameters()"
    )
