"""Kernels: what a tape noted, as one function of several tensors at a time, compiled by torch.

A kernel takes WIDTH flat tensors of any sizes and is called in turns, so that the time to compile
does not grow with the model, and no change of sizes, numbers or of which parameters have gradients
makes another. Many small tensors of one shape are stacked and go as the rows of a matrix.
"""

from __future__ import annotations

import linecache
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchzero_clip.core.norms import numbers
from torchzero_clip.core.scratch import MANY, PIECE, SMALL
from torchzero_clip.core.tensorlist import base_of

if TYPE_CHECKING:
    from torchzero_clip.core.tape import Tape

Ref: TypeAlias = "tuple[str, Any]"
"""An operand of a line: ("value", line), ("number", i), ("scalar", i), ("row", i) and the like."""

WIDTH = 16  # tensors that a kernel takes at a time
MOST = 1000  # homes that are remembered
DUMMY = 2**16  # numbers in the tensors that a kernel is compiled with: large enough for threads
BOOLEAN = ("isfinite", "isinf", "isnan", "positive")
FORMULAS: dict[str, Callable[..., str]] = {
    "mul": "{} * {}".format,
    "div": "{} / {}".format,
    "add": "{} + {}".format,
    "sub": "{} - {}".format,
    "add_scaled": "{0} + {2} * {1}".format,
    "addcmul": lambda x, a, b, scale=None: (
        f"{x} + {a} * {b}" if scale is None else f"{x} + {scale} * {a} * {b}"
    ),
    "lerp": "torch.lerp({0}, {1}, {2}.to({0}.dtype))".format,
    "clamp_min": "torch.maximum({}, {})".format,
    "clamp_max": "torch.minimum({}, {})".format,
    "where": "torch.where({1}, {0}, {2})".format,
    "hypot": "torch.hypot({}, {})".format,
    "positive": "{} > 0".format,
    "to": "{}.to({})".format,
    "neg": "-{}".format,
}
"""Where the source of a line is more than torch.name(operand)."""


class Kernel(NamedTuple):
    """A piece of a tape, in canonical names: equal pieces are compiled once in a process."""

    lines: tuple[tuple[str, tuple[Ref, ...]], ...]
    stores: tuple[tuple[int, int], ...]
    """(which list, the line that goes there)"""
    lists: tuple[torch.dtype, ...]
    rows: tuple[torch.dtype, ...]
    scalars: tuple[torch.dtype, ...]
    device: torch.device

    def source(self, width: int, stacked: bool) -> str:
        """The function of `width` tensors of each list, or of one of which each row is a tensor."""
        inputs = ["numbers", *[f"row{i}" for i in range(len(self.rows))]]
        inputs += [f"scalar{i}" for i in range(len(self.scalars))]
        inputs += [f"x{i}_{lane}" for i in range(len(self.lists)) for lane in range(width)]
        body = ["number = numbers.unbind()"]
        if not stacked:
            body += [f"row{i} = row{i}.unbind()" for i in range(len(self.rows))]
        for lane in range(width):
            body += self._lane(lane, stacked)
        return "\n    ".join([f"def kernel({', '.join(inputs)}):", *body])

    def _lane(self, lane: int, stacked: bool) -> list[str]:
        first = ""

        def operand(ref: Ref) -> str:
            kind, which = ref
            if kind == "row" and not stacked:
                return f"row{which}[{lane}]"
            if kind == "row" and self.rows[which].is_floating_point:  # a column, not a number
                return f"row{which}.to({first}.dtype)"
            return {
                "list": f"x{which}_{lane}",
                "value": f"v{which}_{lane}",
                "number": f"number[{which}]",
                "dtype": str(which),
            }.get(kind, f"{kind}{which}")

        body = []
        kept = [value for _, value in self.stores]
        for i, (name, refs) in enumerate(self.lines):
            first = f"v{refs[0][1]}_{lane}"
            terms = [operand(ref) for ref in refs]
            if name == "load":
                text = terms[0] + (".clone()" if i in kept else "")
            elif name in FORMULAS:
                text = FORMULAS[name](*terms)
            else:
                text = f"torch.{name}({', '.join(terms)})"
            body.append(f"v{i}_{lane} = {text}")
        return body + [f"x{home}_{lane}.copy_(v{value}_{lane})" for home, value in self.stores]


@cache
def plain(kernel: Kernel, width: int, stacked: bool = False) -> Callable[..., None]:
    """The function itself, run line by line."""
    source = kernel.source(width, stacked)
    name = f"<torchzero_clip kernel {zlib.crc32(source.encode()):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch}
    exec(compile(source, name, "exec"), space)
    made: Callable[..., None] = space["kernel"]
    return made


@cache
def compiled(kernel: Kernel, width: int, stacked: bool = False) -> Callable[..., None]:
    """The same, compiled with tensors that are large and all of other sizes."""
    function = plain(kernel, width, stacked)
    inner: list[Callable[..., None]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        from torch._dynamo import lookup_backend  # takes as long to import as torch

        made = lookup_backend("inductor")(graph, inputs)
        direct = _without_guards(graph, made, list(signature(function).parameters))
        if kernel.device.type == "cpu" and direct is not None:
            inner.append(direct)
        return made

    shapes = [(64 + i, DUMMY // 64) if stacked else (DUMMY + 64 * i,) for i in range(width)]
    make = [(dtype, shape) for dtype in kernel.lists for shape in shapes]
    length = (64, 1) if stacked else (width,)
    guarded = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    guarded(
        torch.ones(_count(kernel), dtype=torch.float64, device=kernel.device),
        *[torch.ones(length, dtype=dtype, device=kernel.device) for dtype in kernel.rows],
        *[torch.ones((), dtype=dtype, device=kernel.device) for dtype in kernel.scalars],
        *[torch.ones(shape, dtype=dtype, device=kernel.device) for dtype, shape in make],
    )
    return inner[0] if inner else guarded


def _without_guards(graph: Any, made: Any, names: list[str]) -> Callable[..., None] | None:
    """The compiled graph, called with the arguments of the function in the graph's order.

    torch checks 64 tensors before each call, which takes as long as the work on small ones; here
    they are what they should be. None where the graph is not as open to sizes as it should be.
    """
    places: list[tuple[int, int | None]] = []  # (argument, None) or (argument, which of its sizes)
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    sizes: dict[str, tuple[int, int]] = {}
    for node in inputs:
        value, name = node.meta.get("example_value"), node.name[2:-1]
        if isinstance(value, Tensor):
            if name not in names or (name[0] == "x" and any([type(n) is int for n in value.shape])):
                return None
            for d, size in enumerate(value.shape):
                sizes.setdefault(str(size), (names.index(name), d))
    for node in inputs:
        value = node.meta["example_value"]
        if not isinstance(value, Tensor) and str(value) not in sizes:
            return None
        whole = (names.index(node.name[2:-1]), None) if isinstance(value, Tensor) else None
        places.append(whole or sizes[str(value)])

    def call(*args: Tensor) -> None:
        made(*[args[i] if d is None else args[i].shape[d] for i, d in places])

    return call


def _count(kernel: Kernel) -> int:
    """How many numbers a kernel takes: at least one, since torch compiles none otherwise."""
    return max(
        [ref[1] + 1 for _, refs in kernel.lines for ref in refs if ref[0] == "number"] or [1]
    )


class Home:
    """Tensors that a tape reads and writes, and what was found out about them."""

    def __init__(self, tensors: Sequence[Tensor], views: bool = False) -> None:
        self.tensors = list(tensors)
        self.places = _places(tensors, views)
        self.views = views  # whether somebody may give them another shape
        self._flats: list[Tensor | None] | None = None
        self.shapes: list[torch.Size] | None = None  # of the parameters, once they are known to be
        self._stacks: dict[int, Tensor | None] = {}
        self.contiguous = all(map(Tensor.is_contiguous, tensors))

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, in the memory they had."""
        if len(tensors) != len(self.tensors) or not all(map(operator.is_, tensors, self.tensors)):
            return False
        return _places(tensors, self.views) == self.places

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def flats(self) -> list[Tensor | None]:
        """The same memory as vectors that are no views of the tensors; None where it has gaps."""
        if self._flats is None:
            if self.contiguous:
                self._flats = [t.view(-1).data for t in self.tensors]
            else:
                self._flats = [_flat(t) for t in self.tensors]
        return self._flats

    def stack(self, some: list[int]) -> Tensor | None:
        """Some of the tensors as the rows of a matrix, if that is their memory."""
        if some[0] not in self._stacks:
            base = base_of([self.tensors[i] for i in some])
            if base is not None:
                base = base.view(len(some), -1).data if base.is_contiguous() else None
            self._stacks[some[0]] = base
        return self._stacks[some[0]]


class Split(NamedTuple):
    """How the tensors of a bucket go into kernels."""

    wide: list[int]
    crowds: list[list[int]]  # many, small, and of one shape
    single: list[int]  # of one number: torch would compile these apart


class Compiler:
    """Runs the tapes of one optimizer, and remembers what lasts from step to step."""

    make = staticmethod(compiled)
    """What makes a function of a kernel; `plain` makes one that is not compiled."""

    def __init__(self) -> None:
        self.devices: set[str] = set()  # that kernels can be compiled for
        self.homes: dict[Any, Home] = {}
        self.splits: dict[Any, tuple[list[torch.Size], Split]] = {}
        self.pads: dict[Kernel, list[Tensor]] = {}
        self.rooms: dict[Any, tuple[Tensor, list[Tensor]]] = {}

    def check(self, device: torch.device) -> None:
        """Raise a sentence where torch cannot compile for this kind of device."""
        kind = device.type
        if kind not in self.devices:
            why = _missing(kind)
            if why is not None:
                raise RuntimeError(f"compile=True {why}; leave compile out to step without it")
            self.devices.add(kind)

    def home(self, key: Any, tensors: Sequence[Tensor], views: bool = False) -> Home:
        """What is known of tensors that come under this key in every step."""
        held = self.homes.get(key)
        if held is None or not held.same(tensors):
            if len(self.homes) >= MOST:  # parameters come and go
                for memory in (self.homes, self.splits, self.rooms):
                    memory.clear()
            held = self.homes[key] = Home(tensors, views)
        return held

    def split(self, tape: Tape) -> Split:
        """How its tensors go into kernels."""
        shapes, split = self.splits.get(tape.key, (None, None))
        if split is None or shapes is not tape.shapes:
            split = _split(tape.shapes, tape.homes[0].tensors[0].device)
            self.splits[tape.key] = tape.shapes, split
        return split

    def run(self, tape: Tape, stores: Mapping[int, int]) -> None:
        """Do what was noted on a tape, and store values in homes."""
        job = Job(tape, stores)
        wide, crowds, odd = self.split(tape)
        if not all([home.contiguous for home in job.homes]):
            fits = [i for i in wide if job.fits(i)]
            odd = [*odd, *[i for i in wide if i not in set(fits)]]
            wide = fits
        for begin in reversed(range(0, len(wide), WIDTH)):  # what a norm read last is in the cache
            self._wide(job, wide[begin : begin + WIDTH])
        for some in crowds:
            self._stacked(job, some)
        for position in job.written:  # autograd looks at versions, kernels do not move them
            increment_version(job.homes[position].tensors)
        for i in odd:
            rows = [row[i : i + 1] for row in job.rows]
            tensors = [torch.atleast_1d(home.tensors[i]) for home in job.homes]
            plain(job.kernel, 1)(job.numbers, *rows, *job.scalars, *tensors)

    def _wide(self, job: Job, some: list[int]) -> None:
        """One call of the kernel, filled up with small tensors where these are the last."""
        missing = WIDTH - len(some)
        pads = self._padding(job.kernel) if missing else []
        flats = []
        for position, home in enumerate(job.homes):
            flats += [home.flats[i] for i in some]
            flats += pads[position * WIDTH : position * WIDTH + missing]
        rows = []
        for row in job.rows:
            together = some[-1] - some[0] == len(some) - 1
            part = row[some[0] : some[-1] + 1] if together else row[some]
            rows.append(torch.cat([part, part.new_ones(missing)]) if missing else part.data)
        self.make(job.kernel, WIDTH)(job.numbers, *rows, *job.scalars, *flats)

    def _stacked(self, job: Job, some: list[int]) -> None:
        """Tensors of one shape as the rows of a matrix."""
        shape, stacks, back = job.homes[0].tensors[some[0]].shape, [], []
        for position, home in enumerate(job.homes):
            stack = home.stack(some)
            if stack is not None:
                stacks.append(stack)
                continue
            room, parts = self._room(position, home.dtype, len(some), shape)
            tensors = [home.tensors[i] for i in some]
            if position in job.read:
                torch.stack(tensors, out=room)
            if position in job.written:
                back.append((tensors, parts))
            stacks.append(room.view(len(some), -1).data)
        rows = [row[some].view(-1, 1).data for row in job.rows]
        self.make(job.kernel, 1, True)(job.numbers, *rows, *job.scalars, *stacks)
        for tensors, parts in back:
            torch._foreach_copy_(tensors, parts)

    def _padding(self, kernel: Kernel) -> list[Tensor]:
        """Small tensors that fill the last call."""
        if kernel not in self.pads:
            make = [dtype for dtype in kernel.lists for _ in range(WIDTH)]
            self.pads[kernel] = [torch.ones(2, dtype=d, device=kernel.device) for d in make]
        return self.pads[kernel]

    def _room(self, position: int, dtype: torch.dtype, count: int, shape: torch.Size) -> Any:
        """Kept memory for a stack, and its parts."""
        key = position, dtype, count, shape
        if key not in self.rooms:
            room = torch.empty(count, *shape, dtype=dtype, device="cpu")
            self.rooms[key] = room, list(room.unbind())
        return self.rooms[key]


def _missing(kind: str) -> str | None:
    """What torch lacks to compile for a kind of device."""
    if kind == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "needs Triton for parameters on cuda: pip install triton"
    if kind != "cpu":
        return f"works for parameters on cpu and cuda, got some on {kind}"
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
    except ImportError:  # another torch has it elsewhere, and says so itself at the first step
        return None
    try:
        get_cpp_compiler()
    except Exception as error:
        return (
            "needs a C++ compiler: install g++ or clang, or name one in the environment variable "
            f"CXX (torch found none: {type(error).__name__})"
        )
    return None


class Job:
    """The part of a tape that some stores need: a kernel, and what it is called with."""

    def __init__(self, tape: Tape, stores: Mapping[int, int]) -> None:
        needed = set(stores.values())
        for i in range(len(tape.lines) - 1, -1, -1):
            if i in needed:
                needed |= {which for kind, which in tape.lines[i][1] if kind == "value"}
        new: dict[str, dict[Any, int]] = {
            kind: {} for kind in ("value", "list", "number", "row", "scalar")
        }

        def name(kind: str, which: Any) -> Ref:  # in the order of use, whatever else the tape holds
            return kind, new[kind].setdefault(which, len(new[kind])) if kind in new else which

        lines = []
        for i in sorted(needed):
            lines.append((tape.lines[i][0], tuple([name(*ref) for ref in tape.lines[i][1]])))
            name("value", i)
        ends = [(name("list", h)[1], name("value", v)[1]) for h, v in stores.items()]
        self.homes = [tape.homes[h] for h in new["list"]]
        self.rows = [tape.rows[i] for i in new["row"]]
        self.scalars = [tape.scalars[i] for i in new["scalar"]]
        self.written = {home for home, _ in ends}
        self.read = {refs[0][1] for operator, refs in lines if operator == "load"}
        self.kernel = Kernel(
            tuple(lines),
            tuple(sorted(ends)),
            tuple([home.dtype for home in self.homes]),
            tuple([row.dtype for row in self.rows]),
            tuple([scalar.dtype for scalar in self.scalars]),
            self.homes[0].tensors[0].device,
        )
        like = torch.empty(0, dtype=torch.float64, device=self.kernel.device)
        self.numbers = numbers([tape.numbers[i] for i in new["number"]] or [0.0], like)

    def fits(self, i: int) -> bool:
        """Whether the i-th tensors are without gaps, and in one order."""
        if any([home.flats[i] is None for home in self.homes]):
            return False
        strides = {home.tensors[i].stride() for home in self.homes}
        return len(strides) == 1 or all([home.tensors[i].is_contiguous() for home in self.homes])


def _split(shapes: Sequence[torch.Size], device: torch.device) -> Split:
    alike: dict[torch.Size, list[int]] = {}
    for i, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(i)
    wide, single, crowds = [], [], []
    for shape, some in alike.items():
        if shape.numel() < 2:
            single += some if shape.numel() else []
        elif device.type == "cpu" and len(some) >= MANY and shape.numel() <= SMALL:
            many = PIECE // shape.numel()
            parts = [some[begin : begin + many] for begin in range(0, len(some), many)]
            wide += parts.pop() if len(parts[-1]) < MANY else []
            crowds += parts
        else:
            wide += some
    return Split(sorted(wide), crowds, single)


def _places(tensors: Sequence[Tensor], views: bool) -> list[Any]:
    """Where tensors are in memory, and how they lie there."""
    if not views:
        return [t.data_ptr() for t in tensors]
    return [(t.data_ptr(), t.shape, t.stride()) for t in tensors]


def _flat(t: Tensor) -> Tensor | None:
    order = sorted(range(t.dim()), key=t.stride, reverse=True)
    t = t.permute(order)
    return t.view(-1).data if t.is_contiguous() else None
