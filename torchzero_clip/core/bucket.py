"""Bucket: the parameters of a group that share a device and a dtype, and their update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.cohort import Cohort
from torchzero_clip.core.engine import Formula, Group, State
from torchzero_clip.core.formats import KEPT, Exact, Nearest, Stochastic, wide_of
from torchzero_clip.core.formats.stochastic import DRAWS, DROPPED, ROUNDS, mix_, prepare_draws
from torchzero_clip.core.link import Link
from torchzero_clip.core.plan import Tail
from torchzero_clip.core.sharding.layout import local, locals_of, part_of, whole_of
from torchzero_clip.core.state import share_vectors
from torchzero_clip.core.step import Step
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.core.tensorlist import TensorList

BEGUN = "begun"
"""The number in the state of a parameter that says whether it has begun at a link."""
COUNTS = "counts on the host: say reads = ('step',) instead, and leave max_consecutive out"
Origin: TypeAlias = Literal["gradient", "touched", "update"]
"""What flows: the gradient as it came, the gradient that links have looked at and may have
scaled, or what a link has made of it."""


class Bucket:
    """Part of a parameter group, as one link sees it.

    `u` is the update (or the gradient, for target="grad"): read it, transform it, set it. `group`
    holds the live values of the link, `state` its tensors of every parameter, `group_state` what
    links keep once for the group.
    """

    bound: Link
    """The link that sees this bucket: see `seen_by`."""
    tail: Tail | None = None
    """The tail of the chain, once a link that it begins with was reached."""
    ratio: Tensor | None = None
    """The tensor with one element by which the tail divides the update."""

    def __init__(self, step: Step, cohort: Cohort, grads: Sequence[Tensor]) -> None:
        self.step, self.cohort = step, cohort
        self.settings = step.groups[cohort.index]
        states, params = step.states, cohort.originals
        self.param_states = [{} if states is None else states[p] for p in params]
        step.new += [state for state in self.param_states if not state]
        if not cohort.plain:
            params, grads = locals_of(params), locals_of(grads)
        self.session = step.opened(step.opener.open(cohort.key, cohort.places, params, grads))
        self.rounding = step.rounding if cohort.dtype in DROPPED else ""  # of what is subtracted
        if self.rounding:
            self._prepare_rounding()
        self.origin: Origin = "gradient"
        self.numbers: dict[str, Tensor] = {}  # that the link keeps once, and the loss
        self.update = self.session.adopt(self.session.grads.borrow())

    # ------------------------------------------------------------------ what a link sees

    @property
    def originals(self) -> list[Tensor]:
        """The parameters as the optimizer holds them, whole or sharded."""
        return self.cohort.originals

    @property
    def names(self) -> list[str | None]:
        """The name of each parameter, if it has one."""
        return self.cohort.names

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.cohort.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters, as links see them."""
        return torch.float32 if self.rounding == "exact" else self.cohort.dtype

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of state: float32 for parameters in half precision."""
        return self.cohort.state_dtype

    @property
    def params(self) -> TensorList:
        """The parameters, borrowed."""
        return self.session.params.borrow()

    @property
    def grads(self) -> TensorList:
        """The gradients, borrowed."""
        return self.session.grads.borrow()

    @property
    def group(self) -> Group:
        """The live values of the link, the numbers that it keeps once, and the parameters and
        gradients as TensorLists.
        """
        return {**self.numbers_of_group(), "params": self.params, "grads": self.grads}

    def numbers_of_group(self) -> Group:
        """Return the live values of the link, and the numbers that it keeps once."""
        values = self.bound.values(self.settings)
        values.update(self.numbers)
        return values

    @property
    def group_state(self) -> dict[str, Any]:
        """The state that links keep once for this group: the dict `param_groups[i]["chain"]`."""
        return self.settings["chain"]

    @property
    def u(self) -> TensorList:
        """The update; for a link with target="grad" the gradients themselves.

        It is in the dtype of state for a link that has some, or whose class `widens`, and where
        the parameters are seen in that.
        """
        tfm, exact = self.bound.transform, self.rounding == "exact"
        wide = exact or tfm.widens or self.state_names
        dtype = self.cohort.state_dtype if wide else self.update.dtype
        if tfm.target == "update":
            self.update = self.update.to(dtype)
            return self.update
        grads = self.writable_grads()
        if self.origin == "update" and self.update.tensors[0] is grads.tensors[0]:
            self.update = self.update.own()  # a limit that was not reached
        return grads.to(dtype)

    @u.setter
    def u(self, value: TensorList) -> None:
        tfm = self.bound.transform
        made = tfm.target == "update" and tfm.leaves != "gradient"
        if self.origin != "update":
            self.origin = "update" if made else "touched"
        if tfm.target == "grad":
            self.step.measured.clear()
            self.step.gradients.write(self.originals)
            self.update = self.session.write_grads(value, self.update)
        else:
            self.update = self.session.adopt(value)

    @property
    def state(self) -> State:
        """The link's tensors of every parameter; of sharded ones the parts on this rank."""
        rows, path = self.held(), self.bound.path
        roundings = self.roundings(rows) if self.bound.narrow else {}
        if self.cohort.sharded:
            rows = {name: locals_of(row) for name, row in rows.items()}
        return {
            name: self.session.state(f"{path}/{name}", row, roundings.get(name))
            for name, row in rows.items()
        }

    @property
    def state_names(self) -> dict[str, bool]:
        """The names that the link's `init` makes, and whether their tensors are like parameters."""
        return self.cohort.kinds(self.bound.path, self.bound.state_names)[0][0]

    def roundings(self, rows: Mapping[str, Sequence[Tensor]]) -> dict[str, Stochastic]:
        """How the state that is kept in bfloat16 is rounded."""
        like_params = self.state_names
        made: dict[str, Stochastic] = {}
        names = [n for n, row in rows.items() if like_params[n] and row[0].dtype == torch.bfloat16]
        for i in range(0, len(names), 2):  # a hash has bits for two
            drawn = self._drawn(DRAWS, self.bound.number, i)
            for half, name in enumerate(names[i : i + 2]):
                made[name] = Stochastic(drawn, self.cohort.elements, half)
        return made

    def _drawn(self, draws: tuple[str, str], *numbers: int) -> Tensor:
        """A whole number for each parameter, which is another one in every step."""
        seed, step = self.step.draw(self.cohort.index, draws)
        return self.cohort.keys(*numbers, seed) ^ mix_(step.to(self.device, copy=True))

    def settle(self) -> None:
        """Round what the link has written to state in bfloat16; `bucket.state` is read anew then.

        It happens by itself when the link is done. Before, where others are to read the state.
        """
        if self.bound.narrow:
            self.session.settle(self.bound.path)

    def held(self) -> dict[str, list[Tensor]]:
        """The link's tensors of every parameter, whole or sharded, as the optimizer holds them."""
        rows: dict[str, list[Tensor]] = {}
        for name, like_params in self.state_names.items():
            key = f"{self.bound.path}/{name}"
            rows[name] = [state[key] for state in self.param_states]
            if like_params and key not in self.cohort.checked:
                self.cohort.check_shapes(key, rows[name], self.settings)
        return rows

    def make_state(self) -> None:
        """Make the link's state for the parameters that have none yet."""
        link, names = self.bound, self.state_names
        if not names:
            return
        keys = [f"{link.path}/{name}" for name in names]
        new = [i for i, state in enumerate(self.param_states) if keys[0] not in state]
        if link.narrow and any(names.values()):
            prepare_draws(self.step.groups, DRAWS)
        if new:
            self.step.notes.made(f"{link.path} makes state, once")
            for i in new:
                p, layout = self.originals[i], self.cohort.layouts[i]
                if self.rounding == "exact":  # links see float32
                    whole = wide_of(local(p), local(self.param_states[i][Exact.key]))
                    p = whole if layout is None else layout.wrap(whole)
                self.param_states[i].update(link.new_state(p))
            share_vectors([self.param_states[i] for i in new], keys)

    def writable_grads(self) -> TensorList:
        """The gradients, to be written in place."""
        self.step.measured.clear()
        self.step.gradients.write(self.originals)
        return self.session.writable_grads()

    # ------------------------------------------------------------------ how parameters are kept

    def _prepare_rounding(self) -> None:
        """Make what the rounding of parameters in half precision keeps, where it lacks."""
        if self.rounding == "stochastic":
            prepare_draws(self.step.groups, ROUNDS)
        if (kept := KEPT.get(self.rounding)) is not None:
            for p, state in zip(self.originals, self.param_states, strict=True):
                if kept.key not in state:
                    self.step.notes.made(f"rounding={self.rounding!r} makes state, once")
                    state[kept.key] = torch.zeros_like(p, dtype=kept.dtype)
        if self.rounding == "exact":
            self._keep()

    def _keep(self) -> Bucket:
        """Have the session keep the parameters as their rounding says, in this step."""
        form: Nearest
        if self.rounding == "stochastic":
            half = 2 if self.dtype == torch.float16 else 0
            form = Stochastic(self._drawn(ROUNDS, 0), self.cohort.elements, half)
        elif self.rounding in KEPT:
            kept = KEPT[self.rounding]
            form = kept(locals_of([state[kept.key] for state in self.param_states]))
        else:
            self.step.meters.append(torch.zeros(2, dtype=wide(self.device), device=self.device))
            form = Nearest(meter=self.step.meters[-1])
        self.session.keep(form)
        return self

    def keep_rounding(self) -> None:
        """Have the session store the parameters as their rounding says, if that is not done yet."""
        if self.rounding not in ("", "exact"):
            self._keep()

    def subtract(self) -> None:
        """Compute w ← w - u, by the end of the step."""
        self.keep_rounding()
        self.session.subtract(self.update)

    # ------------------------------------------------------------------ what a combinator does

    def at(self, link: Link) -> Bucket:
        """Return the same bucket at a link that reads its state and its live values."""
        return self._but(bound=link, numbers={})

    def seen_by(self, link: Link) -> Bucket:
        """The same bucket as another link sees it."""
        u = self.update  # the other bucket's writes must not reach what this one has borrowed
        u = u if u.owned else self.session.adopt(u.borrow())
        return self._but(bound=link, numbers={}, update=u)

    def with_update(self, u: TensorList) -> Bucket:
        """A bucket of the same parameters with another update, for a chain inside a link."""
        session = self.step.opened(self.session.branch())
        origin: Origin = "update" if self.origin == "update" else "touched"
        made = self._but(session=session, origin=origin, update=session.adopt(u))
        return made._keep() if self.rounding == "exact" else made

    def select(self, where: Sequence[int]) -> Bucket:
        """The bucket of some of the parameters."""
        some = TensorList([self.update.tensors[i] for i in where], owned=self.update.owned)
        cohort = self.step.roster.once((self.cohort, *where), lambda: self.cohort.select(where))
        session = self.step.opened(self.session.select(where, cohort.key, cohort.places))
        states = [self.param_states[i] for i in where]
        update = session.adopt(some)
        made = self._but(session=session, update=update, param_states=states, cohort=cohort)
        return made._keep() if self.rounding == "exact" else made

    def alike(self) -> list[Bucket]:
        """This bucket in parts, in each of which `init` makes the same names for all parameters."""
        kinds = self.cohort.kinds(self.bound.path, self.bound.state_names)
        return [self] if len(kinds) == 1 else [self.select(where) for _, where in kinds]

    def view(self, formula: Formula, units: Any = None, **values: Any) -> TensorList:
        """formula(u, state, group), an entry of which depends on those in its place alone.

        It writes nothing. An accelerator computes it in pieces, whenever it is read, so what it
        reads must stay as it is. The group has `values` too: numbers, lists, and vectors of units.
        """
        return self.session.view(formula, self.u, self.state, self._group(units, values))

    def apply(self, rule: Any, units: Any = None, **values: Any) -> None:
        """Let `update` of the link's transform make the update; `values` are as in `view`."""
        u = self.u.to(self.cohort.state_dtype)
        group = self._group(units, values) if values else self.group
        self.u = self.session.update(rule.rule(self), u, self.state, group)

    def _group(self, units: Any, values: dict[str, Any]) -> Group:
        if units is not None:
            values = {name: units.operand(self, x) for name, x in values.items()}
        return self.group | values

    def set_state(self, name: str, values: TensorList) -> None:
        """Write the state with this name, for others that read it before the link is done."""
        self.state[name].copy_(values)
        self.settle()

    def whole(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors like the parameters, gathered from all ranks where they are sharded."""
        return list(map(whole_of, tensors, self.cohort.layouts))

    def parts(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The parts on this rank of whole tensors like the parameters."""
        return list(map(part_of, tensors, self.cohort.layouts))

    def _but(self, **changes: Any) -> Bucket:
        """A copy with some attributes changed."""
        other = object.__new__(Bucket)
        vars(other).update({**vars(self), **changes})
        return other


def begun(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The buckets without the parameters whose first step at the link this is.

    From now on they have begun, which is known on the host.
    """
    out: list[Bucket] = []
    for bucket in buckets:
        key = f"{bucket.bound.path}/{BEGUN}"
        old = [i for i, state in enumerate(bucket.param_states) if state.get(key)]
        if len(old) == len(bucket.param_states):
            out.append(bucket)
            continue
        bucket.step.skip.read(f"{bucket.bound.path}: parameters begin")
        bucket.step.notes.made(f"{bucket.bound.path}: parameters begin, once")
        for state in bucket.param_states:
            state[key] = 1
        out += [bucket.select(old)] if old else []
    return out


def in_buckets(
    step: Step, gradient: Callable[[Tensor], Tensor | None] | None = None, moves: bool = False
) -> list[Bucket]:
    """Buckets of the parameters that have a gradient: their own, unless another is given.

    Where the step `moves` parameters, gradients may lie in their memory.
    """
    return [Bucket(step, cohort, grads) for cohort, grads in step.cohorts(gradient, moves)]


def count_step(
    buckets: Sequence[Bucket], name: str = "step", by: int = 1, asks: bool = False
) -> int:
    """The count of steps of this link, this one included: a number kept in every group.

    A link that `asks` the step for all that it decides by the count may be replayed.
    """
    path, step = buckets[0].bound.path, buckets[0].step
    step.skip.read(f"{path} counts the steps that happen")
    if not asks:
        step.notes.host(f"{path} {COUNTS}")
    return step.notes.count(step.groups, f"{path}/{name}", by)


def keep_number(buckets: Sequence[Bucket], name: str, value: int) -> None:
    """Keep a number of this link in every group."""
    buckets[0].step.notes.host(f"{buckets[0].bound.path} {COUNTS}")
    for group in buckets[0].step.groups:
        group["chain"][f"{buckets[0].bound.path}/{name}"] = value
