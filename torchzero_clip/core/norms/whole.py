"""Statistics of whole tensors, right to 1e-6 whatever their size and range.

Only compiled kernels on CPU add up norms of their own, of order 1, 2 and inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from torchzero_clip.core.norms.measures import NAMED, Measure
from torchzero_clip.core.norms.numeric import (
    as_one_operator,
    at_least_float32,
    numbers,
    readable,
    safe_scale,
)
from torchzero_clip.core.norms.scratch import PIECE, SCRATCH
from torchzero_clip.core.state import DOUBLE
from torchzero_clip.core.tensors import MANY, SHAPE, SMALL, all_plain, wide

ROW = 256  # a float32 sum of this many squares is right to 1e-7
CHUNK = 2**16  # what is converted at a time


@as_one_operator
def statistics(tensors: Sequence[Tensor], m: Measure) -> Tensor:
    """The statistic of each tensor, a column each, in float64."""
    filled = list(tensors)
    if not all(map(Tensor.numel, tensors)):
        filled = [t if t.numel() else t.new_zeros(1) for t in tensors]
    if m.kind == "power":
        return _powers(filled, m.p).unsqueeze(0)
    if m.kind == "max":
        return _maxima(filled).unsqueeze(0)
    if m.kind == "count":
        counts = [torch.count_nonzero(t) for t in filled]
        return torch.stack(counts).to(wide(filled[0].device)).unsqueeze(0)
    if m.kind == "sum":
        return totals(filled)
    return _spread(filled)


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor: NaN or infinite where one of its entries is."""
    return statistics(tensors, NAMED["linf"])[0]


def _powers(tensors: list[Tensor], p: float) -> Tensor:
    real = _moduli(tensors, p)
    device = real[0].device
    if readable(real[0]) and all_plain(real):
        return _powers_on_cpu(real, p)
    if device.type == "cpu":
        real = [at_least_float32(t) for t in real]
    if p > 6 or real[0].dtype == torch.float64:  # even float64 sums may leave the range
        biggest = _maxima(real)
        safe = safe_scale(biggest)
        real = [at_least_float32(t) for t in real]
        real = list(torch._foreach_div(real, list(safe.to(real[0].dtype).unbind())))
        return _joint_norms(real, p) * safe
    return _joint_norms(real, p)


def _joint_norms(tensors: list[Tensor], p: float) -> Tensor:
    """The norms of tensors as one vector, summed in float64 where there is one."""
    return torch.stack(torch._foreach_norm(tensors, p, dtype=wide(tensors[0].device)))


def _powers_on_cpu(tensors: list[Tensor], p: float) -> Tensor:
    """p-norms: short tensors by torch, many of one shape together, large ones in rows; those that
    left the range again.

    Nothing but a tensor itself decides what is computed for it, so that its norm has the same bits
    whatever is measured beside it.
    """
    if not all(map(Tensor.is_contiguous, tensors)):
        tensors = [t.contiguous() if t.numel() <= SMALL else t for t in tensors]
    single, alike, large = _by_size(tensors, p)
    vectors = list(tensors)
    for i in single:
        vectors[i] = _chunks(tensors[i], p)
    for i in large:
        vectors[i] = _rows(tensors[i], p)
    if alike:
        norms = torch.empty(len(tensors), dtype=torch.float64, device="cpu")
        for where in alike:
            norms[where] = _joint([tensors[i] for i in where], p)
        if apart := sorted([*single, *large]):
            norms[apart] = _joint_norms([vectors[i] for i in apart], p)
    else:
        norms = _joint_norms(vectors, p)
    if len(single) == len(tensors) and p <= 6 and tensors[0].dtype not in DOUBLE:
        return norms  # float64 holds the powers
    low, high = [end.item() for end in torch.aminmax(norms)]
    if 10.0 ** (-25.0 / p) < low and high < 10.0 ** (35.0 / p):
        return norms
    within = _between(norms, -25.0 / p, 35.0 / p)
    for i in (~within).nonzero().flatten().tolist():
        in_float64 = i in single or tensors[i].numel() <= ROW
        if not in_float64 or not _between(norms[i], -280.0 / p, 300.0 / p):
            norms[i] = _rescaled(tensors[i], p)
    return norms


def _between(norms: Tensor, low: float, high: float) -> Tensor:
    """Where norms lie between two powers of ten."""
    return (norms > 10.0 ** max(low, -300)) & (norms < 10.0 ** min(high, 300))


def _by_size(tensors: list[Tensor], p: float) -> tuple[list[int], list[list[int]], list[int]]:
    """The indexes of tensors for torch, of many of one shape, and of those cut in rows."""
    forms = tuple(map(SHAPE, tensors)), tuple(map(Tensor.is_contiguous, tensors))
    return _divided(*forms, tensors[0].dtype == torch.float64 or p not in (1, 2))


@lru_cache(maxsize=256)
def _divided(
    shapes: Sequence[torch.Size], contiguous: Sequence[bool], whole: bool
) -> tuple[list[int], list[list[int]], list[int]]:
    """`_by_size` of tensors of these shapes; `whole`: all are for torch."""
    if whole:
        return list(range(len(shapes))), [], []
    single: list[int] = []
    alike: list[list[int]] = []
    large: list[int] = []
    by_shape: dict[torch.Size, list[int]] = {}
    for i, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(i)
    for shape, some in by_shape.items():
        n = shape.numel()
        if n > SMALL:
            for i in some:
                (large if contiguous[i] else single).append(i)
        elif n > ROW and n % ROW:
            single += some
        elif len(some) >= MANY:
            alike.append(some)
        else:
            (single if n <= ROW else large).extend(some)
    return single, alike, large


def _joint(tensors: list[Tensor], p: float) -> Tensor:
    """The norms of tensors of one shape, short ones in float64, as torch does one."""
    norms = []
    for some in _stacks(tensors):
        rows = some if some.shape[1] <= ROW else _row_norms(some.view(len(some), -1, ROW), p)
        norms.append(torch.linalg.vector_norm(rows.double(), p, dim=1))
    return torch.cat(norms)


def _stacks(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Tensors of one shape as rows, PIECE numbers at a time: a copy costs less than a call for
    each. They all lie in the same memory, so one is used before the next comes.
    """
    n = tensors[0].numel()
    for begin in range(0, len(tensors), PIECE // n):
        some = SCRATCH.stack(tensors[begin : begin + PIECE // n])
        yield at_least_float32(some).view(len(some), n)


def _chunks(x: Tensor, p: float) -> Tensor:
    """A vector with the norm of a tensor: itself, or the norms of parts that are cached."""
    if x.numel() <= CHUNK or not x.is_contiguous():
        return at_least_float32(x)
    return _joint_norms([at_least_float32(part) for part in x.view(-1).split(CHUNK)], p)


def _rows(x: Tensor, p: float) -> Tensor:
    """A vector with the norm of a tensor: the norms of its rows, and the entries after the last."""
    if p == 2 and x.dtype == torch.float32:
        n = x.numel() // ROW * ROW
        if n == x.numel():
            return _row_norms(x.view(-1, ROW), p)
        flat = x.view(-1)
        return torch.cat([_row_norms(flat[:n].view(-1, ROW), p), flat[n:]])
    room = SCRATCH.get(torch.float32)  # half precision is converted, and |x| taken, in the cache
    parts = []
    for piece in x.view(-1).split(PIECE):
        n = len(piece) // ROW * ROW
        here = room[: len(piece)].copy_(piece)
        parts += [_row_norms(here[:n].view(-1, ROW), p), here[n:].clone()]
    return torch.cat(parts)


def _row_norms(rows: Tensor, p: float) -> Tensor:
    """The norms of rows of their own memory: torch's order 1 takes four times its sum."""
    return rows.abs_().sum(dim=-1) if p == 1 else torch.linalg.vector_norm(rows, p, dim=-1)


def _rescaled(x: Tensor, p: float) -> Tensor:
    biggest = _maxima([x])[0]
    if biggest == 0 or not biggest.isfinite():
        return biggest
    return torch.linalg.vector_norm(x.double() / biggest, p) * biggest


def _maxima(tensors: list[Tensor]) -> Tensor:
    real = _moduli(tensors, math.inf)
    if readable(real[0]) and all_plain(real):
        if len({(t.shape, t.dtype) for t in real}) == 1 and real[0].numel() <= SMALL:
            return torch.cat([_largest_of_rows(some) for some in _stacks(real)])
        ends = [end for t in real for end in torch.aminmax(t)]  # _foreach_norm takes ten times that
        return torch.stack(ends).view(-1, 2).abs().amax(dim=1).double()
    return torch.stack(torch._foreach_norm(real, math.inf)).to(wide(real[0].device))


def _largest_of_rows(rows: Tensor) -> Tensor:
    """torch's aminmax along a dim takes twenty times its amax and amin."""
    return torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg()).double()


def totals(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of each tensor, its real and its imaginary part, a column each."""
    dtype = wide(tensors[0].device)
    if not any([t.is_complex() for t in tensors]):
        real = _sums(list(tensors), dtype)
        return torch.stack([real, torch.zeros_like(real)])
    real = torch.stack(
        [t.real.sum(dtype=dtype) if t.is_complex() else _sum(t, dtype) for t in tensors]
    )
    parts = [t.imag.sum(dtype=dtype) if t.is_complex() else t.sum(dtype=dtype) * 0 for t in tensors]
    return torch.stack([real, torch.stack(parts)])


def _sums(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of each tensor; of many small ones of one shape at once."""
    if not (readable(tensors[0]) and all_plain(tensors)):
        return torch.stack([_sum(t, dtype) for t in tensors])
    tensors = [at_least_float32(t).contiguous() if t.numel() <= SMALL else t for t in tensors]
    single, alike, large = _by_size(tensors, 1)
    sums = torch.empty(len(tensors), dtype=dtype, device="cpu")
    for i in single + large:
        sums[i] = _sum(tensors[i], dtype)
    for where in alike:
        stacks = _stacks([tensors[i] for i in where])
        sums[where] = torch.cat([_sums_of_rows(some, dtype) for some in stacks])
    return sums


def _sums_of_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of each row, added up as `_sum` does."""
    if rows.shape[1] < ROW:
        return rows.sum(dim=1, dtype=dtype)
    return rows.view(len(rows), -1, ROW).sum(dim=2).sum(dim=1, dtype=dtype)


def _sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a tensor: rows in float32, right to 1e-7 of their magnitudes, then in float64."""
    whole = x.numel() // ROW * ROW
    if x.dtype != torch.float32 or not (readable(x) and whole and x.is_contiguous()):
        return x.sum(dtype=dtype)
    flat = x.view(-1)
    return flat[:whole].view(-1, ROW).sum(dim=1).sum(dtype=dtype) + flat[whole:].sum(dtype=dtype)


def _spread(tensors: list[Tensor]) -> Tensor:
    """Mean (real and imaginary part) and √M2 of each tensor: at once where one chunk holds it."""
    small = [i for i, t in enumerate(tensors) if _at_once(t)]
    dtype = wide(tensors[0].device)
    out = torch.empty(3, len(tensors), dtype=dtype, device=tensors[0].device)
    if small:
        rows = [torch.var_mean(tensors[i].to(dtype), correction=0) for i in small]
        var, mean = torch.stack([x for row in rows for x in row]).view(-1, 2).unbind(1)
        m2 = var * numbers([tensors[i].numel() for i in small], var)
        made = torch.stack([mean, torch.zeros_like(mean), m2.sqrt()])
        if len(small) == len(tensors):
            return made
        out[:, small] = made
    for i in set(range(len(tensors))) - set(small):
        out[:, i] = _moments(tensors[i])
    return out


def _at_once(t: Tensor) -> bool:
    plain = t.dtype not in DOUBLE and not t.is_complex()
    return plain and (not readable(t) or t.numel() <= CHUNK)


def _moments(x: Tensor) -> Tensor:
    """Mean (of the real and the imaginary part) and √M2, in two passes over float64 chunks."""
    dtype, n = wide(x.device), x.numel()
    scale = torch.ones((), dtype=dtype, device=x.device)
    if x.dtype in DOUBLE:
        scale = safe_scale(x.abs().amax()).to(dtype)
    means: list[Tensor] = []
    m2 = torch.zeros((), dtype=dtype, device=x.device)
    for part in [x.real, x.imag] if x.is_complex() else [x]:
        chunks = part.reshape(-1).split(CHUNK if readable(x) else max(n, 1))
        parts = [(chunk.to(dtype) / scale).sum() for chunk in chunks]
        means.append(torch.stack(parts).sum() / n)
        rest = [((chunk.to(dtype) / scale) - means[-1]).square().sum() for chunk in chunks]
        m2 = m2 + torch.stack(rest).sum()
    imaginary = means[1] if len(means) > 1 else torch.zeros_like(m2)
    return torch.stack([means[0], imaginary, m2.sqrt()]) * scale


def _moduli(tensors: list[Tensor], p: float) -> list[Tensor]:
    """Complex tensors as real ones of the same norm."""
    if not any(map(Tensor.is_complex, tensors)):
        return tensors
    flat = torch.view_as_real if p == 2 else torch.abs
    return [flat(t) if t.is_complex() else t for t in tensors]
