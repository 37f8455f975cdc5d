"""What is computed later, so that memory is passed over less often.

Deferred is an update that torch's fused kernels can put straight into the parameters. A link such
as Adam, followed by nothing but scaling (LR) and decay towards zero (WeightDecay), needs no memory
for its update: the whole tail of the chain is one kernel. Where another link reads the values, the
kernel puts them into zeros instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.pieces import Scaled, run_kernel
from torchzero_clip.core.tensorlist import Operand, TensorList
from torchzero_clip.core.tensors import all_plain

if TYPE_CHECKING:
    from torchzero_clip.core.bucket import State

Kernel: TypeAlias = Callable[[list[Tensor], Any, Any], None]
"""kernel(params, scale, decay): p ← p - scale · update - decay · p"""
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
        self.owned, self.room, self.norms, self.whole = True, None, None, None

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


def fusable(params: TensorList, u: TensorList, state: State, names: Sequence[str]) -> bool:
    """Whether torch's kernels take these tensors: plain, real, contiguous, of one dtype."""
    example = params.tensors[0]
    if torch.compiler.is_compiling() or example.device.type not in KERNELS:
        return False
    kept = [state[name] for name in names]
    wholes = [some._joined() for some in kept]
    rest = [some.tensors for some, whole in zip(kept, wholes, strict=True) if whole is None]
    lists = [params.tensors, u._origin, *rest]
    dtypes = {t.dtype for some in lists for t in some} | {t.dtype for t in wholes if t is not None}
    return dtypes in ({torch.float32}, {torch.float64}) and all(
        [all_plain(some) and all(map(Tensor.is_contiguous, some)) for some in lists]
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
        run_kernel(u, lambda u, p: move(p, u), params)

    return apply


def counts(steps: TensorList) -> TensorList:
    """Step counts as kernels take them: the same one for all, where a look shows that they are."""
    vector = steps._joined()
    if vector is not None and vector.device.type == "cpu" and bool((vector == vector[0]).all()):
        return TensorList([steps.tensors[0]] * len(steps))
    return steps


def numbers_only(values: Mapping[str, Any], *names: str) -> bool:
    """Whether these live values are numbers, or pairs of them, as kernels want them."""
    flat = [x for name in names for x in _flat(values[name])]
    return all([isinstance(x, (int, float)) for x in flat])


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)
