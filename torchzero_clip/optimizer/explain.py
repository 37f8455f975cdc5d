"""What a step of a chain does with memory, watched on a small model and told in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchzero_clip.core.compiler import Compiler
from torchzero_clip.core.kernel import Job
from torchzero_clip.core.norms import Measure
from torchzero_clip.core.norms.scratch import PIECE, SCRATCH

if TYPE_CHECKING:
    from torchzero_clip.core.tape import Tape
    from torchzero_clip.optimizer.modular import Modular

SIZE = 2**13  # numbers in a parameter that stands for a large one
MOST = 64  # parameters that stand for all
ONLY_WRITE = ("copy_", "zero_", "fill_")


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write, and in which memory."""

    def __init__(self, places: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places  # storage -> what it holds
        self.read = self.written = 0
        self.where: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self.inside = False  # a compiled kernel, which is one pass whatever it is made of
        self.piece: object = None  # that is worked on, and what of it is in the cache, or changed
        self.cached: set[int] = set()
        self.dirty: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        arguments, name = func._schema.arguments, func._schema.name.removeprefix("aten::")
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        makes = all([r.alias_info is None for r in func._schema.returns])
        if self.inside or not (written or makes):  # a view moves nothing
            return out
        named = dict(zip([a.name for a in arguments], args, strict=False)) | kwargs
        if named.get("grad_scale") is None:  # fused kernels write gradients when they scale them
            written.discard("grads")
        touched = 0
        for key, value in named.items():
            only = key in written and (key == "out" or name in ONLY_WRITE)
            touched += self.count(value, reads=not only, writes=key in written)
        if makes:
            touched += self.count(out, reads=False, writes=True)
        if touched:
            self.operators[name] += 1
        return out

    def count(self, value: Any, reads: bool, writes: bool) -> int:
        """Count what is as large as a parameter, but no scratch that stays in the cache."""
        total = 0
        for t in tree_leaves(value):
            if isinstance(t, Tensor) and t.numel() >= SIZE // 2 and not _scratch(t):
                total += self._count(t, reads, writes)
        return total

    def _count(self, t: Tensor, reads: bool, writes: bool) -> int:
        storage = t.untyped_storage().data_ptr()
        if SCRATCH.piece is not self.piece:
            self.piece, self.cached, self.dirty = SCRATCH.piece, set(), set()
        if self.piece is not None:
            if storage not in self.places:  # what is made on the way
                return 0
            reads, writes = (
                reads and storage not in self.cached,
                writes and storage not in self.dirty,
            )
            self.cached.add(storage)
            self.dirty |= {storage} if writes else set()
        bytes_ = t.numel() * t.element_size()
        self.read += bytes_ * reads
        self.written += bytes_ * writes
        if writes:
            self.where[self.places.get(storage, "new memory")] += 1
        return bytes_ * (reads + writes)


class Watched(Compiler):
    """Runs tapes uncompiled, and counts what the compiled kernels would move."""

    way = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.traffic: Traffic | None = None

    def check(self, device: torch.device) -> None:
        """Nothing is compiled."""

    def run(
        self, tape: Tape, stores: Mapping[int, int], measured: tuple[Measure, int] | None = None
    ) -> Tensor | None:
        job = Job(tape, stores, measured)
        if self.traffic is None:
            return super().run(tape, stores, measured)
        for i, home in enumerate(job.homes):
            if i in job.read:
                self.traffic.count(home.tensors, reads=True, writes=False)
            if i in job.written:
                self.traffic.count(home.tensors, reads=False, writes=True)
        self.traffic.operators["one compiled kernel"] += 1
        self.traffic.inside = True
        stats = super().run(tape, stores, measured)
        self.traffic.inside = False
        return stats


def explain(optimizer: Modular) -> str:
    """The plan of a chain: for each link the passes over memory, in bytes for each number."""
    twin = _twin(optimizer)
    for _ in range(3):
        _give_gradients(twin)
        twin.step()
    _give_gradients(twin)
    numbers = sum([p.numel() for group in twin.param_groups for p in group["params"]])
    rows = [_row(label, traffic, numbers) for label, traffic in _watch(twin)]
    reads, writes = sum([row[1] for row in rows]), sum([row[2] for row in rows])
    kept = len({spare for _, spare in twin._rooms})
    width = max([len(row[0]) for row in rows])
    lines = [repr(optimizer.chain)[len("Chain(") : -1], *_parameters(optimizer), ""]
    lines.append(f"{'':{width}}  reads  writes   bytes a number")
    lines += [f"{label:{width}}  {r:5.3g}  {w:6.3g}   {how}" for label, r, w, how in rows]
    buffers = {0: "none", 1: "one buffer", 2: "two buffers"}[kept]
    size = " of the parameters' size" if kept else ""
    lines.append(f"{'in all':{width}}  {reads:5.3g}  {writes:6.3g}")
    return "\n".join(
        [*lines, "", f"Memory kept between steps, besides the state: {buffers}{size}."]
    )


def _watch(twin: Modular) -> Iterator[tuple[str, Traffic]]:
    """A step, link by link."""
    places = _places(twin)
    with torch.no_grad():
        buckets, late = twin._late(twin._buckets())
        for link in twin.links:
            with _watching(twin, places) as traffic:
                buckets = link.step(buckets) if buckets else buckets
            yield link.path, traffic
        with _watching(twin, places) as traffic:
            twin._finish(buckets, late)
        yield "the end", traffic


def _watching(twin: Modular, places: dict[int, str]) -> Traffic:
    traffic = Traffic(places)
    if isinstance(twin.compiler, Watched):
        twin.compiler.traffic = traffic
    return traffic


def _row(label: str, traffic: Traffic, numbers: int) -> tuple[str, float, float, str]:
    read, written = traffic.read / numbers, traffic.written / numbers
    operators = ", ".join(sorted(traffic.operators))
    where = " and ".join(sorted(traffic.where))
    if label == "the end":
        how = f"writes {where}: {operators}" if written else "nothing is left to do"
    elif not traffic.operators:
        how = "nothing yet: it joins a later pass"
    elif written:
        how = f"writes {where}: {operators}"
    else:
        how = f"measures: {operators}"
    return label, read, written, how


def _twin(optimizer: Modular) -> Modular:
    """The same chain over small parameters of the same kinds."""
    from torchzero_clip.optimizer.modular import Modular

    left, groups = MOST, []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"p{i}" for i in range(len(group["params"]))]
        rows = list(zip(names, group["params"], strict=True))[: max(left, 1)]
        left -= len(rows)
        live = {key: group[key] for key in optimizer.names.defaults}
        groups.append({**live, "params": [(name, _small(p)) for name, p in rows]})
    twin = Modular(groups, *optimizer.chain, fused=optimizer.fused, rounding=optimizer.rounding)
    twin.compiler = None if optimizer.compiler is None else Watched()
    return twin


def _small(p: Tensor) -> Parameter:
    shape = [SIZE >> (p.dim() - 1), *[2] * (p.dim() - 1)] if p.dim() else []
    device = "cpu" if p.device.type == "meta" else p.device
    return Parameter(torch.full(shape, 0.01, dtype=p.dtype, device=device))


def _give_gradients(twin: Modular) -> None:
    for group in twin.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 100.0)  # so that limits bite


def _places(twin: Modular) -> dict[int, str]:
    """What each storage holds."""
    places: dict[int, str] = {}

    def hold(tensors: Sequence[Any], what: str) -> None:
        rows = [t for t in tensors if isinstance(t, Tensor)]
        places.update({t.untyped_storage().data_ptr(): what for t in rows})

    params = [p for group in twin.param_groups for p in group["params"]]
    hold([value for p in params for value in twin.state[p].values()], "state")
    hold([t for room in twin._rooms.values() for t in room.values()], "a kept buffer")
    hold([p.grad for p in params], "the gradients")
    hold(params, "the parameters")
    return places


def _parameters(optimizer: Modular) -> list[str]:
    found: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for group in optimizer.param_groups:
        for p in group["params"]:
            kind = f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}"
            found[kind] += 1
            sizes[kind] += math.prod(p.shape)
    return [f"{found[kind]} parameters, {sizes[kind]:,} numbers in {kind}" for kind in found]


def _scratch(t: Tensor) -> bool:
    return t.untyped_storage().nbytes() == PIECE * t.element_size()
