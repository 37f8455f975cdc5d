"""Rounding: the last subtraction, and how half precision takes what its dtype would round away."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.sharding.layout import Layout, local
from torchzero_clip.core.state import STATE_DTYPES
from torchzero_clip.core.stochastic import DROPPED, carried

KINDS = ("nearest", "stochastic", "kahan")
COMPENSATION = "rounding/compensation"  # in the state of a parameter
STEP, SEED = "rounding/step", "rounding/seed"  # in the chain of a group


def check_options(owner: str, rounding: Any, state_dtype: Any, group: Any, *truths: Any) -> None:
    """Raise a sentence unless the options of an optimizer are what they should be."""
    rows = ("rounding", rounding, KINDS), ("state_dtype", state_dtype, tuple(STATE_DTYPES))
    for name, given, choices in rows:
        if not isinstance(given, str) or given not in choices:
            raise ValueError(f"{owner}: {name} must be one of {choices}, got {given!r}")
    kind = getattr(torch.distributed, "ProcessGroup", object)
    if group is not None and not isinstance(group, kind):
        said = f"a ProcessGroup, as mesh.get_group() is, or None, got {group!r}"
        raise TypeError(f"{owner}: process_group must be {said}")
    for name, given in zip(("fused", "compile"), truths, strict=True):
        if not isinstance(given, bool):
            raise TypeError(f"{owner}: {name} must be True or False, got {given!r}")


def prepare_rounding(buckets: Sequence[Bucket], rounding: str) -> None:
    """Make the state of the rounding: a compensation a parameter, or the count of steps."""
    for bucket in buckets:
        if rounding == "nearest" or bucket.dtype not in DROPPED:
            continue
        for group in bucket.step.groups if rounding == "stochastic" else ():
            group["chain"].setdefault(STEP, 0)
            group["chain"].setdefault(SEED, 0)
        for p, state in zip(bucket.originals, bucket.param_states, strict=True):
            if rounding == "kahan" and COMPENSATION not in state:
                # bfloat16: float16 has no range below its own ulp
                state[COMPENSATION] = torch.zeros_like(p, dtype=torch.bfloat16)


def subtract(buckets: Sequence[Bucket], rounding: str) -> None:
    """w ← w - u, rounded to the precision of w."""
    narrow = [bucket for bucket in buckets if rounding != "nearest" and bucket.dtype in DROPPED]
    for bucket in [bucket for bucket in buckets if bucket not in narrow]:
        bucket.session.subtract(bucket.update)
    if narrow:
        prepare_rounding(narrow, rounding)
    if narrow and rounding == "stochastic":
        _draw_and_subtract(narrow)
    for bucket in narrow if rounding == "kahan" else ():
        every = [local(state[COMPENSATION]) for state in bucket.param_states]
        bucket.step.skip.hold([*bucket.params, *every])
        for w, u, lost in zip(bucket.params, bucket.update, every, strict=True):
            _kahan(w, u.float(), lost)


def _draw_and_subtract(buckets: Sequence[Bucket]) -> None:
    groups, notes = buckets[0].step.groups, buckets[0].step.notes
    buckets[0].step.skip.read('rounding="stochastic" counts the steps that happen')
    step = notes.count(groups, STEP, 1)
    for bucket in buckets:
        generator = torch.Generator(bucket.device)
        seed = int(groups[bucket.part.index]["chain"].get(SEED, 0))
        rows = zip(
            bucket.params, bucket.update, bucket.part.places, bucket.part.layouts, strict=True
        )
        for w, u, place, layout in rows:
            numbers = step, bucket.part.index, place, *_shard(layout)
            # a resumed run draws what it would have drawn
            generator.manual_seed(zlib.crc32(repr(numbers).encode(), seed))
            w.copy_(_stochastic(w - u.float(), w.dtype, generator))


def _kahan(w: Tensor, u: Tensor, lost: Tensor) -> None:
    """Subtract u and the `lost` part of earlier roundings; `lost` becomes that of this one."""
    before, change = w.float(), lost - u
    w.add_(change)
    change.add_(before.sub_(w))  # the step that was meant, less the step that was made
    lost.copy_(change.nan_to_num_(0.0, 0.0, 0.0))  # a NaN must not stay in the state


def _stochastic(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Float32 numbers at one of their two neighbours in `dtype`, at the nearer more often."""
    noise = torch.empty_like(x, dtype=torch.int32)
    return carried(x, noise.random_(0, 2 ** DROPPED[dtype], generator=generator), dtype)


def _shard(layout: Layout | None) -> list[int]:
    """Which part of the parameter is here: replicas of a part draw alike."""
    if layout is None:
        return []
    coordinate = layout.mesh.get_coordinate()
    return [coordinate[i] for i in sorted(layout.split)]
