"""Stochastic: float32 numbers in 16 bits, up or down as random bits decide.

The bits are a hash of a seed, the step, the parameter and the element. So they are the same in
every engine and however a parameter is sharded, and a run that goes on from a checkpoint has those
that it would have had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.formats.nearest import Nearest
from torchzero_clip.core.sharding.layout import Layout, local

DRAWS, ROUNDS = ("state/seed", "state/step"), ("rounding/seed", "rounding/step")
"""The seed and the count of steps, in the chain of every group: for state, and for parameters."""
DROPPED = {torch.bfloat16: 16, torch.float16: 13}  # the bits that float32 has more
SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**-112}  # see `carried`


def mix_(x: Tensor) -> Tensor:
    """A hash of whole numbers of 32 bits, by the factors of lowbias32; kernel.h has the same."""
    x = _stirred(x)
    return x.bitwise_xor_(_high(x))


def halves_(x: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper half of that hash."""
    x = _stirred(x)
    high = _high(x)
    return x.bitwise_xor_(high).bitwise_and_(0xFFFF), high


def _stirred(x: Tensor) -> Tensor:
    x = x.mul_(0x7FEB352D)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)


def _high(x: Tensor) -> Tensor:
    return (x >> 16).bitwise_and_(0xFFFF)


def carried(x: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers at one of their two neighbours in `dtype`, at the nearer more often.

    Noise in the bits that are dropped carries into those that stay as often as it should. Float16
    has denormals below 2^-14 where float32 has them below 2^-126: 2^-112 makes these the same.
    """
    bits, scale = DROPPED[dtype], SCALE[dtype]
    scaled = x.mul(scale) if scale != 1 else x
    sums = noise.add_(scaled.view(torch.int32)).bitwise_and_(-(2**bits)).view(torch.float32)
    sums = sums.div_(scale) if scale != 1 else sums
    return sums.clamp_(x, sums)  # NaN where x is


def rounded(x: Tensor, key: Tensor, start: Tensor, half: int) -> Tensor:
    """Float32 numbers in 16 bits, rounded up or down by one half of a hash of key and element.

    `start` is the first of the elements, which then are one after another, or all of them. A half
    of 0 or 1 is for bfloat16, 2 or 3 for float16.
    """
    dtype = torch.float16 if half > 1 else torch.bfloat16
    if start.dim() == 0:
        start = start + torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    noise = halves_(start ^ key)[half % 2] >> (16 - DROPPED[dtype])
    return carried(x, noise, dtype).to(dtype)


class Elements:
    """The elements of parameters: the place that each entry has in the memory of the whole one.

    Args:
        params: The parameters, whole or sharded.
        layouts: Of each parameter, where it is sharded.
    """

    def __init__(self, params: Sequence[Tensor], layouts: Sequence[Layout | None]) -> None:
        alike = [torch.empty_strided(p.shape, p.stride(), device="meta") for p in params]
        self.strides = [torch.empty_like(t).stride() for t in alike]  # those have no gaps
        here = [torch.empty(local(p).shape, device="meta") for p in params]
        self.contiguous = all([self.follow(i, t) for i, t in enumerate(here)])
        """Whether the elements of contiguous tensors like these are in order in their memory."""
        starts = list(map(_start, layouts, self.strides))
        self.starts = torch.tensor(starts, dtype=torch.int32, device=params[0].device)

    def follow(self, i: int, t: Tensor) -> bool:
        """Whether the elements of a tensor like the i-th are one after another in its memory."""
        sides = zip(t.shape, t.stride(), self.strides[i], strict=True)
        rows = [(n, stride, whole) for n, stride, whole in sides if n > 1]
        last = sum([(n - 1) * stride for n, stride, _ in rows])
        return last < max(t.numel(), 1) and all([stride == whole for _, stride, whole in rows])

    def index(self, i: int, t: Tensor) -> Tensor:
        """The element of every entry of a tensor like the i-th."""
        out = self.starts[i].to(torch.int64)
        for d, (n, stride) in enumerate(zip(t.shape, self.strides[i], strict=True)):
            along = torch.arange(n, device=t.device) * stride
            out = out + along.view(-1, *[1] * (t.dim() - d - 1))
        return out.to(torch.int32)


class Stochastic(Nearest):
    """Numbers at one of their two neighbours, at the nearer more often.

    Args:
        keys: A whole number for each tensor, which draws in this step.
        elements: The elements of the parameters.
        half: Which 16 of the 32 bits of an element are its own; 2 more for float16.
    """

    whole = True

    def __init__(self, keys: Tensor, elements: Elements, half: int = 0) -> None:
        super().__init__()
        self.keys, self.elements, self.half = keys, elements, half

    def store(self, i: int, target: Tensor, at: int | None, values: Tensor) -> None:
        elements = self.elements
        places = elements.index(i, target) if at is None else elements.starts[i] + _signed(at)
        target.copy_(rounded(values, self.keys[i], places, self.half))

    def follows(self, i: int, t: Tensor) -> bool:
        return self.elements.follow(i, t)


def keys_of(places: Sequence[int], numbers: Sequence[int], device: torch.device) -> Tensor:
    """A whole number for each place, a hash of it and of some numbers."""
    keys = mix_(torch.tensor(places, dtype=torch.int32, device=device))  # apart from a number
    for number in numbers:
        keys = mix_(keys.bitwise_xor_(_signed(number)))
    return keys


def prepare_draws(groups: Sequence[Mapping[str, Any]], draws: tuple[str, str]) -> None:
    """Put the seed and the count of steps into the groups that have none."""
    seed, step = draws
    for group in groups:
        chain = group["chain"]
        chain.setdefault(seed, 0)
        if not isinstance(chain.get(step), Tensor):
            device = group["params"][0].device if group["params"] else "cpu"
            chain[step] = torch.full((), chain.get(step, 0), dtype=torch.int32, device=device)


def _start(layout: Layout | None, strides: Sequence[int]) -> int:
    """The first element of the part that is here, as a whole number of 32 bits."""
    if layout is None:
        return 0
    ends = layout.extents(layout.mesh.get_coordinate())
    first = sum([begin * stride for (begin, _), stride in zip(ends, strides, strict=True)])
    return _signed(first)


def _signed(x: int) -> int:
    """A whole number of 32 bits, as int32 has it."""
    return (x + 2**31) % 2**32 - 2**31
