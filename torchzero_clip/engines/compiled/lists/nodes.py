"""Nodes: what was asked of lists, and the numbers, vectors and 0-dim tensors that they take."""

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
    """What was asked of lists of `count` tensors on a device.

    A node is (operator, operands): a value is computed from earlier ones, numbers, 0-dim tensors on
    the device, and vectors with an entry a tensor.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.read: Callable[[Tensor], float | Tensor] = float  # the number in a CPU tensor
        self.interpreted = False  # whether the CPU stands for a GPU, whose numbers are not read
        self.clear()

    def clear(self) -> None:
        self.nodes: list[Node] = []
        self.dtypes: list[torch.dtype] = []
        self.numbers: list[float | Tensor] = []
        self.scalars: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.rows: SliceRows | None = None  # the slices that have operands of their own

    def cast(self, value: int, dtype: torch.dtype) -> int:
        """A value in another dtype."""
        if self.dtypes[value] == dtype:
            return value
        return self.node("to", (("value", value), ("dtype", str(dtype))), dtype)

    def add(
        self, name: str, value: int, operands: Sequence[Any], keep_dtype: bool = False
    ) -> int | None:
        """A new value, or None where an operand is nothing that a program takes."""
        if name == "add" and keep_dtype and isinstance(operands[0], TensorList):
            name, operands = "addcmul", (operands[0], 1.0)
        name = SYNONYMS.get(name, name)
        flag, mine = OPERATORS[name].flag, self.dtypes[value]
        found = [self.operand(x) for x in operands]
        known = [x for x in found if x is not None]
        if len(known) < len(found) or (mine == torch.bool and not flag):
            return None
        made_by, made_of = self.nodes[value]
        if name == "reciprocal" and made_by == "div" and made_of[1][0] == "value":
            return self.node("div", made_of[::-1], mine)  # of a quotient: the other one
        if name == "div" and known[0][0] in ("vector", "row", "number"):
            name = "mul"  # a division of every entry takes as long as all the rest
            self._invert(known[0])
        dtype = mine
        if name == "where":
            known[1:] = [
                ("value", self.cast(x[1], mine)) if x[0] == "value" else x for x in known[1:]
            ]
        else:
            for kind, which in known:
                dtype = torch.promote_types(dtype, self.dtypes[which]) if kind == "value" else dtype
        made = self.node(name, (("value", value), *known), torch.bool if flag else dtype)
        return self.cast(made, mine) if keep_dtype else made

    def operand(self, x: Any) -> NodeOperand | None:
        """An operand as nodes name it; None for tensors of other shapes, or of another's memory.

        Those are read at once: they could change before the tape runs.
        """
        if isinstance(x, (int, float)):
            return self._number(float(x))
        if isinstance(x, Tensor):
            whole = x.numel() == 1 and x.shape != (self.count,)  # a model of one shares programs
            return self._scalar(x.reshape(())) if whole else self._vector(x)
        if isinstance(x, OfRows):
            return self._of_rows(x)
        each = x.tensors if isinstance(x, TensorList) else x
        if len(each) != self.count:
            raise ValueError(
                f"a list must have one entry for each of the {self.count} tensors, got "
                f"{len(each)}: give a number, or a 0-dim tensor, for all"
            )
        if not any([isinstance(t, Tensor) for t in each]):
            return self._vector(numbers([float(t) for t in each], self.device))
        if not all([isinstance(t, Tensor) and t.dim() == 0 for t in each]):
            return None
        vector = shared_memory(each)
        return self._vector(torch.stack(list(each)) if vector is None else vector)

    def _invert(self, operand: NodeOperand) -> None:
        kind, i = operand
        if kind != "number":
            self.vectors[i] = self.vectors[i].to(wide(self.device)).reciprocal()
        else:
            x = self.numbers[i]
            number = not isinstance(x, Tensor) and not x
            self.numbers[i] = math.copysign(math.inf, x) if number else 1 / x

    def _of_rows(self, x: OfRows) -> NodeOperand | None:
        """Numbers of slices; None where those of others are an operand already."""
        if self.rows not in (None, x.rows) or not x.rows.whole:
            return None
        self.rows = x.rows
        return self._vector(x.vector, "row")

    def _vector(self, x: Tensor, kind: str = "vector") -> NodeOperand | None:
        if kind == "vector" and x.shape != (self.count,):
            raise ValueError(
                f"a vector must have one number for each of the {self.count} tensors of the "
                f"list, got shape {tuple(x.shape)}: give a number, or a 0-dim tensor, for all"
            )
        if x.is_complex():
            return None
        most = wide(self.device)
        dtype = x.dtype if x.dtype in (torch.float32, most, torch.bool) else most
        # a copy, since it may change before the tape runs
        self.vectors.append(x.detach().to(self.device, dtype, copy=True).contiguous())
        return kind, len(self.vectors) - 1

    def whole(self, x: Tensor) -> NodeOperand:
        """A vector of whole numbers or flags, which stay as they are."""
        known = [i for i, vector in enumerate(self.vectors) if vector is x]
        self.vectors += [] if known else [x]
        return "vector", known[0] if known else len(self.vectors) - 1

    def _scalar(self, x: Tensor) -> NodeOperand | None:
        if x.is_complex():
            return None
        if x.device.type == "cpu" and not self.interpreted:
            return self._number(self.read(x))
        self.scalars.append(x.detach().clone())
        return "scalar", len(self.scalars) - 1

    def _number(self, x: float | Tensor) -> NodeOperand:
        self.numbers.append(x)
        return "number", len(self.numbers) - 1

    def node(self, name: str, operands: tuple[NodeOperand, ...], dtype: torch.dtype) -> int:
        self.nodes.append((name, operands))
        self.dtypes.append(dtype)
        return len(self.nodes) - 1
