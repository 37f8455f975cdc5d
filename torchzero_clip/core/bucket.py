"""Buckets: the parameters of one group that share device and dtype, with their update."""

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
"""A key of a parameter's state. The value is 1 after the parameter's first step at a link."""
COUNTS = (
    "counts steps in Python: use reads = ('step',) in your class, and omit max_consecutive in "
    "guards"
)
Origin: TypeAlias = Literal["gradient", "touched", "update"]
"""Where an update comes from: the untouched gradient, a gradient that links may have scaled, or a
link that computed something else."""


class Bucket:
    """A bucket: the parameters of one group that share device and dtype, as one link sees them.

    A rule with a custom `step` receives a list of buckets. It reads `bucket.u`, computes a new
    update, and assigns it to `bucket.u`.

    Attributes:
        u: The update. For a link with target="grad", `u` is the gradient.
        group: The live hyperparameters and scalars of the link, the parameters and the gradients.
        state: The link's state for each parameter, as one TensorList per name.
        group_state: The state that links keep once per parameter group.
    """

    bound: Link
    """The link that reads and writes this bucket: see `seen_by`."""
    tail: Tail | None = None
    """The tail of the chain: the last links, if an engine can run them in one pass over memory.

    The value is None until the bucket reaches the first link of the tail.
    """
    ratio: Tensor | None = None
    """The divisor of the update in the tail: a tensor with one element, or None."""

    def __init__(self, step: Step, cohort: Cohort, grads: Sequence[Tensor]) -> None:
        self.step = step
        self.cohort = cohort
        self.settings = step.groups[cohort.index]
        states = step.states
        params = cohort.originals
        self.param_states = [{} if states is None else states[p] for p in params]
        step.new += [state for state in self.param_states if not state]
        if not cohort.plain:
            params = locals_of(params)
            grads = locals_of(grads)
        self.session = step.opened(step.opener.open(cohort.key, cohort.places, params, grads))
        # Only parameters in half precision lose bits when the update is subtracted.
        self.rounding = step.rounding if cohort.dtype in DROPPED else ""
        if self.rounding:
            self._prepare_rounding()
        self.origin: Origin = "gradient"
        self.numbers: dict[str, Tensor] = {}  # the scalars that the link keeps once, and the loss
        self.update = self.session.adopt(self.session.grads.borrow())

    # ------------------------------------------------------------------ what a link sees

    @property
    def originals(self) -> list[Tensor]:
        """The parameters of the optimizer. Sharded parameters are DTensors."""
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
        """The dtype in which links read the parameters."""
        return torch.float32 if self.rounding == "exact" else self.cohort.dtype

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of state. It is float32 for parameters in half precision."""
        return self.cohort.state_dtype

    @property
    def params(self) -> TensorList:
        """The parameters, as a list to read. A method that changes the list works on a copy."""
        return self.session.params.borrow()

    @property
    def grads(self) -> TensorList:
        """The gradients, as a list to read. A method that changes the list works on a copy."""
        return self.session.grads.borrow()

    @property
    def group(self) -> Group:
        """The live hyperparameters and scalars of the link, by name.

        `"params"` and `"grads"` are the parameters and the gradients, as TensorLists.
        """
        return {**self.numbers_of_group(), "params": self.params, "grads": self.grads}

    def numbers_of_group(self) -> Group:
        """Return the live hyperparameters, per-group scalars and model-wide scalars of the link."""
        values = self.bound.values(self.settings)
        values.update(self.numbers)
        return values

    @property
    def group_state(self) -> dict[str, Any]:
        """The state that links keep once per group: the dict `param_groups[i]["chain"]`."""
        return self.settings["chain"]

    @property
    def u(self) -> TensorList:
        """The update, or the gradients if the link has target="grad".

        The link writes gradients in place. The update is in `state_dtype` if the link has state, if
        the class of the link sets `widens`, or with rounding="exact". Otherwise the update keeps
        its dtype.
        """
        tfm = self.bound.transform
        wide = self.rounding == "exact" or tfm.widens or self.state_names
        dtype = self.cohort.state_dtype if wide else self.update.dtype
        if tfm.target == "update":
            self.update = self.update.to(dtype)
            return self.update
        grads = self.writable_grads()
        if self.origin == "update" and self.update.tensors[0] is grads.tensors[0]:
            # A link before did not change the update, so the update is still in the memory of the
            # gradients. It must keep its values when this link writes the gradients.
            self.update = self.update.own()
        return grads.to(dtype)

    @u.setter
    def u(self, value: TensorList) -> None:
        tfm = self.bound.transform
        computes_update = tfm.target == "update" and tfm.leaves != "gradient"
        if self.origin != "update":
            self.origin = "update" if computes_update else "touched"
        if tfm.target == "grad":
            self.step.measured.clear()
            self.step.gradients.write(self.originals)
            self.update = self.session.write_grads(value, self.update)
        else:
            self.update = self.session.adopt(value)

    @property
    def state(self) -> State:
        """The link's state by name, with one tensor per parameter.

        For sharded parameters, the tensors are the parts on this rank. The link may change the
        tensors in place.
        """
        stored = self.held()
        path = self.bound.path
        roundings = self.roundings(stored) if self.bound.narrow else {}
        if self.cohort.sharded:
            stored = {name: locals_of(tensors) for name, tensors in stored.items()}
        return {
            name: self.session.state(f"{path}/{name}", tensors, roundings.get(name))
            for name, tensors in stored.items()
        }

    @property
    def state_names(self) -> dict[str, bool]:
        """For each name that `init` returns, whether the tensors have the parameters' shapes."""
        return self.cohort.kinds(self.bound.path, self.bound.state_names)[0][0]

    def roundings(self, stored: Mapping[str, Sequence[Tensor]]) -> dict[str, Stochastic]:
        """Return the format of each state that is stored in bfloat16, by name."""
        like_params = self.state_names
        names = [
            name
            for name, tensors in stored.items()
            if like_params[name] and tensors[0].dtype == torch.bfloat16
        ]
        formats: dict[str, Stochastic] = {}
        if names:  # a checkpoint with float32 state, or a new group, has no seed yet
            prepare_draws(self.step.groups, DRAWS)
        for i in range(0, len(names), 2):  # one hash has enough bits to round two states
            drawn = self._drawn(DRAWS, self.bound.number, i)
            for half, name in enumerate(names[i : i + 2]):
                formats[name] = Stochastic(drawn, self.cohort.elements, half)
        return formats

    def _drawn(self, draws: tuple[str, str], *numbers: int) -> Tensor:
        """Return a random integer for each parameter. The integers change in every step."""
        seed, step = self.step.draw(self.cohort.index, draws)
        return self.cohort.keys(*numbers, seed) ^ mix_(step.to(self.device, copy=True))

    def settle(self) -> None:
        """Round and store the state that the link has written, if state is stored in bfloat16.

        The chain calls this method after each link. A link calls this method earlier if other links
        read its state during its step. Read `bucket.state` again after such a call.
        """
        if self.bound.narrow:
            self.session.settle(self.bound.path)

    def held(self) -> dict[str, list[Tensor]]:
        """Return the link's state by name, in the stored form: plain tensors or DTensors."""
        stored: dict[str, list[Any]] = {}
        for name, like_params in self.state_names.items():
            key = f"{self.bound.path}/{name}"
            stored[name] = [state.get(key) for state in self.param_states]
            if not all([isinstance(t, Tensor) for t in stored[name]]):
                raise self.cohort.state_error(key, stored[name], self.settings)
            if like_params and key not in self.cohort.checked:
                self.cohort.check_shapes(key, stored[name], self.settings)
        return stored

    def make_state(self) -> None:
        """Make the link's state for the parameters that have none yet."""
        link = self.bound
        names = self.state_names
        if not names:
            return
        keys = [f"{link.path}/{name}" for name in names]
        new = [i for i, state in enumerate(self.param_states) if keys[0] not in state]
        if link.narrow and any(names.values()):
            prepare_draws(self.step.groups, DRAWS)
        if new:
            self.step.notes.made(f"{link.path} creates state in this step")
            for i in new:
                p = self.originals[i]
                layout = self.cohort.layouts[i]
                if self.rounding == "exact":  # links read exact weights in float32
                    whole = wide_of(local(p), local(self.param_states[i][Exact.key]))
                    p = whole if layout is None else layout.wrap(whole)
                self.param_states[i].update(link.new_state(p, self.names[i] or ""))
            share_vectors([self.param_states[i] for i in new], keys)

    def join_state(self) -> None:
        """Move the 0-dim state of the link to one vector for each name, if it is in other memory.

        If a parameter gets its first gradient late, or if a parameter between others has no
        gradient, then the state of the bucket's parameters is in several vectors. An operator on
        a vector may round differently than on single tensors. A resumed run has other vectors, so
        it would not be bitwise identical without this method.
        """
        if len(self.param_states) == 1:  # `make_state` has put it into a vector of its own
            return
        has_dims = bool(self.cohort.shapes[0])
        keys = [
            f"{self.bound.path}/{name}"
            for name, like_params in self.state_names.items()
            if not (like_params and has_dims)
        ]

        def note(key: str) -> None:
            self.step.notes.made(f"{key} moves to other memory in this step")

        share_vectors(self.param_states, keys, note)

    def writable_grads(self) -> TensorList:
        """Return the gradients as a list that is written in place."""
        self.step.measured.clear()
        self.step.gradients.write(self.originals)
        return self.session.writable_grads()

    # ------------------------------------------------------------------ how weights are stored

    def _prepare_rounding(self) -> None:
        """Make missing state for the rounding of parameters."""
        if self.rounding == "stochastic":
            prepare_draws(self.step.groups, ROUNDS)
        if (kept := KEPT.get(self.rounding)) is not None:
            for p, state in zip(self.originals, self.param_states, strict=True):
                if kept.key not in state:
                    self.step.notes.made(f"rounding={self.rounding!r} creates state in this step")
                    state[kept.key] = torch.zeros_like(p, dtype=kept.dtype)
        if self.rounding == "exact":
            self._keep()

    def _keep(self) -> Bucket:
        """Tell the session how to store the parameters in this step, and return the bucket."""
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
        """Tell the session how to store the parameters, unless this was done in this step."""
        if self.rounding not in ("", "exact"):
            self._keep()

    def subtract(self) -> None:
        """Compute w ← w - u. The engine may compute this later in the step."""
        self.keep_rounding()
        self.session.subtract(self.floats())

    def floats(self) -> TensorList:
        """Return the update. If a rule has returned masks or integers, return them as floats."""
        dtype = self.update.dtype
        if dtype.is_floating_point or dtype.is_complex:
            return self.update
        return self.session.adopt(self.update.to(self.state_dtype))

    # ------------------------------------------------------------------ other views of a bucket

    def at(self, link: Link) -> Bucket:
        """Return this bucket for another link, with the link's state and live hyperparameters."""
        return self._but(bound=link, numbers={})

    def seen_by(self, link: Link) -> Bucket:
        """Return this bucket for a link that may write the update."""
        u = self.update
        if not u.owned:  # then writes of the link must not change this bucket's update
            u = self.session.adopt(u.borrow())
        return self._but(bound=link, numbers={}, update=u)

    def with_update(self, u: TensorList) -> Bucket:
        """Return a bucket of the same parameters with another update, for a chain inside a link."""
        session = self.step.opened(self.session.branch())
        origin: Origin = "update" if self.origin == "update" else "touched"
        bucket = self._but(session=session, origin=origin, update=session.adopt(u))
        return bucket._keep() if self.rounding == "exact" else bucket

    def select(self, where: Sequence[int]) -> Bucket:
        """Return a bucket of the parameters at these indices."""
        u = TensorList([self.update.tensors[i] for i in where], owned=self.update.owned)
        cohort = self.step.roster.once((self.cohort, *where), lambda: self.cohort.select(where))
        session = self.step.opened(self.session.select(where, cohort.key, cohort.places))
        states = [self.param_states[i] for i in where]
        update = session.adopt(u)
        bucket = self._but(session=session, update=update, param_states=states, cohort=cohort)
        return bucket._keep() if self.rounding == "exact" else bucket

    def alike(self) -> list[Bucket]:
        """Split this bucket into parts.

        For all parameters of one part, `init` returns the same names.
        """
        kinds = self.cohort.kinds(self.bound.path, self.bound.state_names)
        return [self] if len(kinds) == 1 else [self.select(where) for _, where in kinds]

    def view(self, formula: Formula, units: Any = None, **values: Any) -> TensorList:
        """Return `formula(u, state, group)` for a formula that is elementwise and writes nothing.

        The result may be computed later, so the formula's inputs must not change before the result
        is read. On accelerators, the result is computed in pieces.

        Args:
            formula: A function of the update, the state and the group.
            units: The units whose vectors are among the `values`.
            values: More entries of the group: numbers, TensorLists, and one vector over all units.
        """
        return self.session.view(formula, self.u, self.state, self._group(units, values))

    def apply(self, rule: Any, units: Any = None, **values: Any) -> None:
        """Replace the update by the result of the rule's `update`.

        Args:
            rule: The transform of the link.
            units: The units whose vectors are among the `values`.
            values: More entries of the group that `update` receives, as in `view`.
        """
        u = self.u.to(self.cohort.state_dtype)
        group = self._group(units, values) if values else self.group
        self.u = self.session.update(rule.rule(self), u, self.state, group)

    def _group(self, units: Any, values: dict[str, Any]) -> Group:
        """Return the group with more values. Vectors over units are converted to operands."""
        if units is not None:
            values = {name: units.operand(self, x) for name, x in values.items()}
        return self.group | values

    def set_state(self, name: str, values: TensorList) -> None:
        """Write and store the state with this name, so that other links can read it at once."""
        self.state[name].copy_(values)
        self.settle()

    def whole(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return whole tensors, gathered from all ranks if the parameters are sharded."""
        return list(map(whole_of, tensors, self.cohort.layouts))

    def parts(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return this rank's parts of whole tensors that have the shapes of the parameters."""
        return list(map(part_of, tensors, self.cohort.layouts))

    def _but(self, **changes: Any) -> Bucket:
        """Return a copy with some attributes changed."""
        other = object.__new__(Bucket)
        vars(other).update({**vars(self), **changes})
        return other


def begun(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets without the parameters that take their first step at the link.

    This function marks these parameters on the host. So the next call returns them too.
    """
    older: list[Bucket] = []
    for bucket in buckets:
        key = f"{bucket.bound.path}/{BEGUN}"
        old = [i for i, state in enumerate(bucket.param_states) if state.get(key)]
        if len(old) == len(bucket.param_states):
            older.append(bucket)
            continue
        bucket.step.skip.read(f"{bucket.bound.path} creates state")
        bucket.step.notes.made(f"{bucket.bound.path} creates state in this step")
        for state in bucket.param_states:
            state[key] = 1
        if old:
            older.append(bucket.select(old))
    return older


def in_buckets(
    step: Step, gradient: Callable[[Tensor], Tensor | None] | None = None, moves: bool = False
) -> list[Bucket]:
    """Return buckets of the parameters that have a gradient.

    Args:
        step: The step.
        gradient: A function that returns the gradient of a parameter, or None. By default, `p.grad`
            is used.
        moves: Whether the step changes parameters. Gradients that share memory with a parameter are
            then copied.
    """
    return [Bucket(step, cohort, grads) for cohort, grads in step.cohorts(gradient, moves)]


def count_step(
    buckets: Sequence[Bucket], name: str = "step", by: int = 1, asks: bool = False
) -> int:
    """Count a step of the link, store the count in every parameter group, and return the count.

    Args:
        buckets: The buckets at the link.
        name: The name of the count.
        by: The number to add to the count.
        asks: Whether the link calls `Notes.ask` for each decision that depends on the count. The
            steps of the link may then be replayed.
    """
    path = buckets[0].bound.path
    step = buckets[0].step
    step.skip.read(f"{path} counts only steps that are not skipped")
    if not asks:
        step.notes.host(f"{path} {COUNTS}")
    return step.notes.count(step.groups, f"{path}/{name}", by)


def keep_number(buckets: Sequence[Bucket], name: str, value: int) -> None:
    """Store a number of the link in every parameter group."""
    buckets[0].step.notes.host(f"{buckets[0].bound.path} {COUNTS}")
    for group in buckets[0].step.groups:
        group["chain"][f"{buckets[0].bound.path}/{name}"] = value
