"""Bucket: the parameters of a group that share a device and a dtype, and their update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchzero_clip.core.engine import Engine, Group, Session, State
from torchzero_clip.core.link import Link
from torchzero_clip.core.norms.shards import Layout, aligned_grads, layout_of, local
from torchzero_clip.core.state import state_dtype
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.tensors import all_plain, same_shapes, share_memory


class Step:
    """A step: what all its buckets share. It opens and closes their sessions.

    Args:
        groups: The parameter groups.
        states: The state of each parameter, `optimizer.state`.
        record: The measurements of the links, by path; `metrics()` reads them.
        engine: Where arithmetic is done.
        process_group: Processes that hold the rest of the model.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        states: Mapping[Tensor, dict[str, Any]] | None,
        record: dict[str, Any],
        engine: Engine,
        process_group: Any = None,
    ) -> None:
        self.groups, self.states, self.record = groups, states, record
        self.engine, self.process_group = engine, process_group
        self.sessions: list[Session] = []

    def buckets(
        self,
        wanted: Callable[[Tensor], bool] | None = None,
        gradient: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Bucket]:
        """Buckets of the parameters that have a gradient, or that are `wanted`.

        `gradient` gives the first update of a parameter, where it is not its gradient.
        """
        self.close()  # deferred updates may be read again
        out: list[Bucket] = []
        for index, group in enumerate(self.groups):
            params: list[Tensor] = group["params"]
            grads: list[Any] = list(aligned_grads(params))
            if wanted is not None:  # state can be made without gradients
                where = [i for i, p in enumerate(params) if wanted(p)]
                grads = [p if g is None else g for p, g in zip(params, grads, strict=True)]
            else:
                where = [i for i, grad in enumerate(grads) if grad is not None]
            if gradient is not None:
                for i in where:
                    grads[i] = gradient(params[i])
            names = group.get("param_names") or [None] * len(params)
            for places in self._alike(index, params, grads, where):
                rows = [(params[i], grads[i], names[i]) for i in places]
                out.append(Bucket(self, index, places, *map(list, zip(*rows, strict=True))))
        return out

    def _alike(
        self, index: int, params: Sequence[Tensor], grads: Sequence[Any], where: list[int]
    ) -> Iterable[list[int]]:
        """The places of the tensors of each bucket: they share device and dtypes."""
        if not where:
            return []
        here, theirs = [params[i] for i in where], [grads[i] for i in where]
        if {grad.layout for grad in theirs} != {torch.strided}:
            self._refuse_sparse(index, params, grads, where)
        if not same_shapes(theirs, here):
            self._refuse_shape(index, params, grads, where)
        dtypes = {p.dtype for p in here}, {grad.dtype for grad in theirs}
        together = all([p.is_cpu for p in here]) or len({p.device for p in here}) == 1
        if together and len(dtypes[0]) == len(dtypes[1]) == 1:
            return [where]
        found: dict[Any, list[int]] = {}
        for i, p, grad in zip(where, here, theirs, strict=True):
            found.setdefault((p.device, p.dtype, grad.dtype), []).append(i)
        return found.values()

    def _refuse_sparse(
        self, index: int, params: Sequence[Tensor], grads: Sequence[Any], where: list[int]
    ) -> NoReturn:
        i = next(i for i in where if grads[i].layout is not torch.strided)
        raise TypeError(
            f"sparse gradients are not supported, got one of shape {tuple(params[i].shape)} for "
            f"{self.label(index, i)}: make the layer with sparse=False, or give it an optimizer "
            "of its own without transforms, such as torch.optim.SparseAdam"
        )

    def _refuse_shape(
        self, index: int, params: Sequence[Tensor], grads: Sequence[Any], where: list[int]
    ) -> NoReturn:
        i = next(i for i in where if grads[i].shape != params[i].shape)
        raise ValueError(
            f"{self.label(index, i)}: got a gradient of shape {tuple(grads[i].shape)} for a "
            f"parameter of {tuple(params[i].shape)}: set the gradient to None when you change the "
            "shape of a parameter"
        )

    def label(self, index: int, place: int) -> str:
        """The name of a parameter in errors."""
        names = self.groups[index].get("param_names")
        name = f" ({names[place]})" if names else ""
        return f"parameter {place} of group {index}{name}"

    def opened(self, session: Session) -> Session:
        """The session, to be closed with the step."""
        self.sessions.append(session)
        return session

    def close(self) -> None:
        """Close all sessions: updates that were deferred and then dropped are computed."""
        for session in self.sessions:
            session.close()
        self.sessions.clear()


class Bucket:
    """Part of a parameter group, as one link sees it.

    `u` is the update (or the gradient, for target="grad"): read it, transform it, set it. `group`
    holds the live values of the link, `state` its tensors of every parameter, `group_state` what
    links keep once for the group.
    """

    def __init__(
        self,
        step: Step,
        index: int,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        names: Sequence[str | None],
    ) -> None:
        self.step, self.index, self.names = step, index, list(names)
        self.originals = list(params)  # as the optimizer holds them; links see what is here
        self.places = list(places)  # where each parameter stands in its group
        states = step.states
        self.param_states = [{} if states is None else states[p] for p in params]
        self.layouts: list[Layout | None] = [None] * len(params)
        if not all_plain(params):
            self.layouts = [layout_of(p) for p in params]
            params, grads = [local(p) for p in params], [local(g) for g in grads]
        self.device, self.dtype = params[0].device, params[0].dtype
        self.state_dtype = state_dtype(params[0])
        key = (index, self.device, self.dtype)
        self.session = step.opened(step.engine.open(key, self.places, params, grads))
        self.link: Link | None = None
        self.produced = False  # whether a link has made an update: no longer the gradient
        self.update = self.session.adopt(self.session.grads.borrow())

    # ------------------------------------------------------------------ what a link sees

    @property
    def params(self) -> TensorList:
        """The parameters, borrowed."""
        return self.session.params.borrow()

    @property
    def grads(self) -> TensorList:
        """The gradients, borrowed."""
        return self.session.grads.borrow()

    @property
    def settings(self) -> dict[str, Any]:
        """The parameter group itself."""
        return self.step.groups[self.index]

    @property
    def group(self) -> Group:
        """The live values of the link, and the parameters and gradients as TensorLists."""
        return {**self.bound.values(self.settings), "params": self.params, "grads": self.grads}

    @property
    def group_state(self) -> dict[str, Any]:
        """The state that links keep once for this group: the dict `param_groups[i]["chain"]`."""
        state: dict[str, Any] = self.settings["chain"]
        return state

    @property
    def u(self) -> TensorList:
        """The update; for a link with target="grad" the gradients themselves."""
        if self.bound.transform.target == "update":
            return self.update
        grads = self.session.writable_grads()
        if self.produced and self.update.tensors[0] is grads.tensors[0]:
            self.update = self.update.own()  # a limit that was not reached
        return grads

    @u.setter
    def u(self, value: TensorList) -> None:
        tfm = self.bound.transform
        if tfm.target == "grad":
            self.session.write_grads(value)
        else:
            self.produced = self.produced or not tfm.passes_gradient
            self.update = self.session.adopt(value)

    @property
    def state(self) -> State:
        """The link's tensors of every parameter; of sharded ones the parts on this rank."""
        rows = self.held()
        if any(self.layouts):
            rows = {name: [local(t) for t in row] for name, row in rows.items()}
        path = self.bound.path
        return {name: self.session.state(f"{path}/{name}", row) for name, row in rows.items()}

    def held(self) -> dict[str, list[Tensor]]:
        """The link's tensors of every parameter, whole or sharded, as the optimizer holds them."""
        link = self.bound
        rows: dict[str, list[Tensor]] = {}
        for name, like_params in link.state_names(self.originals[0]).items():
            key = f"{link.path}/{name}"
            try:
                rows[name] = [state[key] for state in self.param_states]
            except KeyError:
                raise ValueError(
                    f"{link.path}: init must make the same names for every parameter, "
                    f"{list(link.state_names(self.originals[0]))}"
                ) from None
            if like_params:
                self._check_shapes(key, rows[name])
        return rows

    def _check_shapes(self, key: str, row: Sequence[Tensor]) -> None:
        """Raise before memory is touched where a parameter has changed its shape."""
        if same_shapes(row, self.originals):
            return
        rows = zip(self.places, self.originals, row, strict=True)
        place, p, t = next(one for one in rows if one[1].shape != one[2].shape)
        raise ValueError(
            f"{self.step.label(self.index, place)} has shape {tuple(p.shape)} now, and state "
            f"{key!r} of shape {tuple(t.shape)}: when you change the shape of a parameter, "
            "delete optimizer.state[p], or make a new optimizer"
        )

    def make_state(self) -> None:
        """Make the link's state for the parameters that have none yet."""
        link = self.bound
        names = link.state_names(self.originals[0])
        if not names:
            return
        keys = [f"{link.path}/{name}" for name in names]
        new = [i for i, state in enumerate(self.param_states) if keys[0] not in state]
        for i in new:
            self.param_states[i].update(link.new_state(self.originals[i]))
        share_vectors([self.param_states[i] for i in new], keys)

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each parameter, those on other ranks included."""
        return list(map(Tensor.numel, self.originals))

    # ------------------------------------------------------------------ what a combinator does

    def seen_by(self, link: Link) -> Bucket:
        """The same bucket as another link sees it."""
        other = self._copy()
        other.link = link
        if not self.update.owned:  # the other bucket's writes must not reach this one
            other.update = self.session.adopt(self.update.borrow())
        return other

    def with_update(self, u: TensorList) -> Bucket:
        """A bucket of the same parameters with another update, for a chain inside a link."""
        other = self._copy()
        other.session = self.step.opened(self.session.branch())
        other.update = other.session.adopt(u)
        return other

    def select(self, where: Sequence[int]) -> Bucket:
        """The bucket of some of the parameters."""
        some = [self.update.tensors[i] for i in where]
        other = self._copy()
        for name in ("names", "param_states", "places", "originals", "layouts"):
            setattr(other, name, [getattr(self, name)[i] for i in where])
        key = (self.index, self.device, self.dtype)
        other.session = self.step.opened(self.session.select(where, key, other.places))
        other.update = other.session.adopt(TensorList(some, owned=self.update.owned))
        return other

    def beside(self, tensors: TensorList) -> TensorList:
        """The same values, to be written in other memory than the update lies in."""
        kept = self.session.workspace(self.update)
        return TensorList(tensors.tensors, workspace=None if kept is None else lambda: kept)

    def whole(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors like the parameters, gathered from all ranks where they are sharded."""
        rows = zip(tensors, self.layouts, strict=True)
        return [t if layout is None else layout.whole(t) for t, layout in rows]

    def parts(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The parts on this rank of whole tensors like the parameters."""
        rows = zip(tensors, self.layouts, strict=True)
        return [t if layout is None else layout.part(t) for t, layout in rows]

    @property
    def bound(self) -> Link:
        """The link that sees this bucket."""
        assert self.link is not None, "a bucket is read through a link: bucket.seen_by(link)"
        return self.link

    def _copy(self) -> Bucket:
        other = object.__new__(Bucket)
        for name, value in vars(self).items():
            setattr(other, name, value)
        return other


def share_vectors(states: Sequence[dict[str, Any]], keys: Iterable[str]) -> None:
    """Make the 0-dim tensors under each key the entries of one vector."""
    for key in keys:
        some = [state for state in states if isinstance(state.get(key), Tensor)]
        row = [state[key] for state in some]
        if row and not any(map(Tensor.dim, row)) and len(set(map(id, row))) == len(row):
            for state, t in zip(some, share_memory(row), strict=True):
                state[key] = t


def count_step(buckets: Sequence[Bucket], name: str = "step", by: int = 1) -> int:
    """The count of steps of this link, this one included: a number kept in every group."""
    path, groups = f"{buckets[0].bound.path}/{name}", buckets[0].step.groups
    count = int(groups[0]["chain"].get(path, 0)) + by
    keep_number(buckets, name, count)
    return count


def keep_number(buckets: Sequence[Bucket], name: str, value: int) -> None:
    """Keep a number of this link in every group."""
    for group in buckets[0].step.groups:
        group["chain"][f"{buckets[0].bound.path}/{name}"] = value
