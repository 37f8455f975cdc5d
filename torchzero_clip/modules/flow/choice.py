"""Functions that choose parameters by name and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from torchzero_clip.core import Bucket


def split(
    buckets: list[Bucket], where: Callable[[Any, Tensor], bool]
) -> tuple[list[Bucket], list[Bucket]]:
    """Return buckets with the parameters that meet a condition, and buckets with all others."""
    inside: list[Bucket] = []
    outside: list[Bucket] = []
    for bucket in buckets:
        pairs = zip(bucket.names, bucket.originals, strict=True)
        chosen = [bool(bucket.step.notes.ask(where, n or _NoName(), p)) for n, p in pairs]
        if all(chosen):
            inside.append(bucket)
        elif not any(chosen):
            outside.append(bucket)
        else:
            inside.append(bucket.select([i for i, choice in enumerate(chosen) if choice]))
            outside.append(bucket.select([i for i, choice in enumerate(chosen) if not choice]))
    return inside, outside


class _NoName:
    """The name of an unnamed parameter. It equals "", and any other use raises an error.

    With a plain empty string, no pattern would match, and nobody would notice that names are
    missing.
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
    """Return the error for a choice by name if the parameters have no names."""
    return ValueError(
        "parameters are selected by name, but have no names: pass model.named_parameters() to the "
        "optimizer instead of model.parameters()"
    )
