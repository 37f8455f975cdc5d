"""Matrices: those of a bucket, each with its state on the rank that owns it, and work on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.bucket import BEGUN, Bucket
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
    side_by_side,
    stands_alone,
)
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.core.tensor_kinds import is_sharded


class StateForm(NamedTuple):
    """What a tensor of state is like, and its key."""

    key: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Matrices:
    """The matrices of a bucket as the link sees it that keeps state of them.

    Args:
        bucket: The bucket. State that is missing is made, and what was loaded goes to its owner.
        count: The number of the step, at a link that refreshes.

    Attributes:
        where: The parameters that are matrices, or several.
        mine: For each of them whose owner is this rank, the state of its matrices.
        taken: Flags on the device: whether matrices took new state, which is finite then.
        stacked: Whether the rule takes matrices of one shape as a stack.
    """

    def __init__(self, bucket: Bucket, count: int = 0) -> None:
        self.bucket, self.rule, self.count = bucket, bucket.bound.transform, count
        once = bucket.step.roster.once
        self.rows, self.forms = once((bucket.cohort, bucket.bound.path), lambda: _forms(bucket))
        self.where = [i for i, rows in enumerate(self.rows) if rows]
        self.layouts: Sequence[Any] = bucket.cohort.layouts
        self.taken: list[Tensor] = []
        self.stacked = bool(vars(type(self.rule)).get("batched", False))
        self.owners = dict(zip(self.where, self._owners(), strict=True))
        self._settle()
        self.mine = {i: self._memories(i) for i in self.where if self._is_mine(i)}
        if self.where and not self.mine:  # every rank tells how many it kept, also of none
            self.taken.append(torch.ones(1, dtype=torch.bool, device=bucket.device))
        if self.stacked:
            self._share()

    def over(
        self,
        lists: Sequence[Sequence[Tensor]],
        function: Callable[[Stack, list[Tensor]], Tensor],
        some: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The first list with what a function made of every matrix, by its owner.

        Args:
            lists: Lists of tensors like the parameters.
            function: Called with a batch, and with its matrices of each list, which may be
                written: stacked where the rule takes stacks.
            some: The places of the parameters that it is called for, unless it is all.
        """
        where = self.where if some is None else list(some)
        layouts = [self.layouts[i] for i in where]

        def work(here: list[int], *whole: list[Tensor]) -> list[Tensor]:
            mine = [where[k] for k in here]
            lists = [dict(zip(mine, row, strict=True)) for row in whole]
            blocks: dict[int, dict[int, Tensor]] = {}
            for batch in self.batches(mine):
                batch.give(function(batch, [batch.cut(row, self.rows) for row in lists]), blocks)
            return [joined(blocks[i], lists[0][i]) for i in mine]

        chosen = [[row[i] for i in where] for row in lists]
        if any(layouts):
            results = by_owners(chosen, layouts, [self.owners[i] for i in where], work)
        else:
            results = work(list(range(len(where))), *chosen)
        made = dict(zip(where, results, strict=True))
        return [made.get(i, t) for i, t in enumerate(lists[0])]

    def batches(self, where: Sequence[int]) -> list[Stack]:
        """The matrices of some parameters that are owned here: those of one form whose state lies
        side by side together, where the rule takes stacks, and otherwise each by itself.
        """
        every = self._of(where)
        states = list(map(self._state, every))

        def joins(before: int, k: int) -> bool:
            return self.stacked and follows(states[k], states[before])

        kinds = [(self._kind(i, b), self.begins(i)) for i, b in every]
        return [self._batch([every[k] for k in run]) for run in batches(kinds, joins=joins)]

    def _batch(self, run: list[MatrixPlace]) -> Stack:
        rows = list(map(self._state, run))
        state = side_by_side(rows) if self.stacked else rows[0]
        return Stack(run, state, self.begins(run[0][0]), self.stacked)

    def keep(self, batch: Stack, new: Mapping[str, Tensor]) -> Tensor | None:
        """Take new values of matrices' state: all, or of one where any is not finite none.

        Returns whether they were taken, as a flag on the device, or one for each of a stack.
        """
        if not new:
            return None
        self.bucket.bound.check_names("state that comes back", new, batch.state)
        taken = finite(list(new.values()), batch.stacked)
        for name, t in new.items():
            held = batch.state[name]
            flag = taken.view(*taken.shape, *[1] * (held.dim() - taken.dim()))
            torch.where(flag, t.expand_as(held), held, out=held)
        self.taken.append(taken)
        return taken

    def begins(self, i: int) -> bool:
        """Whether this is the first step of a parameter here, which is known on the host."""
        return not self.bucket.param_states[i].get(f"{self.bucket.bound.path}/{BEGUN}")

    def begin(self) -> None:
        """Note that all of them have begun."""
        for i in self.where:
            self.bucket.param_states[i][f"{self.bucket.bound.path}/{BEGUN}"] = 1

    def due(self, i: int) -> bool:
        """Whether a parameter is refreshed in this step: its first, and those of the link."""
        turn = self.bucket.cohort.places[i] if getattr(self.rule, "stagger", False) else 0
        return self.begins(i) or self.rule.is_due(self.count - 1 + turn)

    # ------------------------------------------------------------------ where it lies

    def _is_mine(self, i: int) -> bool:
        owner = self.owners[i]
        return owner is None or owner == torch.distributed.get_rank()

    def _owners(self) -> list[int | None]:
        """The owner of each, as its state says; those without are shared out."""
        layouts = [self.layouts[i] for i in self.where]
        if not any(layouts):
            return [None] * len(layouts)
        rows = [(self.bucket.param_states[i], self._forms(i)) for i in self.where]
        held = [owner_of(state.get(forms[0].key)) if forms else None for state, forms in rows]
        return owners_of(layouts, [self._cost(i) for i in self.where], held)

    def _cost(self, i: int) -> float:
        """What a parameter is to its owner: operations, and entries of state."""
        param, rows = self.bucket.originals[i], self.rows[i]
        columns = param.numel() // sum(rows)
        products = 2.0 * sum([r * columns * (r + columns) for r in rows])
        entries = sum([math.prod(form.shape) for form in self._forms(i)])
        return (self.rule.operations(param) or products) + entries

    def _forms(self, i: int) -> list[StateForm]:
        """The form of all state of a parameter."""
        return [form for each in self.forms[i] for form in each.values()]

    def _settle(self) -> None:
        """Make the state that is missing, and bring what was loaded to its owner."""
        come: list[tuple[dict[str, Any], str, Layout, int | None]] = []
        for i in self.where:
            state, owner, mine = self.bucket.param_states[i], self.owners[i], self._is_mine(i)
            forms = self._forms(i)
            lacks = any([like.key not in state for like in forms])
            new = self._made(i, mine) if lacks else state
            for like in forms:
                held = new[like.key]
                if is_sharded(held) and owner_of(held) is None:
                    come.append((state, like.key, evenly(self.layouts[i], like.shape), owner))
                elif held is not None and held.shape != like.shape:
                    raise ValueError(
                        f"{like.key!r} has shape {tuple(held.shape)}, and the matrix asks for "
                        f"{tuple(like.shape)}: delete optimizer.state[p] to begin anew"
                    )
                elif owner is None or owner_of(held) is not None:
                    state[like.key] = held
                else:
                    state[like.key] = hold(held if mine else None, like, owner)
        parts = [state[key] for state, key, _, _ in come]
        whole = collect(parts, [row[2] for row in come], [row[3] for row in come])
        for (state, key, _, _), t in zip(come, whole, strict=True):
            state[key] = t

    def _made(self, i: int, mine: bool) -> dict[str, Any]:
        """The state that a parameter begins with, where its owner is here."""
        if self.rule.refreshes:
            self.bucket.param_states[i].setdefault(f"{self.bucket.bound.path}/{BEGUN}", 0)
        forms = self._forms(i)
        if not mine:
            return {form.key: None for form in forms}
        columns = self.bucket.originals[i].numel() // sum(self.rows[i])
        with torch.device(self.bucket.device):
            made = [t for r in self.rows[i] for t in self.rule.init_matrix(r, columns).values()]
        rows = zip(forms, made, strict=True)
        return {form.key: t.to(form.device, form.dtype) for form, t in rows}

    def _kind(self, i: int, b: int) -> Any:
        """What matrices have in common that may be in one batch."""
        param, rows = self.bucket.originals[i], self.rows[i]
        shape = param.shape if self.layouts[i] else None  # they go to owners together
        return rows[b], param.numel() // sum(rows), shape

    def _of(self, where: Iterable[int]) -> list[MatrixPlace]:
        """The matrices of some parameters that are owned here."""
        return [(i, b) for i in where for b in range(len(self.mine[i]))]

    def _state(self, place: MatrixPlace) -> MatrixState:
        return self.mine[place[0]][place[1]]

    def _share(self) -> None:
        """Bring state that stands alone side by side, so that no step needs to copy it."""
        alone = [place for place in self._of(self.mine) if stands_alone(self._state(place))]
        kinds = [self._kind(*place) for place in alone]
        entries = [sum(map(Tensor.numel, self._state(place).values())) for place in alone]
        sizes = [high * wide + n for (high, wide, _), n in zip(kinds, entries, strict=True)]
        most = MOST_ON_CPU if self.bucket.device.type == "cpu" else MOST
        for some in batches(kinds, sizes, most):
            places = [alone[k] for k in some]
            moved = share(list(map(self._state, places))) if len(some) > 1 else []
            for place, state in zip(places, moved, strict=False):
                self._move(place, state)

    def _move(self, place: MatrixPlace, state: MatrixState) -> None:
        """Hold the state of a matrix in other memory."""
        i, b = place
        for name, like in self.forms[i][b].items():
            owner = owner_of(self.bucket.param_states[i][like.key])
            t = state[name]
            self.bucket.param_states[i][like.key] = t if owner is None else hold(t, like, owner)
        self.mine[i][b] = state

    def _memories(self, i: int) -> list[MatrixState]:
        forms, held = self.forms[i], self.bucket.param_states[i]
        return [{name: local(held[form.key]) for name, form in each.items()} for each in forms]


def matrix_key(path: str, name: str, b: int) -> str:
    """Return the key of the state of the b-th matrix of a parameter."""
    return f"{path}/{name}_{b + 1}" if b else f"{path}/{name}"


def _forms(bucket: Bucket) -> tuple[list[list[int]], list[list[dict[str, StateForm]]]]:
    """The rows of the matrices of each parameter, and the form of their state."""
    named = zip(bucket.names, bucket.originals, strict=True)
    rows = [list(bucket.bound.transform.rows_of(name or "", p)) for name, p in named]
    each = zip(bucket.originals, rows, strict=True)
    return rows, [[_form(bucket, p, cut, b) for b in range(len(cut))] for p, cut in each]


def _form(bucket: Bucket, p: Tensor, rows: list[int], b: int) -> dict[str, StateForm]:
    """The form of the state of the b-th matrix of a parameter."""
    form, path, rule = {}, bucket.bound.path, bucket.bound.transform
    with torch.device("meta"):
        made = rule.init_matrix(rows[b], p.numel() // sum(rows))
    for name, t in made.items():
        if not t.dim():
            raise ValueError(
                f"{path}: init_matrix makes a number for {name!r}: give it the shape "
                "(1,), since state of an owner is kept in parts"
            )
        dtype = statistic_dtype(p) if t.is_floating_point() else t.dtype
        key = matrix_key(path, name, b)
        form[name] = StateForm(key, t.shape, dtype, p.device)
    return form
