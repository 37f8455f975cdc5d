"""Ledger: what reaches a device, operator by operator, while nothing is computed.

It sees calls, views, host reads, copies, collectives and fresh memory. It does not see time, what
a kernel computes, or what an operator does inside: a few are known to wait there, and are named.
"""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from torchzero_clip.core.torch_private import TorchDispatchMode, known_number, schema, tree_leaves
from torchzero_clip.engines.compiled.printers import launches

WAITS = ("cholesky", "eig", "eigh", "eigvals", "inv", "lstsq", "lu_factor", "solve", "svd")
"""Operators of torch.linalg that wait for the device inside, or may: no fake tensor shows it."""
HERE, TORCH = Path(__file__).parent, Path(torch.__file__).parent
SPEAKING = tuple([str(TORCH / part) for part in ("optim", "nn", "amp", "distributed")])
"""The parts of torch that ask as users do; its other files only hand on."""
OURS = [HERE.parent / "core" / f"{name}.py" for name in ("foreach", "private", "tensorlist")]
TRIAL = str(HERE / "step.py")
SILENT = tuple(map(str, [TORCH, HERE, launches.__file__, *OURS]))
PATIENCE = 20_000
"""Numbers that a step may read: a loop that ends by a value ends never, where there is none."""
NORMS = (1, 2, math.inf)  # that torch has for many tensors at once


class Request(NamedTuple):
    """One operator that was asked of the device.

    Attributes:
        kind: A "call" starts work on the device, a "view" none; "memory" is reserved, and not
            written. A "read" waits for a number, a "copy" goes from one device to another, a
            "collective" to other processes.
        name: As torch calls it.
        calls: The kernels that it starts: a foreach operator off its fast route starts one for
            each tensor.
        given: What it was given: the dtype and shape of tensors, and where those lie that were
            there before the step; and all numbers.
        where: The file and line of the code that asked.
        waits: Whether it waits for the device inside.
        called: Where that is torch's own, the file and line of the code that called it.
        fresh: The bytes of memory that it reserved.
    """

    kind: str
    name: str
    calls: int
    given: tuple[Any, ...]
    where: str
    waits: bool = False
    called: str = ""
    fresh: int = 0

    def __str__(self) -> str:
        return f"{self.where}: {self.name}"


class Given(NamedTuple):
    """A tensor among the arguments of an operator.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        place: Where on the device it lies; None if it was made in this step.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    place: int | None


class Host(NamedTuple):
    """A 0-dim tensor of the host among the arguments: NaN, which equals nothing, if not known."""

    number: float


class NeedsValues(RuntimeError):
    """Raised where a step cannot go on without values, which fake tensors do not have."""


class Ledger(TorchDispatchMode):
    """All that happens between `with ledger:` and the end of the block, inside `fake_cuda`.

    A number that the host reads is noted, and the block goes on as if it were one, or a flag that
    is not set. Where a shape depends on values, nothing can go on: `NeedsValues` names the line.

    Attributes:
        requests: All that was asked, in order.
        fresh: The bytes of memory that were reserved, freed or not.
        peak: The most of these that were in use at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.requests: list[Request] = []
        self.fresh = self.peak = self._alive = self._reads = 0
        self._made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def of(self, *kinds: str) -> list[Request]:
        """What was asked of these kinds."""
        return [request for request in self.requests if request.kind in kinds]

    @property
    def calls(self) -> int:
        """How many kernels start."""
        return sum([request.calls for request in self.of("call")])

    @property
    def reads(self) -> list[Request]:
        """What the host waits for: numbers."""
        return self.of("read")

    @property
    def copies(self) -> list[Request]:
        """What goes from one device to another."""
        return self.of("copy")

    @property
    def collectives(self) -> list[Request]:
        """What goes to other processes."""
        return self.of("collective")

    @property
    def waits(self) -> list[Request]:
        """Operators that wait for the device inside."""
        return [request for request in self.requests if request.waits]

    def __enter__(self) -> Self:
        launches.WATCHED.append(self._launched)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        launches.WATCHED.remove(self._launched)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _launched(self, name: str, given: Sequence[Any]) -> None:
        """Note a kernel of ours, with the form of what it is given."""
        self._note("call", f"triton.{name}", given, 1)

    # ------------------------------------------------------------------ what torch calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any([kind.__name__ == "DTensor" for kind in types]):  # it comes again, as its parts
            return NotImplemented
        kwargs, name, told = kwargs or {}, str(func), schema(func)
        given = _tensors((args, kwargs))
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if _by_mask(name, args):
            self._note("read", name, (args, kwargs))
        elif _needs_values(func, given, kwargs):
            return self._read(func, name, args, kwargs, given)
        out = func(*args, **kwargs)
        made = _tensors(out)
        old = {id(t.untyped_storage()) for t in given}
        new = {id(m): m for t in made if id(m := t.untyped_storage()) not in old and t.is_cuda}
        kind = _kind(name, given + made, bool(new) or told.is_mutable)
        if kind is not None:
            calls = _kernels(name, args) if kind == "call" else 0
            fresh = sum([memory.nbytes() for memory in new.values()])
            self._note(kind, name, (args, kwargs), calls, fresh)
        for memory in new.values():
            self._reserve(memory)
        return out

    def _read(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """A number that the host asks for: what it is, where that is known, or one."""
        if any([t.is_cuda for t in given]):
            self._note("read", name, (args, kwargs))
            self._reads += 1
        if self._reads > PATIENCE:
            raise NeedsValues(f"{_where()[0]} reads number after number: a loop that a value ends?")
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if any(["Tensor" in str(made.type) for made in schema(func).returns]):
                raise NeedsValues(
                    f"{_where()[0]} asks for a shape that depends on values, which fake tensors do "
                    f"not have ({name}): it waits for the device"
                ) from error
        return _one(given[0].dtype)

    def _note(self, kind: str, name: str, given: Any, calls: int = 0, fresh: int = 0) -> None:
        asked = tuple(map(self._form, tree_leaves(given)))
        where, called = _where()
        self.requests.append(Request(kind, name, calls, asked, where, _waits(name), called, fresh))

    def _form(self, x: Any) -> Any:
        """An argument, to be compared: of tensors form and place, of all else what it is."""
        if isinstance(x, Tensor):
            if not x.is_cuda and not x.dim():
                return Host(known_number(x))
            memory = x.untyped_storage()
            lies = None if memory in self._made else getattr(memory, "address", None)
            return Given(x.dtype, tuple(x.shape), lies and lies + x.storage_offset())
        plain = isinstance(x, (int, str, torch.dtype, torch.device)) or x is None
        return x if plain or (isinstance(x, (float, complex)) and x == x) else str(type(x))

    def _reserve(self, memory: torch.UntypedStorage) -> None:
        size = memory.nbytes()
        self._made.add(memory)
        self.fresh, self._alive = self.fresh + size, self._alive + size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(memory, self._free, size)

    def _free(self, size: int) -> None:
        self._alive -= size


def ledgers(make: Callable[[Any], Any], params: Any, steps: int = 3) -> list[Ledger]:
    """The ledgers of some steps, inside `fake_cuda`.

    Args:
        make: Called with the parameters; returns an optimizer, or a function that does a step.
        params: The parameters, with gradients.
        steps: How many steps are done.
    """
    with Ledger():  # so that reads have values
        made = make(params)
    step = getattr(made, "step", made)
    found = []
    for _ in range(steps):
        with Ledger() as ledger:
            step()
        found.append(ledger)
    return found


def differences(one: Ledger, other: Ledger) -> Iterator[tuple[Request, str]]:
    """What the second of two steps asks otherwise than the first, and how.

    A graph of a step may be replayed where nothing is: numbers among the arguments are part of it,
    and so is where tensors lie.
    """
    for a, b in zip(one.requests, other.requests, strict=False):
        if a[:3] != b[:3]:
            yield b, f"comes where {a} came in the step before"
            return
        if a.given != b.given:
            yield b, _change(a.given, b.given)
    if len(one.requests) != len(other.requests):
        rest = (one.requests, other.requests)[len(one.requests) < len(other.requests)]
        yield rest[min(len(one.requests), len(other.requests))], "comes in one of two steps alone"


def same(one: Ledger, other: Ledger) -> str | None:
    """None where two steps ask the same, else a sentence with the first difference."""
    return next((f"{request} {words}" for request, words in differences(one, other)), None)


# ---------------------------------------------------------------------- what an operator is


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in tree_leaves(x) if isinstance(t, Tensor)]


def _needs_values(func: Any, given: Sequence[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether the host must wait for values: for a number, or for a shape."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    told = kwargs.get("output_size") is not None  # what is repeated, and how often in all
    if told or torch.Tag.dynamic_output_shape not in func.tags:
        return False
    by_index = func.overloadpacket.__name__.startswith(("index", "_unsafe_index"))
    return not by_index or any([t.dtype in (torch.bool, torch.uint8) for t in given[1:]])


def _by_mask(name: str, args: Sequence[Any]) -> bool:
    """Whether entries are written by a mask, of which torch asks how many; one fill needs none."""
    if not name.startswith(("aten.index_put", "aten._index_put", "aten._unsafe_index_put")):
        return False
    masks = [t for t in _tensors(args[1]) if t.dtype in (torch.bool, torch.uint8) and t.is_cuda]
    fills = args[2].numel() == 1 and not args[2].is_cuda
    return bool(masks) and not fills


def _kind(name: str, tensors: Sequence[Tensor], works: bool) -> str | None:
    """The kind of an operator that has these tensors; None of what the host does alone."""
    devices = {t.device.type for t in tensors}
    if "c10d" in name:
        return "collective"
    if "cuda" not in devices:
        return None
    if len(devices) > 1:
        moves = "copy" in name or any([t.dim() for t in tensors if not t.is_cuda])
        if moves:  # a 0-dim tensor is a number else
            return "copy"
    if not works:
        return "view"
    reserves = name.startswith(("aten.empty", "aten.new_empty"))
    return "memory" if reserves else "call"


def _kernels(name: str, args: Sequence[Any]) -> int:
    """How many kernels an operator starts: several where foreach is off its fast route."""
    if not name.startswith("aten._foreach_"):
        return 1
    lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
    numbers = [x for x in tree_leaves(args) if isinstance(x, (int, float, complex))]
    single = [x for x in args if isinstance(x, Tensor)]
    first = lists[0][0].dtype
    dtypes = [{t.dtype for t in some} for some in lists]
    one = all([len(some) == 1 for some in dtypes])
    if not name.startswith("aten._foreach_copy"):
        one = one and len(set.union(*dtypes)) == 1
    one = one and all([x.dtype == first for x in single if x.is_cuda])
    rows = zip(*lists, strict=True)
    alike = all([len({(t.shape, t.stride()) for t in row}) == 1 for row in rows])
    dense = all([_dense(t) for some in lists for t in some])
    promotes = not (first.is_floating_point or first.is_complex)
    promotes = promotes and any([isinstance(x, float) for x in numbers])
    known = not name.startswith("aten._foreach_norm") or not numbers or numbers[0] in NORMS
    return 1 if one and alike and dense and known and not promotes else len(lists[0])


def _dense(t: Tensor) -> bool:
    """Whether the requests are all of a piece of memory, each once."""
    if t.is_contiguous():
        return True
    room = 1
    for step, n in sorted([(s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]):
        if step != room:
            return False
        room *= n
    return True


def _waits(name: str) -> bool:
    """Whether an operator is one of WAITS, under one of its names."""
    home, operator, *_ = name.split(".")
    words = operator.removeprefix("_").removeprefix("linalg_").removesuffix("_ex")
    return home == "aten" and words in WAITS


def _one(dtype: torch.dtype) -> bool | int | float:
    """What is put in the place of a number that is not known."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _change(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """How the arguments of an operator are others than in the step before."""
    for a, b in zip(before, now, strict=False):
        if a == b:
            continue
        if isinstance(b, Host):
            return "is given a number of the host in a tensor, and a graph keeps what it once was"
        if isinstance(a, Given) and isinstance(b, Given) and a[:2] == b[:2]:
            return "is given a tensor that lay elsewhere in the step before: write state in place"
        return f"is given {_plain(b)}, which was {_plain(a)} in the step before"
    return f"is given {len(now)} arguments, which were {len(before)} in the step before"


def _plain(x: Any) -> Any:
    if isinstance(x, Given):
        return f"a tensor of {x.dtype} and shape {x.shape}"
    return f"{x:.4g}" if isinstance(x, float) else x


def _where() -> tuple[str, str]:
    """The file and line of the code that asked, and of the code outside of torch if it is torch."""
    asked = ""
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if file == TRIAL and asked:  # the step is torch's own
            break
        if not file.startswith(SILENT):
            place = f"{file}:{line}"
            return (asked, place) if asked else (place, "")
        if not asked and file.startswith(SPEAKING):
            asked = f"{file}:{line}"
    return asked or "an unknown place", ""


def lines(requests: Iterable[Request]) -> list[str]:
    """The places that asked, each once, in order."""
    return list(dict.fromkeys(map(str, requests)))
