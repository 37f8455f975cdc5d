"""WrittenStep: one step of a chain, run on one parameter that stands for all, and written down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule, Step, TensorList, in_buckets, norms, send
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.link import Link
from torchzero_clip.core.torch_private import without_torch_function
from torchzero_clip.engines import Eager
from torchzero_clip.modules.descent import QKClip
from torchzero_clip.modules.descent.heads import shrunk
from torchzero_clip.modules.flow import Masked, Partition
from torchzero_clip.source.file_state import WrittenState
from torchzero_clip.source.file_units import SourceUnits
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.rule_names import RuleNames, changed
from torchzero_clip.source.symbols import ATOM, Context, Op, SourceError, Value
from torchzero_clip.source.written_operators import OPERATORS, NoCounts, NoNames

STAND_INS = (((2, 3), 0.5), ((4, 5), 0.75))
"""The shape and the entries of parameters that stand for all: a file is the same for each."""
ENGINE = Eager(fuses=False, keeps=False)


class WrittenStep:
    """A step of some links, as operations.

    Args:
        links: The links of an optimizer.
        settings: Its live values, by key.
        shape, entry: The parameter that stands for all.
    """

    def __init__(
        self, links: Sequence[Link], settings: dict[str, Any], shape: tuple[int, int], entry: float
    ) -> None:
        self.shape, self.entry = shape, entry
        self.recorder = OpRecorder(OPERATORS)
        self.naming = RuleNames(self.recorder)
        self.functions = self.recorder.functions
        self.links, self.settings = links, settings
        self.state = WrittenState(self.recorder)

    def run(self) -> list[Op]:
        """The operations of the step."""
        with self.recorder:
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
        with without_torch_function(), recorder.resting():
            p = torch.nn.Parameter(torch.full(self.shape, self.entry))
            p.grad = torch.full(self.shape, self.entry / 2)
            u = torch.full(self.shape, self.entry / 2)
            group = {
                **self.settings,
                "params": [p],
                "chain": NoCounts(),
                "param_names": ["layer.weight"],
            }
            state: dict[Tensor, dict[str, Any]] = {p: {}}
            with Step([group], state, {}, ENGINE) as step:
                bucket = in_buckets(step)[0]
        params, grads = bucket.session.params.tensors[0], bucket.session.grads.tensors[0]
        recorder.context = context
        sized = self._input(params, "params")
        recorder.flowing = self._input(grads, "grads")
        sizes = [recorder.size(sized, math.prod(self.shape))]
        bucket = changed(bucket, part=changed(bucket.cohort, names=NoNames(), sizes=sizes))
        if outer is None:
            return bucket
        value = recorder.knows(outer.update.tensors[0])
        assert value is not None
        made, flags = Value("list", hint="u"), context.flags
        assert flags is not None
        write = lambda n: (f"_chosen({n(value)}, {n(flags)})", ATOM)
        recorder.add(write, [value, flags], made, always=True, stays=True)
        made.root, recorder.flowing = value, made
        update = TensorList([recorder.learn(u, made)], owned=outer.update.owned)
        return changed(bucket, update=update, origin=outer.origin)

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
        before = self.recorder.flowing
        try:
            self._refuse_joined(link)
            if isinstance(rule, QKClip):
                return self._shrunk(bucket.seen_by(link))
            for inner in link.walk():
                if inner.transforms:
                    self.state.make(inner, bucket)
            out = send(self._with_units(link), [bucket])
        except SourceError as error:
            raise SourceError(sentence(link.path, str(error))) from None
        except Exception as error:  # of a rule that takes no stand-in
            raise SourceError(sentence(link.path, f"it cannot be watched ({error})")) from error
        if len(out) != 1:
            raise SourceError(sentence(link.path, "it ends steps"))
        value = self.recorder.knows(out[0].update.tensors[0])
        if value is not None:
            value.hint = value.hint or "u"
        self.recorder.flowing = value or before
        if any(getattr(one, "target", "") == "grad" for one in link.transform.walk()):
            self._write_back(out[0])
        return out[0]

    def _refuse_joined(self, link: Link) -> None:
        """Raise for a rule about entries of all parameters that stands inside another."""
        for inner in [one for child in link.children for one in child.walk()]:
            tfm = inner.transform
            if getattr(tfm, "dim", None) == "global" and not isinstance(tfm, NormRule):
                raise SourceError(f"{inner.path} takes entries of all parameters, inside of it")

    def _shrunk(self, bucket: Bucket) -> Bucket:
        """The bucket after heads of attention shrink, of which the file asks the user."""
        recorder, (params, u) = self.recorder, self._values(bucket)
        found, made = Value("list", hint="heads"), Value("list", hint="u")
        text = f"[{self.functions.asked('max_logits')}(*named) for named in _named(group)]"
        recorder.add(lambda n: (text, ATOM), [], found, repeats=True, joint=False, takes="flags")
        numbers = [recorder.named(bucket.group[key], key) for key in ("tau", "alpha")]
        args, name = [found, params, u, *numbers], self.functions.copy(shrunk)
        write = lambda n: (f"{name}({', '.join([n(x) for x in args])})", ATOM)
        recorder.add(write, args, made, each=True)
        with recorder.resting():
            bucket.u = TensorList([recorder.learn(bucket.u.tensors[0].clone(), made)])
        recorder.flowing = made
        return bucket

    def _write_back(self, bucket: Bucket) -> None:
        """Gradients that were converted are written where they came from."""
        params, grads = [self.recorder.knows(x.tensors[0]) for x in (bucket.params, bucket.grads)]
        assert params is not None
        assert grads is not None
        write = lambda n: (f"torch._foreach_copy_([p.grad for p in {n(params)}], {n(grads)})", ATOM)
        self.recorder.add(write, [params, grads], writes=[params], effect=True, foreach=True)

    def _with_units(self, link: Link) -> Link:
        """The link with a rule that measures units as the file will."""
        rule, own = link.transform, dict[str, Any]()
        if isinstance(rule, NormRule):
            some = self.recorder, rule, norms.measure(rule.ord), self.state.cell
            own["units"] = lambda buckets: SourceUnits(*some, buckets)
        made = self.naming.copy(rule, **own)
        children = tuple([self._with_units(child) for child in link.children])
        return changed(link, acts=made, transform=made, children=children)

    def _inside(self, link: Link, children: Sequence[Link], bucket: Bucket, text: Any) -> Bucket:
        """The bucket after transforms that see some of its parameters."""
        recorder, outer = self.recorder, self.recorder.context
        recorder.link, recorder.like = link.path, None
        flags = Value("list", hint="here")
        recorder.add(lambda n: (text, ATOM), [], flags, repeats=True, joint=False, takes="flags")
        context = Context(f"{outer.path}/{len(self.state.texts)}.{len(recorder.ops)}", flags, outer)
        _, before = self._values(bucket)
        whole = Value("list", hint="u")
        recorder.add(lambda n: (f"list({n(before)})", ATOM), [before], whole, stays=True)
        whole.root = before
        with recorder.resting():
            tensor = recorder.learn(torch.full(self.shape, self.entry / 2), whole)
        outside = bucket.with_update(TensorList([tensor], owned=bucket.update.owned))
        inner = self._bucket(context, outside)
        for child in children:
            inner = self._send(child, inner)
        _, u = self._values(inner)
        recorder.link = link.path
        write = lambda n: (f"_put({n(u)}, {n(whole)}, {n(flags)})", ATOM)
        slots = Value("list", hint="u", root=whole)
        recorder.add(write, [u, whole, flags], writes=[whole, slots], effect=True, stays=True)
        recorder.context, recorder.like = outer, None
        same_memory = u.memory is before.memory and inner.update.owned
        update = TensorList([tensor], owned=bucket.update.owned and same_memory)
        recorder.flowing = whole
        return changed(outside, update=update, origin=inner.origin)


def sentence(path: str, why: str) -> str:
    """What an error says of a link."""
    return f"{path} cannot be written as a file of plain torch: {why}; use the library for it"
