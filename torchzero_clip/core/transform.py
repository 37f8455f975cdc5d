"""Transform: one step of a chain. Chain: several. Link: one at its place in an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from torchzero_clip.core.bucket import Bucket, Group, State, statistic
from torchzero_clip.core.config import from_config, to_config
from torchzero_clip.core.description import Description
from torchzero_clip.core.fused import Deferred, Kernel
from torchzero_clip.core.norms.shards import full, put
from torchzero_clip.core.pieces import InPieces, can_be_cut
from torchzero_clip.core.tensorlist import TensorList


class Transform(Description):
    """One link of a chain. Write `update` (and `init` for state), or `step` to see the whole model.

    Args:
        target: "update" transforms what flows towards the parameters; "grad" rewrites `p.grad`.
        name: Stands in the names of state and hyperparameters instead of the class name.
    """

    target: Literal["update", "grad"] = field(default="update", kw_only=True)
    name: str | None = field(default=None, kw_only=True)

    reads_grads: ClassVar[bool] = False
    """Set where `update` reads `group["grads"]`, so that target="grad" links before it matter."""
    produces: ClassVar[bool] = True
    """Unset where what leaves the link is still the gradient."""
    holds: ClassVar[Literal["chain", "branches"] | None] = None
    """Set where the links inside see what flows: one after another, or each a part."""
    goes_first: ClassVar[bool] = False
    """Set where the link must see the gradients before any other does, as a guard."""
    elementwise: ClassVar[bool] = False
    """Set where `update` treats every entry by itself: it may then see tensors in pieces."""
    linear: ClassVar[bool] = False
    """Set where `update` scales, and adds the parameters: a kernel before it takes that along."""
    numbers: ClassVar[tuple[str, ...]] = ()
    """The names in a parameter's state that are numbers, which never were on a device."""
    complex: ClassVar[Literal["pairs", "whole", "refuse"]] = "pairs"
    """How `update` meets complex tensors: as pairs of real numbers, as they are, or not at all."""

    def init(self, param: Tensor) -> dict[str, Tensor]:
        """The state of one parameter when its first gradient comes."""
        return {}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        """The transformed update of one bucket."""
        raise NotImplementedError(f"{type(self).__name__} has neither update nor step")

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        """Transform the whole model; an empty list ends the step."""
        for bucket in buckets:
            self._update_bucket(bucket)
        return buckets

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        """Make the state that `step` would make; returns what later links will see."""
        for bucket in buckets:
            _ = bucket.state
        return buckets

    def per_parameter(self, param: Tensor) -> dict[str, Any]:
        """All that is kept in `optimizer.state[param]`: what `init` makes, and a rule's numbers."""
        return self.init(param)

    def per_group(self) -> dict[str, Any]:
        """What a rule keeps once for a group or for all."""
        return {}

    def kernel(self, u: TensorList, state: State, group: Group) -> Kernel | None:
        """Where torch has a fused one: what puts `update` straight into the parameters."""
        return None

    def _update_bucket(self, bucket: Bucket) -> None:
        state, group = bucket.state, bucket.group
        u = bucket.u.to(bucket.state_dtype)
        late = bucket.late if self.target == "update" and bucket.tape is None else None
        if bucket.tape is not None:
            whole = {name for name, (kind, _) in self._kinds.items() if kind is int}
            group = {k: v if k in whole else _as_tensor(v) for k, v in group.items()}
        kernel = self.kernel(u, state, group) if late is not None else None
        if late is not None and kernel is not None:
            update: TensorList = Deferred(lambda: bucket.zeros(u), kernel, bucket.params)
        elif self._in_pieces(bucket, u, state, group):
            update = InPieces(u, self._of_a_piece, state, group, bucket.kept)
        else:
            bucket.u = self._values(bucket, u, state, group)
            return
        if late is None:
            update._settle()
        else:
            late.append(update)
        bucket.u = update

    def _in_pieces(self, bucket: Bucket, u: TensorList, state: State, group: Group) -> bool:
        """Whether `update` may see pieces of tensors, so that what it makes on the way is small."""
        if not self.elementwise or not bucket.in_pieces or bucket.tape is not None:
            return False
        if self.linear and isinstance(u, Deferred) and u.waits:
            return False
        return can_be_cut(u, state, group["params"])

    def _of_a_piece(self, u: TensorList, state: State, group: Group) -> TensorList:
        handles = dict(state)
        return self._store(self.update(u, state, group), state, handles)

    def _values(self, bucket: Bucket, u: TensorList, state: State, group: Group) -> TensorList:
        """Run `update`; what it returns of its own state is borrowed."""
        if not bucket.params.peek[0].is_complex() or self.complex == "whole":
            handles = dict(state)
            out = self._store(self.update(u, state, group), state, handles)
            return bucket.borrowed(out) if _is_any(out, handles) else out
        self.refuse_complex(bucket)
        real = {name: pairs(tensors) for name, tensors in state.items()}
        group["params"], group["grads"] = pairs(group["params"]), pairs(group["grads"])
        out = self._store(self.update(pairs(u), real, group), real, real)
        return TensorList(unpaired(out).tensors, owned=out.owned and not _is_any(out, real))

    def refuse_complex(self, bucket: Bucket) -> None:
        """Raise for complex parameters where the rule has no meaning for them."""
        if self.complex == "refuse" and bucket.params.peek[0].is_complex():
            raise TypeError(
                f"{type(self).__name__} has no meaning for complex parameters, got one of "
                f"{bucket.params.peek[0].dtype}; rules about norms, like ClipNorm, have one"
            )

    def _store(self, u: TensorList, state: State, handles: Mapping[str, TensorList]) -> TensorList:
        """Put what `update` assigned to its state dict into the state; returns `u`."""
        if not isinstance(u, TensorList):
            raise TypeError(
                f"{type(self).__name__}.update must return a TensorList, got {type(u).__name__}"
            )
        for key in state:
            if key not in handles:
                raise KeyError(
                    f"{type(self).__name__}.update set state[{key!r}], which init does not make; "
                    f"init makes {list(handles)}"
                )
            if state[key] is not handles[key]:
                handles[key].copy_(state[key])
        return u

    def check(self) -> None:
        self.require_one_of("target", ("update", "grad"))
        if self.name is not None and (not isinstance(self.name, str) or "/" in self.name):
            raise ValueError(
                f"{type(self).__name__}: name must be a string without '/', got {self.name!r}"
            )


class TensorwiseTransform(Transform):
    """A transform that needs one tensor at a time: write `update_tensor`."""

    complex = "whole"

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        """The transformed update of one tensor; `u` may be written."""
        raise NotImplementedError(f"{type(self).__name__} has no update_tensor")

    def _values(self, bucket: Bucket, u: TensorList, state: State, group: Group) -> TensorList:
        """Sharded tensors are gathered, since the function of a part is not part of it."""
        if not any(bucket.layouts):
            return super()._values(bucket, u, state, group)
        for name in ("params", "grads"):
            group[name] = Whole(bucket, group[name])
        held = bucket.held()
        whole = {name: TensorList([full(t) for t in tensors]) for name, tensors in held.items()}
        u = TensorList(bucket.whole(u.own()), owned=True)
        out = super()._values(bucket, u, whole, group)
        for name, tensors in held.items():
            for stored, new in zip(tensors, whole[name], strict=True):
                put(stored, new)
        return TensorList(bucket.parts(out))

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        u = u.own()
        keys = list(state)
        out = [
            self.update_tensor(t, {key: state[key].tensors[i] for key in keys}, group)
            for i, t in enumerate(u.tensors)
        ]
        return TensorList(out)  # may be state: borrowed


class Whole(TensorList):
    """Sharded tensors, gathered when somebody reads them."""

    __slots__ = ("_bucket", "_parts", "_whole")

    def __init__(self, bucket: Bucket, parts: TensorList) -> None:
        self._bucket, self._parts = bucket, parts.tensors
        self._whole: list[Tensor] | None = None
        self.owned, self.room, self.norms, self.whole = False, None, None, None

    @property
    def tensors(self) -> list[Tensor]:
        """The whole tensors."""
        if self._whole is None:
            self._whole = self._bucket.whole(self._parts)
        return self._whole

    @tensors.setter
    def tensors(self, values: list[Tensor]) -> None:
        self._whole = values


class Chain(Transform):
    """Several transforms, one after another, as one."""

    links: tuple[Transform, ...]

    holds = "chain"

    def __init__(self, *links: Transform, name: str | None = None) -> None:
        self.links, self.name = tuple(links), name

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return run(buckets)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        return prepare(buckets)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.links)

    def __len__(self) -> int:
        return len(self.links)

    def __getitem__(self, index: int) -> Transform:
        return self.links[index]

    def arguments(self) -> dict[str, Any]:
        return {} if self.name is None else {"name": self.name}

    def __repr__(self) -> str:
        named = [f"{key}={value!r}" for key, value in self.arguments().items()]
        return f"Chain({', '.join([*map(repr, self.links), *named])})"

    def to_config(self) -> Any:
        """Plain data that JSON can hold; `Chain.from_config` makes an equal chain of it."""
        return to_config(self)

    @classmethod
    def from_config(cls, config: Any) -> Chain:
        """A chain from a list of names, (name, arguments) pairs and dicts with a "type"."""
        made = from_config(config)
        return made if isinstance(made, Chain) else Chain(made)

    def check(self) -> None:
        for link in self.links:
            if not isinstance(link, Transform):
                raise TypeError(f"every link must be a Transform, got {link!r}{_advice(link)}")
        super().check()


class Link:
    """A transform at its place: the path that names its state, and its keys in `param_groups`."""

    def __init__(self, transform: Any, path: str, children: tuple[Link, ...]) -> None:
        self.transform = transform
        self.path = path
        self.children = children
        self.keys: dict[str, str] = {}  # field -> key in param_groups; filled by hyper.Names
        self._state_names: tuple[str, ...] | None = None

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        out: list[Bucket] = self.transform.step([bucket.at(self) for bucket in buckets])
        return out

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        out: list[Bucket] = self.transform.prepare([bucket.at(self) for bucket in buckets])
        return out

    @property
    def stateful(self) -> bool:
        """Whether the link keeps anything for single parameters."""
        example = torch.empty(1, device="meta")
        tfm = self.transform
        return isinstance(tfm, Transform) and (
            type(tfm).init is not Transform.init or bool(tfm.per_parameter(example))
        )

    def walk(self) -> Iterator[Link]:
        """This link and all inside it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def values(self, settings: Mapping[str, Any]) -> Group:
        """The live values in one group; those of the links inside under their names."""
        values = {name: settings[key] for name, key in self.keys.items()}
        for child in self.children:
            values[child.path.rsplit("/", 1)[-1]] = child.values(settings)
        return values

    def new_state(self, param: Tensor) -> dict[str, Tensor]:
        """The state of one parameter that `init` makes, under its full keys."""
        return self._full(self.transform.init(param), param)

    def layout(self, param: Tensor) -> dict[str, Tensor]:
        """All that the link may keep for one parameter, without memory."""
        if not isinstance(self.transform, Transform):
            return {}
        thin = torch.empty_like(param, device="meta")
        return self._full(self.transform.per_parameter(thin), thin)

    def shared_values(self) -> dict[str, Any]:
        """What the link keeps in the chain dict of a group, as it begins."""
        return self.transform.per_group() if isinstance(self.transform, Transform) else {}

    def _full(self, made: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
        return {f"{self.path}/{name}": statistic(value, param) for name, value in made.items()}

    def state_names(self, param: Tensor) -> tuple[str, ...]:
        """The names of the tensors that `init` makes."""
        if self._state_names is None:
            self._state_names = tuple(self.transform.init(torch.empty_like(param, device="meta")))
        return self._state_names


def _advice(link: Any) -> str:
    """What somebody meant who put this into a chain."""
    if isinstance(link, type):
        return f"; write {link.__name__}(...)" if issubclass(link, Description) else ""
    if isinstance(link, (list, tuple)):
        return "; unpack it with *"
    if isinstance(link, (int, float)):
        return f"; is it LR({link})?"
    if isinstance(link, Description):
        return f"; write AdaptiveClip({link!r})"
    return "; write Lambda(fn) for a function of one tensor" if callable(link) else ""


def bind(parent: Description, path: str = "") -> tuple[Link, ...]:
    """The links of what is inside a description, named and numbered. Unnamed chains dissolve."""
    links: list[Link] = []
    used: dict[str, int] = {}
    for label, child in _flat(parent):
        base = label or getattr(child, "name", None) or type(child).__name__
        used[base] = used.get(base, 0) + 1
        own = path + (base if used[base] == 1 else f"{base}_{used[base]}")
        links.append(Link(child, own, bind(child, own + "/")))
    if len({link.path for link in links}) < len(links):
        raise ValueError(f"two links have the same name: {sorted(link.path for link in links)}")
    return tuple(links)


def _flat(parent: Description) -> Iterator[tuple[str | None, Description]]:
    for label, child in parent.children():
        if isinstance(child, Chain) and child.name is None and label is None:
            yield from _flat(child)
        else:
            yield label, child


def run(buckets: list[Bucket]) -> list[Bucket]:
    """Send buckets through the transforms inside the link they are at."""
    for link in buckets[0].bound.children if buckets else ():
        if buckets and isinstance(link.transform, Transform):
            buckets = link.step(buckets)
    return buckets


def prepare(buckets: list[Bucket]) -> list[Bucket]:
    """Make the state of the transforms inside the link that the buckets are at."""
    for link in buckets[0].bound.children if buckets else ():
        if buckets and isinstance(link.transform, Transform):
            buckets = link.prepare(buckets)
    return buckets


def pairs(tensors: TensorList) -> TensorList:
    """Complex tensors as real ones with a last dim of two."""
    if not tensors.dtype.is_complex:
        return tensors
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors.tensors]
    return TensorList(real, owned=tensors.owned)


def unpaired(tensors: TensorList) -> TensorList:
    """What `pairs` made real, complex again."""
    return TensorList([torch.view_as_complex(t) for t in tensors.tensors], owned=tensors.owned)


def _as_tensor(value: Any) -> Any:
    """A live number as a tensor, so that `update` cannot do another thing when it is zero."""
    if isinstance(value, tuple):
        return tuple([_as_tensor(x) for x in value])
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _is_any(u: TensorList, handles: Mapping[str, TensorList]) -> bool:
    return any([u is handle for handle in handles.values()])
