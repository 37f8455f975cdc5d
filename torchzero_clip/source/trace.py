"""Trace: one step of a chain, run on one parameter that stands for all, and written down."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule, Step, TensorList, norms, send
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.link import Link
from torchzero_clip.engines import Eager
from torchzero_clip.modules.clipping import clip_percentile
from torchzero_clip.modules.flow import Masked, Partition
from torchzero_clip.source.numbers import traced
from torchzero_clip.source.recorder import Recorder
from torchzero_clip.source.units import SourceUnits
from torchzero_clip.source.values import ATOM, Context, Op, SourceError, Value, constant, operand

SHAPE = (2, 3)
ENGINE = Eager(defers=False, keeps=False)


class Trace:
    """A step of some links, as operations.

    Args:
        links: The links of an optimizer.
        settings: Its live values, by key.
    """

    def __init__(self, links: Sequence[Link], settings: dict[str, Any]) -> None:
        self.recorder = Recorder()
        self.functions = self.recorder.functions
        self.links, self.settings = links, settings
        self.state: dict[Context, dict[str, str]] = {}  # what each parameter begins with, by key
        self.step: Step | None = None

    def run(self) -> list[Op]:
        """The operations of the step."""
        with _leaves(self.recorder), _profiled(self.recorder), self.recorder:
            bucket = self._bucket(Context(), None)
            for link in self.links:
                bucket = self._send(link, bucket)
            params, u = self._values(bucket)
            self.recorder.link = ""
            write = lambda n: (f"torch._foreach_sub_({n(params)}, {n(u)})", ATOM)
            self.recorder.add(write, [params, u], writes=[params], effect=True, foreach=True)
        return self.recorder.ops

    def _values(self, bucket: Bucket) -> tuple[Value, Value]:
        known = self.recorder.knows
        params, u = known(bucket.params.tensors[0]), known(bucket.update.tensors[0])
        if params is None or u is None:
            raise SourceError(f"{self.recorder.link}: its result is not made of the update")
        return params, u

    # ------------------------------------------------------------------ buckets

    def _bucket(self, context: Context, outer: Bucket | None) -> Bucket:
        """The parameter that stands for those of a context."""
        recorder = self.recorder
        with torch._C.DisableTorchFunctionSubclass(), recorder.resting():
            p = torch.nn.Parameter(torch.full(SHAPE, 0.5))
            p.grad = torch.full(SHAPE, 0.25)
            u = torch.full(SHAPE, 0.25)
            group = {**self.settings, "params": [p], "chain": {}, "param_names": ["layer.weight"]}
            state: dict[Tensor, dict[str, Any]] = {p: {}}
            step = Step([group], state, {}, ENGINE)
            bucket = step.buckets()[0]
            bucket.names = _NoNames()
        grads = bucket.session.grads.tensors[0]
        recorder.context = context
        self._input(bucket.session.params.tensors[0], "params")
        self._input(grads, "grads")
        value = recorder.knows(bucket.params.tensors[0])
        assert value is not None
        bucket.sizes = [recorder.size(value, 6)]
        if outer is None:
            recorder.flowing = recorder.knows(grads)
        else:
            value = recorder.knows(outer.update.tensors[0])
            assert value is not None
            made = Value("list", hint="u")
            flags = context.flags
            assert flags is not None
            write = lambda n: (f"_chosen({n(value)}, {n(flags)})", ATOM)
            recorder.add(write, [value, flags], made, always=True, stays=True)
            made.root = value
            bucket.update = TensorList([recorder.learn(u, made)], owned=outer.update.owned)
            bucket.produced = outer.produced
            recorder.flowing = made
        return bucket

    def _input(self, tensor: Tensor, takes: str, **kinds: Any) -> Value:
        made = Value("list", hint=takes)
        self.recorder.add(
            lambda n: ("", ATOM), [], made, repeats=True, joint=False, takes=takes, **kinds
        )
        self.recorder.learn(tensor, made)
        return made

    # ------------------------------------------------------------------ links

    def _send(self, link: Link, bucket: Bucket) -> Bucket:
        """The bucket after a link."""
        rule = link.transform
        if isinstance(rule, Chain):
            for child in link.children:
                bucket = self._send(child, bucket)
            return bucket
        if isinstance(rule, Masked):
            flags = self.functions.flag(rule.where)
            return self._inside(link, link.children, bucket, flags)
        if isinstance(rule, Partition):
            for (label, _), child in zip(rule.transforms.items(), link.children, strict=True):
                bucket = self._inside(
                    link, [child], bucket, self.functions.label(rule.labels, label)
                )
            return bucket
        self.recorder.link = link.path
        self.recorder.joins = getattr(rule, "dim", None) == "global"
        for inner in link.walk():
            if inner.transforms:
                self._make_state(inner, bucket)
        replaced = self._with_units(link)
        before = self.recorder.flowing
        try:
            out = send(replaced, [bucket])
        except SourceError as error:
            raise SourceError(_sentence(link, str(error))) from None
        if len(out) != 1:
            raise SourceError(_sentence(link, "it ends steps"))
        value = self.recorder.knows(out[0].update.tensors[0])
        self.recorder.flowing = value or before
        if any(getattr(one, "target", "") == "grad" for one in link.transform.walk()):
            self._write_back(out[0])
        return out[0]

    def _write_back(self, bucket: Bucket) -> None:
        """Gradients that were converted are written where they came from."""
        params, grads = [self.recorder.knows(x.tensors[0]) for x in (bucket.params, bucket.grads)]
        assert params is not None
        assert grads is not None
        write = lambda n: (f"torch._foreach_copy_([p.grad for p in {n(params)}], {n(grads)})", ATOM)
        self.recorder.add(write, [params, grads], writes=[params], effect=True, foreach=True)

    def _with_units(self, link: Link) -> Link:
        """The link with a rule that measures units as the file will."""
        made = copy.copy(link)
        made.children = tuple(self._with_units(child) for child in link.children)
        rule = made.acts = made.transform = copy.copy(link.transform)
        if isinstance(rule, NormRule):
            order = norms.measure(rule.ord)
            units: list[SourceUnits] = []

            def of(buckets: Sequence[Bucket]) -> SourceUnits:
                units.append(SourceUnits(self.recorder, rule, buckets, order, self._cell))
                return units[-1]

            vars(rule)["units"] = of
            vars(rule)["_ratio"] = lambda units, norm, limit: units.divisor(norm, limit)
        return made

    def _inside(self, link: Link, children: Sequence[Link], bucket: Bucket, text: Any) -> Bucket:
        """The bucket after transforms that see some of its parameters."""
        recorder, outer = self.recorder, self.recorder.context
        recorder.link = link.path
        flags = Value("list", hint="here")
        recorder.add(lambda n: (text, ATOM), [], flags, repeats=True, joint=False, takes="flags")
        context = Context(f"{outer.path}/{len(self.state)}.{len(recorder.ops)}", flags, outer)
        _, before = self._values(bucket)
        whole = Value("list", hint="u")
        recorder.add(lambda n: (f"list({n(before)})", ATOM), [before], whole, stays=True)
        whole.root = before
        with recorder.resting():
            tensor = recorder.learn(torch.full(SHAPE, 0.25), whole)
        outside = bucket.with_update(TensorList([tensor], owned=bucket.update.owned))
        outside.produced = bucket.produced
        inner = self._bucket(context, outside)
        for child in children:
            inner = self._send(child, inner)
        _, u = self._values(inner)
        recorder.link = link.path
        write = lambda n: (f"_put({n(u)}, {n(whole)}, {n(flags)})", ATOM)
        slots = Value("list", hint="u", root=whole)
        recorder.add(write, [u, whole, flags], writes=[whole, slots], effect=True, stays=True)
        recorder.context = outer
        outside.update.owned = outside.update.owned and u.memory is before.memory
        outside.produced = inner.produced
        recorder.flowing = whole
        return outside

    # ------------------------------------------------------------------ state

    def _make_state(self, link: Link, bucket: Bucket) -> None:
        """The link's tensors for the parameter, and how the file makes them."""
        with self.recorder.resting():
            p = bucket.originals[0]
            link.state_names(p)
            made = link.new_state(p)
            double = link.new_state(torch.nn.Parameter(p.detach().double()))
        for key, x in made.items():
            x = x.clone()
            bucket.param_states[0][key] = x
            self._keep(key, x, double[key])
            self.recorder.link = link.path
            self._list(key, x)

    def _keep(self, key: str, x: Tensor, double: Tensor) -> None:
        """How the file makes a tensor of state."""
        values = set(x.flatten().tolist())
        if len(values) != 1 or x.shape not in ((), torch.Size(SHAPE)):
            raise SourceError(f"state {key!r} begins with other than one value")
        dtype = ", dtype=dtype" if double.dtype == torch.float64 else ", dtype=torch.float32"
        self._begin(key, values.pop(), dtype, like=bool(x.dim()))

    def _begin(self, key: str, start: Any, dtype: str, like: bool) -> None:
        number = constant(float(start), lambda v: "")
        if like:
            text = (
                f"torch.full_like(p, {number}{dtype})" if start else f"torch.zeros_like(p{dtype})"
            )
        else:
            text = f"torch.full((), {number}{dtype}, device=p.device)"
            text = text if start else f"torch.zeros((){dtype}, device=p.device)"
        self.state.setdefault(self.recorder.context, {})[key] = text

    def _list(self, key: str, x: Tensor) -> Value:
        hint = key.rpartition("/")[2]
        made = Value("list", hint=hint)
        self.recorder.add(lambda n: (key, ATOM), [], made, repeats=True, joint=False, takes="state")
        self.recorder.learn(x, made)
        return made

    def _cell(self, units: SourceUnits, name: str, start: Any) -> Tensor:
        """The tensor that holds a number of each unit."""
        key, recorder = f"{units.path}/{name}", self.recorder
        with recorder.resting():
            flat = start.flatten().tolist() if isinstance(start, Tensor) else [float(start)]
            cell = torch.tensor(flat if isinstance(start, Tensor) else flat[0], dtype=torch.float32)
        text = constant(flat if isinstance(start, Tensor) else flat[0], lambda v: "")
        same = len(set(map(str, flat))) == 1
        if len(flat) > 1 and not same and flat == [flat[0] + i for i in range(len(flat))]:
            text = f"range({flat[0]:g}, {flat[-1] + 1:g})"
        if isinstance(start, Tensor) and same:
            text = f"{constant(flat[0], lambda v: '')}] * {len(flat)}"
            text = f"[{text}"
        if units.scope == "tensor":
            made = f"torch.tensor({text}, dtype=dtype, device=p.device)"
            self.state.setdefault(recorder.context, {})[key] = made
            self._list(key, cell)
            return cell
        held = Value("tensor", hint=f"{name}_cell")
        kinds: dict[str, Any] = {"lasting": True, "stays": True}
        if units.scope == "group":
            write = lambda n: (f'_of_group(group, "{key}", {text})', ATOM)
            recorder.add(write, [], held, joint=False, **kinds)
        elif units.scope == "global":
            recorder.add(
                lambda n: (f'self._shared("{key}", {text})', ATOM), [], held, joint=True, **kinds
            )
        else:
            layers, params = units.layers(), units.params()
            write = lambda n: (f'self._of_layers("{key}", {text}, {n(layers)}, {n(params)})', ATOM)
            recorder.add(write, [layers, params], held, joint=True, **kinds)
            held.kind, held.hint = "list", f"{name}_cells"
        recorder.learn(cell, held)
        return cell


def _sentence(link: Link, why: str) -> str:
    return f"{link.path} cannot be written as a file of plain torch: {why}; use the library for it"


# ---------------------------------------------------------------------- while it runs


@contextmanager
def _profiled(recorder: Recorder) -> Iterator[None]:
    """Values get the names that rules give them."""
    before = sys.getprofile()
    sys.setprofile(recorder.watch)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def _leaves(recorder: Recorder) -> Iterator[None]:
    """What the core computes in a way of its own, the file does in plain lines."""

    class Info:
        def __init__(self, dtype: torch.dtype) -> None:
            kind = recorder.dtype()
            value = Value("number")
            value.made = Op(lambda n: (f"torch.finfo({n(kind)}).eps", ATOM), [kind], value)
            self.eps = traced(2.0**-23, value, recorder.notice)

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

    with ExitStack() as stack:
        stack.enter_context(patch.object(clip_percentile, "percentile", percentile))
        stack.enter_context(patch.object(norms, "readable", lambda x: False))
        stack.enter_context(patch.object(norms, "statistics", statistics))
        stack.enter_context(patch.object(torch, "finfo", Info))
        yield


class _NoNames(list[Any]):
    """The names of parameters, which a file has only where it chooses parameters."""

    def __getitem__(self, index: Any) -> Any:
        raise SourceError("it asks for the name of every parameter in every step")

    def __iter__(self) -> Any:
        return self[0]


class _Sums(list[Tensor]):
    """Statistics with one row, as they are read."""

    def to(self, *_: Any) -> _Sums:
        return self
