"""The tail of a chain: its last links, which run together in one pass over memory.

The pass is a fused optimizer of torch or a subtraction. A fused optimizer requires updates in the
dtype of its state. If updates must first be divided or converted, `finish` does so for one piece at
a time. So a piece is still in the cache when the fused optimizer reads it, and the converted
values need little memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from torchzero_clip.core import norms, small_tensors
from torchzero_clip.core.engine import Ending, FusedKernel
from torchzero_clip.core.foreach import copy_into
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.state import HALF, state_dtype
from torchzero_clip.core.tensor_kinds import DTYPE, SHAPE, all_plain, storages
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.torch_private import foreach, is_fused
from torchzero_clip.engines import pieces
from torchzero_clip.engines.kept import BATCH, Wide
from torchzero_clip.engines.pieces import Piece

LARGEST = 4 * pieces.PIECE
"""The number of elements of a piece on an accelerator.

Pieces are larger than on CPU, because each call to an accelerator takes time.
"""
NO_FUSED_END = "the chain does not end with one of PyTorch's fused optimizers"


class Tensors(Protocol):
    """The part of a session that `finish` needs: the tensors of one bucket during one step."""

    stored: list[Tensor]
    """The parameters in the dtype in which they are stored."""
    wide: Wide | None
    """The parameters in float32, if they are stored in fewer bits."""
    skip: Skip

    def guard(self, why: str, tensors: Sequence[Tensor]) -> None:
        """Make sure that these tensors keep their values if a guard skips the step."""

    def divide_grads(self, ratio: Tensor) -> None:
        """Divide the gradients in place."""


def finish(session: Tensors, u: TensorList, ending: Ending) -> bool:
    """Run the tail of a chain for the parameters of a session.

    Returns:
        Whether the tail could run. If False, nothing was written and the caller must run the links
        one by one.
    """
    wide = session.wide
    if wide is not None and wide.form.whole:
        return False
    if ending.kernel is None:
        return _subtract_scaled(session, u.tensors, ending)
    if not _takes(ending.kernel, session.stored, u.tensors, ending, wide):
        return False
    _run_kernel(session, u, ending, ending.kernel)
    return True


def subtract_(params: list[Tensor], values: Sequence[Tensor], a: float, b: float = 0.0) -> None:
    """Compute w ← (1 - b) w - a u in place, where w is `params` and u is `values`."""
    if b:
        foreach("mul_", params, 1 - b)
    rest, divisor = norms.halves(a, params[0].dtype)
    if divisor != 1:
        values = foreach("div", [u.to(params[0].dtype) for u in values], divisor)
    # The fast path of torch's foreach operators requires that all lists have one dtype. It must be
    # the wider one: values in half precision must not round parameters in float32.
    dtype = torch.promote_types(params[0].dtype, values[0].dtype)
    values = _converted(list(values), dtype)
    if params[0].dtype == dtype:
        foreach("sub_", params, values, alpha=rest)
        return
    wide = small_tensors.copies(params, dtype)
    foreach("sub_", wide, values, alpha=rest)
    copy_into(params, wide)


def times(u: TensorList, factor: float) -> TensorList:
    """Multiply a list by a number that the dtype of the list may be unable to represent."""
    rest, divisor = norms.halves(factor, u.dtype)
    u = u.mul_(rest)
    return u if divisor == 1 else u.div_(divisor)


# ---------------------------------------------------------------------- no fused optimizer


def _subtract_scaled(session: Tensors, values: list[Tensor], ending: Ending) -> bool:
    """Compute w ← (1 - b) w - a u, where u is `values` divided by the ratio of the ending.

    Returns:
        Whether this was possible. If False, nothing was written.
    """
    params = session.stored
    wide = session.wide
    a = ending.rate
    b = ending.decay
    if isinstance(a, Tensor) or (b and overlap(params, values)):
        return False
    dtype = state_dtype(params[0])
    factor, ratio = _factor(ending.ratio, dtype)
    more = [] if wide is None else wide.form.beside
    session.guard(NO_FUSED_END, [*params, *more])
    a = a * factor
    if ratio is None and wide is None and values[0].dtype == params[0].dtype:
        subtract_(params, values, a, b)
        return True
    for piece in _pieces(params, values, wide):
        changes = piece.of(values)
        if ratio is not None:
            changes = foreach("div", _converted(changes, dtype), ratio)
        if wide is None:
            subtract_(piece.of(params), changes, a, b)
        else:
            wide.move(piece, changes, a, b)
        del changes  # so that the next piece can use this memory
    return True


def overlap(params: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Return whether the values to subtract share memory with the parameters."""
    return all_plain(params) and not storages(params).isdisjoint(storages(values))


# ---------------------------------------------------------------------- a fused optimizer


def _takes(
    kernel: FusedKernel,
    params: list[Tensor],
    grads: list[Tensor],
    ending: Ending,
    wide: Wide | None,
) -> bool:
    """Return whether the fused optimizer can be called with these tensors.

    The fused optimizers of torch do not check the layouts of tensors. Tensors may be replaced
    between two steps, so every step must call this function.
    """
    if kernel.function is None or params[0].device.type not in kernel.devices:
        return False
    dtype = state_dtype(params[0])
    if dtype not in (torch.float32, torch.float64):
        return False
    moving = [*params, *grads]
    if not {dtype, *HALF}.issuperset(map(DTYPE, moving)):
        return False
    shapes = list(map(SHAPE, params))
    alike = [grads]
    tensors = moving
    for name in kernel.state:
        row = ending.state.get(name)
        if row is None:
            continue
        stored = torch.bfloat16 if name in ending.forms else dtype
        if not {stored}.issuperset(map(DTYPE, row)):
            return False
        if len(row) != len(params):
            return False
        if name not in kernel.numbers:
            alike.append(row)
        tensors = tensors + row
    if not (all_plain(tensors) and all(map(Tensor.is_contiguous, tensors))):
        return False
    for row in alike:
        if list(map(SHAPE, row)) != shapes:
            return False
    if wide is not None and not wide.cut:
        return False
    return all([Wide(ending.state[name], form).cut for name, form in ending.forms.items()])


def _run_kernel(session: Tensors, u: TensorList, ending: Ending, kernel: FusedKernel) -> None:
    """Compute w ← (1 - b) w - a · update with the fused optimizer, piece by piece if needed."""
    params = session.stored
    wide = session.wide
    skip = session.skip
    dtype = state_dtype(params[0])
    wide_state = {name: Wide(ending.state[name], form) for name, form in ending.forms.items()}
    narrow = wide is None and params[0].dtype != dtype
    converts = narrow or wide is not None or bool(wide_state)
    a = ending.rate
    b = ending.decay
    decays = bool(kernel.decays and b and a != 0)
    function, options = _function(kernel)
    options["lr"] = a
    options["weight_decay"] = b / a if decays else 0.0
    shrink: Any = 1 - b if b and not decays else None

    ratio = ending.ratio
    grads = u.tensors
    if ending.writes_grads and ratio is not None:
        if not converts and _divides_gradients(kernel, dtype, grads, ratio):
            options["grad_scale"] = ratio.to(grads[0].device, dtype).reshape(())
        else:
            session.divide_grads(ratio)
        ratio = None
    if skip:
        for row in ending.state.values():
            if not row[0].dim():
                skip.hold(row)
        flag = skip.on(params[0].device)
        options["found_inf"] = flag.to(torch.float32)
        if shrink is not None:
            shrink = torch.where(flag, torch.ones_like(flag, dtype=dtype), shrink)
    kernel.advance({name: TensorList(row, owned=True) for name, row in ending.state.items()})

    factor, ratio = _factor(ratio, dtype)
    damps = is_fused(kernel.function, "sgd") and not (
        options.get("dampening") or options.get("nesterov")
    )
    in_float32 = not converts or (wide is not None and wide.form.wide and not wide_state)
    if damps and in_float32 and dtype == torch.float32 and 1e-6 < factor < 1:
        # torch's SGD computes m ← momentum · m + (1 - dampening) · gradient.
        options["dampening"] = 1 - factor
        factor = 1.0
    as_they_are = factor == 1 and ratio is None and grads[0].dtype == dtype and not converts
    whole = Piece(0, len(params))
    for piece in [whole] if as_they_are else _pieces(params, grads, wide):
        changes = _converted(piece.of(grads), dtype)
        if ratio is not None:
            changes = foreach("div", changes, ratio)
        elif factor != 1:
            changes = _multiplied(changes, factor)
        stored = piece.of(params)
        weights = stored
        if wide is not None:
            weights = wide.wide(piece)
        elif narrow:
            weights = small_tensors.copies(stored, dtype)
        if shrink is not None:
            if "grad_scale" not in options and overlap(weights, changes):
                changes = [change.clone() for change in changes]
            foreach("mul_", weights, shrink)
        lists = []
        for name in kernel.state:
            if name in wide_state:
                lists.append(wide_state[name].wide(piece))
            else:
                lists.append(piece.of(ending.state.get(name, ())))
        function(weights, changes, *lists, **options)
        if wide is not None:
            wide.put(piece, weights)
        elif narrow:
            foreach("copy_", stored, weights)
        for name, values in zip(kernel.state, lists, strict=True):
            if name in wide_state:
                wide_state[name].put(piece, values)
        del weights, changes, lists  # so that the next piece can use this memory


def _function(kernel: FusedKernel) -> tuple[Any, dict[str, Any]]:
    """Return the function that a kernel calls, and the keyword arguments of this function."""
    function = kernel.function
    if isinstance(function, partial):
        return function.func, dict(function.keywords)
    return function, {}


def _divides_gradients(
    kernel: FusedKernel, dtype: torch.dtype, grads: Sequence[Tensor], ratio: Tensor
) -> bool:
    """Return whether a kernel can divide gradients by the ratio and store the quotients."""
    if dtype != torch.float32 or grads[0].dtype != dtype:
        return False
    if norms.readable(ratio) and not 1e-30 < ratio.item() < 1e30:
        return False
    return is_fused(kernel.function, "adamw") or is_fused(kernel.function, "sgd")


# ---------------------------------------------------------------------- helpers of both


def _pieces(params: list[Tensor], values: list[Tensor], wide: Wide | None) -> Iterator[Piece]:
    """Yield the pieces of the tensors. Callers divide and convert one piece at a time."""
    cuts = all(map(Tensor.is_contiguous, [*params, *values])) and (wide is None or wide.cut)
    if params[0].device.type in small_tensors.HOSTS:
        return pieces.pieces(params, cuts, BATCH, grows=False)
    return pieces.pieces(params, cuts, LARGEST)


def _factor(ratio: Tensor | None, dtype: torch.dtype) -> tuple[float, Tensor | None]:
    """Return a factor and a divisor that together have the effect of dividing by the ratio.

    If the host can read the ratio, the divisor is None. Otherwise the factor is 1 and the divisor
    is a tensor on the device.
    """
    if ratio is None:
        return 1.0, None
    if norms.readable(ratio):
        return norms.factor_of(ratio, dtype), None
    return 1.0, ratio.to(dtype).reshape(())


def _converted(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors in a dtype. If they already have this dtype, return the same list."""
    if tensors[0].dtype == dtype:
        return tensors
    return small_tensors.copies(tensors, dtype)


def _multiplied(tensors: list[Tensor], factor: float) -> list[Tensor]:
    """Return tensors times a number that the dtype of the tensors may be unable to represent."""
    size, divisor = norms.halves(factor, tensors[0].dtype)
    number = torch.full((), size, dtype=tensors[0].dtype, device=tensors[0].device)
    products: list[Tensor] = foreach("mul", tensors, number)
    if divisor != 1:
        foreach("div_", products, divisor)
    return products
