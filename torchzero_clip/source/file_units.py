"""The methods of `Units`, written as lines of a file.

A unit is everything that one norm covers: a slice, a tensor, a layer, a group or the model. In this
module, "write" means to record an operation that becomes a line of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from torchzero_clip.source.symbols import Kind, Names, SourceError, Value, Write, constant, operand
from torchzero_clip.source.wording import repeated, wrapped
from torchzero_clip.source.written_norms import NORM_DTYPE, WrittenNorms
from torchzero_clip.source.written_numbers import plain


class SourceUnits(WrittenNorms):
    """The units of one bucket, which represents all groups.

    Args:
        recorder: The recorder of operations.
        rule: The rule that requests norms.
        order: The norm.
        cell: The function that returns the tensor in which the file stores a scalar of each unit.
        buckets: The bucket.
    """

    def __init__(
        self,
        recorder: OpRecorder,
        rule: NormRule,
        order: Measure,
        cell: Callable[[SourceUnits, str, Any], Tensor],
        buckets: Sequence[Bucket],
    ) -> None:
        super().__init__(recorder, rule, order, buckets)
        self.groups = [self.buckets]
        self.path = self.buckets[0].bound.path
        self.dtype = NORM_DTYPE
        self.home = torch.device("cpu")
        self.count = 1
        self.division = SimpleNamespace(lengths=[1] if self.sliced else None, scope=rule.scope)
        self._cell = cell
        self._divided: TensorList | None = None
        """The update after the division, if the rule requested a norm after the division."""

    # ------------------------------------------------------------------ flags and ratios

    def norms_of(self, lists: Sequence[TensorList]) -> Tensor:
        """Write the norms of a list of tensors. There is one list, because there is one bucket."""
        return self._norm(lists[0], "")

    def after(self, norm: Tensor, divisors: Sequence[Tensor]) -> Tensor:
        """Write the norms that the update has after a division."""
        if not self.joint:
            return super().after(norm, divisors)
        # groups may have different ratios, so the joint norm has to be computed again
        self._divided = self._scaled(divisors, None)
        return self._norm(self._divided, "clipped")

    def of_shapes(self, like: Tensor, function: Any, *args: Any) -> Tensor:
        """Write a factor for each unit, which a function computes from the shape of each tensor."""
        value = self.value_of(like)
        u = self.value(self.buckets[0].u)
        name = self.recorder.functions.copy(function)
        more = "".join([f", {constant(x)}" for x in args])
        write: Write = lambda n: f"{name}({n(u)}.shape{more})"
        if self.sliced:
            return self._written("factor", [u], write, (1, 1), "list", each=True)
        factors = self.recorder.new("list", write, [u], "factors", each=True)
        text: Write = lambda n: (
            f"torch.tensor({n(factors)}, dtype=torch.float64, device={n(value)}.device)"
        )
        return self._written("factors", [factors, value], text, like.shape)

    def finite(self, norm: Tensor) -> Tensor:
        """Write the test for finite norms."""
        return torch.isfinite(norm)

    def smaller_than(self, size: int) -> Tensor:
        """Write the test for units that have fewer elements than `size`."""
        u = self.buckets[0].u
        helpers = self.recorder.helpers
        if self.sliced:
            small = self._of_slices(helpers.small_slices(self.rule, size), "small", u)
        else:
            small = self._by_helper(helpers.small(size), u, "small")
        return self.recorder.learn(torch.zeros_like(small, dtype=torch.bool), self.value_of(small))

    def too_small(self, size: int) -> Tensor | None:
        """Write the test for units with fewer elements than `size`, or return None if size is 1."""
        return self.smaller_than(size) if size > 1 else None

    def comparable(self, x: Any, norm: Tensor) -> Tensor:
        """Return a limit as a tensor. A limit that is a number is the same for every unit."""
        if isinstance(x, Tensor):
            return x
        live = self.recorder.knows(x)
        write: Write = lambda n: operand(x if live is None else live, n)
        kind: Kind = "list" if self.sliced else "tensor"
        limit = self.recorder.new(kind, write, [] if live is None else [live], "limit")
        with self.recorder.not_recording():
            limits = torch.full_like(norm, plain(x))
        if self.sliced:
            limit.kind = "tensor"
        return self.recorder.learn(limits, limit)

    def _hinted(self, x: Tensor, hint: str) -> Tensor:
        """Give a name to the value that a tensor represents, unless the value has a name."""
        value = self.value_of(x)
        value.hint = value.hint or hint
        return x

    # ------------------------------------------------------------------ values of groups

    def each(self, live: str) -> list[Any]:
        """Return the value of a hyperparameter in each bucket. There is only one bucket."""
        return [self.buckets[0].group[live]]

    def live(self) -> list[dict[str, Any]]:
        """Return the group of each bucket, with the functions that a rule may call."""
        group = self.buckets[0].group
        for name in ("params", "grads"):
            group[name] = Joined([group[name]])
            group[name].measure = self.measure
        more = {"total": self.total, "of_shapes": self.of_shapes, "dot": _no_dot}
        return [{**group, **more}]

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return one vector for all groups, computed with the first group's hyperparameters."""
        value = self.value_of(vectors[0])
        if not self.joint or value.joint:
            return vectors[0]
        return self.recorder.learn(vectors[0].clone(), self._of_first(value, {}))

    def _of_first(self, value: Value, known: dict[Value, Value]) -> Value:
        """Return a value that is computed with the first group's hyperparameters.

        Args:
            value: The value, with the hyperparameters of each group.
            known: The results so far. The method adds new ones.
        """
        if value.joint or value in known:
            return known.get(value, value)
        if value.kind != "tensor" or value.op is None:
            raise SourceError(
                "the transform combines the parameters of several groups into one number"
            )
        op = value.op
        args = [x if x.numeric else self._of_first(x, known) for x in op.args]
        if self.scope == "layer" or self.recorder.context.flags is not None:
            # a layer, or the parameters of a mask, need not be in the first group
            keys = [leaf.live[0] for x in args for leaf in leaves(x) if leaf.live]
            self.recorder.live.shared += keys

        def write(names: Names) -> str:
            return op.write(lambda v: f"first{names(v)[5:]}" if v.live else names(known.get(v, v)))

        known[value] = self.recorder.new("tensor", write, args, value.hint, joint=True)
        return known[value]

    # ------------------------------------------------------------------ changes

    def divide(self, bucket: Bucket, u: TensorList, ratio: Tensor) -> TensorList:
        """Write the division of an update by the ratio of each unit."""
        return u.div_(self.operand(bucket, self._hinted(ratio, "ratio")))

    def scale(
        self, divisors: Sequence[Tensor], updates: Sequence[TensorList] | None = None
    ) -> None:
        """Write the division of the update, unless `after` has written it."""
        divided = self._scaled(divisors, updates) if self._divided is None else self._divided
        self.buckets[0].u = divided

    def _scaled(
        self, divisors: Sequence[Tensor], updates: Sequence[TensorList] | None
    ) -> TensorList:
        """Write code that divides the update, or `updates` if they are given."""
        bucket = self.buckets[0]
        u = bucket.u if updates is None else updates[0]
        return self.divide(bucket, u.to(bucket.state_dtype), divisors[0])

    def lerp_(self, name: str, weights: Sequence[Tensor], where: Tensor) -> None:
        """Write the interpolation of state towards the update, in the units that `where` marks."""
        bucket = self.buckets[0]
        m = bucket.state[name]
        conditions = self.as_list(bucket, where)
        triples = zip(conditions, bucket.u, m, strict=True)
        u = TensorList([torch.where(holds, x, old) for holds, x, old in triples])
        m.lerp_(u, self.as_list(bucket, weights[0]))

    def div_(self, name: str, ratio: Tensor) -> None:
        """Write the division of state by the ratio of each unit."""
        bucket = self.buckets[0]
        bucket.state[name].div_(self.operand(bucket, ratio))

    def record(self, *_: Any) -> None:
        """Do nothing, because a file has no metrics."""

    def load(self, made: Mapping[str, Any]) -> dict[str, Tensor]:
        """Write the lines that read the scalars of units, and return them by name."""
        self._cells = {name: self._cell(self, name, start) for name, start in made.items()}
        state = {}
        for name, cell in self._cells.items():
            if self.scope in ("tensor", "layer"):
                x = torch.stack([cell]).to(NORM_DTYPE)
            else:
                x = cell.to(NORM_DTYPE).clone()  # the cell is written while x is still read
                x = x if self.single else x.unsqueeze(0)
            state[name] = self._hinted(x, name)
        return state

    def store(self, state: Mapping[str, Tensor]) -> None:
        """Write the lines that store the scalars of units."""
        for name, x in state.items():
            cell = self._cells[name]
            if self.scope in ("tensor", "layer"):
                foreach("copy_", [cell], list(x.unbind()))
            else:
                cell.copy_(x if self.single else x.squeeze(0))

    # ------------------------------------------------------------------ vectors as operands

    def operand(self, bucket: Bucket, vector: Tensor | float) -> Any:
        """Return a vector with one element per unit, as an operand for lists of tensors."""
        if not isinstance(vector, Tensor) or self.single or self.scope == "tensor":
            return vector
        if self.sliced:
            return [vector]
        if self.scope == "layer":
            return [self._of_layers(vector)]
        return vector.squeeze(0)

    def _of_layers(self, vector: Tensor) -> Tensor:
        """Write a list that has, for each parameter, the element of the parameter's layer."""
        value = self.value_of(vector)
        layer = self.recorder.layer()
        index = self.index()
        write = lambda n: f"{wrapped(value, n)}[{n(index)}[{n(layer)}]]"
        args = [value, layer, index]
        return self.recorder.record("list", vector[0].clone(), write, args, each=True)

    def as_list(self, bucket: Bucket, vector: Tensor) -> TensorList:
        """Return a vector with one element per unit, as a list with one tensor per parameter."""
        operand = self.operand(bucket, vector)
        if not isinstance(operand, Tensor):
            return TensorList(operand)
        if self.scope == "tensor":
            return TensorList(list(operand.unbind()))
        # the scalar is the same for all parameters
        value = self.value_of(operand)
        u = self.value(bucket.u)
        write = repeated(value, u)
        return TensorList([self.recorder.record("list", operand.clone(), write, [value, u])])


def _no_dot(*_: Any) -> Any:
    """Raise the error for a rule that computes an inner product."""
    raise SourceError("the transform computes the inner product of two TensorLists")
