"""Lowering: a step that was written down, as a sequence of native calls and calls of torch.

Each tensor is a region of a memory, which its form tells, and each operator of torch that
operators.py has is a node; launches are nodes too. What the table lacks stands between segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx import Node as GraphNode

from torchzero_clip.core.norms.numeric import vector_norm
from torchzero_clip.core.torch_private import schema
from torchzero_clip.engines.compiled.printers.operators import ATEN, OPERATORS, REDUCTIONS
from torchzero_clip.engines.compiled.printers.program import Relaunch
from torchzero_clip.engines.compiled.printers.vectors import (
    DTYPES,
    Launched,
    Region,
    Segment,
    VectorMemory,
    VectorNode,
    VectorOperand,
)
from torchzero_clip.engines.compiled.replay.pruning import arguments, views
from torchzero_clip.engines.compiled.replay.regions import GraphRegions, Lacking

FORM = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "implicit"}
"""Arguments that say where a result lies, which its form tells."""
NORM = vector_norm.__wrapped__  # type: ignore[attr-defined]


class Lowering(GraphRegions):
    """The sequence of a graph: nodes of the table, and calls that stay torch's.

    Args:
        graph, leaves, changing, home: As for `GraphRegions`.
        able: Whether a launch may be a node.
        most: How many entries a node makes; with more of them torch's own calls are faster.

    Attributes:
        lacking: The names of the operators that the table lacks, in order.
    """

    def __init__(
        self,
        graph: Graph,
        leaves: Sequence[Any],
        changing: Sequence[Tensor],
        home: torch.device,
        able: Callable[[Relaunch], bool],
        most: int,
    ) -> None:
        super().__init__(graph, leaves, changing, home)
        self.lacking, self._able, self._most = list[str](), able, most
        for node in graph.nodes:
            if node.op == "placeholder":
                self._leaf(node)
            elif node.op == "call_function" and not self._view(node):
                self._add(node)

    def _add(self, node: GraphNode) -> None:
        try:
            nodes = self._nodes(node)
        except Lacking as lacking:
            self._call(node)
            if (name := node.meta.get("operator")) is None:
                name = getattr(self._function(node), "__name__", "a launch")
            self.lacking.append(f"{name}{lacking}")
            return
        if not self.sequence or not isinstance(self.sequence[-1], list):
            self.sequence.append([])
        self.sequence[-1] += nodes  # type: ignore[operator]

    def _function(self, node: GraphNode) -> Any:
        """The function of ours that a node calls."""
        return self.leaves[cast(GraphNode, node.args[0])]

    def _call(self, node: GraphNode) -> None:
        """A call that stays torch's; what it makes lies elsewhere in every step."""
        self.sequence.append(node)
        for one in [node, *[user for user in node.users if user.meta.get("item")]]:
            self._roots.pop(one, None)
            self.regions.pop(one, None)
            if "form" not in one.meta:
                continue
            dtype, device, shape, strides, start = one.meta["form"]
            dense = torch.empty_strided(shape, strides, device="meta").is_contiguous() and not start
            if dense and dtype in DTYPES and device == self.home and not views(node):
                self._root(one, VectorMemory(dtype, changes=True), 0, ("made", one))

    # ------------------------------------------------------------------ operators

    def _nodes(self, node: GraphNode) -> Segment:
        """A call as nodes of the table; raises `Lacking` where there are none."""
        operator = node.meta.get("operator")
        if operator is None:
            return self._ours(node)
        told = schema(operator)
        base = told.name.removeprefix("aten::")
        listed, base = base.startswith("_foreach_"), base.removeprefix("_foreach_")
        base = base.removesuffix("_") if told.is_mutable else base
        base, order = ATEN.get(base, (base, ()))
        given, options = operands(node, told)
        if base in ("stack", "cat"):
            return self._joined(node, base, given)
        if base in REDUCTIONS or base == "linalg_vector_norm":
            return [self._reduced(node, base, given)]
        if base == "clamp":
            given += [None] * (3 - len(given))
            low, high = given[1:3]
            base = "clamp_max" if low is None else "clamp_min" if high is None else "clamp"
            given = [x for x in given if x is not None]
        row, mutable = OPERATORS.get(base), told.is_mutable
        if row is None or not row.aten or options or len(given) < len(order):
            raise Lacking
        given = [given[x] if type(x) is int else x for x in order] or given
        if len(given) != row.arity:
            raise Lacking
        if listed:
            return self._of_lists(node, base, given, mutable)
        some = list(map(self._operand, given))
        out = self._region(node.args[0]) if mutable else self._fresh(node)
        wide = [x.expanded(out.shape) if isinstance(x, Region) else x for x in some]
        return [self._entry(base, out, wide, computed(base, out, some, mutable))]

    def _entry(
        self, name: str, out: Region, row: Sequence[VectorOperand], dtype: torch.dtype
    ) -> VectorNode:
        """A node for every entry of a region, from operands of its shape."""
        if math.prod(out.shape) > self._most:
            raise Lacking(f" of {math.prod(out.shape)} entries")
        whole = not (OPERATORS[name].whole or dtype.is_floating_point)
        if whole or (name == "bitwise_not" and dtype != torch.bool):
            raise Lacking
        assert {x.shape for x in row if isinstance(x, Region)} <= {out.shape}
        some = [d for d, n in enumerate(out.shape) if n != 1]
        given = [x.of(some) if isinstance(x, Region) else x for x in row]
        return VectorNode(name, out.of(some), tuple(given), dtype)

    def _of_lists(self, node: GraphNode, name: str, given: list[Any], mutable: bool) -> Segment:
        """Nodes for an operator on lists of tensors: one for all that are alike."""
        written: Any = node.args[0]
        each = [x if isinstance(x, (list, tuple)) else [x] * len(written) for x in given]
        rows = [list(map(self._operand, row)) for row in each]
        if mutable:
            outs = list(map(self._region, written))
        else:
            items: list[Any] = sorted(node.users, key=lambda user: cast(int, user.args[1]))
            if len(items) < len(written):  # somebody takes the list as a whole, or leaves some out
                raise Lacking
            outs = list(map(self._fresh, items))
        entries = sum([math.prod(out.shape) for out in outs])
        if entries > self._most:
            raise Lacking(f" of {entries} entries")
        nodes: Segment = []
        for (first, *some), (out, *row) in self._side_by_side([outs, *rows]):
            dtype = computed(name, first, some, mutable)  # of one: those with dims weigh more
            nodes.append(self._entry(name, out, row, dtype))
        return nodes

    def _joined(self, node: GraphNode, name: str, given: list[Any]) -> Segment:
        """Tensors behind one another, or in a dim of their own."""
        some = list(map(self._region, given[0]))
        out, shape = self._fresh(node), node.meta["form"][2]
        dim = (given[1] if len(given) > 1 else 0) % max(len(shape), 1)
        if math.prod(shape) > self._most:
            raise Lacking
        stacked, outs, at = name == "stack", [], 0
        for x in some:
            length = 1 if stacked else x.shape[dim] if x.shape != (0,) else 0
            sizes = (*shape[:dim], length, *shape[dim + 1 :])
            to = out._replace(shape=sizes, start=out.start + at * out.strides[dim])
            outs.append(to.of([d for d in range(len(shape)) if d != dim]) if stacked else to)
            at += length
        pairs = [(to, x) for to, x in zip(outs, some, strict=True) if 0 not in to.shape]
        rows = self._side_by_side(list(zip(*pairs, strict=True))) if pairs else []
        return [self._entry("copy", to, [x], x.dtype) for _, (to, x) in rows]

    def _reduced(self, node: GraphNode, name: str, given: list[Any]) -> VectorNode:
        """A reduction over some dims."""
        x, rest = self._region(given[0]), given[1:]
        if name == "linalg_vector_norm":
            order = {1: "norm1", 2: "norm2", math.inf: "norminf"}.get(rest[0] if rest else 2)
            if order is None:
                raise Lacking
            name, rest = order, rest[1:]
        dims, keep, *_ = [*rest, None, False]
        dims = [dims] if isinstance(dims, int) else dims
        whole = not x.dtype.is_floating_point
        extreme = name in ("amax", "amin") and (whole or 0 in x.shape)
        if math.prod(x.shape) > self._most or extreme:
            raise Lacking
        count = len(x.shape)
        over = {d % count for d in dims} if dims else set(range(count))
        left = [d for d in range(count) if d not in over]
        long = [d for d in left if x.shape[d] != 1]
        out = self._fresh(node).of([d if keep else left.index(d) for d in long])
        dtype = torch.int64 if whole and not out.dtype.is_floating_point else torch.float64
        return VectorNode(name, out, (x.of([*long, *sorted(over)]),), dtype)

    # ------------------------------------------------------------------ what is ours

    def _ours(self, node: GraphNode) -> Segment:
        function = self._function(node)
        if isinstance(function, Relaunch) and self._able(function):
            return [self._launched(node, function)]
        if function is not NORM:
            raise Lacking
        x, p = self._region(node.args[1]), node.args[2]
        fits = 0 < math.prod(x.shape) <= self._most
        if x.dtype != torch.float64 or not isinstance(p, (int, float)) or not fits:
            raise Lacking
        last = len(x.shape) - 1
        long = [d for d in range(last) if x.shape[d] != 1]
        given = (x.of([*long, last]),)
        return [VectorNode("norm", self._fresh(node).of(long), given, torch.float64, float(p))]

    def _launched(self, node: GraphNode, again: Relaunch) -> Launched:
        numbers, vectors, scalars = cast(Any, node.args[1:])
        named = tuple(map(self._operand, numbers))
        rows = [tuple(map(self._region, row)) for row in (vectors, scalars)]
        if any([x.strides != (1,) and x.shape != (1,) for x in rows[0]]):
            raise Lacking
        out = self._fresh(node) if "form" in node.meta else None
        return Launched(again, named, rows[0], rows[1], out)


def operands(node: GraphNode, told: Any) -> tuple[list[Any], dict[str, Any]]:
    """The operands of a call in order, and the arguments that are none."""
    given, options = list[Any](), dict[str, Any]()
    for argument, value in arguments(told, node.args, node.kwargs):
        name = argument.name
        factor = name == "alpha" or (name == "value" and "addc" in told.name)
        if name in FORM:
            continue
        if not (factor or argument.kwarg_only):
            given.append(value)
        elif value != argument.default_value:
            options[name] = value
    return given, options


def computed(name: str, out: Region, row: Sequence[VectorOperand], mutable: bool) -> torch.dtype:
    """The dtype in which an operator computes."""
    dtype = out.dtype
    if name == "copy" and isinstance(row[0], Region):
        return row[0].dtype
    if OPERATORS[name].flag or (mutable and len(row) == 2):
        dtype = promoted(row)
    quotient = not (OPERATORS[name].whole or dtype.is_floating_point)
    return out.dtype if quotient else dtype


def promoted(operands: Sequence[VectorOperand]) -> torch.dtype:
    """The dtype in which torch computes with operands."""
    given: list[Any] = [
        torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Region) else x
        for x in operands
    ]
    return given[0].dtype if len(given) == 1 else torch.result_type(*given[:2])
