"""Fingerprints: numbers that tell two chains apart in a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.link import Link
from torchzero_clip.core.transform import Transform

MARK = "fingerprint"


def fingerprint(links: Sequence[Link]) -> list[int]:
    """Numbers that tell two chains apart: of their links, and of their fixed arguments.

    Arguments at their default do not count, so that a later release may add some.
    """
    names = [f"{link.path}:{type(link.transform).__name__}" for link in links]
    rows = [(link.path, name, v) for link in links for name, v in _fixed(link.transform).items()]
    fixed = [f"{path}/{name}={value!r}" for path, name, value in sorted(rows, key=lambda r: r[:2])]
    return [zlib.crc32("\n".join(lines).encode()) for lines in (names, fixed)]


def shared_start(links: Sequence[Link], params: Any, held: Mapping[str, Any]) -> dict[str, Any]:
    """The chain dict of a new group: the fingerprint, and what a group of the same chain had.

    The fingerprint is a tensor with a dimension, since distributed checkpointing takes from such
    the device to load to, and there may be no other.
    """
    mine = fingerprint(links)
    kept = held if marks(held)[:1] == mine[:1] else {}
    device = next((p.device for p in params if p.device.type != "meta"), "cpu")
    copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept.items()}
    return {**copied, MARK: torch.tensor(mine, device=device)}


def marks(shared: Mapping[str, Any]) -> list[int]:
    """The fingerprint in a chain dict, or nothing."""
    held = shared.get(MARK)
    return held.tolist() if isinstance(held, Tensor) and held.dim() == 1 else []


def _fixed(tfm: Any) -> dict[str, Any]:
    """The arguments that cannot change, other than defaults; a function counts by its name.

    State may be loaded in either of its dtypes.
    """
    others = {*tfm.live, "state_dtype"}
    inside = (Transform, tuple, list, dict) if dict(tfm.children()) else ()
    fields = [(name, x) for name, x in tfm.not_default().items() if name not in others]
    return {name: getattr(x, "__qualname__", x) for name, x in fields if not isinstance(x, inside)}
