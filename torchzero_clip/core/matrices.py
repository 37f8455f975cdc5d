"""Matrices: the matrices of a bucket, with state that the owner of each parameter stores.

The owner of a sharded parameter is the rank that processes the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.bucket import BEGUN, Bucket
from torchzero_clip.core.logical_matrices import LogicalMatrices
from torchzero_clip.core.sharding.layout import Layout, local
from torchzero_clip.core.sharding.owned_tensors import collect, evenly, hold, owner_of
from torchzero_clip.core.sharding.owners import by_owners, owners_of
from torchzero_clip.core.stacks import (
    MOST,
    MOST_ON_CPU,
    MatrixPlace,
    MatrixState,
    Stack,
    batches,
    finite,
    follows,
    joined,
    share,
    stacked_state,
    stands_alone,
)
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.core.tensor_kinds import is_sharded


class StateForm(NamedTuple):
    """The key, shape, dtype and device of a state tensor."""

    key: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Matrices:
    """The matrices of a bucket, for a link that has state of matrices.

    The constructor makes missing state, and brings loaded state to its owner.

    Args:
        bucket: The bucket, as the link sees it.
        count: The number of this step, for a link that refreshes state.

    Attributes:
        where: The indices of the parameters that consist of one or more matrices.
        mine: For each of these parameters that this rank owns, the state of its matrices.
        owners: The rank that owns each of these parameters, or None if every rank has it.
        matrices: The matrices of each parameter, or None for a parameter without matrices.
        taken: Flags on the device: whether matrices have accepted their new state. A matrix accepts
            only finite state.
        stacked: Whether the rule accepts matrices of one shape as a stack.
    """

    def __init__(self, bucket: Bucket, count: int = 0) -> None:
        self.bucket = bucket
        self.rule = bucket.bound.transform
        self.count = count
        once = bucket.step.roster.once
        self.matrices, self.forms = once((bucket.cohort, bucket.bound.path), lambda: _forms(bucket))
        self.where = [i for i, matrices in enumerate(self.matrices) if matrices is not None]
        self.layouts: Sequence[Any] = bucket.cohort.layouts
        self.taken: list[Tensor] = []
        self.stacked = bool(vars(type(self.rule)).get("batched", False))
        self.owners = dict(zip(self.where, self._owners(), strict=True))
        self._settle()
        self.mine = {i: self._states(i) for i in self.where if self._is_mine(i)}
        if self.where and not self.mine:  # a rank that owns nothing records flags as well
            self.taken.append(torch.ones(1, dtype=torch.bool, device=bucket.device))
        if self.stacked:
            self._share()

    def over(
        self,
        lists: Sequence[Sequence[Tensor]],
        function: Callable[[Stack, list[Tensor]], Tensor],
        some: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Call a function for every matrix, on the rank that owns its parameter.

        Return the results as tensors in the shapes of the parameters. If a tensor has no matrices,
        return the tensor of the first list unchanged.

        Args:
            lists: Lists of tensors like the parameters.
            function: A function of a stack and a list of tensors. The list contains the matrices of
                the stack from each of `lists`. The function may change these matrices in place.
            some: The indices of the parameters to process, or None for all.
        """
        where = self.where if some is None else list(some)
        layouts = [self.layouts[i] for i in where]

        def work(chosen: list[int], *whole: list[Tensor]) -> list[Tensor]:
            here = [where[k] for k in chosen]
            stacks = [{i: self._of(i, t) for i, t in zip(here, row, strict=True)} for row in whole]
            results: dict[int, dict[tuple[int, int], Tensor]] = {}
            for batch in self.batches(here):
                runs = batch.runs(self.matrices)
                pieces = [batch.cut(row, runs) for row in stacks]
                batch.give(function(batch, pieces), results, runs)
            return [joined(results[i], self.matrices[i]) for i in here]

        chosen = [[row[i] for i in where] for row in lists]
        if any(layouts):
            results = by_owners(chosen, layouts, [self.owners[i] for i in where], work)
        else:
            results = work(list(range(len(where))), *chosen)
        by_index = dict(zip(where, results, strict=True))
        return [by_index.get(i, t) for i, t in enumerate(lists[0])]

    def batches(self, where: Sequence[int]) -> list[Stack]:
        """Return the matrices of some parameters that this rank owns, as stacks.

        Matrices share a stack if they have one shape and their state is contiguous in memory.
        If the rule does not accept stacks, each stack is a single matrix.
        """
        places = self._places(where)
        states = list(map(self._state, places))

        def joins(before: int, k: int) -> bool:
            return self.stacked and follows(states[k], states[before])

        kinds = [(self._kind(i, b), self.begins(i)) for i, b in places]
        return [self._stack([places[k] for k in run]) for run in batches(kinds, joins=joins)]

    def _stack(self, places: list[MatrixPlace]) -> Stack:
        states = list(map(self._state, places))
        state = stacked_state(states) if self.stacked else states[0]
        return Stack(places, state, self.begins(places[0][0]), self.stacked)

    def keep(self, batch: Stack, new: Mapping[str, Tensor]) -> Tensor | None:
        """Store new state of a stack, for the matrices whose new values are all finite.

        Return a flag on the device: whether the values were stored. If the rule accepts stacks,
        return a flag for each matrix.
        """
        if not new:
            return None
        self.bucket.bound.check_names("returned state", new, batch.state)
        taken = finite(list(new.values()), batch.stacked)
        for name, t in new.items():
            old = batch.state[name]
            flag = taken.view(*taken.shape, *[1] * (old.dim() - taken.dim()))
            torch.where(flag, t.expand_as(old), old, out=old)
        self.taken.append(taken)
        return taken

    def begins(self, i: int) -> bool:
        """Return whether this is the first step of a parameter at this link."""
        return not self.bucket.param_states[i].get(f"{self.bucket.bound.path}/{BEGUN}")

    def begin(self) -> None:
        """Note that all parameters have had their first step."""
        for i in self.where:
            self.bucket.param_states[i][f"{self.bucket.bound.path}/{BEGUN}"] = 1

    def due(self, i: int) -> bool:
        """Return whether the state of a parameter is refreshed in this step."""
        turn = self.bucket.cohort.places[i] if getattr(self.rule, "stagger", False) else 0
        return self.begins(i) or self.rule.is_due(self.count - 1 + turn)

    # ------------------------------------------------------------------ owners

    def _is_mine(self, i: int) -> bool:
        owner = self.owners[i]
        return owner is None or owner == torch.distributed.get_rank()

    def _owners(self) -> list[int | None]:
        """Return the owner of each parameter: the rank that has its state, or a new owner."""
        layouts = [self.layouts[i] for i in self.where]
        if not any(layouts):
            return [None] * len(layouts)
        known: list[int | None] = []
        for i in self.where:
            forms = self._state_forms(i)
            known.append(owner_of(self.bucket.param_states[i].get(forms[0].key)) if forms else None)
        return owners_of(layouts, [self._cost(i) for i in self.where], known)

    def _cost(self, i: int) -> float:
        """Return the cost of a parameter for its owner, from operations and elements of state."""
        elements = sum([math.prod(form.shape) for form in self._state_forms(i)])
        products = 0.0
        for rows, columns in self._sizes(i):
            own = self.rule.operations(rows, columns)
            products += own or 2.0 * rows * columns * (rows + columns)
        return products + elements

    def _sizes(self, i: int) -> list[tuple[int, int]]:
        """Return the rows and columns of each matrix of a parameter."""
        matrices = self.matrices[i]
        return [] if matrices is None else matrices.sizes

    def _of(self, i: int, t: Tensor) -> list[Tensor]:
        """Return the matrices in a tensor with the shape of a parameter."""
        matrices = self.matrices[i]
        return [] if matrices is None else matrices.of(t)

    def _state_forms(self, i: int) -> list[StateForm]:
        """Return the form of each state tensor of a parameter."""
        return [form for forms in self.forms[i] for form in forms.values()]

    # ------------------------------------------------------------------ state

    def _settle(self) -> None:
        """Make missing state, and send loaded state to its owner."""
        loaded: list[tuple[dict[str, Any], str]] = []  # state in even parts on all ranks
        layouts: list[Layout] = []
        owners: list[int | None] = []
        for i in self.where:
            state = self.bucket.param_states[i]
            owner = self.owners[i]
            forms = self._state_forms(i)
            lacks = any([form.key not in state for form in forms])
            new = self._initial(i) if lacks else state
            for form in forms:
                t = new[form.key]
                if is_sharded(t) and owner_of(t) is None:
                    loaded.append((state, form.key))
                    layouts.append(evenly(self.layouts[i], form.shape))
                    owners.append(owner)
                elif t is not None and t.shape != form.shape:
                    raise ValueError(
                        f"the state {form.key!r} has shape {tuple(t.shape)}, but the matrix "
                        f"needs state of shape {tuple(form.shape)}: delete optimizer.state[p] "
                        "to restart the state of the parameter p"
                    )
                elif owner is None or owner_of(t) is not None:
                    state[form.key] = t
                else:
                    state[form.key] = hold(t if self._is_mine(i) else None, form, owner)
        parts = [state[key] for state, key in loaded]
        for (state, key), t in zip(loaded, collect(parts, layouts, owners), strict=True):
            state[key] = t

    def _initial(self, i: int) -> dict[str, Any]:
        """Return the initial state of a parameter, with None on ranks that are not its owner."""
        if self.rule.refreshes:
            self.bucket.param_states[i].setdefault(f"{self.bucket.bound.path}/{BEGUN}", 0)
        forms = self._state_forms(i)
        if not self._is_mine(i):
            return {form.key: None for form in forms}
        with torch.device(self.bucket.device):
            tensors = [t for size in self._sizes(i) for t in self.rule.init_matrix(*size).values()]
        both = zip(forms, tensors, strict=True)
        return {form.key: t.to(form.device, form.dtype) for form, t in both}

    def _kind(self, i: int, b: int) -> Any:
        """Return a key for a matrix. Only matrices with the same key share a batch."""
        # an exchange has parameters of one shape
        shape = self.bucket.originals[i].shape if self.layouts[i] else None
        return (*self._sizes(i)[b], shape)

    def _places(self, where: Iterable[int]) -> list[MatrixPlace]:
        """Return the places of the matrices of some parameters that this rank owns."""
        return [(i, b) for i in where for b in range(len(self.mine[i]))]

    def _state(self, place: MatrixPlace) -> MatrixState:
        return self.mine[place[0]][place[1]]

    def _share(self) -> None:
        """Move state tensors with separate memory into shared memory.

        Steps then process several matrices together without copying their state.
        """
        alone = [place for place in self._places(self.mine) if stands_alone(self._state(place))]
        kinds = [self._kind(*place) for place in alone]
        elements = [sum(map(Tensor.numel, self._state(place).values())) for place in alone]
        sizes = [high * wide + n for (high, wide, _), n in zip(kinds, elements, strict=True)]
        most = MOST_ON_CPU if self.bucket.device.type == "cpu" else MOST
        for batch in batches(kinds, sizes, most):
            if len(batch) > 1:
                places = [alone[k] for k in batch]
                states = share(list(map(self._state, places)))
                for place, state in zip(places, states, strict=True):
                    self._move(place, state)

    def _move(self, place: MatrixPlace, state: MatrixState) -> None:
        """Replace the state of a matrix by the same values in other memory."""
        i, b = place
        for name, form in self.forms[i][b].items():
            owner = owner_of(self.bucket.param_states[i][form.key])
            t = state[name]
            self.bucket.param_states[i][form.key] = t if owner is None else hold(t, form, owner)
        self.mine[i][b] = state

    def _states(self, i: int) -> list[MatrixState]:
        """Return the state of each matrix of a parameter, as plain tensors."""
        stored = self.bucket.param_states[i]
        return [
            {name: local(stored[form.key]) for name, form in forms.items()}
            for forms in self.forms[i]
        ]


def matrix_key(path: str, name: str, b: int) -> str:
    """Return the key of the state of the b-th matrix of a parameter."""
    return f"{path}/{name}_{b + 1}" if b else f"{path}/{name}"


def _forms(
    bucket: Bucket,
) -> tuple[list[LogicalMatrices | None], list[list[dict[str, StateForm]]]]:
    """Return the matrices of each parameter, and the forms of the state of each matrix."""
    rule = bucket.bound.transform
    named = zip(bucket.names, bucket.originals, strict=True)
    all_matrices = [rule.matrices_of(name or "", p) for name, p in named]
    forms: list[list[dict[str, StateForm]]] = []
    for p, matrices in zip(bucket.originals, all_matrices, strict=True):
        sizes = [] if matrices is None else matrices.sizes
        forms.append([_form(bucket, p, size, b) for b, size in enumerate(sizes)])
    return all_matrices, forms


def _form(bucket: Bucket, p: Tensor, size: tuple[int, int], b: int) -> dict[str, StateForm]:
    """Return the forms of the state of the b-th matrix of a parameter, by name."""
    path = bucket.bound.path
    with torch.device("meta"):
        state = bucket.bound.transform.init_matrix(*size)
    forms: dict[str, StateForm] = {}
    for name, t in state.items():
        if not t.dim():
            raise ValueError(
                f"{path}: init_matrix must return state with at least one dim, got a 0-dim "
                f"tensor for {name!r}: return a tensor of shape (1,) instead"
            )
        dtype = statistic_dtype(p) if t.is_floating_point() else t.dtype
        forms[name] = StateForm(matrix_key(path, name, b), t.shape, dtype, p.device)
    return forms
