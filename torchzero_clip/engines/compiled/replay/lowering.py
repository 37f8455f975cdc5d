"""Lowering: split a step graph into segments that are compiled, and calls that PyTorch runs.

`Lowering` reads the nodes of a step graph in order:

- A PyTorch operator on small tensors becomes vector nodes, if `printers/operators.py` has this
  operator. Vector nodes are added to the current segment.
- A launch of a list program is added to the current segment.
- PyTorch runs every other node. Such a node ends the current segment.

`CompiledStep` compiles the segments. `TorchCalls` runs the PyTorch calls.
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
from torchzero_clip.core.plurals import counted
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
from torchzero_clip.engines.compiled.replay.pruning import arguments, may_alias
from torchzero_clip.engines.compiled.replay.regions import GraphRegions, Unsupported

FORM = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "implicit"}
"""Names of arguments that only choose the form of a result. The recorded result has this form."""
NORM = vector_norm.__wrapped__  # type: ignore[attr-defined]


class Lowering(GraphRegions):
    """The lowered form of a step graph. The result is the attribute `sequence`.

    Args:
        graph: The step graph.
        leaves: The inputs of the graph during recording.
        changing: The inputs that are new tensors in every step.
        device: The device of the step.
        supports: A function that returns whether a native call may include a launch.
        max_elements: The largest number of elements of a vector node.

    Attributes:
        torch_calls: The names of the operators that PyTorch runs, in the order of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        leaves: Sequence[Any],
        changing: Sequence[Tensor],
        device: torch.device,
        supports: Callable[[Relaunch], bool],
        max_elements: int,
    ) -> None:
        super().__init__(graph, leaves, changing, device)
        self.torch_calls = list[str]()
        self._supports = supports
        self._max_elements = max_elements
        for node in graph.nodes:
            if node.op == "placeholder":
                self._leaf(node)
            elif node.op == "call_function" and not self._view(node):
                self._add(node)

    def _add(self, node: GraphNode) -> None:
        """Append a node to the current segment if it can be compiled, else as a PyTorch call."""
        try:
            nodes = self._nodes(node)
        except Unsupported as unsupported:
            self._call(node)
            if (name := node.meta.get("operator")) is None:
                name = getattr(self._function(node), "__name__", "a launch")
            self.torch_calls.append(f"{name}{unsupported}")
            return
        if not self.sequence or not isinstance(self.sequence[-1], list):
            self.sequence.append([])
        self.sequence[-1] += nodes  # type: ignore[operator]

    def _function(self, node: GraphNode) -> Any:
        """Return the function of this library that a node calls: see `StepRecorder.call`."""
        return self.leaves[cast(GraphNode, node.args[0])]

    def _call(self, node: GraphNode) -> None:
        """Append a node that PyTorch runs. Its results are new tensors in every step."""
        self.sequence.append(node)
        for result in [node, *[user for user in node.users if user.meta.get("item")]]:
            self._roots.pop(result, None)
            self.regions.pop(result, None)
            if "form" not in result.meta:
                continue
            dtype, device, shape, strides, start = result.meta["form"]
            dense = torch.empty_strided(shape, strides, device="meta").is_contiguous() and not start
            if dense and dtype in DTYPES and device == self.device and not may_alias(node):
                self._root(result, VectorMemory(dtype, changes=True), 0, ("made", result))

    # ------------------------------------------------------------------ operators of PyTorch

    def _nodes(self, node: GraphNode) -> Segment:
        """Return the vector nodes or the launch for a node, or raise `Unsupported`."""
        operator = node.meta.get("operator")
        if operator is None:
            return self._library_call(node)
        signature = schema(operator)
        mutable = signature.is_mutable
        base = signature.name.removeprefix("aten::")
        is_list = base.startswith("_foreach_")
        base = base.removeprefix("_foreach_")
        base = base.removesuffix("_") if mutable else base
        base, order = ATEN.get(base, (base, ()))
        inputs, options = operands(node, signature)
        if base in ("stack", "cat"):
            return self._joined(node, base, inputs)
        if base in REDUCTIONS or base == "linalg_vector_norm":
            return [self._reduced(node, base, inputs)]
        if base == "clamp":
            inputs += [None] * (3 - len(inputs))
            low, high = inputs[1:3]
            if low is None:
                base = "clamp_max"
            elif high is None:
                base = "clamp_min"
            inputs = [x for x in inputs if x is not None]
        row = OPERATORS.get(base)
        if row is None or not row.aten or options or len(inputs) < len(order):
            raise Unsupported
        inputs = [inputs[x] if type(x) is int else x for x in order] or inputs
        if len(inputs) != row.arity:
            raise Unsupported
        if is_list:
            return self._of_lists(node, base, inputs, mutable)
        narrow = list(map(self._operand, inputs))
        out = self._region(node.args[0]) if mutable else self._fresh(node)
        wide = [x.expanded(out.shape) if isinstance(x, Region) else x for x in narrow]
        return [self._elementwise(base, out, wide, computed(base, out, narrow, mutable))]

    def _elementwise(
        self, name: str, out: Region, inputs: Sequence[VectorOperand], dtype: torch.dtype
    ) -> VectorNode:
        """Return a node that computes each element of `out` from operands of the same shape."""
        if math.prod(out.shape) > self._max_elements:
            raise Unsupported(f" of {counted(math.prod(out.shape), 'element')}")
        integers = not (OPERATORS[name].whole or dtype.is_floating_point)
        if integers or (name == "bitwise_not" and dtype != torch.bool):
            raise Unsupported
        assert {x.shape for x in inputs if isinstance(x, Region)} <= {out.shape}
        long = [d for d, n in enumerate(out.shape) if n != 1]
        squeezed = [x.of(long) if isinstance(x, Region) else x for x in inputs]
        return VectorNode(name, out.of(long), tuple(squeezed), dtype)

    def _of_lists(self, node: GraphNode, name: str, inputs: list[Any], mutable: bool) -> Segment:
        """Return nodes for an operator on lists. Similar neighboring tensors share one node."""
        written: Any = node.args[0]
        lists = [x if isinstance(x, (list, tuple)) else [x] * len(written) for x in inputs]
        operand_lists = [list(map(self._operand, row)) for row in lists]
        if mutable:
            outs = list(map(self._region, written))
        else:
            items: list[Any] = sorted(node.users, key=lambda user: cast(int, user.args[1]))
            if len(items) < len(written):  # not every result is used by itself
                raise Unsupported
            outs = list(map(self._fresh, items))
        elements = sum([math.prod(out.shape) for out in outs])
        if elements > self._max_elements:
            raise Unsupported(f" of {counted(elements, 'element')}")
        nodes: Segment = []
        for (first_out, *first), (out, *merged) in self._side_by_side([outs, *operand_lists]):
            # the dtype for single tensors: with dims they would weigh more in type promotion
            dtype = computed(name, first_out, first, mutable)
            nodes.append(self._elementwise(name, out, merged, dtype))
        return nodes

    def _joined(self, node: GraphNode, name: str, inputs: list[Any]) -> Segment:
        """Return nodes that copy the operands of `stack` or `cat` into the result."""
        tensors = list(map(self._region, inputs[0]))
        out = self._fresh(node)
        shape = node.meta["form"][2]
        dim = (inputs[1] if len(inputs) > 1 else 0) % max(len(shape), 1)
        if math.prod(shape) > self._max_elements:
            raise Unsupported
        other_dims = [d for d in range(len(shape)) if d != dim]
        pairs: list[tuple[Region, Region]] = []
        position = 0
        for x in tensors:
            length = 1
            if name == "cat":
                length = 0 if x.shape == (0,) else x.shape[dim]  # `cat` skips empty vectors
            sizes = (*shape[:dim], length, *shape[dim + 1 :])
            to = out._replace(shape=sizes, start=out.start + position * out.strides[dim])
            position += length
            if name == "stack":
                to = to.of(other_dims)
            if 0 not in to.shape:
                pairs.append((to, x))
        if not pairs:
            return []
        merged = self._side_by_side(list(zip(*pairs, strict=True)))
        return [self._elementwise("copy", to, [x], x.dtype) for _, (to, x) in merged]

    def _reduced(self, node: GraphNode, name: str, inputs: list[Any]) -> VectorNode:
        """Return a node for a reduction over some dims or over all elements."""
        x = self._region(inputs[0])
        rest = inputs[1:]
        if name == "linalg_vector_norm":
            order = {1: "norm1", 2: "norm2", math.inf: "norminf"}.get(rest[0] if rest else 2)
            if order is None:
                raise Unsupported
            name = order
            rest = rest[1:]
        dims, keep, *_ = [*rest, None, False]
        dims = [dims] if isinstance(dims, int) else dims
        integers = not x.dtype.is_floating_point
        unsupported_extreme = name in ("amax", "amin") and (integers or 0 in x.shape)
        if math.prod(x.shape) > self._max_elements or unsupported_extreme:
            raise Unsupported
        count = len(x.shape)
        over = {d % count for d in dims} if dims else set(range(count))
        left = [d for d in range(count) if d not in over]
        long = [d for d in left if x.shape[d] != 1]
        out = self._fresh(node).of([d if keep else left.index(d) for d in long])
        dtype = torch.int64 if integers and not out.dtype.is_floating_point else torch.float64
        return VectorNode(name, out, (x.of([*long, *sorted(over)]),), dtype)

    # ------------------------------------------------------------------ functions of this library

    def _library_call(self, node: GraphNode) -> Segment:
        """Return a launch or a node for `vector_norm`. Otherwise raise `Unsupported`."""
        function = self._function(node)
        if isinstance(function, Relaunch) and self._supports(function):
            return [self._launched(node, function)]
        if function is not NORM:
            raise Unsupported
        x = self._region(node.args[1])
        p = node.args[2]
        fits = 0 < math.prod(x.shape) <= self._max_elements
        if x.dtype != torch.float64 or not isinstance(p, (int, float)) or not fits:
            raise Unsupported
        last = len(x.shape) - 1
        long = [d for d in range(last) if x.shape[d] != 1]
        out = self._fresh(node).of(long)
        return [VectorNode("norm", out, (x.of([*long, last]),), torch.float64, float(p))]

    def _launched(self, node: GraphNode, relaunch: Relaunch) -> Launched:
        """Return a launch whose vectors and scalars are regions of memory."""
        numbers, vectors, scalars = cast(Any, node.args[1:])
        number_operands = tuple(map(self._operand, numbers))
        vector_regions = tuple(map(self._region, vectors))
        scalar_regions = tuple(map(self._region, scalars))
        if any([x.strides != (1,) and x.shape != (1,) for x in vector_regions]):
            raise Unsupported
        out = self._fresh(node) if "form" in node.meta else None
        return Launched(relaunch, number_operands, vector_regions, scalar_regions, out)


def operands(node: GraphNode, signature: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the operands of a call in order, and other arguments that differ from their default.

    Arguments that only choose the form of the result are skipped.
    """
    inputs = list[Any]()
    options = dict[str, Any]()
    for argument, value in arguments(signature, node.args, node.kwargs):
        name = argument.name
        is_factor = name == "alpha" or (name == "value" and "addc" in signature.name)
        if name in FORM:
            continue
        if not (is_factor or argument.kwarg_only):
            inputs.append(value)
        elif value != argument.default_value:
            options[name] = value
    return inputs, options


def computed(name: str, out: Region, inputs: Sequence[VectorOperand], mutable: bool) -> torch.dtype:
    """Return the dtype in which a vector node must compute an operator."""
    dtype = out.dtype
    if name == "copy" and isinstance(inputs[0], Region):
        return inputs[0].dtype
    if OPERATORS[name].flag or (mutable and len(inputs) == 2):
        dtype = promoted(inputs)
    is_quotient = not (OPERATORS[name].whole or dtype.is_floating_point)
    return out.dtype if is_quotient else dtype


def promoted(operands: Sequence[VectorOperand]) -> torch.dtype:
    """Return the dtype to which PyTorch promotes operands."""
    values: list[Any] = [
        torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Region) else x
        for x in operands
    ]
    return values[0].dtype if len(values) == 1 else torch.result_type(*values[:2])
