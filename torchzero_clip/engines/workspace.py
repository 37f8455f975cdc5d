"""Workspaces: memory like the parameters that an engine keeps from step to step."""

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
    """One tensor for each parameter, found by the key of its bucket and its place there."""

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
        """Return memory for updates of these parameters; None while it is in use.

        It is in use while a list, or a view that a rule made, has one of the tensors that were
        returned last. Each call returns other tensors of the same memory, so that this is known.
        `moving` are the tensors whose values go there.
        """
        lent = [self._lent.get((key, i)) for i in places]
        if any([tensor is not None and tensor() is not None for tensor in lent]):
            return None
        memory = self.like(key, places, params)
        untracked = torch.is_inference_mode_enabled()  # a view does not hold its base there
        if untracked and not storages(memory).isdisjoint(storages(moving)):
            return None
        tensors = [t.data for t in memory]
        for i, t in zip(places, tensors, strict=True):
            self._lent[key, i] = weakref.ref(t)
        return tensors

    def like(self, key: Hashable, places: Sequence[int], params: Sequence[Tensor]) -> list[Tensor]:
        """Memory for updates of these parameters, made where none of their form is kept.

        It has no gaps, so that the form of a parameter is compared with that of the one before.
        """
        kept, dtype = self.kept.setdefault(key, {}), state_dtype(params[0])
        found: list[Tensor] = []
        for i, p in zip(places, params, strict=True):
            form = dtype, p.shape, p.stride()
            if i not in kept or kept[i][0] != form:
                with torch.inference_mode(False):  # memory that is written outside of it as well
                    kept[i] = form, torch.empty_like(p, dtype=dtype)
            found.append(kept[i][1])
        return found

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are kept."""
        return [t for kept in self.kept.values() for _, t in kept.values()]
