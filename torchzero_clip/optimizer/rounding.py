"""Rounding: the last subtraction, and how half precision takes what its dtype would round away."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.norms.shards import Layout, local
from torchzero_clip.core.state import STATE_DTYPES
from torchzero_clip.core.stochastic import DRAWS, DROPPED, carried
from torchzero_clip.optimizer.state_checks import check_value, numbered, take_counts, with_keys

KINDS = ("nearest", "stochastic", "kahan")
COMPENSATION = "rounding/compensation"  # in the state of a parameter
STEP = "rounding/step"  # in the chain of a group


def check_options(owner: str, rounding: Any, state_dtype: Any) -> None:
    """Raise a sentence unless there is such a rounding, and state can be kept so."""
    rows = ("rounding", rounding, KINDS), ("state_dtype", state_dtype, tuple(STATE_DTYPES))
    for name, given, choices in rows:
        if not isinstance(given, str) or given not in choices:
            raise ValueError(f"{owner}: {name} must be one of {choices}, got {given!r}")


def rounds(bucket: Bucket, rounding: str) -> bool:
    """Whether these parameters need more than a plain subtraction."""
    return rounding != "nearest" and bucket.dtype in DROPPED


def prepare_rounding(buckets: Sequence[Bucket], rounding: str) -> None:
    """Make the state of the rounding: a compensation a parameter, or the count of steps."""
    for bucket in buckets:
        if rounding == "stochastic" and rounds(bucket, rounding):
            for group in bucket.step.groups:
                group["chain"].setdefault(STEP, 0)
        if rounding == "kahan" and rounds(bucket, rounding):
            for p, state in zip(bucket.originals, bucket.param_states, strict=True):
                if COMPENSATION not in state:  # bfloat16: float16 has no range below its own ulp
                    state[COMPENSATION] = torch.zeros_like(p, dtype=torch.bfloat16)


def subtract(buckets: Sequence[Bucket], rounding: str) -> None:
    """w ← w - u, rounded to the precision of w."""
    prepare_rounding(buckets, rounding)
    half = []
    for bucket in buckets:
        if not rounds(bucket, rounding):
            bucket.session.subtract(bucket.update)
        elif rounding == "stochastic":
            half.append(bucket)
        else:
            lost = [local(state[COMPENSATION]) for state in bucket.param_states]
            bucket.step.skip.hold([*bucket.params, *lost])
            for w, u, state in zip(bucket.params, bucket.update, bucket.param_states, strict=True):
                _kahan(w, u.float(), local(state[COMPENSATION]))
    if half:
        _draw_and_subtract(half)


def _draw_and_subtract(buckets: Sequence[Bucket]) -> None:
    groups = buckets[0].step.groups
    buckets[0].step.skip.read('rounding="stochastic" counts the steps that happen')
    step = int(groups[0]["chain"].get(STEP, 0)) + 1
    for group in groups:
        group["chain"][STEP] = step
    for bucket in buckets:
        generator = torch.Generator(bucket.device)
        rows = zip(bucket.params, bucket.update, bucket.places, bucket.layouts, strict=True)
        for w, u, place, layout in rows:
            generator.manual_seed(_seed(step, bucket.index, place, *_shard(layout)))
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


def _seed(*numbers: int) -> int:
    """A seed for this step of this parameter: a resumed run draws what it would have drawn."""
    return zlib.crc32(repr(numbers).encode())


def _shard(layout: Layout | None) -> list[int]:
    """Which part of the parameter is here: replicas of a part draw alike."""
    if layout is None:
        return []
    coordinate = layout.mesh.get_coordinate()
    return [coordinate[i] for i in sorted(layout.split)]


# ---------------------------------------------------------------------- loading


def without(given: Any) -> Any:
    """A checkpoint without the state of roundings."""
    kept = with_keys(given, lambda key: key != COMPENSATION)
    groups = [dict(group) for group in given["param_groups"]]
    for group in groups:
        if isinstance(group.get("chain"), Mapping):
            chain = group["chain"].items()
            group["chain"] = {key: x for key, x in chain if key not in (STEP, *DRAWS)}
    return {**kept, "param_groups": groups}


def adapted(
    given: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]], rounding: str
) -> dict[str, Any]:
    """A checkpoint with the state that this rounding needs; warns where another one saved it."""
    out, rows = without(given), list(numbered(given, param_groups))
    half = [row for row in rows if row[1].dtype in DROPPED]
    for index, p, held in half:
        if rounding == "kahan" and COMPENSATION in held:
            value = held[COMPENSATION]
            example = torch.empty_like(p, dtype=torch.bfloat16, device="meta")
            check_value(f"parameter {index}", COMPENSATION, value, example)
            out["state"][index][COMPENSATION] = torch.as_tensor(value, dtype=torch.bfloat16)
    if rounding == "stochastic":
        take_counts(given, out, [STEP])
    here = rounding if half else "nearest"
    saved = here
    if any([COMPENSATION in held for _, _, held in rows]):
        saved = "kahan"
    elif any([STEP in group["chain"] for group in given["param_groups"]]):
        saved = "stochastic"
    elif any([held for _, _, held in half]):
        saved = "nearest"
    if saved != here:
        end = {saved: "its compensation is dropped", here: "the compensation starts at zero"}
        warnings.warn(
            f"the checkpoint was saved with rounding={saved!r}, the parameters here have "
            f"rounding={here!r}" + (f": {end['kahan']}" if "kahan" in end else ""),
            stacklevel=5,
        )
    return out
