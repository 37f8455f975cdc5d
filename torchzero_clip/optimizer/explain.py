"""The plan of a chain: the bytes that each link reads and writes, watched on a small model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip.core.link import Link
from torchzero_clip.core.sharding.layout import layout_of
from torchzero_clip.core.sharding.owners import route
from torchzero_clip.core.torch_private import (
    TorchDispatchMode,
    name_of_fused,
    schema,
    tree_leaves,
)
from torchzero_clip.core.transform import TensorwiseTransform, averages
from torchzero_clip.optimizer import branches
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.optimizer.chain_meaning import sentences

SIZE = 2**13  # numbers in a parameter that stands for a large one
MOST = 64  # parameters that stand for all
END, KERNEL = "the end", "one compiled kernel"
ONLY_WRITE = ("copy_", "zero_", "fill_")


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write during a part of a step.

    Args:
        label: The part, as the plan names it.
        places: For each storage the words for what it holds.
    """

    def __init__(self, label: str, places: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.label, self.places = label, places
        self.read = self.written = 0
        self.where: set[str] = set()
        self.operators: set[str] = set()
        self.inside = False  # in a pass that is one, whatever it is made of

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        told = schema(func)
        arguments, name = told.arguments, told.name.removeprefix("aten::")
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        makes = all([r.alias_info is None for r in told.returns])
        if self.inside or not (written or makes):  # a view moves nothing
            return out
        named = dict(zip([a.name for a in arguments], args, strict=False)) | kwargs
        if named.get("grad_scale") is None:  # fused kernels write gradients when they scale them
            written.discard("grads")
        for key, value in named.items():
            only = key in written and (key == "out" or name in ONLY_WRITE)
            self.count(name, value, reads=not only, writes=key in written)
        if makes:
            self.count(name, out, reads=False, writes=True)
        return out

    def count(self, name: str, value: Any, reads: bool, writes: bool) -> None:
        """Count the tensors that are as large as a parameter; small ones stay in the cache."""
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        for t in [t for t in tensors if t.numel() >= SIZE // 2]:
            size, storage = t.numel() * t.element_size(), t.untyped_storage().data_ptr()
            self.operators.add(name)
            self.read += size * reads
            self.written += size * writes
            if writes:
                self.where.add(self.places.get(storage, "new memory"))

    @contextmanager
    def whole(self, read: list[Tensor], written: list[Tensor]) -> Iterator[None]:
        """Count a pass, and not the operators that it is made of here."""
        self.count(KERNEL, read, reads=True, writes=False)
        self.count(KERNEL, written, reads=False, writes=True)
        self.inside = True
        yield
        self.inside = False

    def row(self, width: int, numbers: int) -> str:
        """The line about this part, in bytes for each number."""
        operators = ", ".join(sorted(self.operators))
        if self.written:
            how = f"writes {' and '.join(sorted(self.where))}: {operators}"
        elif self.label == END:
            how = "nothing is left to do"
        else:
            how = f"measures: {operators}" if operators else "nothing yet: it joins a later pass"
        read, written = self.read / numbers, self.written / numbers
        return f"{self.label:{width}}  {read:5.3g}  {written:6.3g}   {how}"


def explain(optimizer: Any, make: Callable[..., Any], each: bool = False) -> str:
    """The plan of a chain: for each link the passes over memory, in bytes for each number."""
    twin, parts = _twin(optimizer, make), list[Traffic]()

    def watch(read: list[Tensor], written: list[Tensor]) -> AbstractContextManager[None]:
        return parts[-1].whole(read, written)

    twin.engine = optimizer.engine.twin(watch)
    params = params_of(twin)
    for _ in range(4):
        for p in params:
            p.grad = torch.full_like(p, 100.0)  # so that limits bite
        parts.clear()
        skip = _watch(twin, parts)
    numbers, width = sum(map(Tensor.numel, params)), max([len(part.label) for part in parts])
    reads = sum([part.read for part in parts]) / numbers
    writes = sum([part.written for part in parts]) / numbers
    kinds = _parameters, _owners, _refreshes, _averages, _tails
    told = [line for of_kind in kinds for line in of_kind(optimizer)]
    said = [*sentences(optimizer), *branches.joint(optimizer)]
    said = [f"{sentence}." for sentence in [*said, *(branches.fallen(optimizer) if each else ())]]
    lines = [*said, *[""] * bool(said), repr(optimizer.chain)[len("Chain(") : -1], *told, ""]
    lines.append(f"{'':{width}}  reads  writes   bytes a number")
    lines += [part.row(width, numbers) for part in parts]
    kept = sum([t.numel() for t in twin.engine.lasting()])
    size = f"{kept / numbers:.3g} of {optimizer._keeps_like} size" if kept else "none"
    lines.append(f"{'in all':{width}}  {reads:5.3g}  {writes:6.3g}")
    ends = [f"Memory kept between steps, besides the state: {size}."]
    if skip:
        waits = f"The host waits in each step for whether it is skipped: {skip.why}."
        ends.append("Whether a step is skipped stays on the device." if skip.why is None else waits)
    ends += optimizer.engine.says([])
    table = ["", *branches.parameters(optimizer)] if each else []
    return "\n".join([*lines, "", *ends, *table])


def _watch(twin: Any, parts: list[Traffic]) -> Any:
    """The flag that guards left of a step that happens; `parts` takes the traffic of each link, and
    of the end.
    """
    places, links = _places(twin), twin.links

    def watched() -> Iterator[Link]:
        for link in links:
            parts.append(Traffic(link.path, places))
            with parts[-1]:
                yield link
            if step.skip.flag is not None:
                step.skip.flag.zero_()
        parts.append(end.enter_context(Traffic(END, places)))

    with torch.no_grad(), ExitStack() as end:
        step = twin._begin(loss=1.0)  # for links that need the loss of each step
        twin.links = watched()
        twin._through(step)
    twin.links = links
    return step.skip


def _twin(optimizer: Any, make: Callable[..., Any]) -> Any:
    """The same chain over small parameters of the same kinds."""
    left, groups, links = MOST, [], optimizer.keys.links
    square = any([getattr(link.transform, "keeps_matrices", False) for link in links])
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"p{i}" for i in range(len(group["params"]))]
        rows = list(zip(names, group["params"], strict=True))[: max(left, 1)]
        left -= len(rows)
        live = {key: group[key] for key in optimizer.keys.defaults}
        groups.append({**live, "params": [(name, _small(p, square)) for name, p in rows]})
    options = {name: getattr(optimizer, name) for name in ("fused", "rounding", "state_dtype")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer itself has warned
        twin = make(groups, *optimizer.chain, **options)
    twin._is_trial = True  # explain() may be called on one rank alone
    for link in twin.keys.links:
        if square and getattr(link.transform, "blocks", None) is not None:
            link.transform = link.acts = link.transform.with_values({"blocks": None})
        if getattr(link.transform, "place", "") == "first":  # a guard: all gradients are bad here
            link.transform = link.acts = link.transform.with_values({"max_consecutive": None})
    return twin


def _small(p: Tensor, square: bool) -> Parameter:
    """A parameter of SIZE numbers; nearly `square` where the work grows with its longer side."""
    shape = [SIZE] * p.dim()
    if p.dim() > 1 and square:
        shape = [SIZE // 128, 128, *[1] * (p.dim() - 2)]
    elif p.dim() > 1:  # as many rows as it has, which blocks of them must add up to
        shape = [len(p), max(2, SIZE // max(len(p), 1)), *[1] * (p.dim() - 2)]
    device = "cpu" if p.device.type == "meta" else p.device
    dtype = p.dtype if p.is_floating_point() or p.is_complex() else torch.float32  # never moves
    return Parameter(torch.full(shape, 0.01, dtype=dtype, device=device))


def _places(twin: Any) -> dict[int, str]:
    """The words for each storage: state, a kept buffer, the gradients or the parameters."""
    params = params_of(twin)
    rows: dict[str, list[Any]] = {
        "state": [value for p in params for value in twin.state[p].values()],
        "a kept buffer": twin.engine.lasting(),
        "the gradients": [p.grad for p in params],
        "the parameters": params,
    }
    held = [(t, words) for words, row in rows.items() for t in row if isinstance(t, Tensor)]
    return {t.untyped_storage().data_ptr(): words for t, words in held}


def _parameters(optimizer: Any) -> list[str]:
    sizes: dict[str, list[int]] = {}
    for p in params_of(optimizer):
        kind = f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}"
        sizes.setdefault(kind, []).append(p.numel())
    return [f"{len(n)} parameters, {sum(n):,} numbers in {kind}" for kind, n in sizes.items()]


def _averages(optimizer: Any) -> Iterator[str]:
    """A line about weights for evaluation, where links have some."""
    found = [link.path for link in optimizer.keys.links if averages(link.transform)]
    if found:
        others = [f"averaged({path!r})" for path in found[:-1]]
        more = f", and {' and '.join(others)} those of others" if others else ""
        yield f"weights for evaluation are those of {found[-1]}: averaged() shows them{more}"


def _tails(optimizer: Any) -> Iterator[str]:
    """Yield a line for each tail of the chain, which one pass over memory does."""
    if not optimizer.engine.fuses:
        return
    tails = list(optimizer._plan.tails.values())
    live = optimizer.keys.defaults
    devices = {p.device.type for p in params_of(optimizer)}
    for tail in tails:
        larger = [other for other in tails if len(other.links) > len(tail.links)]
        if any([other.links[-len(tail.links) :] == tail.links for other in larger]):
            continue
        names = [link.path for link in tail.links]
        verb = "are" if len(names) > 1 else "is"
        does = "part of the last subtraction"
        if tail.rule is not None:
            kernel = tail.rule.transform.fused(tail.rule.values(live))
            if devices.isdisjoint(kernel.devices):
                continue
            does = f"one call of {name_of_fused(kernel.function)}"
        line = f"{' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} {verb} {does}."
        if tail.factor is not None:
            line += f" {tail.factor.path}'s factor is applied in the same pass."
        yield line


def _owners(optimizer: Any) -> Iterator[str]:
    """A line for each link whose sharded matrices have owners, and what is gathered instead."""
    matrices = [p for p in params_of(optimizer) if p.dim() > 1]
    layouts = [layout for p in matrices if (layout := layout_of(p)) is not None and layout.split]
    ranks = [len(route(layout)[1]) for layout in layouts]
    for link in optimizer.keys.links:
        needs = getattr(type(link.transform), "operations", TensorwiseTransform.operations)
        keeps = getattr(link.transform, "keeps_matrices", False)
        if not layouts or not (keeps or needs is not TensorwiseTransform.operations):
            continue
        owned, lost = [n for n in ranks if n], ranks.count(0)
        among = " or ".join(map(str, sorted(set(owned))))
        has = f"{len(owned)} have owners among {among} ranks" if owned else "none has an owner"
        why = "that hold a part share no process group"
        rest = f"; {lost} are gathered, since the ranks {why}" if lost else ""
        yield f"{link.path}: of the model's {len(ranks)} sharded matrices {has}{rest}"


def _refreshes(optimizer: Any) -> Iterator[str]:
    """A line for each link with state that is renewed now and then."""
    for link in optimizer.keys.links:
        if getattr(link.transform, "refreshes", False):
            when = link.transform.rhythm
            turns = getattr(link.transform, "stagger", False) and when != "in every step"
            when += ", in turns" if turns else ""
            yield f"{link.path}: a matrix is refreshed {when}, by a program of its own"
