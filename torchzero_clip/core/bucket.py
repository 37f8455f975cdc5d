"""Bucket: the parameters of one group that share a device and a dtype, and what flows for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.norms.shards import Layout, align_grad, layout_of, local
from torchzero_clip.core.pieces import InPieces, Later, Scaled, Waiting, can_be_cut
from torchzero_clip.core.tape import Recorded, Tape
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.tensors import all_plain, join

if TYPE_CHECKING:
    from torchzero_clip.core.compiler import Compiler
    from torchzero_clip.core.transform import Link

State: TypeAlias = dict[str, TensorList]
"""What `update` gets as state: for each name that `init` makes, the tensors of all parameters."""
Group: TypeAlias = dict[str, Any]
"""The live values by name, and the TensorLists "params" and "grads"."""
Memory: TypeAlias = dict[str, Any]


class Bucket:
    """What one link sees of part of one parameter group.

    `u` is the update (or the gradient, for target="grad"): read it, transform it, set it. `group`
    holds the live values of the link, `state` its tensors of every parameter, `shared` what links
    keep once for the group.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        names: Sequence[str | None],
        index: int,
        groups: Sequence[dict[str, Any]],
        memory: Sequence[Memory],
        store: Mapping[Tensor, Memory],
        record: dict[str, Any],
        room: Callable[..., list[Tensor]] | None,
        places: Sequence[int],
        process_group: Any = None,
    ) -> None:
        self.given = list(params)  # as the optimizer holds them; links see what is here of them
        self.layouts: list[Layout | None] = [None] * len(params)
        if not all_plain(params):
            self.layouts = [layout_of(p) for p in params]
            params, grads = [local(p) for p in params], [local(g) for g in grads]
        self.params, self.grads = TensorList(params), TensorList(grads)
        self.names = list(names)
        self.index, self.groups = index, groups
        self.memory = list(memory)  # optimizer.state[p] of every parameter
        self.store = store  # optimizer.state
        self.record = record  # what the links measured this step, by path
        self.places = list(places)  # where each parameter stands in its group
        self.room = room
        self.process_group = process_group  # whose processes hold the rest of the model
        self.late: list[Any] | None = None  # deferred updates, where the optimizer allows them
        self.in_pieces = False  # whether links may see pieces of tensors
        self.tape: Tape | None = None  # what is noted rather than done, with compile=True
        self.link: Link | None = None
        self.produced = False  # whether what flows is an update, and no longer the gradient
        self.update = self.flowing(self.grads.tensors)

    # ------------------------------------------------------------------ what a link sees

    @property
    def settings(self) -> dict[str, Any]:
        """The parameter group itself."""
        return self.groups[self.index]

    @property
    def group(self) -> Group:
        """The link's live values, and the parameters and gradients as TensorLists."""
        group = self.bound.values(self.settings)
        group["params"], group["grads"] = self.params.borrow(), self.grads.borrow()
        return group

    @property
    def u(self) -> TensorList:
        if self.bound.transform.target == "grad":
            if self.tape is not None:
                return self.tape.record(self.grads.peek)
            self.update._settle()  # it may read gradients, which this link may write
            if self.produced and self.update.tensors[0] is self.grads.tensors[0]:
                self.update = self.update.own()  # a limit that was not reached
            return TensorList(self.grads.tensors, owned=True)
        if self.tape is not None and not isinstance(self.update, Recorded):
            self.update = self.tape.record(self.update.tensors, owned=self.update.owned)
        return self.update

    @u.setter
    def u(self, value: TensorList) -> None:
        if self.bound.transform.target == "grad":
            self._write_grads(value)
        else:
            self.produced = self.produced or self.bound.transform.produces
            if value is not self.update:
                mine = isinstance(value, Later) or value.owned
                self.update = value if mine else self.borrowed(value)

    def _write_grads(self, value: TensorList) -> None:
        if isinstance(value, Recorded) and isinstance(self.grads, Recorded):
            if not (value.owned and value._home == self.grads._home):
                self.u.copy_(value)
            return
        pairs = zip(value.tensors, self.grads.tensors, strict=True)
        if any([new is not old for new, old in pairs]):
            TensorList(self.grads.tensors, owned=True).copy_(value)

    @property
    def state(self) -> State:
        """What is here of the link's tensors of every parameter, made where they are missing."""
        rows = self.held().items()
        if any(self.layouts):
            rows = {name: [local(t) for t in row] for name, row in rows}.items()
        if self.tape is None:
            return {name: TensorList(row, owned=True) for name, row in rows}
        path = self.bound.path
        return {name: self.tape.record(row, (path, name)) for name, row in rows}

    def held(self) -> dict[str, list[Tensor]]:
        """The link's tensors of every parameter as the optimizer holds them."""
        link = self.bound
        names = link.state_names(self.given[0])
        if not names:
            return {}
        keys = [f"{link.path}/{name}" for name in names]
        new = [i for i, memory in enumerate(self.memory) if keys[0] not in memory]
        for i in new:
            self.memory[i].update(link.new_state(self.given[i]))
        if new:
            join([self.memory[i] for i in new], keys)
        try:
            rows = [[memory[key] for memory in self.memory] for key in keys]
        except KeyError:
            raise ValueError(
                f"{link.path}: init must make the same names for every parameter, {list(names)}"
            ) from None
        return dict(zip(names, rows, strict=True))

    @property
    def shared(self) -> Memory:
        """What the links keep once for this group: the dict `param_groups[i]["chain"]`."""
        shared: Memory = self.settings["chain"]
        return shared

    def put_off(self, u: TensorList, rows: Sequence[tuple[str, list[float]]]) -> None:
        """Multiply or divide what the link sees, by one number a tensor, once somebody reads it."""
        if not rows:
            self.u = u
        elif self.bound.transform.target == "update":
            self.update, self.produced = Scaled(u, rows), True
        else:
            division = Scaled(TensorList(self.grads.tensors, owned=True), rows, stays=True)
            if self.update.tensors[0] is self.grads.tensors[0]:
                division.room = self.flowing(self.grads.tensors).room
                self.update = division
            self.grads = Waiting(division)
            assert self.late is not None
            self.late.append(division)

    # ------------------------------------------------------------------ what a combinator does

    def at(self, link: Link) -> Bucket:
        """The same bucket as another link sees it."""
        other = self._copy()
        other.link = link
        if isinstance(self.update, Recorded) and not self.update.owned:
            other.update = self.update.borrow()  # what is written there is nothing to this bucket
        return other

    def carrying(self, u: TensorList) -> Bucket:
        """The same parameters with another update flowing, for a chain inside a link."""
        other = self._copy()
        other._take_off_tape()
        other.update = u
        other.room, other.late = None, None  # kept memory and parameters belong to the outer flow
        return other

    def select(self, where: Sequence[int]) -> Bucket:
        """The bucket of some of the parameters."""
        if self.tape is not None:
            self.tape.run()
        other = self._copy()
        other.tape = None
        for name in ("names", "memory", "places", "given", "layouts"):
            setattr(other, name, [getattr(self, name)[i] for i in where])
        for name in ("params", "grads"):
            setattr(other, name, TensorList([getattr(self, name).tensors[i] for i in where]))
        some = [self.update.tensors[i] for i in where]
        other.update = TensorList(some, owned=True) if self.update.owned else other.flowing(some)
        other.wait_like(self)
        return other

    def wait_like(self, example: Bucket) -> None:
        """Put off what the other bucket puts off."""
        self.late = example.late
        if example.tape is not None and example.late is not None:
            self.use_tape(example.tape.compiler, example.late)

    def use_tape(self, compiler: Compiler, late: list[Any]) -> None:
        """Note what is to be done rather than do it, link by link, where kernels can."""
        self.late = late
        example = self.params.peek[0]
        if example.is_complex() or not all_plain([*self.params, *self.grads]):
            return
        compiler.check(example.device)
        key = (
            self.index,
            id(self.given[0]),
            len(self.given),
            example.device,
            self.grads.peek[0].dtype,
        )
        room = partial(self.room, self.index, self.places) if self.room else None
        room = room if example.device.type == "cpu" else None
        tape = self.tape = Tape(self.params.tensors, compiler, key, room)
        late.append(tape)
        flows_in_grads = self.update.tensors[0] is self.grads.tensors[0]
        self.params, self.grads = tape.record_like(self.params), tape.record_like(self.grads)
        if flows_in_grads:
            self.update = self.grads.borrow()
        else:  # so that its memory is known to be in use
            self.update = tape.record(self.update.tensors, owned=self.update.owned)

    def _take_off_tape(self) -> None:
        """Plain lists, with what was noted done."""
        if self.tape is not None:
            self.tape.run()
            for name in ("params", "grads"):
                setattr(self, name, TensorList(getattr(self, name).tensors))
            self.tape = None

    def _copy(self) -> Bucket:
        other = object.__new__(Bucket)
        other.__dict__.update(self.__dict__)
        return other

    @property
    def sizes(self) -> list[int]:
        """How many entries each parameter has, those on other ranks included."""
        if not any(self.layouts):
            return list(map(Tensor.numel, self.params.peek))
        rows = zip(self.params, self.layouts, strict=True)
        return [t.numel() if layout is None else layout.numel for t, layout in rows]

    def whole(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors like the parameters, gathered from all ranks where they are sharded."""
        rows = zip(tensors, self.layouts, strict=True)
        return [t if layout is None else layout.whole(t) for t, layout in rows]

    def parts(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Of whole tensors like the parameters what belongs here."""
        rows = zip(tensors, self.layouts, strict=True)
        return [t if layout is None else layout.part(t) for t, layout in rows]

    @property
    def bound(self) -> Link:
        assert self.link is not None, "a bucket is read through a link: bucket.at(link)"
        return self.link

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype that state and updates are kept in."""
        return state_dtype(self.params.peek[0])

    def borrowed(self, u: TensorList) -> TensorList:
        """What somebody else's memory holds, to be moved before it is written."""
        return u.borrow() if isinstance(u, Recorded) else self.flowing(u.tensors)

    def flowing(self, tensors: Sequence[Tensor]) -> TensorList:
        """Borrowed tensors; on CPU, where fresh memory costs more than the arithmetic, written
        ones move to memory that the optimizer keeps from step to step.
        """
        on_cpu = tensors[0].device.type == "cpu" and not torch.compiler.is_compiling()
        return TensorList(tensors, room=self.kept if on_cpu else None)

    @property
    def kept(self) -> Callable[[], list[Tensor]] | None:
        """Memory that the optimizer keeps for the update."""
        return partial(self.room, self.index, self.places) if self.room else None

    def zeros(self, flowing: TensorList) -> list[Tensor]:
        """Zeros for an update, apart from what flows."""
        kept = self.apart(flowing)
        if kept is None:
            return [zeros_like_state(p) for p in self.params]
        torch._foreach_zero_(kept)
        return kept

    def apart(self, flowing: TensorList) -> list[Tensor] | None:
        """Memory that the optimizer keeps on CPU and that does not hold what flows."""
        if self.room is None or self.tape is not None or self.params.peek[0].device.type != "cpu":
            return None
        for spare in (True, False):
            kept = self.room(self.index, self.places, spare=spare)
            if all([a is not b for a, b in zip(kept, flowing._origin, strict=True)]):
                return kept
        return None

    def beside(self, tensors: TensorList) -> TensorList:
        """The same values, to be written in memory apart from what flows."""
        copy, kept = tensors.borrow(), self.apart(self.update)
        copy.room = None if kept is None else lambda: kept
        return copy

    def entrywise(
        self, update: Callable[[TensorList, State], TensorList], u: TensorList, held: State
    ) -> TensorList:
        """`update(u, held)`, which treats every entry by itself and returns `u` or one of `held`.

        It sees pieces of the lists where that saves memory; 0-dim tensors go with their tensor.
        """
        u._settle()  # it may flow on
        if not self.in_pieces or not can_be_cut(u, held, self.params):
            return update(u, dict(held))
        made = InPieces(u, lambda u, held, _: update(u, held), held, {}, self.kept)
        made._settle()
        return made


def count_step(buckets: Sequence[Bucket], name: str = "step", by: int = 1) -> int:
    """How often this link has run, now included: a number kept in every group."""
    path, groups = f"{buckets[0].bound.path}/{name}", buckets[0].groups
    count = int(groups[0]["chain"].get(path, 0)) + by
    keep_number(buckets, name, count)
    return count


def keep_number(buckets: Sequence[Bucket], name: str, value: int) -> None:
    """Keep a number of this link in every group."""
    for group in buckets[0].groups:
        group["chain"][f"{buckets[0].bound.path}/{name}"] = value


def state_dtype(param: Tensor) -> torch.dtype:
    """float32 for half precision (an average in bfloat16 stalls), otherwise the parameter's own."""
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


def zeros_like_state(param: Tensor) -> Tensor:
    """Zeros in the shape of a parameter and the dtype of its state."""
    return torch.zeros_like(param, dtype=state_dtype(param))


def counter(param: Tensor) -> Tensor:
    """A step count for a parameter, in float32 as torch's own."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


def statistic_dtype(param: Tensor) -> torch.dtype:
    """The dtype of the numbers kept for a parameter: float32, or float64 for a double one."""
    double = param.dtype in (torch.float64, torch.complex128)
    return torch.float64 if double else torch.float32


def statistic(value: Any, param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A value that is kept for a parameter: numbers become 0-dim tensors."""
    if isinstance(value, Tensor):
        return value.to(param.device, dtype if dtype is not None else value.dtype)
    return torch.full((), value, dtype=dtype or statistic_dtype(param), device=param.device)


def has_grad(param: Tensor) -> bool:
    """Whether a parameter takes part in a step."""
    return param.grad is not None


def collect(
    groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, Memory] | None,
    record: dict[str, Any],
    room: Callable[..., list[Tensor]] | None = None,
    wanted: Callable[[Tensor], bool] = has_grad,
    process_group: Any = None,
) -> list[Bucket]:
    """The wanted parameters, those with a gradient, by group, device and dtype."""
    buckets: list[Bucket] = []
    for g, group in enumerate(groups):
        names = group.get("param_names")
        for places, params, grads in _kinds(g, group["params"], wanted):
            buckets.append(
                Bucket(
                    params=params,
                    grads=grads,
                    names=[names[i] for i in places] if names else [None] * len(places),
                    index=g,
                    groups=groups,
                    memory=[{} for _ in params] if state is None else [state[p] for p in params],
                    store={} if state is None else state,
                    record=record,
                    room=room,
                    places=places,
                    process_group=process_group,
                )
            )
    return buckets


def _kinds(
    g: int, every: Sequence[Tensor], wanted: Callable[[Tensor], bool]
) -> Iterator[tuple[list[int], list[Tensor], list[Tensor]]]:
    """The wanted parameters of a group that share device and dtype: places, they, gradients."""
    grads: list[Any] = [p.grad for p in every]
    if wanted is has_grad:
        places = [i for i, grad in enumerate(grads) if grad is not None]
    else:
        places = [i for i, p in enumerate(every) if wanted(p)]
    if not places:
        return
    everything = wanted is has_grad and len(places) == len(every)
    params = list(every) if everything else [every[i] for i in places]
    if not all_plain(params):
        grads = [align_grad(p) for p in params]
    elif not everything:
        grads = [every[i] if grads[i] is None else grads[i] for i in places]
    if {grad.layout for grad in grads} != {torch.strided}:
        k = [grad.layout is torch.strided for grad in grads].index(False)
        i, p = places[k], params[k]
        raise TypeError(
            f"sparse gradients are not supported, got one of shape {tuple(p.shape)} for "
            f"parameter {i} of group {g}: make the layer with sparse=False, or give it an "
            "optimizer of its own, such as torch.optim.SparseAdam"
        )
    dtypes = {p.dtype for p in params}, {grad.dtype for grad in grads}
    together = all([p.is_cpu for p in params]) or len({p.device for p in params}) == 1
    if together and len(dtypes[0]) == len(dtypes[1]) == 1:
        yield places, params, grads
        return
    found: dict[Any, list[int]] = {}
    for k, (p, grad) in enumerate(zip(params, grads, strict=True)):
        found.setdefault((p.device, p.dtype, grad.dtype), []).append(k)
    for some in found.values():
        yield [places[k] for k in some], [params[k] for k in some], [grads[k] for k in some]
