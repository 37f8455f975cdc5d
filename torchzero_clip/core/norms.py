"""Norms, right to 1e-6 whatever the size and range: the file that knows about precision.

Only compiled kernels on CPU add up norms of their own, of order 1, 2 and inf: see native.py.

A statistic of one tensor is a column of a few numbers that combine over tensors: a norm for the
p-norms, a maximum, a count, a sum, or mean and √M2 for std and var. Sums are taken in float64.
Reading a number back from a *CPU* tensor is free, so that here, and only here, it is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.rows import all_plain
from torchzero_clip.core.scratch import MANY, PIECE, SCRATCH, SMALL, by_shape
from torchzero_clip.core.tensorlist import wide

Ord: TypeAlias = "float | str"

ROW = 256  # a float32 sum of this many squares is right to 1e-7
DOUBLE = (torch.float64, torch.complex128)
CHUNK = 2**16  # what is converted at a time
DIGIT = 16  # bits that are counted at a time


@dataclass(frozen=True)
class Measure:
    """A norm order: what is summed, and with which power it grows when the tensor is scaled."""

    kind: Literal["power", "max", "count", "spread", "sum"]
    p: float = 2.0
    degree: int = 1
    mean: bool = False  # a power mean rather than a power sum
    root: bool = False  # std rather than var

    @property
    def rows(self) -> int:
        """How many numbers the statistic of a tensor is."""
        return {"spread": 3, "sum": 2}.get(self.kind, 1)

    @property
    def counts(self) -> bool:
        """Whether it takes the number of entries to go from statistics to norms."""
        return self.mean or self.kind == "spread"


NAMED = {
    "l0": Measure("count", degree=0),
    "l1": Measure("power", 1.0),
    "l2": Measure("power", 2.0),
    "l3": Measure("power", 3.0),
    "l4": Measure("power", 4.0),
    "linf": Measure("max"),
    "mad": Measure("power", 1.0, mean=True),
    "rms": Measure("power", 2.0, mean=True),
    "std": Measure("spread", root=True),
    "var": Measure("spread", degree=2),
    "sum": Measure("sum"),
}


def measure(order: Ord) -> Measure:
    """The measure behind `ord`; raises ValueError with the choices."""
    if isinstance(order, str) and order in NAMED:
        return NAMED[order]
    if isinstance(order, (int, float)) and not isinstance(order, bool) and order >= 0:
        if order == math.inf:
            return NAMED["linf"]
        return Measure("power", float(order)) if order > 0 else NAMED["l0"]
    raise ValueError(f"must be a number > 0, inf, 0, or one of {list(NAMED)}, got {order!r}")


# ---------------------------------------------------------------------- whole tensors


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


def merge(stats: Tensor, counts: Tensor | None, m: Measure) -> Tensor:
    """Statistics of shape (rows, units, parts) as those of the units, (rows, units).

    `counts` says of how many entries each part is, where the measure needs it: (units, parts).
    """
    if m.kind == "power":
        return stats.squeeze(2) if stats.shape[2] == 1 else _vector_norm(stats, m.p)
    if m.kind == "max":
        return stats.amax(dim=2)
    if m.kind != "spread":
        return stats.sum(dim=2)
    assert counts is not None
    scale = _safe(stats.abs().amax(dim=(0, 2)))  # squares must stay in range
    rows = stats / scale.unsqueeze(1)
    mean = (rows[:2] * counts).sum(dim=2) / counts.sum(dim=1).clamp(min=1)
    away = (rows[:2] - mean.unsqueeze(2)).square().sum(dim=0)
    m2 = (rows[2].square() + counts * away).sum(dim=1)
    return torch.cat([mean, m2.sqrt().unsqueeze(0)]) * scale


def finish(stats: Tensor, count: Tensor | None, m: Measure) -> Tensor:
    """The norms of units from their statistics, (rows, units); `count` is their size."""
    if m.kind == "power":
        if not m.mean:
            return stats[0]
        assert count is not None
        return stats[0] / count.clamp(min=1) ** (1 / m.p)
    if m.kind == "sum":
        return torch.hypot(stats[0], stats[1])
    if m.kind != "spread":
        return stats[0]
    assert count is not None
    root = stats[2] / (count - 1).clamp(min=1).sqrt()
    root = torch.where(count < 2, torch.zeros_like(root), root)  # one, even infinite, has none
    return root if m.root else root.square()


def scaled(stats: Tensor, ratio: Tensor, m: Measure) -> Tensor:
    """The statistics of tensors that were divided by `ratio`."""
    return stats if m.kind == "count" else stats / ratio


def numbers(values: Sequence[float], like: Tensor) -> Tensor:
    """A vector of known numbers on a device, without a copy from the host that would wait."""
    if like.device.type == "cpu":
        return torch.tensor(values, dtype=like.dtype, device=like.device)
    out = torch.zeros(len(values), dtype=like.dtype, device=like.device)
    torch._foreach_add_(list(out.unbind()), [float(v) for v in values])
    return out


def _powers(tensors: list[Tensor], p: float) -> Tensor:
    real = _moduli(tensors, p)
    device = real[0].device
    if _readable(real[0]) and _plain(real):
        return _powers_on_cpu(real, p)
    if device.type == "cpu":
        real = [_full(t) for t in real]
    if p > 6 or real[0].dtype == torch.float64:  # even float64 sums may leave the range
        biggest = _maxima(real)
        safe = _safe(biggest)
        real = [_full(t) for t in real]
        real = list(torch._foreach_div(real, list(safe.to(real[0].dtype).unbind())))
        return torch.stack(torch._foreach_norm(real, p, dtype=wide(device))) * safe
    return torch.stack(torch._foreach_norm(real, p, dtype=wide(device)))


def _powers_on_cpu(tensors: list[Tensor], p: float) -> Tensor:
    """Small tensors many at a time, large ones in rows; redo what left the range."""
    single, alike, large = _by_size(tensors, p)
    norms = torch.empty(len(tensors), dtype=torch.float64, device="cpu")
    if single:
        norms[single] = _apart([_chunks(tensors[i]) for i in single], p)
    if large:
        norms[large] = _joined([_rows(tensors[i].view(-1), p) for i in large], p)
    for where in alike:
        norms[where] = _joint([tensors[i] for i in where], p)
    double = tensors[0].dtype == torch.float64
    low, high = (-280.0, 300.0) if double or not (alike or large) else (-25.0, 35.0)
    within = (norms > 10.0 ** max(low / p, -300)) & (norms < 10.0 ** min(high / p, 300))
    for i in [] if bool(within.all()) else (~within).nonzero().flatten().tolist():
        norms[i] = _rescaled(tensors[i], p)
    return norms


def _by_size(tensors: list[Tensor], p: float) -> tuple[list[int], list[list[int]], list[int]]:
    """Which tensors torch measures, which are many of one shape, and which go in rows."""
    if p not in (1, 2) or tensors[0].dtype == torch.float64:
        return list(range(len(tensors))), [], []
    single: list[int] = []
    alike: list[list[int]] = []
    large: list[int] = []
    for shape, some in by_shape(tensors).items():
        if shape.numel() > SMALL:
            for i in some:
                (large if tensors[i].is_contiguous() else single).append(i)
        elif len(some) >= MANY and (shape.numel() <= ROW or shape.numel() % ROW == 0):
            alike.append(some)
        else:
            single += some
    return single, alike, large


def _joint(tensors: list[Tensor], p: float) -> Tensor:
    """The norms of tensors of one shape."""
    rows = [_row_norms(some, p).double() for some in _stacked_rows(tensors)]
    return torch.cat([torch.linalg.vector_norm(some, p, dim=1) for some in rows])


def _stacked_rows(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Tensors of one shape as (tensors, rows, entries): a copy costs less than a call for each."""
    n = tensors[0].numel()
    many, width = PIECE // n, min(n, ROW)
    for begin in range(0, len(tensors), many):
        some = _full(SCRATCH.stack(tensors[begin : begin + many]))
        yield some.view(len(some), -1, width)


def _chunks(x: Tensor) -> list[Tensor]:
    """What torch converts to float64 at a time."""
    if x.numel() <= CHUNK or not x.is_contiguous():
        return [_full(x)]
    return [_full(chunk) for chunk in x.view(-1).split(CHUNK)]


def _rows(flat: Tensor, p: float) -> list[Tensor]:
    """The norms of the rows of a vector, and what is left of it."""
    if p == 2 and flat.dtype == torch.float32:
        whole = flat.numel() // ROW * ROW
        rows = _row_norms(flat[:whole].view(-1, ROW), p)
        return [rows] if whole == flat.numel() else [rows, flat[whole:]]
    room = SCRATCH.get(torch.float32)  # half precision is converted, and |x| taken, in the cache
    parts = []
    for piece in flat.split(PIECE):
        whole = len(piece) // ROW * ROW
        here = room[: len(piece)].copy_(piece)
        rest = [here[whole:].clone()] if whole < len(piece) else []
        parts += [_row_norms(here[:whole].view(-1, ROW), p), *rest]
    return parts


def _joined(parts: list[list[Tensor]], p: float) -> Tensor:
    """The norms of vectors from what they are made of, as vectors again: small enough to copy."""
    whole = torch.cat([t for some in parts for t in some]).double()
    each = whole.split([sum([len(t) for t in some]) for some in parts])
    return torch.stack(torch._foreach_norm(list(each), p))


def _apart(parts: list[list[Tensor]], p: float) -> Tensor:
    """The norms of tensors from those of their parts."""
    flat = [t for some in parts for t in some]
    norms = torch.stack(torch._foreach_norm(flat, p, dtype=torch.float64))
    if len(flat) == len(parts):
        return norms
    each = norms.split([len(some) for some in parts])
    return torch.stack(torch._foreach_norm(list(each), p))


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
    if _readable(real[0]) and _plain(real):
        if len({(t.shape, t.dtype) for t in real}) == 1 and real[0].numel() <= SMALL:
            many = PIECE // real[0].numel()
            stacks = [real[begin : begin + many] for begin in range(0, len(real), many)]
            return torch.cat([_largest_of_rows(SCRATCH.stack(some)) for some in stacks])
        ends = [end for t in real for end in torch.aminmax(t)]  # _foreach_norm takes ten times that
        return torch.stack(ends).view(-1, 2).abs().amax(dim=1).double()
    return torch.stack(torch._foreach_norm(real, math.inf)).to(wide(real[0].device))


def _largest_of_rows(x: Tensor) -> Tensor:
    """torch's aminmax along a dim takes twenty times its amax and amin."""
    rows = x.view(len(x), -1)
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
    """Many small tensors of one shape at once."""
    if not (_readable(tensors[0]) and _plain(tensors)):
        return torch.stack([_sum(t, dtype) for t in tensors])
    single, alike, large = _by_size(tensors, 1)
    sums = torch.empty(len(tensors), dtype=dtype, device="cpu")
    for i in single + large:
        sums[i] = _sum(tensors[i], dtype)
    for where in alike:
        rows = _stacked_rows([tensors[i] for i in where])
        sums[where] = torch.cat([some.sum(dim=-1).sum(dim=1, dtype=dtype) for some in rows])
    return sums


def _sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows in float32, which is right to 1e-7 of what is added up, their sums in float64."""
    whole = x.numel() // ROW * ROW
    if x.dtype != torch.float32 or not (_readable(x) and whole and x.is_contiguous()):
        return x.sum(dtype=dtype)
    flat = x.view(-1)
    return flat[:whole].view(-1, ROW).sum(dim=1).sum(dtype=dtype) + flat[whole:].sum(dtype=dtype)


def _spread(tensors: list[Tensor]) -> Tensor:
    """Mean (real and imaginary part) and √M2 of each tensor: at once where one chunk holds it."""
    whole = [t.dtype not in DOUBLE and not t.is_complex() for t in tensors]
    if all(whole) and (not _readable(tensors[0]) or max([t.numel() for t in tensors]) <= CHUNK):
        dtype = wide(tensors[0].device)
        rows = [torch.var_mean(t.to(dtype), correction=0) for t in tensors]
        var, mean = torch.stack([x for row in rows for x in row]).view(-1, 2).unbind(1)
        m2 = var * numbers([t.numel() for t in tensors], var)
        return torch.stack([mean, torch.zeros_like(mean), m2.sqrt()])
    return torch.stack([_moments(t) for t in tensors], dim=1)


def _moments(x: Tensor) -> Tensor:
    """Mean (of the real and the imaginary part) and √M2, in two passes over float64 chunks."""
    dtype, n = wide(x.device), x.numel()
    scale = (
        _safe(x.abs().amax()).to(dtype)
        if x.dtype in DOUBLE
        else torch.ones((), dtype=dtype, device=x.device)
    )
    means: list[Tensor] = []
    m2 = torch.zeros((), dtype=dtype, device=x.device)
    for part in [x.real, x.imag] if x.is_complex() else [x]:
        chunks = part.reshape(-1).split(CHUNK if _readable(x) else max(n, 1))
        parts = [(chunk.to(dtype) / scale).sum() for chunk in chunks]
        means.append(torch.stack(parts).sum() / n)
        rest = [((chunk.to(dtype) / scale) - means[-1]).square().sum() for chunk in chunks]
        m2 = m2 + torch.stack(rest).sum()
    imaginary = means[1] if len(means) > 1 else torch.zeros_like(m2)
    return torch.stack([means[0], imaginary, m2.sqrt()]) * scale


# ---------------------------------------------------------------------- slices


def slice_statistics(x: Tensor, dims: tuple[int, ...], m: Measure) -> Tensor:
    """The statistic of each slice along `dims`, a column each; zeros where there are none."""
    if not dims or x.numel() == 0:
        lengths = [1 if d in dims or not dims else n for d, n in enumerate(x.shape)]
        return torch.zeros(m.rows, math.prod(lengths), dtype=wide(x.device), device=x.device)
    most = max(PIECE // 2 * len(x) // x.numel(), 1)
    if not _readable(x) or most >= len(x):
        return _slice_statistics(x, dims, m)
    blocks = x.split(most)  # so that float64 copies stay in the cache
    stats = [_slice_statistics(block, dims, m) for block in blocks]
    if 0 not in dims:
        return torch.cat(stats, dim=1)
    sizes = [math.prod([block.shape[d] for d in dims]) for block in blocks]
    counts = torch.tensor(sizes, dtype=torch.float64, device=x.device)
    return merge(torch.stack(stats, dim=2), counts.expand(stats[0].shape[1], -1), m)


def _slice_statistics(x: Tensor, dims: tuple[int, ...], m: Measure) -> Tensor:
    dtype = wide(x.device)
    if m.kind == "power":
        real = x.abs() if x.is_complex() else x
        if m.p > 6 or real.dtype == torch.float64:
            real = real.to(dtype)
            safe = _safe(real.abs().amax(dims, keepdim=True))
            norm = torch.linalg.vector_norm(real / safe, m.p, dims, True) * safe
        else:
            norm = torch.linalg.vector_norm(_full(real), m.p, dims, True, dtype=dtype)
        return norm.view(1, -1)
    if m.kind == "max":
        return x.abs().amax(dims).to(dtype).view(1, -1)
    if m.kind == "count":
        return (x != 0).sum(dims).to(dtype).view(1, -1)
    double = x.to(torch.complex128 if x.is_complex() else dtype)
    if m.kind == "sum":
        return _parts(double.sum(dims))
    safe = _safe(double.abs().amax(dims, keepdim=True))
    double = double / safe
    mean = double.mean(dims, keepdim=True)
    m2 = (double - mean).abs().square().sum(dims, keepdim=True)
    return torch.cat([_parts(mean), m2.sqrt().view(1, -1)]) * safe.view(1, -1)


def _parts(x: Tensor) -> Tensor:
    """Real and imaginary part, a row each."""
    flat = x.reshape(-1)
    return torch.stack([flat.real, flat.imag if flat.is_complex() else torch.zeros_like(flat)])


# ---------------------------------------------------------------------- order


def percentile(tensors: Sequence[Tensor], p: float | Tensor) -> Tensor:
    """The p-th percentile of all magnitudes: one of them, the nearest below."""
    last = sum([t.numel() for t in tensors]) - 1
    if last < 0:
        return torch.zeros((), dtype=tensors[0].dtype, device=tensors[0].device)
    if last > PIECE // 2 and _readable(tensors[0]) and _plain(list(tensors)):
        return _counted(tensors, int(float(p) * last / 100))
    rows = [t.reshape(-1).abs() for t in tensors]
    sizes = torch.cat(rows) if len(rows) > 1 else rows[0]
    if isinstance(p, Tensor):  # as a number it would have to be read on the host
        index = (p * last / 100).to(sizes.device).floor().long()
        return sizes.sort().values.index_select(0, index.view(1)).view(())
    return sizes.kthvalue(int(p * last / 100) + 1).values


def _counted(tensors: Sequence[Tensor], rank: int) -> Tensor:
    """The magnitude of that rank, sixteen bits at a time: as integers, floats have their order."""
    double = torch.float64 in {t.dtype for t in tensors}
    dtype, whole, bits = (
        (torch.float64, torch.int64, 64) if double else (torch.float32, torch.int32, 32)
    )
    prefix = 0
    for shift in range(bits - DIGIT, -1, -DIGIT):
        counts = torch.zeros(2**DIGIT, dtype=torch.int64, device="cpu")
        for t in tensors:
            for chunk in t.reshape(-1).split(PIECE // 2):
                digits = chunk.to(dtype).abs().view(whole).bitwise_right_shift(shift)
                if shift < bits - DIGIT:
                    digits = digits[digits.bitwise_right_shift(DIGIT) == prefix]
                counts += digits.bitwise_and_(2**DIGIT - 1).bincount(minlength=2**DIGIT)
        upto = counts.cumsum(0)
        digit = int((upto <= rank).sum())
        rank -= int(upto[digit - 1]) if digit else 0
        prefix = prefix << DIGIT | digit
    return torch.tensor(prefix, dtype=whole, device="cpu").view(dtype)


# ---------------------------------------------------------------------- scaling


def divisions(ratio: Tensor, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """How to divide tensors of a dtype by `ratio`: ("mul" or "div", by what), one after another.

    Nothing where all are 1; otherwise a product, after an exact quotient where the dtype holds the
    ratio or its inverse badly or not at all, so that no unit's bits depend on another's ratio. Who
    cannot look divides once.
    """
    if not _readable(ratio):
        return [("div", ratio)]
    low, high = [float(end) for end in torch.aminmax(ratio)] if ratio.numel() else (1.0, 1.0)
    if low == high == 1:
        return []
    safe, most = _safe(ratio), 1e290 if dtype in DOUBLE else 1e30
    if bool(((safe > 1 / most) & (safe < most)).all()):
        return [("mul", ratio.reciprocal())]
    first = torch.exp2((torch.log2(safe) / 2).floor())  # a power of two divides exactly
    return [("div", first), ("mul", first / ratio)]


# ---------------------------------------------------------------------- helpers


def _readable(x: Tensor) -> bool:
    """Whether a look at values costs nothing."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and _plain([x])


def _moduli(tensors: list[Tensor], p: float) -> list[Tensor]:
    """Complex tensors as real ones of the same norm."""
    if not any(map(Tensor.is_complex, tensors)):
        return tensors
    flat = torch.view_as_real if p == 2 else torch.abs
    return [flat(t) if t.is_complex() else t for t in tensors]


def _full(x: Tensor) -> Tensor:
    """At least float32: on CPU, dtype= alone would still sum in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _safe(scale: Tensor) -> Tensor:
    """A scale to divide by: 1 where it is 0, infinite or NaN."""
    return torch.where((scale > 0) & torch.isfinite(scale), scale, torch.ones_like(scale))


def _vector_norm(x: Tensor, p: float) -> Tensor:
    """p-norm along the last dim, in the range that its result has."""
    if _readable(x) and x.dtype == torch.float64:
        norm = torch.linalg.vector_norm(x, p, dim=-1)
        if p <= 6 and all([1e-40 < n < 1e40 for n in norm.flatten().tolist()]):
            return norm
    safe = _safe(x.amax(dim=-1, keepdim=True))
    return (torch.linalg.vector_norm(x / safe, p, dim=-1, keepdim=True) * safe).squeeze(-1)


def _plain(tensors: list[Tensor]) -> bool:
    return all_plain(tensors)
