"""Statistics of whole tensors, right to 1e-6 whatever their size and range.

Only compiled kernels on CPU add up norms of their own, of order 1, 2 and inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.core.norms.measures import NAMED, Measure, merge
from torchzero_clip.core.norms.numeric import (
    as_one_operator,
    at_least_float32,
    numbers,
    readable,
    safe_scale,
)
from torchzero_clip.core.norms.short_tensors import LINF, PACKINGS, POWERS, ROW, SUM, reduced
from torchzero_clip.core.small_tensors import in_stacks
from torchzero_clip.core.stacks import portion
from torchzero_clip.core.state import DOUBLE, HALF
from torchzero_clip.core.tensor_kinds import DTYPE, SHAPE, all_real, wide
from torchzero_clip.core.torch_private import foreach

FEW_ROWS = 2**10  # whose norms are joined together with those of others
CHUNK = 2**16  # what is converted at a time
MOST = 2**21  # the same where calls are dear
SINGLE = frozenset((torch.float32, *HALF))  # whose squares float64 holds
SHARED = (1, 2, math.inf)  # norms that torch takes of many tensors in one call on an accelerator


@as_one_operator
def statistics(tensors: Sequence[Tensor], m: Measure) -> Tensor:
    """The statistic of each tensor, a column each, in float64."""
    filled = list(tensors)
    if not all(map(Tensor.numel, tensors)):
        filled = [t if t.numel() else t.new_zeros(1) for t in tensors]
    if m.kind in ("power", "max") and any(map(Tensor.is_complex, filled)):
        filled = _moduli(filled, m.p if m.kind == "power" else math.inf)
    if m.kind == "power":
        return _powers(filled, m.p).unsqueeze(0)
    if m.kind == "max":
        return _maxima(filled).unsqueeze(0)
    if m.kind == "count":
        counts = in_stacks(
            filled, lambda x: torch.count_nonzero(x.flatten(1), dim=1), torch.count_nonzero
        )
        return torch.stack(counts).to(wide(filled[0].device)).unsqueeze(0)
    if m.kind == "sum":
        return totals(filled)
    return _spread(filled)


def joint_norm(tensors: Sequence[Tensor], m: Measure) -> Tensor | None:
    """Return the norm of all tensors together, as a vector with one entry.

    This is faster than to join the norms of single tensors. It is only done for the 2-norm of short
    tensors on CPU. For all others the result is None.
    """
    if m != NAMED["l2"] or not SINGLE.issuperset(map(DTYPE, tensors)):
        return None
    if not (readable(tensors[0]) and all_real(tensors) and all(map(Tensor.numel, tensors))):
        return None
    packing = PACKINGS.of(tuple(map(SHAPE, tensors)))
    if packing.long:
        return None
    norms = [torch.linalg.vector_norm(batch.copy(tensors)) for batch in packing.batches]
    if len(norms) > 1:
        norms = [torch.linalg.vector_norm(torch.stack(norms))]
    return norms[0].view(1)


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor: NaN or infinite where one of its entries is."""
    return statistics(tensors, NAMED["linf"])[0]


def _powers(real: list[Tensor], p: float) -> Tensor:
    double = real[0].dtype in DOUBLE
    if readable(real[0]) and all_real(real):
        if p in POWERS and not double:
            return reduced(real, POWERS[p], lambda some: _long_powers(some, p))
        norms = _joint_norms([_chunks(t, p) for t in real], p)
        in_float64 = p <= 6 and not double  # which holds the powers
        return norms if in_float64 else _in_range(norms, real, p, -280, 300)
    if real[0].is_cpu or p > 6 or double:
        real = [at_least_float32(t) for t in real]
    if p > 6 or double:  # even float64 sums may leave the range
        safe = safe_scale(_maxima(real))
        real = list(foreach("div", real, list(safe.to(real[0].dtype).unbind())))
        return _joint_norms(real, p) * safe
    return _joint_norms(real, p)


def _joint_norms(tensors: list[Tensor], p: float) -> Tensor:
    """The norms of tensors as one vector, summed in float64 where there is one."""
    dtype = wide(tensors[0].device)
    if p in SHARED or tensors[0].is_cpu:
        return torch.stack(foreach("norm", tensors, p, dtype=dtype))
    norm = torch.linalg.vector_norm
    rows = in_stacks(
        tensors,
        lambda x: norm(x.flatten(1), p, dim=1, dtype=dtype),
        lambda t: norm(t, p, dtype=dtype),
    )
    return torch.stack(rows)


def _long_powers(tensors: list[Tensor], p: float) -> Tensor:
    """p-norms of tensors of many entries, most of them from those of rows in float32."""
    vectors = [_rows(t, p) if t.is_contiguous() else _chunks(t, p) for t in tensors]
    return _in_range(_norms_of_vectors(vectors, p), tensors, p, -25, 35)


def _norms_of_vectors(vectors: list[Tensor], p: float) -> Tensor:
    """The norm of each vector, of those that are short in one call."""
    lengths = list(map(Tensor.numel, vectors))
    if max(lengths) <= FEW_ROWS:
        return POWERS[p].joined(torch.cat(vectors), torch.tensor(lengths, device="cpu"))
    if min(lengths) > FEW_ROWS:
        return _joint_norms(vectors, p)
    short = [n <= FEW_ROWS for n in lengths]
    norms = torch.empty(len(vectors), dtype=torch.float64, device="cpu")
    for kind in (True, False):
        some = [v for v, is_short in zip(vectors, short, strict=True) if is_short is kind]
        norms[torch.tensor(short, device="cpu") == kind] = _norms_of_vectors(some, p)
    return norms


def _in_range(norms: Tensor, tensors: list[Tensor], p: float, low: float, high: float) -> Tensor:
    """p-norms, those again whose powers of p are not between two powers of ten."""
    least, most = [10.0 ** max(min(end / p, 300), -300) for end in (low, high)]
    smallest, largest = torch.aminmax(norms)
    if least < smallest.item() and largest.item() < most:
        return norms
    beyond = (~((norms > least) & (norms < most))).nonzero().flatten()
    norms[beyond] = _rescaled([tensors[i] for i in beyond.tolist()], p)
    return norms


def _chunks(x: Tensor, p: float) -> Tensor:
    """A vector with the norm of a tensor: itself, or the norms of parts that are cached."""
    if x.numel() <= CHUNK or not x.is_contiguous():
        return at_least_float32(x)
    return _joint_norms([at_least_float32(part) for part in x.view(-1).split(CHUNK)], p)


def _rows(x: Tensor, p: float) -> Tensor:
    """A vector with the norm of a tensor: the norms of its rows, and the entries after the last."""
    n = x.numel() // ROW * ROW
    if p == 2 and x.dtype == torch.float32:
        if n == x.numel():
            return POWERS[p].of_rows(x.view(-1, ROW))
        flat = x.view(-1)
        return torch.cat([POWERS[p].of_rows(flat[:n].view(-1, ROW)), flat[n:]])
    parts, room = [], PACKINGS.memory.view(torch.float32)
    for piece in x.view(-1).split(len(room)):  # to convert half precision, and take |x|, in cache
        n, here = len(piece) // ROW * ROW, room[: len(piece)].copy_(piece)
        parts += [POWERS[p].of_rows(here[:n].view(-1, ROW)), here[n:].abs()]
    return torch.cat(parts)


def _rescaled(tensors: list[Tensor], p: float) -> Tensor:
    """p-norms of tensors over their largest entry, where that is a number to divide by."""
    norms = _maxima(tensors)
    for i in ((norms > 0) & norms.isfinite()).nonzero().flatten().tolist():
        norms[i] = torch.linalg.vector_norm(tensors[i].double() / norms[i], p) * norms[i]
    return norms


def _maxima(real: list[Tensor]) -> Tensor:
    if readable(real[0]) and all_real(real):
        return reduced(real, LINF, _largest)
    return torch.stack(foreach("norm", real, math.inf)).to(wide(real[0].device))


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest magnitude of each tensor: _foreach_norm takes ten times that."""
    ends = [end for t in tensors for end in torch.aminmax(t)]
    return torch.stack(ends).view(-1, 2).abs().amax(dim=1).double()


def totals(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of each tensor, its real and its imaginary part, a column each."""
    dtype = wide(tensors[0].device)
    if not any([t.is_complex() for t in tensors]):
        real = _sums(list(tensors), dtype)
        return torch.stack([real, torch.zeros_like(real)])
    real = torch.stack([_sum(t.real, dtype) for t in tensors])
    parts = [t.imag.sum(dtype=dtype) if t.is_complex() else t.sum(dtype=dtype) * 0 for t in tensors]
    return torch.stack([real, torch.stack(parts)])


def _sums(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of each tensor."""
    if readable(tensors[0]) and all_real(tensors):
        return reduced(tensors, SUM, lambda some: _sums_apart(some, dtype))
    return _sums_apart(tensors, dtype)


def _sums_apart(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    rows = in_stacks(tensors, lambda x: x.flatten(1).sum(1, dtype=dtype), lambda t: _sum(t, dtype))
    return torch.stack(rows)


def _sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a tensor: rows in float32, right to 1e-7 of their magnitudes, then in float64."""
    whole = x.numel() // ROW * ROW
    if x.dtype == torch.float32 and readable(x) and whole and x.is_contiguous():
        flat = x.view(-1)
        rows = flat[:whole].view(-1, ROW).sum(dim=1)
        total = rows.sum(dtype=dtype) + flat[whole:].sum(dtype=dtype)
        if total.isfinite():
            return total
    return x.sum(dtype=dtype)


def _spread(tensors: list[Tensor], most: int = 0) -> Tensor:
    """Mean (real and imaginary part) and √M2 of each tensor: at once where one chunk holds it."""
    most = most or portion(tensors, MOST)
    small = [i for i, t in enumerate(tensors) if _at_once(t, most)]
    dtype, columns = wide(tensors[0].device), dict[int, Tensor]()
    if small:
        some = [tensors[i] for i in small]
        rows = in_stacks(
            some, lambda x: _var_mean(x.flatten(1), dtype, 1), lambda t: _var_mean(t, dtype)
        )
        var, mean = torch.stack(rows).unbind(1)
        m2 = var * numbers([tensors[i].numel() for i in small], var)
        made = torch.stack([mean, torch.zeros_like(mean), m2.sqrt()])
        if len(small) == len(tensors):
            return made
        columns.update(zip(small, made.unbind(1), strict=True))
    for i in set(range(len(tensors))) - set(small):
        t = tensors[i]
        columns[i] = _moments(t) if readable(t) or not _is_plain(t) else _of_parts(t, most)
    return torch.stack([columns[i] for i in range(len(tensors))], dim=1)


def _of_parts(t: Tensor, most: int) -> Tensor:
    """The same of a large tensor on an accelerator: a copy of all in float64 would be larger."""
    parts = list(t.reshape(-1).split(most))
    stats = _spread(parts, most).unsqueeze(1)
    counts = numbers([part.numel() for part in parts], stats).unsqueeze(0)
    return merge(stats, counts, NAMED["std"]).squeeze(1)


def _var_mean(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """Variance and mean, side by side in the last dim."""
    return torch.stack(torch.var_mean(x.to(dtype), dim, correction=0), -1)


def _at_once(t: Tensor, most: int) -> bool:
    return _is_plain(t) and t.numel() <= (CHUNK if readable(t) else most)


def _is_plain(t: Tensor) -> bool:
    return t.dtype not in DOUBLE and not t.is_complex()


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
    flat = torch.view_as_real if p == 2 else torch.abs
    return [flat(t) if t.is_complex() else t for t in tensors]
