"""SourceUnits: the verbs of `Units`, as lines of a file.

Vectors have an entry for each tensor of a group, or of each layer; a group and the model have one
number, and slices a tensor for each parameter, with its dims kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule, TensorList
from torchzero_clip.core.norms import Measure
from torchzero_clip.core.units import Joined
from torchzero_clip.source.numbers import plain
from torchzero_clip.source.recorder import Recorder, wrapped
from torchzero_clip.source.values import ATOM, Names, Value, constant, operand

WIDE = torch.float64
Text = Callable[[Names], str]


class SourceUnits:
    """The units of one bucket, which stands for all groups.

    Args:
        recorder: What writes the lines.
        rule: The rule whose units they are.
        buckets: The bucket.
        order: The norm.
        store: Where the file keeps the numbers of units.
    """

    def __init__(
        self,
        recorder: Recorder,
        rule: NormRule,
        buckets: Sequence[Bucket],
        order: Measure,
        store: Any,
    ) -> None:
        self.recorder, self.rule, self.buckets, self.order = recorder, rule, list(buckets), order
        scope = rule.scope
        self.sliced = not (scope is None or isinstance(scope, str))
        self.scope = "slices" if self.sliced else scope or "tensor"
        self.joint, self.groups = scope in ("global", "layer"), [self.buckets]
        self.dtype, self.home, self.count = WIDE, torch.device("cpu"), 1
        self.division = SimpleNamespace(lengths=[1] if self.sliced else None, scope=scope)
        self.single = scope in ("group", "global") and not any(
            isinstance(x, Tensor) for x in rule.init_unit().values()
        )
        self._store = store
        self._known: dict[str, Value] = {}
        self.path = self.buckets[0].bound.path

    # ------------------------------------------------------------------ what is measured

    def norm(self, name: str | None = None) -> Tensor:
        if name is None:
            return self._norm(self.buckets[0].u, "norm")
        return self._norm(self.buckets[0].state[name], f"{name}_norm")

    def measure(self, tensors: TensorList) -> Tensor:
        return self._norm(tensors.lists[0] if isinstance(tensors, Joined) else tensors, "")

    def norms_of(self, lists: Sequence[TensorList]) -> Tensor:
        return self._norm(lists[0], "")

    def after(self, norm: Tensor, ratios: Sequence[Tensor]) -> Tensor:
        if self.joint:  # groups may have other ratios
            return self._norm(self.buckets[0].u, "clipped")
        return norm / (ratios[0] if self.order.degree == 1 else ratios[0] ** self.order.degree)

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
        value, shape = self.value(u), [1] * u.tensors[0].dim()
        return self._made(
            hint, [value], lambda n: f"{helper}({n(value)})", shape, "list", each=True
        )

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
        """A list of all groups as one."""
        of_state = value.made is not None and value.made.takes == "state"
        if self.recorder.context.flags is not None or of_state:
            some = Value("list", hint=value.hint, root=value)
            write = lambda n: (f"list({n(value)})", ATOM)
            made = value.made
            always = made is None or made.repeats or made.always
            self.recorder.add(write, [value], some, always=always, stays=True)
            return self.recorder.gathered(some)
        return self.recorder.gathered(value)

    # ------------------------------------------------------------------ layers

    def _layer(self) -> Value:
        """The layer of each parameter."""
        return self.recorder.layer_of[self.recorder.context]

    def layers(self) -> Value:
        """The layers of the parameters of all groups."""
        if "layers" not in self._known:
            self._known["layers"] = self.every(self._layer())
            self._known["layers"].hint = "layers"
        return self._known["layers"]

    def params(self) -> Value:
        """The parameters of all groups."""
        if "params" not in self._known:
            self._known["params"] = self.every(self.value(self.buckets[0].params))
        return self._known["params"]

    def _index(self) -> Value:
        """The number of each layer, by its name."""
        if "index" in self._known:
            return self._known["index"]
        every = self.layers()
        made = self._known["index"] = Value("tensor", hint="index")
        write = lambda n: (f"{{k: i for i, k in enumerate(dict.fromkeys({n(every)}))}}", ATOM)
        self.recorder.add(write, [every], made, joint=True)
        return made

    def of_shapes(self, like: Tensor, function: Any, *args: Any) -> Tensor:
        """What a function says of each tensor's shape, at each of its units."""
        value, u = self.value_of(like), self.value(self.buckets[0].u)
        name = self.recorder.functions.copy(function)
        given = "".join([f", {constant(x, lambda v: '')}" for x in args])
        if self.sliced:
            write: Text = lambda n: f"{name}({n(u)}.shape{given})"
            return self._made("factor", [u], write, like.shape, "list", each=True)
        each = Value("list", hint="factors")
        self.recorder.add(lambda n: (f"{name}({n(u)}.shape{given})", ATOM), [u], each, each=True)
        text: Text = lambda n: (
            f"torch.tensor({n(each)}, dtype=torch.float64, device={n(value)}.device)"
        )
        return self._made("factors", [each, value], text, like.shape)

    # ------------------------------------------------------------------ flags and ratios

    def finite(self, norm: Tensor) -> Tensor:
        return torch.isfinite(norm)

    def smaller_than(self, size: int) -> Tensor:
        """Whether units have fewer entries: of the update, whose shapes are those of all."""
        value = self.value(self.buckets[0].u)
        if self.sliced:
            helper = self.recorder.helpers.small(self.rule, size)
            made = self._each(helper, "small", self.buckets[0].u)
        else:
            made = self._counted(value, size)
        return self.recorder.learn(torch.zeros_like(made, dtype=torch.bool), self.value_of(made))

    def value_of(self, x: Tensor) -> Value:
        found = self.recorder.knows(x)
        assert found is not None
        return found

    def _counted(self, value: Value, size: int) -> Tensor:
        like = self.recorder.like
        device: Text = lambda n: f", device={n(like)}.device" if like is not None else ""
        args = [value] + ([like] if like is not None else [])
        if self.scope == "tensor":
            text: Text = lambda n: (
                f"torch.tensor([x.numel() < {size} for x in {n(value)}]{device(n)})"
            )
            return self._made("small", args, text, (1,))
        if self.scope == "layer":
            every, layers = self.every(value), self.layers()
            apart = self.recorder.helpers.layers()
            sizes = Value("tensor", hint="sizes")
            total: Text = lambda n: (
                f"[sum([x.numel() for x in some]) for some in {apart}({n(every)}, {n(layers)})]"
            )
            self.recorder.add(lambda n: (total(n), ATOM), [every, layers], sizes, joint=True)
        else:
            over = self.every(value) if self.joint else value
            sizes = Value("tensor", hint="size")
            self.recorder.add(
                lambda n: (f"sum([x.numel() for x in {n(over)}])", ATOM),
                [over],
                sizes,
                joint=self.joint,
            )
        small: Text = lambda n: f"torch.tensor({n(sizes)}{device(n)}) < {size}"
        shape = () if self.single else (1,)
        return self._made("small", [sizes, *args[1:]], small, shape, joint=self.joint)

    def ratio(self, norm: Tensor, limit: Tensor | float) -> Tensor:
        ratio = norm / limit
        return ratio.sqrt() if self.order.degree == 2 else ratio

    def divisor(self, norm: Tensor, limit: Tensor | float) -> Tensor:
        """The divisor with which the norm meets the limit; 1 where a unit stays as it is."""
        if not isinstance(limit, Tensor):
            limit = self._constant(limit, norm)
        stays = norm == 0 if self.rule.sets_norm else norm <= limit
        ratio = torch.where(stays | (limit == torch.inf), 1, self.ratio(norm, limit))
        if self.rule.min_size > 1:
            ratio = ratio.masked_fill(self.smaller_than(self.rule.min_size), 1)
        return self._hinted(ratio, "ratio")

    def _constant(self, x: Any, norm: Tensor) -> Tensor:
        """A number as the limit of every unit."""
        found = self.recorder.knows(x)
        value = x if found is None else found
        made = Value("list" if self.sliced else "tensor", hint="limit")
        args = [] if found is None else [found]
        self.recorder.add(lambda n: operand(value, n), args, made, joint=found is None)
        with self.recorder.resting():
            out = torch.full_like(norm, plain(x))
        if self.sliced:
            made.kind = "tensor"
        return self.recorder.learn(out, made)

    def _hinted(self, x: Tensor, hint: str) -> Tensor:
        value = self.value_of(x)
        value.hint = value.hint or hint
        return x

    # ------------------------------------------------------------------ values of groups

    def each(self, live: str) -> list[Any]:
        return [self.buckets[0].group[live]]

    def group(self, members: Sequence[Bucket]) -> dict[str, Any]:
        bucket = self.buckets[0]
        group = bucket.values
        for name in ("params", "grads"):
            group[name] = Joined([getattr(bucket, name)], self.measure)
        return {**group, "total": self.total}

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        """A vector that is of all groups: with the live values of the first."""
        value = self.value_of(vectors[0])
        if not self.joint or value.joint:
            return vectors[0]
        if self.scope == "layer":  # which may lie in several groups
            keys = self.buckets[0].bound.walk()
            self.recorder.uniform |= dict.fromkeys(
                key for link in keys for key in link.keys.values()
            )
        return self.recorder.learn(vectors[0].clone(), self.recorder.of_first(value))

    # ------------------------------------------------------------------ verbs

    def divide(self, bucket: Bucket, u: TensorList, ratio: Tensor) -> TensorList:
        return u.div_(self.operand(bucket, ratio))

    def lerp_(self, name: str, weights: Sequence[Tensor], where: Tensor) -> None:
        bucket = self.buckets[0]
        m = bucket.state[name]
        keep = self.as_list(bucket, where)
        rows = zip(keep, bucket.u, m, strict=True)
        u = TensorList([torch.where(yes, x, old) for yes, x, old in rows])
        m.lerp_(u, self.as_list(bucket, weights[0]))

    def div_(self, name: str, ratio: Tensor) -> None:
        bucket = self.buckets[0]
        bucket.state[name].div_(self.operand(bucket, ratio))

    def record(self, *_: Any) -> None:
        """Leave nothing: a file has no metrics."""

    def load(self, made: Mapping[str, Any]) -> dict[str, Tensor]:
        self._cells = {name: self._store(self, name, start) for name, start in made.items()}
        state = {}
        for name, cell in self._cells.items():
            if self.scope in ("tensor", "layer"):
                x = torch.stack([cell]).to(WIDE)
            else:
                x = cell.to(WIDE).clone()  # which is written while it is read
                x = x if self.single else x.unsqueeze(0)
            state[name] = self._hinted(x, name)
        return state

    def store(self, state: Mapping[str, Tensor]) -> None:
        for name, x in state.items():
            cell = self._cells[name]
            if self.scope in ("tensor", "layer"):
                torch._foreach_copy_([cell], list(x.unbind()))
            else:
                cell.copy_(x if self.single else x.squeeze(0))

    # ------------------------------------------------------------------ vectors as operands

    def operand(self, bucket: Bucket, vector: Tensor | float) -> Any:
        if not isinstance(vector, Tensor) or self.single or self.scope == "tensor":
            return vector
        if self.sliced:
            return [vector]
        if self.scope == "layer":
            return [self._of_layers(vector)]
        return vector.squeeze(0)

    def _of_layers(self, vector: Tensor) -> Tensor:
        value, layer, index = self.value_of(vector), self._layer(), self._index()
        made = Value("list")
        write = lambda n: (f"{wrapped(value, n)}[{n(index)}[{n(layer)}]]", ATOM)
        self.recorder.add(write, [value, layer, index], made, each=True)
        return self.recorder.learn(vector[0].clone(), made)

    def as_list(self, bucket: Bucket, vector: Tensor) -> TensorList:
        each = self.operand(bucket, vector)
        if isinstance(each, Tensor):
            if self.scope == "tensor":
                each = list(each.unbind())
            else:  # one number for all
                value, u = self.value_of(each), self.value(bucket.u)
                made = Value("list")
                write = lambda n: (f"[{n(value)}] * len({n(u)})", ATOM)
                self.recorder.add(write, [value, u], made)
                each = [self.recorder.learn(each.clone(), made)]
        return TensorList(each)
