"""Matrices: those of a bucket, each with its state on the rank that owns it, and work on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.bucket import BEGUN, Bucket
from torchzero_clip.core.sharding import (
    Layout,
    by_owners,
    collect,
    evenly,
    hold,
    local,
    owner_of,
    owners_of,
    place_of,
    rank_at,
)
from torchzero_clip.core.stacks import (
    MatrixPlace,
    MatrixState,
    Stack,
    finite,
    follows,
    joined,
    share,
    side_by_side,
    stands_alone,
)
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.core.tensors import is_sharded


class StateForm(NamedTuple):
    """What a tensor of state is like."""

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
        kept = bucket.step.roster.kept
        self.rows, self.forms = kept((bucket.part, bucket.bound.path), lambda: _forms(bucket))
        self.where = [i for i, rows in enumerate(self.rows) if rows]
        self.layouts = [bucket.part.layouts[i] for i in self.where]
        self.taken: list[Tensor] = []
        self.stacked = bool(vars(type(self.rule)).get("batched", False))
        self.places = self._places()
        self._settle()
        self.mine: dict[int, list[MatrixState]] = {
            i: self._memories(i) for i, place in self._owners() if self._is_mine(i, place)
        }
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
        out = list(lists[0])
        ways = dict(zip(self.where, zip(self.layouts, self.places, strict=True), strict=True))
        where = self.where if some is None else list(some)
        layouts, places = [ways[i][0] for i in where], [ways[i][1] for i in where]

        def work(here: list[int], *whole: list[Tensor]) -> list[Tensor]:
            mine = [where[k] for k in here]
            lists = [dict(zip(mine, row, strict=True)) for row in whole]
            blocks: dict[int, dict[int, Tensor]] = {}
            for batch in self.batches(mine):
                batch.give(function(batch, [batch.cut(row, self.rows) for row in lists]), blocks)
            return [joined(blocks[i], lists[0][i]) for i in mine]

        chosen = [[row[i] for i in where] for row in lists]
        if any(layouts):
            results = by_owners(chosen, layouts, places, work)
        else:
            results = work(list(range(len(where))), *chosen)
        for i, t in zip(where, results, strict=True):
            out[i] = t
        return out

    def batches(self, where: Sequence[int]) -> list[Stack]:
        """The matrices of some parameters that are owned here: those of one form whose state lies
        side by side together, where the rule takes stacks, and otherwise each by itself.
        """
        runs: list[list[MatrixPlace]] = []
        last: dict[Any, list[MatrixPlace]] = {}
        for i in where:
            begins = self.begins(i)
            for b, state in enumerate(self.mine[i]):
                run = last.get((self._kind(i, b), begins))
                if not (run and self.stacked and follows(state, self._state(run[-1]))):
                    run = last[self._kind(i, b), begins] = []
                    runs.append(run)
                run.append((i, b))
        return [self._batch(run) for run in runs]

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
        if not (isinstance(new, Mapping) and new.keys() <= batch.state.keys()):
            raise KeyError(
                f"{self.bucket.bound.path}: the state that comes back must be a dict with names of "
                f"{list(batch.state)}, got {new!r}"
            )
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
        turn = self.bucket.part.places[i] if getattr(self.rule, "stagger", False) else 0
        return self.begins(i) or self.rule.is_due(self.count - 1 + turn)

    # ------------------------------------------------------------------ where it lies

    def _owners(self) -> Iterator[tuple[int, int | None]]:
        return zip(self.where, self.places, strict=True)

    def _is_mine(self, i: int, place: int | None) -> bool:
        layout = self.bucket.part.layouts[i]
        if place is None or layout is None:
            return True
        return rank_at(place, layout) == torch.distributed.get_rank()

    def _places(self) -> list[int | None]:
        """The owner of each, as its state says; those without are shared out."""
        if not any(self.layouts):
            return [None] * len(self.where)
        held: list[int | None] = []
        for i, layout in zip(self.where, self.layouts, strict=True):
            keys = [key for key, _ in self._keys(i)]
            rank = owner_of(self.bucket.param_states[i].get(keys[0])) if keys else None
            held.append(None if rank is None or layout is None else place_of(rank, layout))
        return owners_of(self.layouts, [self._cost(i) for i in self.where], held)

    def _cost(self, i: int) -> float:
        """What a parameter is to its owner: operations, and entries of state."""
        param, rows = self.bucket.originals[i], self.rows[i]
        columns = param.numel() // sum(rows)
        products = 2.0 * sum([r * columns * (r + columns) for r in rows])
        entries = sum([math.prod(t.shape) for form in self.forms[i] for t in form.values()])
        return (self.rule.operations(param) or products) + entries

    def _keys(self, i: int) -> list[tuple[str, StateForm]]:
        """The keys of a parameter's state, and the form of each."""
        path = self.bucket.bound.path
        return [
            (f"{path}/{name}" + (f"_{b + 1}" if b else ""), t)
            for b, form in enumerate(self.forms[i])
            for name, t in form.items()
        ]

    def _settle(self) -> None:
        """Make the state that is missing, and bring what was loaded to its owner."""
        come: list[tuple[int, str, Layout, int | None]] = []
        for i, place in self._owners():
            layout: Any = self.bucket.part.layouts[i]
            state = self.bucket.param_states[i]
            owner = None if place is None or layout is None else rank_at(place, layout)
            new: Any = self._made(i, self._is_mine(i, place)) if self._lacks(i) else {}
            for key, like in self._keys(i):
                held = new[key] if new else state[key]
                if is_sharded(held) and owner_of(held) is None:
                    come.append((i, key, evenly(layout, like.shape), owner))
                elif held is not None and held.shape != like.shape:
                    raise ValueError(
                        f"{key!r} has shape {tuple(held.shape)}, and the matrix asks for "
                        f"{tuple(like.shape)}: delete optimizer.state[p] to begin anew"
                    )
                elif owner is None or owner_of(held) is not None:
                    state[key] = held
                else:
                    state[key] = hold(held if self._is_mine(i, place) else None, like, owner)
        if come:
            parts = [self.bucket.param_states[i][key] for i, key, _, _ in come]
            whole = collect(parts, [row[2] for row in come], [row[3] for row in come])
            for (i, key, _, _), t in zip(come, whole, strict=True):
                self.bucket.param_states[i][key] = t

    def _lacks(self, i: int) -> bool:
        state = self.bucket.param_states[i]
        return any([key not in state for key, _ in self._keys(i)])

    def _made(self, i: int, mine: bool) -> dict[str, Tensor | None]:
        """The state that a parameter begins with, where its owner is here."""
        if self.rule.refreshes:
            self.bucket.param_states[i].setdefault(f"{self.bucket.bound.path}/{BEGUN}", 0)
        keys = self._keys(i)
        if not mine:
            return {key: None for key, _ in keys}
        columns = self.bucket.originals[i].numel() // sum(self.rows[i])
        with torch.device(self.bucket.device):
            made = [t for r in self.rows[i] for t in self.rule.init_matrix(r, columns).values()]
        return {k: t.to(like.device, like.dtype) for (k, like), t in zip(keys, made, strict=True)}

    def _kind(self, i: int, b: int) -> Any:
        """What matrices have in common that may be in one batch."""
        param, rows = self.bucket.originals[i], self.rows[i]
        shape = param.shape if self.bucket.part.layouts[i] else None  # they go to owners together
        return rows[b], param.numel() // sum(rows), shape

    def _state(self, place: MatrixPlace) -> MatrixState:
        return self.mine[place[0]][place[1]]

    def _share(self) -> None:
        """Bring state that stands alone side by side, so that no step needs to copy it."""
        alike: dict[Any, list[MatrixPlace]] = {}
        for i, states in self.mine.items():
            for b, state in enumerate(states):
                if state and stands_alone(state):
                    alike.setdefault(self._kind(i, b), []).append((i, b))
        for (rows, columns, _), places in alike.items():
            if len(places) > 1:
                moved = share(list(map(self._state, places)), rows * columns)
                for place, state in zip(places, moved, strict=True):
                    self._move(place, state)

    def _move(self, place: MatrixPlace, state: MatrixState) -> None:
        """Hold the state of a matrix in other memory."""
        i, b = place
        names = list(self.forms[i][b])
        before = sum([len(form) for form in self.forms[i][:b]])
        for name, (key, like) in zip(names, self._keys(i)[before:], strict=False):
            owner = owner_of(self.bucket.param_states[i][key])
            t = state[name]
            self.bucket.param_states[i][key] = t if owner is None else hold(t, like, owner)
        self.mine[i][b] = state

    def _memories(self, i: int) -> list[MatrixState]:
        state, keys = self.bucket.param_states[i], iter(self._keys(i))
        return [{n: local(state[next(keys)[0]]) for n in form} for form in self.forms[i]]


def _forms(bucket: Bucket) -> tuple[list[list[int]], list[list[dict[str, StateForm]]]]:
    """The rows of the matrices of each parameter, and the form of their state."""
    rule: Any = bucket.bound.transform
    rows: list[list[int]] = []
    forms: list[list[dict[str, StateForm]]] = []
    for name, p in zip(bucket.names, bucket.originals, strict=True):
        cut = list(rule.rows_of(name or "", p))
        rows.append(cut)
        columns = p.numel() // sum(cut) if cut else 0
        forms.append([_form(bucket, rule, r, columns, p) for r in cut])
    return rows, forms


def _form(bucket: Bucket, rule: Any, rows: int, columns: int, p: Tensor) -> dict[str, StateForm]:
    """The form of the state of a matrix."""
    form = {}
    with torch.device("meta"):
        made = rule.init_matrix(rows, columns)
    for name, t in made.items():
        if not t.dim():
            raise ValueError(
                f"{bucket.bound.path}: init_matrix makes a number for {name!r}: give it the shape "
                "(1,), since state of an owner is kept in parts"
            )
        dtype = statistic_dtype(p) if t.is_floating_point() else t.dtype
        form[name] = StateForm(t.shape, dtype, p.device)
    return form
