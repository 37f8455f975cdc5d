"""Fingerprints: numbers in a checkpoint that are different for different chains."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.link import Link
from torchzero_clip.core.transform import Transform

MARK = "fingerprint"
"""The key of the fingerprint in the chain dict of a group."""


def fingerprint(links: Sequence[Link]) -> list[int]:
    """Return two numbers: one for the links of a chain, and one for the links' fixed arguments.

    Arguments with their default value are ignored, so a later release can add arguments.
    """
    names = [f"{link.path}:{type(link.transform).__name__}" for link in links]
    fixed = [
        f"{link.path}/{name}={value!r}"
        for link in links
        for name, value in _fixed_arguments(link.transform).items()
    ]
    return [zlib.crc32("\n".join(lines).encode()) for lines in (names, sorted(fixed))]


def shared_start(links: Sequence[Link], params: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chain dict of a new group: the fingerprint, and state of the same chain.

    The fingerprint is a tensor with one dimension. Distributed checkpointing reads the device for
    loading from such tensors, and a chain may have no other one.

    Args:
        links: All links of the chain.
        params: The parameters of the group.
        shared: The chain dict in the group so far. If it is from the same chain, its state is kept.
    """
    numbers = fingerprint(links)
    is_same_chain = marks(shared)[:1] == numbers[:1]
    state = shared if is_same_chain else {}
    device = next((p.device for p in params if p.device.type != "meta"), "cpu")
    copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    return {**copied, MARK: torch.tensor(numbers, device=device)}


def marks(shared: Mapping[str, Any]) -> list[int]:
    """Return the fingerprint in a chain dict, or an empty list."""
    value = shared.get(MARK)
    return value.tolist() if isinstance(value, Tensor) and value.dim() == 1 else []


def _fixed_arguments(tfm: Any) -> dict[str, Any]:
    """Return the fixed arguments of a transform, except arguments with their default value.

    The name of a function represents the function. `state_dtype` is ignored, because state loads in
    either dtype.
    """
    others = {*tfm.live, "state_dtype"}
    inside = (Transform, tuple, list, dict) if dict(tfm.children()) else ()
    fields = [(name, x) for name, x in tfm.not_default().items() if name not in others]
    return {name: getattr(x, "__qualname__", x) for name, x in fields if not isinstance(x, inside)}
