"""Stand-ins: what takes the place of our norms and of torch.finfo while a chain runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, TensorList, norms
from torchzero_clip.modules.clipping import clip_percentile
from torchzero_clip.modules.descent import heads, qk_clip
from torchzero_clip.source.recorder import Recorder
from torchzero_clip.source.values import ATOM, SourceError, Value, operand


@contextmanager
def stand_ins(recorder: Recorder) -> Iterator[None]:
    """What the core computes in a way of its own, the file does in plain lines."""

    class Info:
        def __init__(self, dtype: torch.dtype) -> None:
            kind = recorder.dtype()
            write = lambda n: (f"torch.finfo({n(kind)}).eps", ATOM)
            self.eps = recorder.live.number(2.0**-23, Value("number"), write, (kind,))

    def statistics(tensors: Sequence[Tensor], m: norms.Measure) -> Tensor:
        value = recorder.knows(tensors[0])
        if value is None or m.kind != "sum":
            raise SourceError(f"it takes statistics of its own, {m.kind}")
        made = Value("tensor", hint="sums")
        write = lambda n: (f"torch.stack([x.sum(dtype=torch.float64) for x in {n(value)}])", ATOM)
        recorder.add(write, [value], made)
        return _Sums([recorder.learn(torch.ones(1, dtype=torch.float64), made)])  # type: ignore[return-value]

    def percentile(tensors: Sequence[Tensor], p: Any) -> Tensor:
        value, q = recorder.knows(tensors[0]), recorder.knows(p)
        assert value is not None
        helper = recorder.helpers.percentile()
        whole = recorder.joins
        text = lambda n: (f"{helper}({n(value)}, {operand(p if q is None else q, n)[0]})", ATOM)
        args = [value] + ([] if q is None else [q])
        if not whole:
            recorder.add(text, args, made := Value("list"), each=True)
        else:
            over = Value("list", hint=value.hint)
            recorder.add(
                lambda n: (n(value), ATOM), [value], over, joint=True, gathers=True, small=True
            )
            every = Value("tensor", hint="every")
            recorder.add(
                lambda n: (f"torch.cat([x.flatten() for x in {n(over)}])", ATOM),
                [over],
                every,
                joint=True,
            )
            write = lambda n: (
                f"{helper}({n(every)}, {operand(p if q is None else q, n)[0]})",
                ATOM,
            )
            recorder.add(write, [every, *args[1:]], made := Value("tensor"))
        with recorder.resting():
            return recorder.learn(torch.full((), 0.1), made)

    def shrink(bucket: Bucket, max_logits: Any) -> TensorList:
        found, made = Value("list", hint="heads"), Value("list", hint="u")
        asked = recorder.functions.asked("max_logits")
        text = f"[{asked}(*named) for named in _named(group)]"
        recorder.add(lambda n: (text, ATOM), [], found, repeats=True, joint=False, takes="flags")
        numbers = [recorder.named(bucket.group[key], key) for key in ("tau", "alpha")]
        params, u = recorder.knows(bucket.params.tensors[0]), recorder.knows(bucket.u.tensors[0])
        assert params is not None
        assert u is not None
        args, name = [found, params, u, *numbers], recorder.functions.copy(heads.shrunk)
        write = lambda n: (f"{name}({', '.join([n(x) for x in args])})", ATOM)
        recorder.add(write, args, made, each=True)
        with recorder.resting():
            return TensorList([recorder.learn(bucket.u.tensors[0].clone(), made)])

    with ExitStack() as stack:
        stack.enter_context(patch.object(qk_clip, "shrink", shrink))
        stack.enter_context(patch.object(clip_percentile, "percentile", percentile))
        stack.enter_context(patch.object(norms, "readable", lambda x: False))
        stack.enter_context(patch.object(norms, "statistics", statistics))
        stack.enter_context(patch.object(torch, "finfo", Info))
        yield


class NoNames(list[Any]):
    """The names of parameters, which a file has only where it chooses parameters."""

    def __getitem__(self, index: Any) -> Any:
        raise SourceError("it asks for the name of every parameter in every step")

    def __iter__(self) -> Any:
        return self[0]


class NoCounts(dict[str, Any]):
    """What a group keeps besides live values, which a file has for norms alone."""

    def __getitem__(self, key: str) -> Any:
        raise SourceError("it counts steps, or keeps other numbers of a group")

    def __setitem__(self, key: str, value: Any) -> None:
        self[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]

    def setdefault(self, key: str, default: Any = None) -> Any:
        return self[key]


class _Sums(list[Tensor]):
    """Statistics with one row, as they are read."""

    def to(self, *_: Any) -> _Sums:
        return self
