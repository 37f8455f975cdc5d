"""Nodes: the recorded operators of a tape, and those operands that are not lists of tensors.

Such an operand is a Python number, a 0-dim tensor (a scalar), or a vector with one element per
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.norms import OfRows, SliceRows, numbers
from torchzero_clip.core.tensor_kinds import shared_memory, wide
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.engines.compiled.printers.operators import OPERATORS, SYNONYMS
from torchzero_clip.engines.compiled.printers.program import Node, NodeOperand


class Nodes:
    """The recorded operators of one tape. Each list of the tape has `count` tensors on one device.

    A node is a pair (operator, operands). `NodeOperand` in printers/program.py describes operands.
    The index of a node is called a value, because it stands for the result of the node.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self.device = device
        self.read: Callable[[Tensor], float | Tensor] = float  # reads the number in a CPU tensor
        self.interpreted = False  # whether Triton's interpreter runs programs of CPU tensors
        self.clear()

    def clear(self) -> None:
        """Remove everything that was recorded."""
        self.nodes: list[Node] = []
        self.dtypes: list[torch.dtype] = []
        self.numbers: list[float | Tensor] = []
        self.scalars: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.rows: SliceRows | None = None  # the slices that have operands of their own

    def cast(self, value: int, dtype: torch.dtype) -> int:
        """Return a value in another dtype. Record a cast if necessary."""
        if self.dtypes[value] == dtype:
            return value
        return self.node("to", (("value", value), ("dtype", str(dtype))), dtype)

    def add(
        self, name: str, value: int, operands: Sequence[Any], keep_dtype: bool = False
    ) -> int | None:
        """Record an operator and return its value, or None if an operand cannot be recorded."""
        if name == "add" and keep_dtype and isinstance(operands[0], TensorList):
            name = "addcmul"  # the same program as with a factor
            operands = operands[0], 1.0
        name = SYNONYMS.get(name, name)
        flag = OPERATORS[name].flag
        list_dtype = self.dtypes[value]
        maybe = [self.operand(x) for x in operands]
        recorded = [x for x in maybe if x is not None]
        if len(recorded) < len(maybe) or (list_dtype == torch.bool and not flag):
            return None
        source, source_operands = self.nodes[value]
        if name == "reciprocal" and source == "div" and source_operands[1][0] == "value":
            return self.node("div", source_operands[::-1], list_dtype)  # 1 / (a / b) is b / a
        if name == "div" and recorded[0][0] in ("vector", "row", "number"):
            name = "mul"  # dividing each element takes as long as all other operators together
            self._invert(recorded[0])
        dtype = list_dtype
        if name == "where":
            recorded[1:] = [
                ("value", self.cast(x[1], dtype)) if x[0] == "value" else x for x in recorded[1:]
            ]
        else:
            for kind, which in recorded:
                if kind == "value":
                    dtype = torch.promote_types(dtype, self.dtypes[which])
        result = self.node(name, (("value", value), *recorded), torch.bool if flag else dtype)
        return self.cast(result, list_dtype) if keep_dtype else result

    def operand(self, x: Any) -> NodeOperand | None:
        """Record an operand and return it, or return None if the operand cannot be recorded.

        A list of tensors with other shapes or memory cannot be recorded, because the tensors could
        change before the tape runs.
        """
        if isinstance(x, (int, float)):
            return self._number(float(x))
        if isinstance(x, Tensor):
            # with a single tensor, x of shape (1,) is a vector as with several tensors
            is_scalar = x.numel() == 1 and x.shape != (self.count,)
            return self._scalar(x.reshape(())) if is_scalar else self._vector(x)
        if isinstance(x, OfRows):
            return self._of_rows(x)
        each = x.tensors if isinstance(x, TensorList) else x
        if len(each) != self.count:
            raise ValueError(
                "a list operand must have one element per tensor of the TensorList, here "
                f"{self.count}, got {len(each)}. To use one value for all tensors, pass a number "
                "or a 0-dim tensor"
            )
        if not any([isinstance(t, Tensor) for t in each]):
            return self._vector(numbers([float(t) for t in each], self.device))
        if not all([isinstance(t, Tensor) and t.dim() == 0 for t in each]):
            return None
        vector = shared_memory(each)
        return self._vector(torch.stack(list(each)) if vector is None else vector)

    def _invert(self, operand: NodeOperand) -> None:
        """Replace a recorded number or vector by its reciprocal."""
        kind, i = operand
        if kind != "number":
            self.vectors[i] = self.vectors[i].to(wide(self.device)).reciprocal()
            return
        x = self.numbers[i]
        is_zero = not isinstance(x, Tensor) and not x
        self.numbers[i] = math.copysign(math.inf, x) if is_zero else 1 / x

    def _of_rows(self, x: OfRows) -> NodeOperand | None:
        """Record a vector with one element per slice, or return None if that is not possible.

        All such vectors on a tape must refer to the same slices.
        """
        if self.rows not in (None, x.rows) or not x.rows.whole:
            return None
        self.rows = x.rows
        return self._vector(x.vector, "row")

    def _vector(self, x: Tensor, kind: str = "vector") -> NodeOperand | None:
        """Record a vector of numbers or flags."""
        if kind == "vector" and x.shape != (self.count,):
            raise ValueError(
                "a vector operand must have one element per tensor of the TensorList, here "
                f"{self.count}, got shape {tuple(x.shape)}. To use one value for all tensors, "
                "pass a number or a 0-dim tensor"
            )
        if x.is_complex():
            return None
        widest = wide(self.device)
        dtype = x.dtype if x.dtype in (torch.float32, widest, torch.bool) else widest
        # a copy, because x may change before the tape runs
        self.vectors.append(x.detach().to(self.device, dtype, copy=True).contiguous())
        return kind, len(self.vectors) - 1

    def whole(self, x: Tensor) -> NodeOperand:
        """Record a vector of integers or flags, without a cast or a copy."""
        for i, vector in enumerate(self.vectors):
            if vector is x:
                return "vector", i
        self.vectors.append(x)
        return "vector", len(self.vectors) - 1

    def _scalar(self, x: Tensor) -> NodeOperand | None:
        """Record a 0-dim tensor. A tensor on the CPU is recorded as a number."""
        if x.is_complex():
            return None
        if x.device.type == "cpu" and not self.interpreted:
            return self._number(self.read(x))
        self.scalars.append(x.detach().clone())
        return "scalar", len(self.scalars) - 1

    def _number(self, x: float | Tensor) -> NodeOperand:
        """Record a number."""
        self.numbers.append(x)
        return "number", len(self.numbers) - 1

    def node(self, name: str, operands: tuple[NodeOperand, ...], dtype: torch.dtype) -> int:
        """Record a node and return its value."""
        self.nodes.append((name, operands))
        self.dtypes.append(dtype)
        return len(self.nodes) - 1
