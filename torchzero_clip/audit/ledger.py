"""Ledger: a record of all operators that a step calls on a fake GPU, which computes nothing.

A ledger records kernel calls, views, values that the host reads, copies between devices,
collectives and new memory. It does not record times or results. A ledger also cannot look inside an
operator. Some operators are known to synchronize inside. `WAITS` lists these operators.
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

from torchzero_clip.core import foreach, tensorlist, torch_private
from torchzero_clip.core.torch_private import TorchDispatchMode, known_number, schema, tree_leaves
from torchzero_clip.engines.compiled.printers import launches

WAITS = ("cholesky", "eig", "eigh", "eigvals", "inv", "lstsq", "lu_factor", "solve", "svd")
"""Operators of torch.linalg that may synchronize inside. Fake tensors do not show this."""
AUDIT = Path(__file__).parent
TORCH = Path(torch.__file__).parent
TORCH_CALLERS = tuple([str(TORCH / part) for part in ("optim", "nn", "amp", "distributed")])
"""The parts of torch that call operators as users do. Other files of torch only pass calls on, so a
request never names a line of such a file."""
PASSING_ON = (launches, foreach, torch_private, tensorlist)
"""Modules of this library that only pass calls on to torch or to Triton."""
SILENT = (str(TORCH), str(AUDIT), *[str(module.__file__) for module in PASSING_ON])
"""A request never names a line of these files. It names the code that called them instead."""
READS_ALLOWED = 20_000
"""The largest number of values that a step may read. Fake tensors have no values, so a loop that
runs until a value is small would never end."""
FAST_NORMS = (1, 2, math.inf)
"""The orders of norms that torch computes for many tensors in one kernel."""


class Request(NamedTuple):
    """One operator that a step called on the device.

    Attributes:
        kind: A "call" starts a kernel. A "view" starts no kernel. A "memory" request allocates
            memory and does not write it. A "read" is a value that the host waits for. A "copy"
            moves data between two devices. A "collective" exchanges data with other processes.
        name: The name of the operator in torch.
        calls: The number of kernels that the operator starts. A foreach operator starts one kernel
            for each tensor if it cannot use torch's fast route.
        given: The arguments, in a form that can be compared with another step. They contain all
            numbers, and the dtype, shape and address of each tensor. A tensor that this step
            allocated has no address.
        where: The file and line of the code that called the operator.
        waits: Whether the operator synchronizes inside.
        called: If `where` is a line of torch, the file and line of the code that called torch.
            Empty if the step itself is a method of torch.
        fresh: The number of bytes that the operator allocated.
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


class TensorArgument(NamedTuple):
    """A tensor among the arguments of an operator, in a form that can be compared.

    Attributes:
        dtype: The dtype of the tensor.
        shape: The shape of the tensor.
        place: The address of the tensor on the device, or None if this step allocated the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    place: int | None


class HostScalar(NamedTuple):
    """A 0-dim CPU tensor among the arguments of an operator.

    Attributes:
        number: The value, or NaN if the value is not known. NaN is not equal to any number, so an
            unknown value always counts as a change.
    """

    number: float


class NeedsValues(RuntimeError):
    """An error that says that a step needs values, which fake tensors do not have."""


class Ledger(TorchDispatchMode):
    """A context manager that records all operators that a block calls, inside `fake_cuda`.

    If the block reads a value on the host, the ledger records the read. The block then continues
    with the value 1, or False for a bool. If a shape depends on values, the block cannot continue.
    The ledger then raises `NeedsValues` with a message that names the line.

    Attributes:
        requests: All requests of the block, in order.
        fresh: The number of bytes that the block allocated, including memory that it has freed.
        peak: The largest number of allocated bytes that were in use at the same time.

    Example:
        >>> import torch
        >>> from torchzero_clip.audit import Ledger, fake_cuda
        >>> with fake_cuda(), Ledger() as ledger:
        ...     x = torch.ones(8, device="cuda:0")
        ...     total = x.sum().item()
        >>> print(ledger.calls, len(ledger.reads))
        2 1
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.requests: list[Request] = []
        self.fresh = 0
        self.peak = 0
        self._bytes_in_use = 0
        self._count_of_reads = 0
        self._allocated: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def of(self, *kinds: str) -> list[Request]:
        """Return the requests of the given kinds, in order."""
        return [request for request in self.requests if request.kind in kinds]

    @property
    def calls(self) -> int:
        """The number of kernels that the block starts."""
        return sum([request.calls for request in self.of("call")])

    @property
    def reads(self) -> list[Request]:
        """The requests that read a value on the host."""
        return self.of("read")

    @property
    def copies(self) -> list[Request]:
        """The requests that copy data from one device to another."""
        return self.of("copy")

    @property
    def collectives(self) -> list[Request]:
        """The requests that exchange data with other processes."""
        return self.of("collective")

    @property
    def waits(self) -> list[Request]:
        """The requests whose operator synchronizes inside."""
        return [request for request in self.requests if request.waits]

    def __enter__(self) -> Self:
        launches.WATCHED.append(self._launched)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        launches.WATCHED.remove(self._launched)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _launched(self, name: str, arguments: Sequence[Any]) -> None:
        """Record the launch of a Triton kernel of this library."""
        self._record("call", f"triton.{name}", arguments, 1)

    # ------------------------------------------------------------------ what torch calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any([kind.__name__ == "DTensor" for kind in types]):
            return NotImplemented  # torch then dispatches the operators on the local shards
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        name = str(func)
        inputs = _tensors((args, kwargs))
        if _counts_a_mask(name, args):
            self._record("read", name, (args, kwargs))
        elif _needs_values(func, inputs, kwargs):
            return self._read(func, name, args, kwargs, inputs)
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        old = {id(t.untyped_storage()) for t in inputs}
        new = {id(m): m for t in outputs if id(m := t.untyped_storage()) not in old and t.is_cuda}
        kind = _kind(name, inputs + outputs, bool(new) or schema(func).is_mutable)
        if kind is not None:
            calls = _kernels(name, args) if kind == "call" else 0
            fresh = sum([memory.nbytes() for memory in new.values()])
            self._record(kind, name, (args, kwargs), calls, fresh)
        for memory in new.values():
            self._allocate(memory)
        return result

    def _read(self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Record that the host reads a value. Return the value if it is known, otherwise 1."""
        if any([t.is_cuda for t in inputs]):
            self._record("read", name, (args, kwargs))
            self._count_of_reads += 1
        if self._count_of_reads > READS_ALLOWED:
            raise NeedsValues(
                f"{_where()[0]} copies more than {READS_ALLOWED} values to the CPU. Check "
                "this line for a loop that ends only if a tensor has a certain value"
            )
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if any(["Tensor" in str(returned.type) for returned in schema(func).returns]):
                raise NeedsValues(
                    f"{_where()[0]} calls {name}, which synchronizes with the GPU. Replace "
                    f"{name} with an operator whose output shape does not depend on values, "
                    "such as torch.where"
                ) from error
        return _stand_in(inputs[0].dtype)

    def _record(self, kind: str, name: str, arguments: Any, calls: int = 0, fresh: int = 0) -> None:
        comparable = tuple(map(self._comparable, tree_leaves(arguments)))
        where, called = _where()
        request = Request(kind, name, calls, comparable, where, _waits(name), called, fresh)
        self.requests.append(request)

    def _comparable(self, x: Any) -> Any:
        """Return an argument in a form that can be compared with an argument of another step."""
        if isinstance(x, Tensor):
            if not x.is_cuda and not x.dim():
                return HostScalar(known_number(x))
            memory = x.untyped_storage()
            place = None if memory in self._allocated else getattr(memory, "address", None)
            if place is not None:
                place += x.storage_offset()
            return TensorArgument(x.dtype, tuple(x.shape), place)
        if x is None or isinstance(x, (int, str, torch.dtype, torch.device)):
            return x
        if isinstance(x, (float, complex)) and x == x:
            return x
        return str(type(x))  # NaN too: it would not equal the NaN of another step

    def _allocate(self, memory: torch.UntypedStorage) -> None:
        """Count new memory as used until it is freed."""
        size = memory.nbytes()
        self._allocated.add(memory)
        self.fresh += size
        self._bytes_in_use += size
        self.peak = max(self.peak, self._bytes_in_use)
        weakref.finalize(memory, self._free, size)

    def _free(self, size: int) -> None:
        self._bytes_in_use -= size


def run_step(step: Callable[[], object], ledger: Ledger) -> None:
    """Run a step inside a ledger.

    Every audited step starts here. So `_where` can distinguish the frames of the step from the
    frames of the audit and of its caller.
    """
    with ledger:
        step()


def ledgers(make: Callable[[Any], Any], params: Any, steps: int = 3) -> list[Ledger]:
    """Run some steps inside `fake_cuda` and return the ledger of each step.

    Args:
        make: A function of the parameters. It returns an optimizer, or a function that does a step.
        params: Fake parameters with gradients, such as the result of `twin`.
        steps: The number of steps.

    Example:
        >>> import torch
        >>> from torchzero_clip.audit import fake_cuda, ledgers, same, twin
        >>> model = torch.nn.Linear(8, 4)
        >>> with fake_cuda():
        ...     *_, before, last = ledgers(torch.optim.SGD, twin(model.parameters()))
        >>> print(same(before, last))
        None
    """
    with Ledger():  # without a ledger, reading a value of a fake tensor is an error
        optimizer = make(params)
    step = getattr(optimizer, "step", optimizer)
    ledger_of_each = [Ledger() for _ in range(steps)]
    for ledger in ledger_of_each:
        run_step(step, ledger)
    return ledger_of_each


def differences(one: Ledger, other: Ledger) -> Iterator[tuple[Request, str]]:
    """Compare two steps. Yield each request of the second step that differs, and the reason.

    A CUDA graph can replay a step only if there is no difference. The graph contains the numbers
    among the arguments and the addresses of tensors, and cannot change them.
    """
    for a, b in zip(one.requests, other.requests, strict=False):
        if (a.kind, a.name, a.calls) != (b.kind, b.name, b.calls):
            yield b, f"is called in place of {a} of the previous step"
            return
        if a.given != b.given:
            yield b, _change(a.given, b.given)
    if len(one.requests) != len(other.requests):
        shorter, longer = sorted([one.requests, other.requests], key=len)
        yield longer[len(shorter)], "is called in only one of two steps"


def same(one: Ledger, other: Ledger) -> str | None:
    """Return None if two steps call the same operators, otherwise the first difference.

    Args:
        one: The ledger of a step.
        other: The ledger of a later step.
    """
    return next((f"{request} {reason}" for request, reason in differences(one, other)), None)


# ---------------------------------------------------------------------- what an operator is


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in tree_leaves(x) if isinstance(t, Tensor)]


def _is_mask(t: Tensor) -> bool:
    return t.dtype in (torch.bool, torch.uint8)


def _needs_values(func: Any, inputs: Sequence[Tensor], kwargs: dict[str, Any]) -> bool:
    """Return whether the host must wait for a number or a shape from an operator."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if kwargs.get("output_size") is not None:
        return False  # repeat_interleave, whose caller has passed the size of the result
    takes_index = func.overloadpacket.__name__.startswith(("index", "_unsafe_index"))
    return not takes_index or any(map(_is_mask, inputs[1:]))


def _counts_a_mask(name: str, args: Sequence[Any]) -> bool:
    """Return whether an operator writes through a mask whose true elements torch must count.

    Torch does not count the elements if all of them get the same number from the host.
    """
    if not name.startswith(("aten.index_put", "aten._index_put", "aten._unsafe_index_put")):
        return False
    masks = [t for t in _tensors(args[1]) if _is_mask(t) and t.is_cuda]
    is_fill = args[2].numel() == 1 and not args[2].is_cuda
    return bool(masks) and not is_fill


def _kind(name: str, tensors: Sequence[Tensor], works: bool) -> str | None:
    """Return the kind of a request, or None if the operator runs only on the host.

    Args:
        name: The name of the operator.
        tensors: The tensors that the operator receives and returns.
        works: Whether the operator allocates or writes memory.
    """
    devices = {t.device.type for t in tensors}
    if "c10d" in name:
        return "collective"
    if "cuda" not in devices:
        return None
    # A kernel receives a 0-dim CPU tensor as a number, without a copy.
    copies = "copy" in name or any([t.dim() for t in tensors if not t.is_cuda])
    if len(devices) > 1 and copies:
        return "copy"
    if not works:
        return "view"
    return "memory" if name.startswith(("aten.empty", "aten.new_empty")) else "call"


def _kernels(name: str, args: Sequence[Any]) -> int:
    """Return the number of kernels that an operator starts.

    A foreach operator starts one kernel on torch's fast route. Otherwise it starts one kernel for
    each tensor.
    """
    if not name.startswith("aten._foreach_"):
        return 1
    lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
    return 1 if _takes_fast_route(name, args, lists) else len(lists[0])


def _takes_fast_route(name: str, args: Sequence[Any], lists: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether a foreach operator runs as one kernel on these lists of tensors."""
    first = lists[0][0].dtype
    dtypes = [{t.dtype for t in tensors} for tensors in lists]
    if any([len(of_one_list) > 1 for of_one_list in dtypes]):
        return False
    if len(set.union(*dtypes)) > 1 and not name.startswith("aten._foreach_copy"):
        return False
    if any([x.dtype != first for x in args if isinstance(x, Tensor) and x.is_cuda]):
        return False
    for row in zip(*lists, strict=True):
        if len({(t.shape, t.stride()) for t in row}) > 1:
            return False
    if not all([_is_dense(t) for tensors in lists for t in tensors]):
        return False
    numbers = [x for x in tree_leaves(args) if isinstance(x, (int, float, complex))]
    is_floating = first.is_floating_point or first.is_complex
    if not is_floating and any([isinstance(x, float) for x in numbers]):
        return False  # the result has another dtype than the tensors
    is_norm = name.startswith("aten._foreach_norm")
    return not (is_norm and numbers and numbers[0] not in FAST_NORMS)


def _is_dense(t: Tensor) -> bool:
    """Return whether the elements of a tensor fill one piece of memory without gaps or overlap."""
    if t.is_contiguous():
        return True
    expected_stride = 1
    for stride, n in sorted([(s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]):
        if stride != expected_stride:
            return False
        expected_stride *= n
    return True


def _waits(name: str) -> bool:
    """Return whether an operator is in `WAITS`, under any of its names."""
    namespace, operator, *_ = name.split(".")
    base_name = operator.removeprefix("_").removeprefix("linalg_").removesuffix("_ex")
    return namespace == "aten" and base_name in WAITS


def _stand_in(dtype: torch.dtype) -> bool | int | float:
    """Return the number with which a block continues after the host has read an unknown value."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _change(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """Return how the arguments of an operator differ from the arguments in the step before."""
    for old, new in zip(before, now, strict=False):
        if old == new:
            continue
        if isinstance(new, HostScalar):
            return "receives a 0-dim CPU tensor, whose value a CUDA graph cannot update"
        are_tensors = isinstance(old, TensorArgument) and isinstance(new, TensorArgument)
        if are_tensors and (old.dtype, old.shape) == (new.dtype, new.shape):
            return "receives a tensor that is in new memory in each step: update state in place"
        return f"receives {_shown(new)}, but received {_shown(old)} in the previous step"
    return f"receives {len(now)} arguments, but received {len(before)} in the previous step"


def _shown(argument: Any) -> Any:
    """Return an argument in the form that messages show."""
    if isinstance(argument, TensorArgument):
        return f"a tensor of {argument.dtype} and shape {argument.shape}"
    return f"{argument:.4g}" if isinstance(argument, float) else argument


def _where() -> tuple[str, str]:
    """Return the file and line that called the current operator, and the line that called torch.

    The second text is empty unless the first text names a line of torch. If the step is a method of
    torch, the second text is also empty, because the audit is the caller.
    """
    in_torch = ""
    for frame, line in traceback.walk_stack(None):
        if in_torch and frame.f_code is run_step.__code__:
            break
        file = frame.f_code.co_filename
        if not file.startswith(SILENT):
            place = f"{file}:{line}"
            return (in_torch, place) if in_torch else (place, "")
        if not in_torch and file.startswith(TORCH_CALLERS):
            in_torch = f"{file}:{line}"
    return in_torch or "an unknown place", ""


def lines(requests: Iterable[Request]) -> list[str]:
    """Return the line and the operator of each request, in order and without repetition."""
    return list(dict.fromkeys(map(str, requests)))
