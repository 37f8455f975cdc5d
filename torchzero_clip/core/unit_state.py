"""The state of units, and its place: with their parameters, their group, or all groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.decision import UnitState
from torchzero_clip.core.division import Division, layer_of
from torchzero_clip.core.small_tensors import copies, shares
from torchzero_clip.core.state import statistic, statistic_dtype
from torchzero_clip.core.tensor_kinds import share_memory, shared_memory, wide
from torchzero_clip.core.torch_private import foreach

Place: TypeAlias = "tuple[dict[str, Any], Tensor]"
"""A dict that may hold the number of a unit, and a parameter that says its device and dtype."""


class UnitStore:
    """The numbers of units, as vectors while a rule works and in their dicts between steps.

    A tensor's or a layer's number is in the state of its parameters, a group's in its chain dict, a
    global one in the chain dict of every group, with the name of a norm of its own behind "@":
    torch's `state_dict` saves them there.

    Args:
        buckets: The buckets of the units, in order.
        division: The units.
    """

    def __init__(self, buckets: Sequence[Bucket], division: Division) -> None:
        self.buckets, self.division, self.scope = buckets, division, division.scope
        self.home = division.home
        self.cells: dict[str, list[Tensor]] = {}

    def load(self, made: Mapping[str, Any]) -> UnitState:
        """A vector for each name, in float64; numbers that are missing begin as `made` says."""
        path = self.buckets[0].bound.path
        self.cells = {name: self._cells(f"{path}/{name}", value) for name, value in made.items()}
        return dict(zip(self.cells, self._vectors(list(self.cells.values())), strict=True))

    def store(self, state: UnitState) -> None:
        """Write vectors back where the units' numbers are kept."""
        skip = self.buckets[0].step.skip
        rows: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}  # what is written in one call
        for name, vector in state.items():
            cells = self.cells[name]
            if skip:  # now, since a guard that comes next has no say in what this was
                vector = torch.where(skip.on(self.home), self._vector(cells), vector)
            memory = shared_memory(cells)
            kind = memory is None, cells[0].dtype, vector.dtype
            held, new = rows.setdefault(kind, ([], []))
            held += cells if memory is None else [memory]
            new += vector.unbind(0) if memory is None else [vector]
        for held, new in rows.values():
            foreach("copy_", held, new)

    def _vectors(self, rows: list[list[Tensor]]) -> list[Tensor]:
        """A copy of each row; those of single numbers in one call."""
        every = [cell for cells in rows for cell in cells]
        numbers = len({(cell.dtype, cell.device, cell.shape) for cell in every}) == 1
        shared = [memory for memory in map(shared_memory, rows) if memory is not None]
        alike = len({t.dtype for t in shared}) == 1 and shared[0].is_floating_point()
        if len(shared) == len(rows) and alike and shares(shared):
            return copies([t.to(self.home) for t in shared], wide(self.home))
        if len(rows) < 2 or not (numbers and not shared):
            return list(map(self._vector, rows))
        return list(self._vector(every).split(list(map(len, rows))))

    def _vector(self, cells: list[Tensor]) -> Tensor:
        """A copy of the numbers of units as one vector."""
        memory, like = shared_memory(cells), cells[0]
        dtype = wide(self.home) if like.is_floating_point() else like.dtype
        if memory is None:
            return torch.stack([cell.to(self.home) for cell in cells]).to(dtype)
        return memory.to(self.home, dtype, copy=True)

    def _cells(self, key: str, value: Any) -> list[Tensor]:
        """The tensor that holds the number of each unit; those of single tensors share memory."""
        states = [state for bucket in self.buckets for state in bucket.param_states]
        alone = self.scope is None and len({bucket.device for bucket in self.buckets}) == 1
        if alone:
            held = [state.get(key) for state in states]
            there = [cell for cell in held if isinstance(cell, Tensor)]
            ready = len(there) == len(held) and there[0].device == self.home
            if ready and shared_memory(there) is not None:
                return there
        places = self._places(key)
        keys = [key] * len(places)
        if self.scope == "global":
            keys = [f"{key}@{name}" if name else key for name in self.division.norm_groups]
        cells = [self._cell(k, value, rows) for k, rows in zip(keys, places, strict=True)]
        if alone:
            self.buckets[0].step.notes.made(f"{key} is made, once")
            cells = share_memory(cells)
            for state, cell in zip(states, cells, strict=True):
                state[key] = cell
        if self.scope == "global":
            for group in self.buckets[0].step.groups:
                group["chain"].update(zip(keys, cells, strict=True))
        return cells

    def _places(self, key: str) -> list[list[Place]]:
        """The dicts that hold, or should hold, the number of each unit."""
        places: list[list[Place]] = [[] for _ in range(self.division.count)]
        first, units = self.buckets[0].step.groups[0]["chain"], iter(self.division.unit_of)
        for bucket in self.buckets:
            joint = {"group": bucket.group_state, "global": first}
            for state, p in zip(bucket.param_states, bucket.originals, strict=True):
                places[next(units)].append((joint.get(self.scope, state), p))
        if self.scope == "layer":
            self._add_idle(key, places)
        return places

    def _add_idle(self, key: str, places: list[list[Place]]) -> None:
        """Members of the layers without a gradient now: their layer's number is theirs as well."""
        step = self.buckets[0].step
        busy = {id(state) for row in places for state, _ in row}
        for group in step.groups:
            for p, name in zip(group["params"], group["param_names"], strict=True):
                unit = self.division.layers.get(layer_of(name))
                state = {} if unit is None or step.states is None else step.states.get(p, {})
                if unit is not None and key in state and id(state) not in busy:
                    places[unit].append((state, p))

    def _cell(self, key: str, value: Any, places: Sequence[Place]) -> Tensor:
        """The tensor of one unit, made where it is missing; all its places hold the same one."""
        state, param = next((row for row in places if key in row[0]), places[0])
        held = state.get(key, value)
        if key not in state or not isinstance(held, Tensor) or held.device != param.device:
            self.buckets[0].step.notes.made(f"{key} is made, once")
            double = any([statistic_dtype(p) == torch.float64 for _, p in places])
            dtype = torch.float64 if double else torch.float32
            held = statistic(held.clone() if isinstance(held, Tensor) else held, param, dtype)
        for other, _ in places:
            if other.get(key) is not held:
                other[key] = held
        return held
