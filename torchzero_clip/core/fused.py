"""What is computed later, so that memory is passed over less often.

Deferred is an update that torch's fused kernels can put straight into the parameters. A link such
as Adam, followed by nothing but scaling (LR) and decay towards zero (WeightDecay), needs no memory
for its update: the whole tail of the chain is one kernel. Where another link reads the values, the
kernel puts them into zeros instead.

Scaled is what a norm rule has divided. On CPU a kernel takes it in pieces that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.scratch import MANY, PIECE, SCRATCH, SMALL
from torchzero_clip.core.tensorlist import Operand, TensorList, all_plain

if TYPE_CHECKING:
    from torchzero_clip.core.bucket import State

Kernel: TypeAlias = Callable[[list[Tensor], Any, Any], None]
"""kernel(params, scale, decay): p ← p - scale · update - decay · p"""
Lists: TypeAlias = Sequence[list[Tensor]]
KERNELS = ("cpu", "cuda")  # the devices that torch has them for


class Deferred(TensorList):
    """scale · update + decay · parameters, where `update` is not computed yet."""

    __slots__ = ("_kernel", "_memory", "_params", "_values", "decay", "scale")

    def __init__(
        self, memory: Callable[[], list[Tensor]], kernel: Kernel, params: TensorList
    ) -> None:
        self._memory: Callable[[], list[Tensor]] | None = memory
        self._kernel, self._params = kernel, params.tensors
        self._values: list[Tensor] = []
        self.scale: Any = 1.0
        self.decay: Any = 0.0
        self.owned, self.room, self.norms = True, None, None

    def __len__(self) -> int:
        return len(self._params)

    @property
    def waits(self) -> bool:
        """Whether nothing is computed yet."""
        return self._memory is not None

    @property
    def tensors(self) -> list[Tensor]:
        """The values, scaled and decayed: zeros from which the kernel has subtracted -update."""
        if self._memory is not None:
            memory, self._memory = self._memory, None
            zeros = memory()
            self._kernel(zeros, -1.0, 0.0)
            out = TensorList(zeros, owned=True)
            if isinstance(self.scale, Tensor) or self.scale != 1:
                out = out.mul_(self.scale)
            if self.decay:
                out = out.add_(TensorList(self._params), alpha=self.decay)
            self._values = out.tensors
        return self._values

    @tensors.setter
    def tensors(self, values: Sequence[Tensor]) -> None:
        self._values = list(values)

    def apply(self) -> bool:
        """Let the kernel subtract the update from the parameters, if it still can."""
        if self._memory is None or not self._kernel_takes():
            return False
        self._memory = None
        self._kernel(self._params, self.scale, self.decay)
        return True

    def _kernel_takes(self) -> bool:
        """Whether scale and decay are of a kind that kernels take: decay comes as decay / scale."""
        if isinstance(self.scale, Tensor):
            return bool(self.decay == 0) and self.scale.device == self._params[0].device
        return bool(self.decay == 0 or self.scale != 0)

    def to(self, dtype: torch.dtype) -> TensorList:
        return self

    def mul_(self, x: Operand) -> TensorList:
        if self._memory is None or isinstance(x, (TensorList, list, tuple)):
            return super().mul_(x)
        fresh = not isinstance(self.scale, Tensor) and self.scale == 1 and self.decay == 0
        if isinstance(x, Tensor) and (x.dim() or not fresh):  # a float32 product would round
            return super().mul_(x)
        self.scale = self.scale * x
        self.decay = self.decay * x if self.decay else 0.0
        return self

    def add_(self, x: Operand, alpha: float | Tensor = 1) -> TensorList:
        number = not isinstance(alpha, Tensor)
        if self._memory is None or not number or not isinstance(x, TensorList):
            return super().add_(x, alpha)
        if not all([a is b for a, b in zip(x.tensors, self._params, strict=True)]):
            return super().add_(x, alpha)
        self.decay += alpha
        return self


class Scaled(TensorList):
    """source / divisors, which is not computed yet; `stays` where it must go into the source."""

    __slots__ = ("_divisors", "_source", "_values", "stays")

    def __init__(
        self, source: TensorList, divisors: Sequence[list[float]], stays: bool = False
    ) -> None:
        self._source, self._divisors = source, divisors  # one number a tensor, and perhaps another
        self._values: list[Tensor] | None = None
        self.owned, self.room, self.norms, self.stays = not stays, None, None, stays

    def __len__(self) -> int:
        return len(self._source)

    @property
    def _origin(self) -> list[Tensor]:
        """What is divided, or what came of it."""
        return self._source.tensors if self._values is None else self._values

    @property
    def tensors(self) -> list[Tensor]:
        """The values, divided when somebody first reads them."""
        if self._values is None:
            out = self._source
            for row in self._divisors:
                same = len(set(row)) == 1
                each = torch.tensor(row, dtype=self.dtype, device="cpu")
                out = out.div_(row[0] if same else each.unbind())
            self._values = out.tensors
        return self._values

    @tensors.setter
    def tensors(self, values: Sequence[Tensor]) -> None:
        self._values = list(values)

    def memory(self) -> list[Tensor]:
        """The source, divided: where it stays, whatever has become of the values since."""
        self._settle()
        return self._source.tensors

    def to(self, dtype: torch.dtype) -> TensorList:
        return self if self.dtype == dtype else super().to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._origin[0].dtype

    @property
    def divisor(self) -> float | None:
        """What all tensors are still to be divided by, if it is one number."""
        one = self._values is None and len(self._divisors) == len(set(self._divisors[0])) == 1
        return self._divisors[0][0] if one else None

    def run(self, kernel: Callable[..., None], lists: Lists, divides: bool) -> None:
        """kernel(values, *lists), piece by piece while the values are not computed."""
        if self._values is not None:
            kernel(self._values, *lists)
            return
        divides = divides and self.stays and self.dtype == torch.float32
        if divides and self.divisor is not None:
            scale = torch.tensor(self.divisor, dtype=torch.float32, device="cpu")
            kernel(self._source.tensors, *lists, grad_scale=scale)
            self._values = self._source.tensors
            return
        shapes: dict[torch.Size, list[int]] = {}
        for i, t in enumerate(self._origin):
            shapes.setdefault(t.shape, []).append(i)
        small: list[int] = []
        large: list[int] = []
        for shape, where in shapes.items():
            if shape.numel() > SMALL:
                large += where
            elif len(where) < MANY:
                small += where
            else:
                self._run_alike(kernel, lists, where)
        if small:
            self._run_small(kernel, lists, small)
        self._run_large(kernel, lists, sorted(large))
        if self.stays:
            self._values = self._source.tensors

    def _run_alike(self, kernel: Callable[..., None], lists: Lists, where: list[int]) -> None:
        """Many small tensors of one shape, together."""
        many = PIECE // max(self._origin[where[0]].numel(), 1)
        for begin in range(0, len(where), many):
            here = where[begin : begin + many]
            values = self._divide_alike([self._origin[i] for i in here], here)
            kernel(values, *[[some[i] for i in here] if some else [] for some in lists])

    def _divide_alike(self, tensors: list[Tensor], where: list[int]) -> list[Tensor]:
        rows = [[row[i] for i in where] for row in self._divisors]
        if self.stays:
            for row in rows:
                torch._foreach_div_(tensors, row)
            return tensors
        values, parts = SCRATCH.stack(tensors)
        for row in rows:
            each = torch.tensor(row, dtype=self.dtype, device="cpu")
            values.div_(each.view(-1, *[1] * (values.dim() - 1)))
        return parts

    def _run_small(self, kernel: Callable[..., None], lists: Lists, where: list[int]) -> None:
        """Small tensors of any shapes: memory for them costs less than a call for each."""
        values = [self._origin[i] for i in where]
        for row in self._divisors:
            each = [row[i] for i in where]
            if self.stays:
                torch._foreach_div_(values, each)
            else:
                values = list(torch._foreach_div(values, each))
        kernel(values, *[[some[i] for i in where] if some else [] for some in lists])

    def _run_large(self, kernel: Callable[..., None], lists: Lists, where: list[int]) -> None:
        """Large tensors, or parts of them, of PIECE numbers together."""
        room = SCRATCH.get(self.dtype)
        for piece in _pieces(self._origin, where):
            values, start = [], 0
            for i, begin, end in piece:
                value = _part(self._origin[i], begin, end)
                divisors = [row[i] for row in self._divisors if row[i] != 1]
                if self.stays:
                    out = value
                elif divisors:
                    out = room[start : (start := start + value.numel())].view(value.shape)
                for x in divisors:
                    value = torch.div(value, x, out=out)
                values.append(value)
            kernel(values, *[[_part(x[i], b, e) for i, b, e in piece] if x else [] for x in lists])


class Waiting(TensorList):
    """The memory that a pending division goes into: divided when somebody reads it."""

    __slots__ = ("_division", "_own")

    def __init__(self, division: Scaled) -> None:
        self._division, self._own = division, list[Tensor]()
        self.owned, self.room, self.norms = False, None, None

    def __len__(self) -> int:
        return len(self._division)

    @property
    def tensors(self) -> list[Tensor]:
        return self._own or self._division.memory()

    @tensors.setter
    def tensors(self, values: Sequence[Tensor]) -> None:
        self._own = list(values)

    def borrow(self) -> TensorList:
        return TensorList(self._own) if self._own else Waiting(self._division)


def run_kernel(
    u: TensorList, kernel: Callable[..., None], lists: Lists, divides: bool = False
) -> None:
    """kernel(u, *lists) of contiguous tensors; an empty list stays empty.

    `divides` says that it takes a `grad_scale`, and writes what it has divided.
    """
    if isinstance(u, Scaled):
        u.run(kernel, lists, divides)
    else:
        kernel(u.tensors, *lists)


def _pieces(tensors: Sequence[Tensor], where: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Parts of some tensors, (which, from, to), of PIECE numbers together at most."""
    piece: list[tuple[int, int, int]] = []
    free = PIECE
    for i in where:
        n = tensors[i].numel()
        for begin in range(0, max(n, 1), PIECE):
            end = min(begin + PIECE, n)
            if end - begin > free:
                yield piece
                piece, free = [], PIECE
            piece.append((i, begin, end))
            free -= end - begin
    if piece:
        yield piece


def _part(t: Tensor, begin: int, end: int) -> Tensor:
    """Part of a tensor; a count of steps is one number and goes as it is."""
    return t if t.dim() == 0 or end - begin == t.numel() else t.view(-1)[begin:end]


def fusable(params: TensorList, u: TensorList, state: State, names: Sequence[str]) -> bool:
    """Whether torch's kernels take these tensors: plain, real, contiguous, of one dtype."""
    example = params.tensors[0]
    if torch.compiler.is_compiling() or example.device.type not in KERNELS:
        return False
    lists = [params.tensors, u._origin, *[state[name].tensors for name in names]]
    return example.dtype in (torch.float32, torch.float64) and all(
        [
            all_plain(tensors)
            and all(map(Tensor.is_contiguous, tensors))
            and {t.dtype for t in tensors} == {example.dtype}
            for tensors in lists
        ]
    )


def scaling(u: TensorList, factor: Any) -> Kernel | None:
    """The kernel of a link that scales: the factor joins the subtraction."""
    if (isinstance(u, Deferred) and u.waits) or not isinstance(factor, (int, float)):
        return None  # an update that waits takes the factor itself

    def apply(params: list[Tensor], scale: Any, decay: Any) -> None:
        if isinstance(scale, Tensor):
            torch._foreach_sub_(params, u.mul_(factor).mul_(scale).tensors)
            return
        if decay and params[0].dtype != u._origin[0].dtype:  # half precision rounds once
            moved = u.mul_(scale * factor).add_(TensorList(params), alpha=decay)
            torch._foreach_sub_(params, moved.tensors)
            return
        if decay:
            torch._foreach_mul_(params, 1 - decay)
        move = partial(torch._foreach_sub_, alpha=scale * factor)
        whole = u.divisor if isinstance(u, Scaled) and not u.stays else None
        if whole is not None and 1e-30 < abs(scale * factor / whole) < 1e30:
            torch._foreach_sub_(params, u._origin, alpha=scale * factor / whole)
            return
        if not all([all(map(Tensor.is_contiguous, some)) for some in (params, u._origin)]):
            u._settle()  # parts are flat
        run_kernel(u, lambda u, p: move(p, u), [params])

    return apply


def counts(steps: TensorList) -> list[Tensor]:
    """Step counts as kernels take them: the same one for all, where a look shows that they are."""
    vector = steps._vector()
    if vector is not None and vector.device.type == "cpu" and bool((vector == vector[0]).all()):
        return [steps.tensors[0]] * len(steps)
    return steps.tensors


def numbers_only(values: Mapping[str, Any], *names: str) -> bool:
    """Whether these live values are numbers, or pairs of them, as kernels want them."""
    flat = [x for name in names for x in _flat(values[name])]
    return all([isinstance(x, (int, float)) for x in flat])


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)
