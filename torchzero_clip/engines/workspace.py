"""Workspaces: memory for updates that an engine keeps between steps."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.state import state_dtype
from torchzero_clip.core.tensor_kinds import storages

Form: TypeAlias = "tuple[torch.dtype, torch.Size, tuple[int, ...]]"


class Workspaces:
    """One tensor for each parameter, found by the key of the bucket and the place in the bucket."""

    def __init__(self) -> None:
        self.kept: dict[Hashable, dict[int, tuple[Form, Tensor]]] = {}
        self._lent: dict[tuple[Hashable, int], weakref.ref[Tensor]] = {}

    def lend(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        moving: Sequence[Tensor],
    ) -> list[Tensor] | None:
        """Return memory for updates of these parameters, or None if the memory is in use.

        All calls return new tensor objects over the same memory. The memory is in use as long as
        any tensor that the last call returned is alive. A view keeps such a tensor alive.

        Args:
            key: The key of the bucket.
            places: The places of the parameters in the bucket.
            params: The parameters.
            moving: The tensors whose values the caller will write to the memory.
        """
        lent = [self._lent.get((key, i)) for i in places]
        if any([tensor is not None and tensor() is not None for tensor in lent]):
            return None
        memory = self.like(key, places, params)
        # In inference mode a view does not keep its base alive, so storages are compared.
        untracked = torch.is_inference_mode_enabled()
        if untracked and not storages(memory).isdisjoint(storages(moving)):
            return None
        tensors = [t.data for t in memory]
        for i, t in zip(places, tensors, strict=True):
            self._lent[key, i] = weakref.ref(t)
        return tensors

    def like(self, key: Hashable, places: Sequence[int], params: Sequence[Tensor]) -> list[Tensor]:
        """Return one tensor for each parameter, with the same shape, for updates of the parameter.

        A tensor is allocated in the first call, and again if the dtype or layout of the parameter
        has changed. The tensors have no gaps in memory, so their strides may differ from the
        strides of the parameters.
        """
        kept = self.kept.setdefault(key, {})
        dtype = state_dtype(params[0])
        memory: list[Tensor] = []
        for i, p in zip(places, params, strict=True):
            form = dtype, p.shape, p.stride()
            if i not in kept or kept[i][0] != form:
                with torch.inference_mode(False):  # so that later steps can write it outside
                    kept[i] = form, torch.empty_like(p, dtype=dtype)
            memory.append(kept[i][1])
        return memory

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are kept between steps."""
        return [t for kept in self.kept.values() for _, t in kept.values()]
