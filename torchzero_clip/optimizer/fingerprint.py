"""Fingerprints: numbers in a checkpoint that differ for different chains."""

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
    """Return two numbers: one for the links of a chain, one for their fixed arguments.

    Arguments with their default value do not count, so that a later release may add some.
    """
    names = [f"{link.path}:{type(link.transform).__name__}" for link in links]
    arguments = [
        (link.path, name, value)
        for link in links
        for name, value in _fixed_arguments(link.transform).items()
    ]
    arguments.sort(key=lambda argument: argument[:2])
    fixed = [f"{path}/{name}={value!r}" for path, name, value in arguments]
    return [zlib.crc32("\n".join(lines).encode()) for lines in (names, fixed)]


def shared_start(links: Sequence[Link], params: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chain dict of a new group: the fingerprint, and state of the same chain.

    The fingerprint is a tensor with one dimension. Distributed checkpointing finds the device for
    loading from such tensors, and there may be no other.

    Args:
        links: All links of the chain.
        params: The parameters of the group.
        shared: The chain dict that came with the group. Its state is kept if the chain is the same.
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
    """Return the arguments that cannot change and have no default value.

    A function is represented by its name. `state_dtype` does not count, because state loads in
    either dtype.
    """
    others = {*tfm.live, "state_dtype"}
    inside = (Transform, tuple, list, dict) if dict(tfm.children()) else ()
    fields = [(name, x) for name, x in tfm.not_default().items() if name not in others]
    return {name: getattr(x, "__qualname__", x) for name, x in fields if not isinstance(x, inside)}
