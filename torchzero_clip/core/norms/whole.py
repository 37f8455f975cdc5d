"""Statistics of whole tensors, with a relative error of at most 1e-6 for any size and range.

All engines use this module, with one exception: compiled CPU kernels compute norms of order 1, 2
and inf themselves.
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
from torchzero_clip.core.norms.short_tensors import LINF, PACKINGS, POWERS, ROW, SHORT, SUM, reduced
from torchzero_clip.core.small_tensors import in_stacks
from torchzero_clip.core.stacks import portion
from torchzero_clip.core.state import DOUBLE, HALF
from torchzero_clip.core.tensor_kinds import DTYPE, SHAPE, all_real, wide
from torchzero_clip.core.torch_private import foreach

FEW_ROWS = 2**10
"""The largest length of vectors whose norms are computed in one call for all vectors."""
CHUNK = 2**16
"""The number of elements of a CPU tensor that are converted at once. They must fit in cache."""
CHUNK_ON_ACCELERATOR = 2**21
"""The number of elements that are converted at once on an accelerator (calls are expensive)."""
ORDERS_IN_ONE_CALL = (1, 2, math.inf)
"""The orders for which torch computes norms of many tensors in one call on an accelerator."""
SINGLE = frozenset((torch.float32, *HALF))
"""The dtypes whose squares float64 can represent."""


@as_one_operator
def statistics(tensors: Sequence[Tensor], m: Measure) -> Tensor:
    """Return the statistic of each tensor, as a column in float64."""
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

    This is faster than joining the norms of single tensors. It is only possible for the 2-norm of
    short tensors on CPU. In all other cases, the result is None.
    """
    if torch.compiler.is_compiling():  # torch.compile cannot trace the checks below
        return None
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
    """Return the largest magnitude of each tensor. If an element is NaN, the magnitude is NaN."""
    return statistics(tensors, NAMED["linf"])[0]


def _powers(real: list[Tensor], p: float) -> Tensor:
    """Return the p-norm of each real tensor."""
    double = real[0].dtype in DOUBLE
    if readable(real[0]) and all_real(real):
        if p in POWERS and not double:
            return reduced(real, POWERS[p], lambda long: _long_powers(long, p))
        norms = _joint_norms([_chunks(t, p) for t in real], p)
        if p <= 6 and not double:  # float64 can represent these powers of float32 values
            return norms
        return _in_range(norms, real, p, -280, 300)
    if real[0].is_cpu or p > 6 or double:
        real = [at_least_float32(t) for t in real]
    if p > 6 or double:  # sums in float64 may overflow
        safe = safe_scale(_maxima(real))
        real = list(foreach("div", real, list(safe.to(real[0].dtype).unbind())))
        return _joint_norms(real, p) * safe
    return _joint_norms(real, p)


def _joint_norms(tensors: list[Tensor], p: float) -> Tensor:
    """Return the norms of tensors as one vector. Sums are in float64 if the device has it."""
    dtype = wide(tensors[0].device)
    if p in ORDERS_IN_ONE_CALL or tensors[0].is_cpu:
        return torch.stack(foreach("norm", tensors, p, dtype=dtype))
    norm = torch.linalg.vector_norm
    norms = in_stacks(
        tensors,
        lambda x: norm(x.flatten(1), p, dim=1, dtype=dtype),
        lambda t: norm(t, p, dtype=dtype),
    )
    return torch.stack(norms)


def _long_powers(tensors: list[Tensor], p: float) -> Tensor:
    """Return the p-norms of long tensors, from the norms of their rows in float32."""
    vectors = [_rows(t, p) if t.is_contiguous() else _chunks(t, p) for t in tensors]
    return _in_range(_norms_of_vectors(vectors, p), tensors, p, -25, 35)


def _norms_of_vectors(vectors: list[Tensor], p: float) -> Tensor:
    """Return the norm of each vector. All short vectors share one call."""
    lengths = list(map(Tensor.numel, vectors))
    if max(lengths) <= FEW_ROWS:
        return POWERS[p].joined(torch.cat(vectors), torch.tensor(lengths, device="cpu"))
    if min(lengths) > FEW_ROWS:
        return _joint_norms(vectors, p)
    short = torch.tensor([n <= FEW_ROWS for n in lengths], device="cpu")
    norms = torch.empty(len(vectors), dtype=torch.float64, device="cpu")
    norms[short] = _norms_of_vectors([v for v in vectors if v.numel() <= FEW_ROWS], p)
    norms[~short] = _norms_of_vectors([v for v in vectors if v.numel() > FEW_ROWS], p)
    return norms


def _in_range(norms: Tensor, tensors: list[Tensor], p: float, low: float, high: float) -> Tensor:
    """Return p-norms, and compute norms again if their powers may have left the range.

    Args:
        norms: The norms.
        tensors: The tensors.
        p: The order.
        low: The smallest accurate p-th power of a norm is 10**low.
        high: The largest accurate p-th power of a norm is 10**high.
    """
    least, most = [10.0 ** max(min(end / p, 300), -300) for end in (low, high)]
    smallest, largest = torch.aminmax(norms)
    if least < smallest.item() and largest.item() < most:
        return norms
    beyond = (~((norms > least) & (norms < most))).nonzero().flatten()
    norms[beyond] = _rescaled([tensors[i] for i in beyond.tolist()], p)
    return norms


def _chunks(x: Tensor, p: float) -> Tensor:
    """Return a tensor with the same norm: the tensor itself, or the norms of its chunks."""
    if x.numel() <= CHUNK or not x.is_contiguous():
        return at_least_float32(x)
    return _joint_norms([at_least_float32(part) for part in x.view(-1).split(CHUNK)], p)


def _rows(x: Tensor, p: float) -> Tensor:
    """Return a vector with the same norm: the norms of whole rows, and the remaining elements."""
    n = x.numel() // ROW * ROW
    if p == 2 and x.dtype == torch.float32:
        if n == x.numel():
            return POWERS[p].of_rows(x.view(-1, ROW))
        flat = x.view(-1)
        return torch.cat([POWERS[p].of_rows(flat[:n].view(-1, ROW)), flat[n:]])
    parts = []
    scratch = PACKINGS.memory.view(torch.float32)
    for piece in x.view(-1).split(len(scratch)):  # scratch memory fits in cache
        copy = scratch[: len(piece)].copy_(piece)
        n = len(piece) // ROW * ROW
        parts.append(POWERS[p].of_rows(copy[:n].view(-1, ROW)))
        parts.append(copy[n:].abs())
    return torch.cat(parts)


def _rescaled(tensors: list[Tensor], p: float) -> Tensor:
    """Return the p-norms of tensors. Each tensor is first divided by its largest magnitude."""
    norms = _maxima(tensors)
    for i in ((norms > 0) & norms.isfinite()).nonzero().flatten().tolist():
        norms[i] = torch.linalg.vector_norm(tensors[i].double() / norms[i], p) * norms[i]
    return norms


def _maxima(real: list[Tensor]) -> Tensor:
    """Return the largest magnitude of each real tensor."""
    if readable(real[0]) and all_real(real):
        return reduced(real, LINF, _largest)
    return torch.stack(foreach("norm", real, math.inf)).to(wide(real[0].device))


def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest magnitude of each CPU tensor, in a tenth of the time of _foreach_norm."""
    ends = [end for t in tensors for end in torch.aminmax(t)]
    return torch.stack(ends).view(-1, 2).abs().amax(dim=1).double()


def totals(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of each tensor: a column with the real and the imaginary part."""
    dtype = wide(tensors[0].device)
    if not any([t.is_complex() for t in tensors]):
        real = _sums(list(tensors), dtype)
        return torch.stack([real, torch.zeros_like(real)])
    real = torch.stack([_sum(t.real, dtype) for t in tensors])
    parts = [t.imag.sum(dtype=dtype) if t.is_complex() else t.sum(dtype=dtype) * 0 for t in tensors]
    return torch.stack([real, torch.stack(parts)])


def _sums(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of each real tensor."""
    if readable(tensors[0]) and all_real(tensors):
        return reduced(tensors, SUM, lambda long: _separate_sums(long, dtype))
    return _separate_sums(tensors, dtype)


def _separate_sums(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of each real tensor, without copies into scratch memory."""
    sums = in_stacks(tensors, lambda x: x.flatten(1).sum(1, dtype=dtype), lambda t: _sum(t, dtype))
    return torch.stack(sums)


def _sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of a tensor.

    On CPU, each row is summed in float32, with an error of 1e-7 relative to the magnitudes in the
    row. The sums of rows are added in float64.
    """
    n = x.numel() // ROW * ROW
    if x.dtype == torch.float32 and readable(x) and n and x.is_contiguous():
        flat = x.view(-1)
        rows = flat[:n].view(-1, ROW).sum(dim=1)
        total = rows.sum(dtype=dtype) + flat[n:].sum(dtype=dtype)
        if total.isfinite():
            return total
    return x.sum(dtype=dtype)


def _spread(tensors: list[Tensor]) -> Tensor:
    """Return the mean (real and imaginary part) and √M2 of each tensor, as a column.

    Large tensors are converted to float64 in chunks, because a copy of the whole tensor would need
    much memory. The statistics of the chunks are merged.
    """
    device = tensors[0].device
    dtype = wide(device)
    scale = torch.ones((), dtype=dtype, device=device)
    if any(map(Tensor.is_complex, tensors)):
        dtype = dtype.to_complex()
    if any([t.dtype in DOUBLE for t in tensors]):  # squares of float64 may leave the range
        scale = safe_scale(largest(tensors))
        tensors = [t / x for t, x in zip(tensors, scale.unbind(), strict=True)]
    size = CHUNK if readable(tensors[0]) else portion(tensors, CHUNK_ON_ACCELERATOR)
    chunks = [t.reshape(-1).split(size) if t.numel() > size else [t] for t in tensors]
    flat = [chunk for of_tensor in chunks for chunk in of_tensor]
    pairs = in_stacks(
        flat, lambda x: _var_mean(x.flatten(1), dtype, 1), lambda t: _var_mean(t, dtype)
    )
    var, mean = torch.stack(pairs).unbind(1)
    imaginary = mean.imag if dtype.is_complex else torch.zeros_like(mean)
    counts = numbers(list(map(Tensor.numel, flat)), scale)
    stats = torch.stack([mean.real, imaginary, (var.real * counts).sqrt()])
    if len(flat) > len(tensors):
        lengths = list(map(len, chunks))
        parts = zip(stats.split(lengths, dim=1), counts.split(lengths), strict=True)
        stats = torch.cat([_merged(*part) for part in parts], dim=1)
    return stats * scale


def _merged(stats: Tensor, counts: Tensor) -> Tensor:
    """Merge the columns of the chunks of a tensor into one column."""
    if len(counts) == 1:
        return stats
    return merge(stats.unsqueeze(1), counts.unsqueeze(0), NAMED["std"])


def _var_mean(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """Return variance and mean, stacked along a new last dim."""
    x = x.to(dtype)
    if dim is not None or not x.is_cpu or x.numel() < SHORT:
        return torch.stack(torch.var_mean(x, dim, correction=0), -1)
    mean = x.mean()  # two passes take half the time of torch.var_mean
    away = torch.linalg.vector_norm(_moduli([x - mean], 2.0)[0])
    return torch.stack([away.square() / x.numel(), mean])


def _moduli(tensors: list[Tensor], p: float) -> list[Tensor]:
    """Return a real tensor with the same p-norm for each complex tensor."""
    flat = torch.view_as_real if p == 2 else torch.abs
    return [flat(t) if t.is_complex() else t for t in tensors]
