"""One step of a chain, recorded as operations. It runs on a stand-in for all parameters."""

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
from torchzero_clip.core.traits import only_routes
from torchzero_clip.engines import Eager
from torchzero_clip.modules.descent import QKClip
from torchzero_clip.modules.descent.heads import shrunk
from torchzero_clip.modules.flow import Masked, Partition
from torchzero_clip.source.file_state import WrittenState
from torchzero_clip.source.file_units import SourceUnits
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.rule_names import RuleNames, changed
from torchzero_clip.source.symbols import Context, Op, SourceError, Value
from torchzero_clip.source.written_operators import OPERATORS, NoCounts, NoNames

STAND_INS = (((2, 3), 0.5), ((4, 5), 0.75))
"""The shape and the elements of two stand-ins. Both must lead to the same file."""
ENGINE = Eager(fuses=False, keeps=False)


class WrittenStep:
    """A step of some links, which is recorded as operations.

    Args:
        links: The links of an optimizer.
        shape: The shape of the stand-in.
        element: The value of every element of the stand-in.
    """

    def __init__(
        self,
        links: Sequence[Link],
        shape: tuple[int, int],
        element: float,
    ) -> None:
        self.shape = shape
        self.element = element
        self.recorder = OpRecorder(OPERATORS)
        self.rule_names = RuleNames(self.recorder)
        self.functions = self.recorder.functions
        self.links = links
        self.settings: dict[str, Any] = {}  # the hyperparameters by key, which the file sets
        self.state = WrittenState(self.recorder)

    def run(self) -> list[Op]:
        """Run the step, and return the recorded operations."""
        with self.recorder:
            bucket = self._bucket(Context(), None)
            for link in self.links:
                bucket = self._send(link, bucket)
            params, u = self._values(bucket)
            self.recorder.link = ""
            write = lambda n: f"torch._foreach_sub_({n(params)}, {n(u)})"
            self.recorder.add(write, [params, u], writes=[params], foreach=True)
        return self.recorder.ops

    def _values(self, bucket: Bucket) -> tuple[Value, Value]:
        """Return the parameters and the update of a bucket as values."""
        params = self.recorder.knows(bucket.params.tensors[0])
        u = self.recorder.knows(bucket.update.tensors[0])
        if params is None or u is None:
            raise SourceError(f"{self.recorder.link}: the result does not depend on the update")
        return params, u

    # ------------------------------------------------------------------ buckets

    def _bucket(self, context: Context, outer: Bucket | None) -> Bucket:
        """Return a bucket with the stand-in for the parameters of a context.

        Args:
            context: The context.
            outer: The bucket outside of the mask. None if the context has all parameters.
        """
        recorder = self.recorder
        with without_torch_function(), recorder.not_recording():
            p = torch.nn.Parameter(torch.full(self.shape, self.element))
            p.grad = torch.full(self.shape, self.element / 2)
            u = torch.full(self.shape, self.element / 2)
            group = {
                **self.settings,
                "params": [p],
                "chain": NoCounts(),
                "param_names": ["layer.weight"],
            }
            state: dict[Tensor, dict[str, Any]] = {p: {}}
            with Step([group], state, {}, ENGINE) as step:
                bucket = in_buckets(step)[0]
        recorder.context = context
        params = self._input(bucket.session.params.tensors[0], "params")
        recorder.flowing = self._input(bucket.session.grads.tensors[0], "grads")
        sizes = [recorder.size(params, math.prod(self.shape))]
        bucket = changed(bucket, cohort=changed(bucket.cohort, names=NoNames(), sizes=sizes))
        if outer is None:
            return bucket
        whole = recorder.knows(outer.update.tensors[0])
        flags = context.flags
        assert whole is not None
        assert flags is not None
        write = lambda n: f"_chosen({n(whole)}, {n(flags)})"
        selected = recorder.new("list", write, [whole, flags], "u", always=True, stays=True)
        selected.root = whole
        recorder.flowing = selected
        update = TensorList([recorder.learn(u, selected)], owned=outer.update.owned)
        return changed(bucket, update=update, origin=outer.origin)

    def _input(self, tensor: Tensor, takes: str) -> Value:
        """Record an input that every loop can read, and the tensor that represents it."""
        value = self.recorder.input(takes, takes)
        self.recorder.learn(tensor, value)
        return value

    # ------------------------------------------------------------------ links

    def _send(self, link: Link, bucket: Bucket) -> Bucket:
        """Run a link on a bucket, and return the bucket that the link returns."""
        rule = link.transform
        if isinstance(rule, Chain) and only_routes(rule):
            for child in link.children:
                bucket = self._send(child, bucket)
            return bucket
        if isinstance(rule, (Masked, Partition)) and not only_routes(rule):
            why = f"{type(rule).__name__} overrides a method of its base class"
            raise SourceError(message(link.path, why))
        if isinstance(rule, Masked):
            flags = self.functions.flags(rule.where)
            return self._inside(link, link.children, bucket, flags)
        if isinstance(rule, Partition):
            for label, child in zip(rule.transforms, link.children, strict=True):
                flags = self.functions.label_flags(rule.labels, label)
                bucket = self._inside(link, [child], bucket, flags)
            return bucket
        self.recorder.link = link.path
        self.recorder.joins = getattr(rule, "dim", None) == "global"
        before = self.recorder.flowing
        try:
            self._refuse_joined(link)
            if rule.place == "first":
                raise SourceError("the transform can skip a step")
            if isinstance(rule, QKClip):
                return self._shrunk(bucket.seen_by(link))
            for inner in link.walk():
                if inner.transforms:
                    self.state.make(inner, bucket)
            out = send(self._with_units(link), [bucket])
        except SourceError as error:
            raise SourceError(message(link.path, str(error))) from None
        except Exception as error:  # the rule does not accept the stand-in
            why = f"the step cannot be recorded ({error})"
            raise SourceError(message(link.path, why)) from error
        if len(out) != 1:
            raise SourceError(message(link.path, "the transform can end a step early"))
        if not out[0].update.dtype.is_floating_point:
            why = "the transform returns masks or integers: convert them to floats in its update"
            raise SourceError(message(link.path, why))
        value = self.recorder.knows(out[0].update.tensors[0])
        if value is not None:
            value.hint = value.hint or "u"
        self.recorder.flowing = value or before
        if any(getattr(one, "target", "") == "grad" for one in link.transform.walk()):
            self._write_back(out[0])
        return out[0]

    def _refuse_joined(self, link: Link) -> None:
        """Raise an error if an elementwise rule with dim="global" is inside another rule."""
        for inner in [link for child in link.children for link in child.walk()]:
            rule = inner.transform
            if getattr(rule, "dim", None) == "global" and not isinstance(rule, NormRule):
                raise SourceError(
                    f"{inner.path} combines all parameters, which is not supported inside a "
                    "transform"
                )

    def _shrunk(self, bucket: Bucket) -> Bucket:
        """Write the step of `QKClip`. In the file, this step calls a function of the user."""
        recorder = self.recorder
        params, u = self._values(bucket)
        text = f"[{self.functions.argument('max_logits')}(*named) for named in _named(group)]"
        heads = recorder.input("flags", "heads", text)
        numbers = [recorder.named(bucket.group[key], key) for key in ("tau", "alpha")]
        args = [heads, params, u, *numbers]
        name = self.functions.copy(shrunk)
        write = lambda n: f"{name}({', '.join([n(x) for x in args])})"
        update = recorder.new("list", write, args, "u", each=True)
        with recorder.not_recording():
            bucket.u = TensorList([recorder.learn(bucket.u.tensors[0].clone(), update)])
        recorder.flowing = update
        return bucket

    def _write_back(self, bucket: Bucket) -> None:
        """Write converted gradients back into the gradients of the parameters."""
        params = self.recorder.knows(bucket.params.tensors[0])
        grads = self.recorder.knows(bucket.grads.tensors[0])
        assert params is not None
        assert grads is not None
        write = lambda n: f"torch._foreach_copy_([p.grad for p in {n(params)}], {n(grads)})"
        self.recorder.add(write, [params, grads], writes=[params], foreach=True)

    def _with_units(self, link: Link) -> Link:
        """Return the link with a copy of its rule. The units of this copy write the file."""
        rule = link.transform
        attributes: dict[str, Any] = {}
        if isinstance(rule, NormRule):
            order = norms.measure(rule.ord)
            attributes["units"] = lambda buckets: SourceUnits(
                self.recorder, rule, order, self.state.cell, buckets
            )
        copied = self.rule_names.copy(rule, **attributes)
        children = tuple([self._with_units(child) for child in link.children])
        return changed(link, acts=copied, transform=copied, children=children)

    def _inside(self, link: Link, children: Sequence[Link], bucket: Bucket, text: str) -> Bucket:
        """Run links on the parameters that a mask selects, and return the bucket after the links.

        Args:
            link: The link of the mask.
            children: The links inside the mask.
            bucket: The bucket before the mask.
            text: The expression for the flags of the mask.
        """
        recorder = self.recorder
        outer = recorder.context
        recorder.link = link.path
        recorder.like = None
        flags = recorder.input("flags", "here", text)
        context = Context(f"{outer.path}/{len(self.state.texts)}.{len(recorder.ops)}", flags, outer)
        _, before = self._values(bucket)
        whole = recorder.new("list", lambda n: f"list({n(before)})", [before], "u", stays=True)
        whole.root = before
        with recorder.not_recording():
            tensor = recorder.learn(torch.full(self.shape, self.element / 2), whole)
        outside = bucket.with_update(TensorList([tensor], owned=bucket.update.owned))
        inner = self._bucket(context, outside)
        for child in children:
            inner = self._send(child, inner)
        _, u = self._values(inner)
        recorder.link = link.path
        write = lambda n: f"_put({n(u)}, {n(whole)}, {n(flags)})"
        slots = Value("list", hint="u", root=whole)
        recorder.add(write, [u, whole, flags], writes=[whole, slots], stays=True)
        recorder.context = outer
        recorder.like = None
        same_memory = u.memory is before.memory and inner.update.owned
        update = TensorList([tensor], owned=bucket.update.owned and same_memory)
        recorder.flowing = whole
        return changed(outside, update=update, origin=inner.origin)


def message(path: str, why: str) -> str:
    """Return the message of an error about a link."""
    return f"to_source: {path} cannot be exported as plain PyTorch code: {why}"
