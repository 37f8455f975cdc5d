"""SourceUnits: the verbs of `Units`, as lines of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule, TensorList
from torchzero_clip.core.lazy import Joined
from torchzero_clip.core.norms import Measure
from torchzero_clip.core.torch_private import foreach
from torchzero_clip.source.live_numbers import leaves
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.symbols import ATOM, Names, SourceError, Value, constant, operand
from torchzero_clip.source.wording import wrapped
from torchzero_clip.source.written_norms import WIDE, Measured, Text
from torchzero_clip.source.written_numbers import plain


class SourceUnits(Measured):
    """The units of one bucket, which stands for all groups.

    Args:
        recorder, rule, order, buckets: As in `Measured`.
        store: Where the file keeps the numbers of units.
    """

    def __init__(
        self,
        recorder: OpRecorder,
        rule: NormRule,
        order: Measure,
        store: Any,
        buckets: Sequence[Bucket],
    ) -> None:
        super().__init__(recorder, rule, order, buckets)
        self.groups, self._store, self.path = [self.buckets], store, self.buckets[0].bound.path
        self._divided: TensorList | None = None  # what flows, once it is
        self.dtype, self.home, self.count = WIDE, torch.device("cpu"), 1
        self.division = SimpleNamespace(lengths=[1] if self.sliced else None, scope=rule.scope)

    # ------------------------------------------------------------------ flags and ratios

    def norms_of(self, lists: Sequence[TensorList]) -> Tensor:
        return self._norm(lists[0], "")

    def after(self, norm: Tensor, divisors: Sequence[Tensor]) -> Tensor:
        if not self.joint:
            return super().after(norm, divisors)
        self._divided = self._scaled(divisors, None)  # groups may have other ratios
        return self._norm(self._divided, "clipped")

    def of_shapes(self, like: Tensor, function: Any, *args: Any) -> Tensor:
        """What a function says of each tensor's shape, at each of its units."""
        value, u = self.value_of(like), self.value(self.buckets[0].u)
        name = self.recorder.functions.copy(function)
        given = "".join([f", {constant(x, lambda v: '')}" for x in args])
        if self.sliced:
            write: Text = lambda n: f"{name}({n(u)}.shape{given})"
            return self._made("factor", [u], write, (1, 1), "list", each=True)
        each = Value("list", hint="factors")
        self.recorder.add(lambda n: (f"{name}({n(u)}.shape{given})", ATOM), [u], each, each=True)
        text: Text = lambda n: (
            f"torch.tensor({n(each)}, dtype=torch.float64, device={n(value)}.device)"
        )
        return self._made("factors", [each, value], text, like.shape)

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
            write = lambda n: (f"sum([x.numel() for x in {n(over)}])", ATOM)
            self.recorder.add(write, [over], sizes, joint=self.joint)
        small: Text = lambda n: f"torch.tensor({n(sizes)}{device(n)}) < {size}"
        shape = () if self.single else (1,)
        return self._made("small", [sizes, *args[1:]], small, shape, joint=self.joint)

    def too_small(self, size: int) -> Tensor | None:
        return self.smaller_than(size) if size > 1 else None

    def comparable(self, x: Any, norm: Tensor) -> Tensor:
        """A limit as a vector: a number is the limit of every unit."""
        if isinstance(x, Tensor):
            return x
        found = self.recorder.knows(x)
        value = x if found is None else found
        made = Value("list" if self.sliced else "tensor", hint="limit")
        args = [] if found is None else [found]
        self.recorder.add(lambda n: operand(value, n), args, made)
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

    def live(self) -> list[dict[str, Any]]:
        group = self.buckets[0].group
        for name in ("params", "grads"):
            group[name] = Joined([group[name]])
            group[name].measure = self.measure
        more = {"total": self.total, "of_shapes": self.of_shapes, "dot": _no_dot}
        return [{**group, **more}]

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        """A vector that is of all groups: with the live values of the first."""
        value = self.value_of(vectors[0])
        if not self.joint or value.joint:
            return vectors[0]
        return self.recorder.learn(vectors[0].clone(), self._of_first(value, {}))

    def _of_first(self, value: Value, known: dict[Value, Value]) -> Value:
        if value.joint or value in known:
            return known.get(value, value)
        if value.kind != "tensor" or value.made is None:
            raise SourceError("it has one number for all groups, from a list of each")
        made, old = Value("tensor", hint=value.hint), value.made
        args = [x if x.numeric else self._of_first(x, known) for x in old.args]
        if self.scope == "layer" or self.recorder.context.flags is not None:  # not all of the first
            keys = [leaf.live[0] for x in args for leaf in leaves(x) if leaf.live]
            self.recorder.live.shared += keys

        def write(names: Names) -> tuple[str, int]:
            return old.write(lambda v: f"first{names(v)[5:]}" if v.live else names(known.get(v, v)))

        known[value] = made
        self.recorder.add(write, args, made, joint=True)
        return made

    # ------------------------------------------------------------------ verbs

    def divide(self, bucket: Bucket, u: TensorList, ratio: Tensor) -> TensorList:
        return u.div_(self.operand(bucket, self._hinted(ratio, "ratio")))

    def scale(
        self, divisors: Sequence[Tensor], updates: Sequence[TensorList] | None = None
    ) -> None:
        divided = self._scaled(divisors, updates) if self._divided is None else self._divided
        self.buckets[0].u = divided

    def _scaled(
        self, divisors: Sequence[Tensor], updates: Sequence[TensorList] | None
    ) -> TensorList:
        bucket = self.buckets[0]
        u = bucket.u if updates is None else updates[0]
        return self.divide(bucket, u.to(bucket.state_dtype), divisors[0])

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
                foreach("copy_", [cell], list(x.unbind()))
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
        value, layer, index = self.value_of(vector), self.recorder.layer(), self.index()
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


def _no_dot(*_: Any) -> Any:
    raise SourceError("it takes the inner product of two lists")
