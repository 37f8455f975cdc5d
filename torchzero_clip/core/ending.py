"""The end of a step: run the tail of a chain for one bucket in one pass over memory.

The tail is the last links of a chain, if an engine can run all of them in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.engine import Ending, FusedKernel
from torchzero_clip.core.plan import Tail
from torchzero_clip.core.sharding.layout import locals_of
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.core.tensorlist import Operand


def finish(bucket: Bucket, tail: Tail) -> bool:
    """Run a tail in one pass over memory.

    Returns:
        Whether one pass was possible. If not, nothing was written, and the links must run one by
        one.
    """
    scaled = _scaling(bucket, tail)
    if scaled is None:
        return False
    rate, decay = scaled
    seen = bucket
    kernel = None
    state: dict[str, list[Tensor]] = {}
    if tail.rule is not None:
        seen = bucket.at(tail.rule)
        kernel = _kernel(seen)
        if kernel is None:
            return False
        try:
            state = seen.held()
        except KeyError:  # some parameters have no state yet
            seen.make_state()
            seen.join_state()
            state = seen.held()
    forms = seen.roundings(state) if state and seen.bound.narrow else {}
    if bucket.cohort.sharded:
        state = {name: locals_of(row) for name, row in state.items()}
    writes = tail.factor is not None and tail.factor.transform.target == "grad"
    ratio = None if bucket.ratio is None else bucket.ratio.to(bucket.device)
    bucket.keep_rounding()
    ending = Ending(kernel, state, forms, rate, decay, ratio, writes)
    return bucket.session.finish(bucket.floats(), ending)


def divide_now(bucket: Bucket, tail: Tail) -> None:
    """Divide the update or the gradients now by the ratio that the tail would divide by."""
    ratio = bucket.ratio
    if ratio is None:
        return
    bucket.ratio = None
    dtype = statistic_dtype(bucket.originals[0])

    def number(x: Tensor, to: Any = None) -> Operand:
        return x.to(bucket.device, to or dtype).reshape(())

    if tail.factor is not None and tail.factor.transform.target == "grad":
        bucket.session.divide(bucket.writable_grads(), ratio, number, True)
        return
    u = bucket.update.to(bucket.state_dtype)
    bucket.update = bucket.session.adopt(bucket.session.divide(u, ratio, number, True))


def _kernel(bucket: Bucket) -> FusedKernel | None:
    """Return the fused optimizer for the link of the bucket, if it can be called in this step."""
    link = bucket.bound
    alike = len(bucket.cohort.kinds(link.path, link.state_names)) == 1
    if not alike or bucket.cohort.dtype.is_complex or link.acts is not link.transform:
        return None
    group = bucket.numbers_of_group()
    if not _only_numbers(group):
        return None
    kernel: FusedKernel | None = link.transform.fused(group)
    return kernel


def _only_numbers(live: Mapping[str, Any]) -> bool:
    """Return whether no live hyperparameter is a tensor: fused optimizers accept only numbers."""
    for value in live.values():
        if isinstance(value, Tensor):
            return False
        if isinstance(value, (tuple, list)) and any([isinstance(x, Tensor) for x in value]):
            return False
    return True


def _scaling(bucket: Bucket, tail: Tail) -> tuple[Any, float] | None:
    """Return (a, b) such that all scalings of a tail together are u ← a · u + b · w.

    `a` may be a tensor on a device. This function does not read its value. The result is None if
    the scalings cannot be joined.
    """
    a: Any = 1.0
    b = 0.0
    for link in tail.scalings:
        factors = link.transform.affine(link.values(bucket.settings))
        if factors is None or link.acts is not link.transform or isinstance(a, Tensor):
            return None
        more, decay = map(_number, factors)
        if decay is None:
            return None
        if more is None:
            alone = (a, b, decay) == (1.0, 0.0, 0.0)
            if not alone or not isinstance(factors[0], Tensor) or factors[0].numel() != 1:
                return None
            a = factors[0].reshape(())
            continue
        b = more * b + decay
        a = more * a
    return a, b


def _number(x: Any) -> float | None:
    """Return a number, or the value of a tensor on CPU. None if reading it would synchronize."""
    if isinstance(x, (int, float)):
        return x
    readable = isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() == 1
    return x.item() if readable and not x.is_complex() else None
