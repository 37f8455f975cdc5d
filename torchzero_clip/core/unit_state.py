"""The state of units: vectors in a step, and scalars or small tensors in the optimizer's state.

A unit is a set of elements that share one norm.
"""

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
"""A state dict that may contain a unit's value, and a parameter with the device and the dtype."""


class UnitStore:
    """The state of units: loaded as vectors for a rule, and stored in dicts between steps.

    The value of a tensor or a layer is in the state of its parameters. The value of a group is in
    the chain dict of the group. A global value is in the chain dict of every group. For the value
    of a norm group, "@" and the name of the norm group follow the key. All of these dicts are part
    of torch's `state_dict`.

    Args:
        buckets: The buckets of the units, in order.
        division: The units.
    """

    def __init__(self, buckets: Sequence[Bucket], division: Division) -> None:
        self.buckets = buckets
        self.division = division
        self.scope = division.scope
        self.home = division.home
        self.cells: dict[str, list[Tensor]] = {}

    def load(self, initial: Mapping[str, Any]) -> UnitState:
        """Return a vector in float64 for each name. Missing values are made from `initial`."""
        path = self.buckets[0].bound.path
        self.cells = {name: self._cells(f"{path}/{name}", x) for name, x in initial.items()}
        return dict(zip(self.cells, self._vectors(list(self.cells.values())), strict=True))

    def store(self, state: UnitState) -> None:
        """Write the elements of vectors to the tensors that hold the units' values."""
        skip = self.buckets[0].step.skip
        calls: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}  # one call writes each pair
        for name, vector in state.items():
            cells = self.cells[name]
            if skip:  # now, because a guard that comes later must not undo this write
                vector = torch.where(skip.on(self.home), self._vector(cells), vector)
            memory = shared_memory(cells)
            kind = memory is None, cells[0].dtype, vector.dtype
            targets, values = calls.setdefault(kind, ([], []))
            targets += cells if memory is None else [memory]
            values += vector.unbind(0) if memory is None else [vector]
        for targets, values in calls.values():
            foreach("copy_", targets, values)

    def _vectors(self, rows: list[list[Tensor]]) -> list[Tensor]:
        """Return a copy of each row of cells as a vector, in few calls."""
        cells = [cell for row in rows for cell in row]
        alike = len({(cell.dtype, cell.device, cell.shape) for cell in cells}) == 1
        shared = [memory for memory in map(shared_memory, rows) if memory is not None]
        floats = len({t.dtype for t in shared}) == 1 and shared[0].is_floating_point()
        if len(shared) == len(rows) and floats and shares(shared):
            return copies([t.to(self.home) for t in shared], wide(self.home))
        if len(rows) < 2 or not alike or shared:
            return list(map(self._vector, rows))
        return list(self._vector(cells).split(list(map(len, rows))))

    def _vector(self, cells: list[Tensor]) -> Tensor:
        """Return a copy of the values of units as one vector."""
        memory = shared_memory(cells)
        first = cells[0]
        dtype = wide(self.home) if first.is_floating_point() else first.dtype
        if memory is None:
            return torch.stack([cell.to(self.home) for cell in cells]).to(dtype)
        return memory.to(self.home, dtype, copy=True)

    def _cells(self, key: str, initial: Any) -> list[Tensor]:
        """Return the tensor that holds the value of each unit.

        The values of single tensors share memory if they can.
        """
        states = [state for bucket in self.buckets for state in bucket.param_states]
        per_tensor = self.scope is None and len({bucket.device for bucket in self.buckets}) == 1
        if per_tensor:
            values = [state.get(key) for state in states]
            cells = [cell for cell in values if isinstance(cell, Tensor)]
            complete = len(cells) == len(values) and cells[0].device == self.home
            if complete and shared_memory(cells) is not None:
                return cells
        places = self._places(key)
        keys = [key] * len(places)
        if self.scope == "global":
            keys = [f"{key}@{name}" if name else key for name in self.division.norm_groups]
        cells = [self._cell(k, initial, row) for k, row in zip(keys, places, strict=True)]
        if per_tensor:
            elements = share_memory(cells)
            if elements[0] is not cells[0]:
                self.buckets[0].step.notes.made(f"{key} moves to other memory in this step")
            cells = elements
            for state, cell in zip(states, cells, strict=True):
                state[key] = cell
        if self.scope == "global":
            for group in self.buckets[0].step.groups:
                group["chain"].update(zip(keys, cells, strict=True))
        return cells

    def _places(self, key: str) -> list[list[Place]]:
        """Return the dicts that should hold the value of each unit."""
        places: list[list[Place]] = [[] for _ in range(self.division.count)]
        first_chain = self.buckets[0].step.groups[0]["chain"]
        units = iter(self.division.unit_of)
        for bucket in self.buckets:
            joint = {"group": bucket.group_state, "global": first_chain}
            for state, p in zip(bucket.param_states, bucket.originals, strict=True):
                places[next(units)].append((joint.get(self.scope, state), p))
        if self.scope == "layer":
            self._add_idle(key, places)
        return places

    def _add_idle(self, key: str, places: list[list[Place]]) -> None:
        """Add the parameters without a gradient in this step to the places of their layers.

        These parameters also store the value of their layer.
        """
        step = self.buckets[0].step
        busy = {id(state) for row in places for state, _ in row}
        for group in step.groups:
            for p, name in zip(group["params"], group["param_names"], strict=True):
                unit = self.division.layers.get(layer_of(name))
                state = {} if unit is None or step.states is None else step.states.get(p, {})
                if unit is not None and key in state and id(state) not in busy:
                    places[unit].append((state, p))

    def _cell(self, key: str, initial: Any, places: Sequence[Place]) -> Tensor:
        """Return the tensor with one unit's value, and store the tensor in all of its places.

        If the tensor is missing, create it.
        """
        state, param = next((place for place in places if key in place[0]), places[0])
        value = state.get(key, initial)
        if key not in state or not isinstance(value, Tensor) or value.device != param.device:
            self.buckets[0].step.notes.made(f"{key} is made, once")
            double = any([statistic_dtype(p) == torch.float64 for _, p in places])
            dtype = torch.float64 if double else torch.float32
            value = statistic(value.clone() if isinstance(value, Tensor) else value, param, dtype)
        for other, _ in places:
            if other.get(key) is not value:
                other[key] = value
        return value
