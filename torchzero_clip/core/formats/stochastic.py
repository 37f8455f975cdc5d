"""Stochastic rounding: float32 values in 16 bits, rounded up or down by random bits.

The bits are a hash of a seed, the step, the parameter and the element. So all engines use the same
bits. The bits do not depend on how a parameter is sharded. A run that resumes from a checkpoint
uses the same bits as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.formats.nearest import Nearest
from torchzero_clip.core.sharding.layout import Layout, local

DRAWS = ("state/seed", "state/step")
"""The keys of the seed and the step count for rounding state, in the chain dict of every group."""
ROUNDS = ("rounding/seed", "rounding/step")
"""The keys of the seed and the step count for rounding parameters, in the same dict."""
DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""For each dtype, the number of mantissa bits that it has less than float32."""
SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**-112}  # see `carried`


def mix_(x: Tensor) -> Tensor:
    """Replace 32-bit integers by their hash in place, with the factors of lowbias32.

    `kernel.h` has the same function.
    """
    x = _stirred(x)
    return x.bitwise_xor_(_high(x))


def halves_(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper 16 bits of `mix_(x)`."""
    x = _stirred(x)
    high = _high(x)
    return x.bitwise_xor_(high).bitwise_and_(0xFFFF), high


def _stirred(x: Tensor) -> Tensor:
    x = x.mul_(0x7FEB352D)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)


def _high(x: Tensor) -> Tensor:
    return (x >> 16).bitwise_and_(0xFFFF)


def carried(x: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each float32 value as one of its two neighbors in `dtype`, mostly the nearer one.

    Noise is added to the bits that are dropped. The probability that the sum carries into the
    remaining bits is the probability of rounding up. Float16 has denormals below 2^-14, and float32
    below 2^-126. So for float16, the values are multiplied by 2^-112 during the computation. Both
    dtypes then have the same denormals.
    """
    bits = DROPPED[dtype]
    scale = SCALE[dtype]
    scaled = x.mul(scale) if scale != 1 else x
    sums = noise.add_(scaled.view(torch.int32)).bitwise_and_(-(2**bits)).view(torch.float32)
    sums = sums.div_(scale) if scale != 1 else sums
    return sums.clamp_(x, sums)  # keeps a NaN of x


def rounded(x: Tensor, key: Tensor, start: Tensor, half: int) -> Tensor:
    """Return float32 values in 16 bits, rounded by one half of a hash of key and element.

    Args:
        x: The values.
        key: The key of the parameter in this step.
        start: The index of the first element if the indices are consecutive. Otherwise, the index
            of each element.
        half: The half of the hash to use: 0 or 1 for bfloat16, 2 or 3 for float16.
    """
    dtype = torch.float16 if half > 1 else torch.bfloat16
    if start.dim() == 0:
        start = start + torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    noise = halves_(start ^ key)[half % 2] >> (16 - DROPPED[dtype])
    return carried(x, noise, dtype).to(dtype)


class Elements:
    """The index of each element in the memory of its whole parameter, also for shards.

    Args:
        params: The parameters, whole or sharded.
        layouts: The layout of each parameter, or None if it is not sharded.
    """

    def __init__(self, params: Sequence[Tensor], layouts: Sequence[Layout | None]) -> None:
        alike = [torch.empty_strided(p.shape, p.stride(), device="meta") for p in params]
        self.strides = [torch.empty_like(t).stride() for t in alike]  # `empty_like` leaves no gaps
        here = [torch.empty(local(p).shape, device="meta") for p in params]
        self.contiguous = all([self.follow(i, t) for i, t in enumerate(here)])
        """Whether the elements of contiguous tensors like these have consecutive indices."""
        starts = list(map(_start, layouts, self.strides))
        self.starts = torch.tensor(starts, dtype=torch.int32, device=params[0].device)

    def follow(self, i: int, t: Tensor) -> bool:
        """Return whether the elements of a tensor like the i-th have consecutive indices."""
        sides = zip(t.shape, t.stride(), self.strides[i], strict=True)
        dims = [(n, stride, whole) for n, stride, whole in sides if n > 1]
        last = sum([(n - 1) * stride for n, stride, _ in dims])
        return last < max(t.numel(), 1) and all([stride == whole for _, stride, whole in dims])

    def index(self, i: int, t: Tensor) -> Tensor:
        """Return the index of every element of a tensor like the i-th."""
        index = self.starts[i].to(torch.int64)
        for d, (n, stride) in enumerate(zip(t.shape, self.strides[i], strict=True)):
            along = torch.arange(n, device=t.device) * stride
            index = index + along.view(-1, *[1] * (t.dim() - d - 1))
        return index.to(torch.int32)


class Stochastic(Nearest):
    """A format that rounds each value to one of its two neighbors, mostly to the nearer one.

    Args:
        keys: An integer for each tensor. The integers change in every step.
        elements: The elements of the parameters.
        half: The half of the hash to use: 0 or 1 for bfloat16, 2 or 3 for float16.
    """

    whole = True

    def __init__(self, keys: Tensor, elements: Elements, half: int = 0) -> None:
        super().__init__()
        self.keys = keys
        self.elements = elements
        self.half = half

    def store(self, i: int, target: Tensor, at: int | None, values: Tensor) -> None:
        elements = self.elements
        places = elements.index(i, target) if at is None else elements.starts[i] + _signed(at)
        target.copy_(rounded(values, self.keys[i], places, self.half))

    def follows(self, i: int, t: Tensor) -> bool:
        return self.elements.follow(i, t)


def keys_of(places: Sequence[int], numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return an integer for each place: a hash of the place and `numbers`."""
    # hashed once before the numbers are mixed in, so that place 1 and number 2 differ from 2 and 1
    keys = mix_(torch.tensor(places, dtype=torch.int32, device=device))
    for number in numbers:
        keys = mix_(keys.bitwise_xor_(_signed(number)))
    return keys


def prepare_draws(groups: Sequence[Mapping[str, Any]], draws: tuple[str, str]) -> None:
    """Add the seed and the step count to the groups that have none."""
    seed, step = draws
    for group in groups:
        chain = group["chain"]
        chain.setdefault(seed, 0)
        if not isinstance(chain.get(step), Tensor):
            device = group["params"][0].device if group["params"] else "cpu"
            chain[step] = torch.full((), chain.get(step, 0), dtype=torch.int32, device=device)


def _start(layout: Layout | None, strides: Sequence[int]) -> int:
    """Return the index of the first element of the shard of this rank, as an int32."""
    if layout is None:
        return 0
    ends = layout.extents(layout.mesh.get_coordinate())
    first = sum([begin * stride for (begin, _), stride in zip(ends, strides, strict=True)])
    return _signed(first)


def _signed(x: int) -> int:
    """Return the signed 32-bit integer with the lowest 32 bits of x."""
    return (x + 2**31) % 2**32 - 2**31
