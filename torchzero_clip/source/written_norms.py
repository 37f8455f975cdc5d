"""Measured: norms and means of what flows, as lines of a file.

Vectors have an entry for each tensor of a group, or of each layer; a group and the model have one
number, and slices a tensor for each parameter, with its dims kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule, TensorList
from torchzero_clip.core.decision import Cells
from torchzero_clip.core.lazy import Joined
from torchzero_clip.core.norms import Measure
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.symbols import ATOM, Names, Value

WIDE = torch.float64
Text = Callable[[Names], str]


class Measured(Cells):
    """What is measured together in one bucket, which stands for all groups.

    Args:
        recorder: What writes the lines.
        rule: The rule whose units they are.
        order: The norm.
        buckets: The bucket.
    """

    def __init__(
        self, recorder: OpRecorder, rule: NormRule, order: Measure, buckets: Sequence[Bucket]
    ) -> None:
        self.recorder, self.rule, self.buckets, self.order = recorder, rule, list(buckets), order
        scope, self.degree = rule.scope, order.degree
        self.sliced = not (scope is None or isinstance(scope, str))
        self.scope = "slices" if self.sliced else scope or "tensor"
        self.joint = scope in ("global", "layer")
        self.single = scope in ("group", "global") and not any(
            isinstance(x, Tensor) for x in rule.init_unit().values()
        )
        self._known: dict[str, Value] = {}

    # ------------------------------------------------------------------ what is measured

    def norm(self, name: str | None = None) -> Tensor:
        if name is None:
            return self._norm(self.buckets[0].u, "norm")
        return self._norm(self.buckets[0].state[name], f"{name}_norm")

    def measure(self, tensors: TensorList) -> Tensor:
        return self._norm(tensors.lists[0] if isinstance(tensors, Joined) else tensors, "")

    def total(self) -> Tensor:
        """The norm of all that flows, as one."""
        every = self.every(self.value(self.buckets[0].u))
        helper = self.recorder.helpers.norm(self.order)
        return self._made("total", [every], lambda n: f"{helper}({n(every)})", (), joint=True)

    def mean(self) -> Tensor:
        helpers, u = self.recorder.helpers, self.buckets[0].u
        if self.sliced:
            return self._each(helpers.slices(self.rule, None), "mean", u)
        return self._measured(helpers.mean(), u, "mean")

    def _norm(self, u: TensorList, hint: str) -> Tensor:
        m, helpers = self.order, self.recorder.helpers
        if self.sliced:
            return self._each(helpers.slices(self.rule, m), hint, u)
        if self.scope == "tensor" and m.kind == "power" and not m.mean:
            value, p = self.value(u), f"{m.p:g}"
            norms: Text = lambda n: f"torch._foreach_norm({n(value)}, {p}, dtype=torch.float64)"
            return self._made(hint, [value], lambda n: f"torch.stack({norms(n)})", (1,))
        if m.kind == "power" and not m.mean and self.single:
            return self._joined(u, hint)
        return self._measured(helpers.norm(m), u, hint)

    def _joined(self, u: TensorList, hint: str) -> Tensor:
        """The norm of a list as one, from those of its tensors."""
        value, p = self.value(u), f"{self.order.p:g}"
        over = self.every(value) if self.joint else value
        norms = Value("list", elements="tuple")
        write = lambda n: (f"torch._foreach_norm({n(over)}, {p}, dtype=torch.float64)", ATOM)
        self.recorder.add(write, [over], norms, joint=self.joint)
        whole = "" if p == "2" else p
        return self._made(
            hint, [norms], lambda n: f"torch.stack({n(norms)}).norm({whole})", (), joint=self.joint
        )

    def _measured(self, helper: str, u: TensorList, hint: str) -> Tensor:
        """What a helper for lists gives for each unit."""
        value = self.value(u)
        if self.scope == "tensor":
            each: Text = lambda n: f"torch.stack([{helper}([x]) for x in {n(value)}])"
            return self._made(hint, [value], each, (1,))
        if self.scope == "layer":
            every, layers = self.every(value), self.layers()
            apart = self.recorder.helpers.layers()
            stack: Text = lambda n: (
                f"torch.stack([{helper}(some) for some in {apart}({n(every)}, {n(layers)})])"
            )
            return self._made(hint, [every, layers], stack, (1,), joint=True)
        over = self.every(value) if self.joint else value
        text: Text = lambda n: f"{helper}({n(over)})" + ("" if self.single else ".view(1)")
        return self._made(hint, [over], text, () if self.single else (1,), joint=self.joint)

    def _each(self, helper: str, hint: str, u: TensorList) -> Tensor:
        """What a helper gives for the slices of each tensor."""
        value = self.value(u)
        write: Text = lambda n: f"{helper}({n(value)})"
        return self._made(hint, [value], write, (1, 1), "list", each=True)

    def _made(
        self,
        hint: str,
        args: list[Value],
        text: Callable[[Names], str],
        shape: Any,
        kind: Any = "tensor",
        **kinds: Any,
    ) -> Tensor:
        made = Value(kind, hint=hint)
        self.recorder.add(lambda n: (text(n), ATOM), args, made, **kinds)
        if kind == "tensor":
            self.recorder.like = made
        with self.recorder.resting():
            return self.recorder.learn(torch.full(shape, 1.5, dtype=WIDE), made)

    def value(self, u: TensorList) -> Value:
        """The list that a list is in the file."""
        found = self.recorder.knows(u.tensors[0])
        assert found is not None
        return found

    def every(self, value: Value) -> Value:
        """Return a list of all groups as one."""
        return self.recorder.gathered(value)

    def value_of(self, x: Tensor) -> Value:
        found = self.recorder.knows(x)
        assert found is not None
        return found

    # ------------------------------------------------------------------ layers

    def layers(self) -> Value:
        """The layers of the parameters of all groups."""
        if "layers" not in self._known:
            self._known["layers"] = self.every(self.recorder.layer())
            self._known["layers"].hint = "layers"
        return self._known["layers"]

    def params(self) -> Value:
        """The parameters of all groups."""
        if "params" not in self._known:
            self._known["params"] = self.every(self.value(self.buckets[0].params))
        return self._known["params"]

    def index(self) -> Value:
        """The number of each layer, by its name."""
        if "index" in self._known:
            return self._known["index"]
        every = self.layers()
        made = self._known["index"] = Value("tensor", hint="index")
        write = lambda n: (f"{{k: i for i, k in enumerate(dict.fromkeys({n(every)}))}}", ATOM)
        self.recorder.add(write, [every], made, joint=True)
        return made
