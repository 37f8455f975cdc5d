"""Norms and means of the update, written as lines of a file.

The norms of tensors are a vector with one element for each tensor of a group. The norms of layers
are a vector with one element for each layer. The norm of a group or of the model is a 0-dim tensor.
The norms of slices are a list with one tensor for each parameter. This tensor has as many dims as
the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule, TensorList
from torchzero_clip.core.decision import Cells
from torchzero_clip.core.lazy import Joined
from torchzero_clip.core.norms import Measure
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.symbols import Kind, Value, Write

NORM_DTYPE = torch.float64


class WrittenNorms(Cells):
    """The norms and means of the units of one bucket, which represents all groups.

    Args:
        recorder: The recorder of operations.
        rule: The rule that requests norms.
        order: The norm.
        buckets: The bucket.
    """

    def __init__(
        self, recorder: OpRecorder, rule: NormRule, order: Measure, buckets: Sequence[Bucket]
    ) -> None:
        self.recorder = recorder
        self.rule = rule
        self.buckets = list(buckets)
        self.order = order
        self.degree = order.degree
        scope = rule.scope
        self.sliced = not (scope is None or isinstance(scope, str))
        self.scope = "slices" if self.sliced else scope or "tensor"
        self.joint = scope in ("global", "layer")
        self.single = scope in ("group", "global") and not any(
            isinstance(x, Tensor) for x in rule.init_unit().values()
        )
        self._known: dict[str, Value] = {}

    # ------------------------------------------------------------------ norms and means

    def norm(self, name: str | None = None) -> Tensor:
        """Write the norms of the update, or of the state with a name."""
        if name is None:
            return self._norm(self.buckets[0].u, "norm")
        return self._norm(self.buckets[0].state[name], f"{name}_norm")

    def measure(self, tensors: TensorList) -> Tensor:
        """Write the norms of any list."""
        return self._norm(tensors.lists[0] if isinstance(tensors, Joined) else tensors, "")

    def total(self) -> Tensor:
        """Write the norm of the whole update."""
        every = self.every(self.value(self.buckets[0].u))
        helper = self.recorder.helpers.norm(self.order)
        return self._written("total", [every], lambda n: f"{helper}({n(every)})", (), joint=True)

    def mean(self) -> Tensor:
        """Write the means of the update."""
        helpers = self.recorder.helpers
        u = self.buckets[0].u
        if self.sliced:
            return self._of_slices(helpers.slices(self.rule, None), "mean", u)
        return self._by_helper(helpers.norm(None), u, "mean")

    def _norm(self, u: TensorList, hint: str) -> Tensor:
        """Write the norms of a list with functions of torch, or with a helper if torch has none."""
        m = self.order
        helpers = self.recorder.helpers
        if self.sliced:
            return self._of_slices(helpers.slices(self.rule, m), hint, u)
        if self.scope == "tensor" and m.kind == "power" and not m.mean:
            value = self.value(u)
            p = f"{m.p:g}"
            norms: Write = lambda n: f"torch._foreach_norm({n(value)}, {p}, dtype=torch.float64)"
            return self._written(hint, [value], lambda n: f"torch.stack({norms(n)})", (1,))
        if m.kind == "power" and not m.mean and self.single:
            return self._joined(u, hint)
        return self._by_helper(helpers.norm(m), u, hint)

    def _joined(self, u: TensorList, hint: str) -> Tensor:
        """Write the joint norm of all tensors in a list, computed from the norm of each tensor."""
        value = self.value(u)
        p = f"{self.order.p:g}"
        over = self.every(value) if self.joint else value
        write = lambda n: f"torch._foreach_norm({n(over)}, {p}, dtype=torch.float64)"
        norms = self.recorder.new("tuple", write, [over], joint=self.joint)
        whole = "" if p == "2" else p
        return self._written(
            hint, [norms], lambda n: f"torch.stack({n(norms)}).norm({whole})", (), joint=self.joint
        )

    def _by_helper(self, helper: str, u: TensorList, hint: str) -> Tensor:
        """Write the call of a helper for each unit. The argument of a call is a list of tensors."""
        value = self.value(u)
        if self.scope == "tensor":
            each: Write = lambda n: f"torch.stack([{helper}([x]) for x in {n(value)}])"
            return self._written(hint, [value], each, (1,))
        if self.scope == "layer":
            every = self.every(value)
            layers = self.layers()
            by_layer = self.recorder.helpers.layers()
            stack: Write = lambda n: (
                f"torch.stack([{helper}(some) for some in {by_layer}({n(every)}, {n(layers)})])"
            )
            return self._written(hint, [every, layers], stack, (1,), joint=True)
        over = self.every(value) if self.joint else value
        shape = () if self.single else (1,)
        view = "" if self.single else ".view(1)"
        text: Write = lambda n: f"{helper}({n(over)}){view}"
        return self._written(hint, [over], text, shape, joint=self.joint)

    def _of_slices(self, helper: str, hint: str, u: TensorList) -> Tensor:
        """Write the call of a helper that returns one result for each slice of a tensor."""
        value = self.value(u)
        write: Write = lambda n: f"{helper}({n(value)})"
        return self._written(hint, [value], write, (1, 1), "list", each=True)

    def _written(
        self,
        hint: str,
        args: list[Value],
        text: Write,
        shape: Sequence[int],
        kind: Kind = "tensor",
        **kinds: Any,
    ) -> Tensor:
        """Record a call, and return a tensor that represents the result of the call.

        Args:
            hint: The name of the result in the rule.
            args: The values that the call reads.
            text: The function that writes the call.
            shape: The shape of the returned tensor.
            kind: The kind of the result.
            **kinds: Other attributes of `Op`.
        """
        result = self.recorder.new(kind, text, args, hint, **kinds)
        if kind == "tensor":
            self.recorder.like = result
        with self.recorder.not_recording():
            return self.recorder.learn(torch.full(shape, 1.5, dtype=NORM_DTYPE), result)

    def value(self, u: TensorList) -> Value:
        """Return the value that a list represents."""
        return self.value_of(u.tensors[0])

    def every(self, value: Value) -> Value:
        """Return one list that joins the lists of all groups."""
        return self.recorder.gathered(value)

    def value_of(self, x: Tensor) -> Value:
        """Return the value that a tensor represents."""
        value = self.recorder.knows(x)
        assert value is not None
        return value

    # ------------------------------------------------------------------ layers

    def layers(self) -> Value:
        """Return the layers of the parameters of all groups."""
        if "layers" not in self._known:
            self._known["layers"] = self.every(self.recorder.layer())
            self._known["layers"].hint = "layers"
        return self._known["layers"]

    def params(self) -> Value:
        """Return the parameters of all groups."""
        if "params" not in self._known:
            self._known["params"] = self.every(self.value(self.buckets[0].params))
        return self._known["params"]

    def index(self) -> Value:
        """Return a dict from the name of each layer to its index."""
        if "index" not in self._known:
            every = self.layers()
            write = lambda n: f"{{k: i for i, k in enumerate(dict.fromkeys({n(every)}))}}"
            self._known["index"] = self.recorder.new("tensor", write, [every], "index", joint=True)
        return self._known["index"]
