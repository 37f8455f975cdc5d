"""A chain: several transforms that run one after another.

The transforms inside a chain are called links. This module also contains the loop over the links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core.argument_values import is_row
from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.config import from_config, to_config
from torchzero_clip.core.description import Description, class_with
from torchzero_clip.core.ending import divide_now, finish
from torchzero_clip.core.link import Link
from torchzero_clip.core.plan import Tail
from torchzero_clip.core.scalars import numbered
from torchzero_clip.core.sharding.layout import locals_of
from torchzero_clip.core.step import Step
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.traits import Routing, only_routes
from torchzero_clip.core.transform import Transform, averages
from torchzero_clip.core.unknown_key import explained


class Chain(Transform, Routing):
    """A transform that runs several transforms one after another."""

    links: tuple[Transform, ...]

    inner = "chain"
    reach = "tensor"
    pure = True
    takes_all = True

    def __init__(self, *links: Transform, name: str | None = None) -> None:
        self.links = tuple(links)
        self.name = name

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

    def __add__(self, other: Transform) -> Chain:
        if not isinstance(other, Transform):
            return NotImplemented
        return Chain(*_links(self), *_links(other))

    def __radd__(self, other: Transform) -> Chain:
        if not isinstance(other, Transform):
            return NotImplemented
        return Chain(*_links(other), *_links(self))

    def arguments(self) -> dict[str, Any]:
        return {} if self.name is None else {"name": self.name}

    def __repr__(self) -> str:
        named = [f"{key}={value!r}" for key, value in self.arguments().items()]
        name = "Chain" if only_routes(self) else type(self).__name__
        return f"{name}({', '.join([*map(repr, self.links), *named])})"

    def to_config(self) -> Any:
        """Return the chain as plain data for JSON. `Chain.from_config` builds an equal chain."""
        return to_config(self)

    @classmethod
    def from_config(cls, config: Any) -> Chain:
        """Build a chain from a list of names, (name, arguments) pairs and dicts with a "type"."""
        tfm = from_config(config)
        return tfm if isinstance(tfm, Chain) else Chain(tfm)

    def check(self) -> None:
        for link in self.links:
            if not isinstance(link, Transform):
                raise TypeError(
                    f"a chain must contain only transforms, got {link!r}{_advice(link)}"
                )
        super().check()


def _links(tfm: Transform) -> tuple[Transform, ...]:
    """Return the links of an unnamed chain. Otherwise, return the transform itself."""
    return tfm.links if isinstance(tfm, Chain) and dissolves(tfm) else (tfm,)


def dissolves(chain: Chain) -> bool:
    """Return whether a chain can be replaced by its links: it has no name and no other `step`."""
    return chain.name is None and only_routes(chain)


def send(link: Link, buckets: list[Bucket], init: bool = False) -> list[Bucket]:
    """Send buckets through a link, or only make the state that the link needs.

    A link that is not a transform, such as a criterion, returns the buckets unchanged. A link of
    the tail also returns the buckets unchanged, because `end` runs the tail.
    """
    if not (buckets and link.transforms):
        return buckets
    tails = buckets[0].step.tails
    if tails and not init:
        if link in tails:
            for bucket in buckets:
                bucket.tail = bucket.tail or tails[link]
        if all([bucket.tail is not None for bucket in buckets]):
            return buckets
    return _run_link(link, buckets, init)


def end(buckets: Sequence[Bucket]) -> None:
    """Run the tail of the chain for each bucket, and subtract the update from the parameters."""
    for bucket in buckets:
        tail = bucket.tail
        if tail is None:
            bucket.subtract()
        elif not finish(bucket, tail):
            divide_now(bucket, tail)
            _run_one_by_one(bucket, tail)


def _run_one_by_one(bucket: Bucket, tail: Tail) -> None:
    """Run the links of a tail, because one call cannot do them, and subtract the update.

    After the rule of the tail, its scalings are still one pass over memory if that is possible.
    """
    links = list(tail.links)
    parts = [bucket]
    if tail.rule is not None:
        parts = _run_link(links.pop(0), parts)
    for part in parts:
        if links and tail.rule is not None and finish(part, bucket.step.tails[links[0]]):
            continue
        scaled = [part]
        for link in links:
            scaled = _run_link(link, scaled)
        for last in scaled:
            last.subtract()


def _run_link(link: Link, buckets: list[Bucket], init: bool = False) -> list[Bucket]:
    """Run a link for buckets, or only make the state that it needs."""
    seen = [part for bucket in buckets for part in bucket.seen_by(link).alike()]
    # Groups with clip=False skip all rules that clip.
    clips = getattr(link.transform, "clips", False)
    skipped = [bucket for bucket in seen if not bucket.cohort.clips] if clips else []
    if skipped:
        seen = [bucket for bucket in seen if bucket.cohort.clips]
    for bucket in seen:
        if link.transform.complex == "refuse":
            refuse_complex(bucket)
        bucket.make_state()
        bucket.join_state()
    if not seen:
        return skipped
    acts: Transform = link.acts
    try:
        if link.numbered:
            numbered(seen, advance=not init)
        buckets = acts.prepare(seen) if init else acts.step(seen)
    except KeyError as error:
        better = explained(error, link, *_names(seen[0]))
        if better is None:
            raise
        raise better from error
    if seen[0].step.only_names:
        link.transform._record_unknown(seen)
    if link.narrow:
        for bucket in seen:
            bucket.session.settle(link.path)
    return [*buckets, *skipped]


def pass_over(links: Sequence[Link], step: Step) -> None:
    """Tell links about a step that a guard skipped before the step reached them.

    If the flag of the guard stays on the device, all links run even in a skipped step. If the host
    reads the flag, later links do not run, and this function lets them count the skipped step. So
    links that count steps count the same in every engine.
    """
    for link in links:
        if isinstance(link.transform, Chain):
            pass_over(link.children, step)
        elif link.transforms and not link.transform._passed_over(step, link.path):
            return


def _names(bucket: Bucket) -> tuple[list[str], list[str]]:
    """Return the names that a link's rule can read from its `state`, and from its `group`."""
    units: Mapping[str, Any] = getattr(bucket.bound.transform, "init_unit", dict)()
    live = bucket.bound.values(bucket.settings)
    numbers = {**bucket.numbers, **bucket.bound.group_values()}
    return [*bucket.state_names, *units], [*live, *numbers, "params", "grads"]


def refuse_complex(bucket: Bucket) -> None:
    """Raise TypeError if parameters are complex and the rule has no meaning for them."""
    tfm = bucket.bound.transform
    if tfm.complex == "refuse" and bucket.dtype.is_complex:
        raise TypeError(
            f"{type(tfm).__name__} does not support complex parameters, got a parameter of "
            f"{bucket.dtype}. Only transforms of norms, such as ClipNorm, support complex "
            "parameters"
        )


def run(
    buckets: list[Bucket], links: Sequence[Link] | None = None, init: bool = False
) -> list[Bucket]:
    """Send buckets through links. By default, these are the links inside the buckets' link."""
    if links is None:
        links = buckets[0].bound.children if buckets else ()
    for link in links:
        buckets = send(link, buckets, init)
    return buckets


def prepare(buckets: list[Bucket], links: Sequence[Link] | None = None) -> list[Bucket]:
    """Make the state of these links."""
    return run(buckets, links, init=True)


def transformed(
    buckets: list[Bucket], lists: list[TensorList], links: Sequence[Link] | None = None
) -> list[TensorList]:
    """Apply the transforms inside the link of the buckets to one list per bucket.

    Args:
        buckets: The buckets at the outer link.
        lists: The updates to transform, one per bucket.
        links: The transforms to apply, by default all transforms inside the link.

    Returns:
        The transformed lists, one per bucket.
    """
    inner = [bucket.with_update(u) for bucket, u in zip(buckets, lists, strict=True)]
    results: dict[tuple[int, int], Tensor] = {}
    for bucket in run(inner, links):
        for place, t in zip(bucket.cohort.places, bucket.update, strict=True):
            results[bucket.cohort.index, place] = t
    wanted = [[(b.cohort.index, place) for place in b.cohort.places] for b in buckets]
    if any([key not in results for keys in wanted for key in keys]):
        link = buckets[0].bound
        raise RuntimeError(
            f"{link.path}: the transforms {[child.path for child in link.children]} must "
            "return an update for every parameter, but at least one parameter has no update"
        )
    updates = [TensorList([results[key] for key in keys]) for keys in wanted]
    # The sessions must know these lists, or an engine might reuse their memory.
    return [bucket.session.adopt(u) for bucket, u in zip(inner, updates, strict=True)]


def other_state(bucket: Bucket, key: str) -> TensorList | None:
    """Return the state of another link, or None if it does not have the parameters' shapes."""
    stored: list[Any] = [state.get(key) for state in bucket.param_states]
    if [getattr(t, "shape", None) for t in stored] != [p.shape for p in bucket.originals]:
        return None
    return bucket.session.state(key, locals_of(stored)).borrow().to(bucket.state_dtype)


def bind(parent: Description, path: str = "", narrow: bool = False) -> tuple[Link, ...]:
    """Return a link with a unique path for each description inside a description.

    An unnamed chain is replaced by its links.

    Args:
        parent: The outer description.
        path: The start of the paths.
        narrow: Whether state is stored in bfloat16 if a description does not set `state_dtype`.
    """
    links: list[Link] = []
    used: dict[str, int] = {}
    for label, child in _flat(parent):
        base = label or getattr(child, "name", None) or type(child).__name__
        used[base] = used.get(base, 0) + 1
        own = path + (base if used[base] == 1 else f"{base}_{used[base]}")
        asked = getattr(child, "state_dtype", None)
        is_narrow = narrow if asked is None else asked == "bfloat16"
        if averages(child):  # averaged weights are never stored in bfloat16
            is_narrow = False
        links.append(Link(child, own, bind(child, own + "/", is_narrow), is_narrow))
    if len({link.path for link in links}) < len(links):
        raise ValueError(
            f"names of transforms must differ, got {sorted(link.path for link in links)}: "
            "pass a different name= to each of these transforms"
        )
    if not path:
        tops = tuple((top.path, top.transform) for top in links)
        for top in links:
            for link in top.walk():
                link.tops = tops
    return tuple(links)


def _flat(parent: Description) -> Iterator[tuple[str | None, Description]]:
    """Yield the label and the description of each description inside another description.

    An unnamed chain is replaced by its links.
    """
    for label, child in parent.children():
        is_flat = isinstance(child, Chain) and dissolves(child) and label is None
        yield from _flat(child) if is_flat else [(label, child)]


def _advice(link: Any) -> str:
    """Return a hint for a value that is in a chain but is not a transform."""
    if isinstance(link, type):
        return f": write {link.__name__}(...)" if issubclass(link, Description) else ""
    if is_row(link):
        return ": unpack the list with *"
    if isinstance(link, (int, float)):
        return f": did you mean {class_with('lr')}({link})?"
    if isinstance(link, Description):
        return f": write {class_with('criterion')}({link!r})"
    if callable(link):
        return f": for a function of one tensor, write {class_with('fn')}(fn)"
    return ""
