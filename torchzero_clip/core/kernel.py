"""Kernels: what a tape noted, as one function of the tensors of each list, in canonical names.

`plain` is that function as it stands, line by line; native.py and compiled.py compile it.
"""

from __future__ import annotations

import linecache
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.norms import Measure, numbers

if TYPE_CHECKING:
    from torchzero_clip.core.tape import Tape

Ref: TypeAlias = "tuple[str, Any]"
"""An operand of a line: ("value", line), ("number", i), ("scalar", i), ("row", i) and the like."""
Line: TypeAlias = "tuple[str, tuple[Ref, ...]]"
"""An operator and its operands; the first is a value, or the list that is loaded."""

BOOLEAN = ("isfinite", "isinf", "isnan", "positive")
FORMULAS: dict[str, Callable[..., str]] = {
    "mul": "{} * {}".format,
    "div": "{} / {}".format,
    "add": "{} + {}".format,
    "sub": "{} - {}".format,
    "add_scaled": "{0} + {2} * {1}".format,
    "addcmul": lambda x, a, b, scale=None: (
        f"{x} + {a} * {b}" if scale is None else f"{x} + {scale} * {a} * {b}"
    ),
    "lerp": "torch.lerp({0}, {1}, {2}.to({0}.dtype))".format,
    "clamp_min": "torch.maximum({}, {})".format,
    "clamp_max": "torch.minimum({}, {})".format,
    "where": "torch.where({1}, {0}, {2})".format,
    "hypot": "torch.hypot({}, {})".format,
    "positive": "{} > 0".format,
    "to": "{}.to({})".format,
    "neg": "-{}".format,
}
"""Where the source of a line is more than torch.name(operand)."""


class Kernel(NamedTuple):
    """A piece of a tape: equal pieces are compiled once in a process."""

    lines: tuple[Line, ...]
    stores: tuple[tuple[int, int], ...]
    """(which list, the line that goes there)"""
    measured: tuple[Measure, int] | None
    """What is measured of every tensor of a line."""
    lists: tuple[torch.dtype, ...]
    rows: tuple[torch.dtype, ...]
    scalars: tuple[torch.dtype, ...]
    device: torch.device

    @property
    def numbers(self) -> int:
        """How many numbers it takes."""
        refs = [ref for _, line in self.lines for ref in line]
        return max([which + 1 for kind, which in refs if kind == "number"], default=0)

    def source(self, width: int) -> str:
        """The function of `width` tensors of each list; it returns the values to be measured."""
        inputs = ["numbers", *[f"row{i}" for i in range(len(self.rows))]]
        inputs += [f"scalar{i}" for i in range(len(self.scalars))]
        inputs += [f"x{i}_{lane}" for i in range(len(self.lists)) for lane in range(width)]
        body = ["number = numbers.unbind()"]
        body += [f"row{i} = row{i}.unbind()" for i in range(len(self.rows))]
        for lane in range(width):
            body += self._lane(lane)
        if self.measured is not None:
            values = [f"v{self.measured[1]}_{lane}" for lane in range(width)]
            body.append(f"return [{', '.join(values)}]")
        return "\n    ".join([f"def kernel({', '.join(inputs)}):", *body])

    def _lane(self, lane: int) -> list[str]:
        def operand(ref: Ref) -> str:
            kind, which = ref
            return {
                "list": f"x{which}_{lane}",
                "value": f"v{which}_{lane}",
                "number": f"number[{which}]",
                "row": f"row{which}[{lane}]",
                "dtype": str(which),
            }.get(kind, f"{kind}{which}")

        body = []
        kept = [value for _, value in self.stores]
        for i, (name, refs) in enumerate(self.lines):
            terms = [operand(ref) for ref in refs]
            if name == "load":
                text = terms[0] + (".clone()" if i in kept else "")
            elif name in FORMULAS:
                text = FORMULAS[name](*terms)
            else:
                text = f"torch.{name}({', '.join(terms)})"
            body.append(f"v{i}_{lane} = {text}")
        return body + [f"x{home}_{lane}.copy_(v{value}_{lane})" for home, value in self.stores]


@cache
def plain(kernel: Kernel, width: int) -> Callable[..., Any]:
    """The function itself, run line by line."""
    source = kernel.source(width)
    name = f"<torchzero_clip kernel {zlib.crc32(source.encode()):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch}
    exec(compile(source, name, "exec"), space)
    made: Callable[..., Any] = space["kernel"]
    return made


class Job:
    """The part of a tape that some stores need: a kernel, and what it is called with."""

    def __init__(
        self, tape: Tape, stores: Mapping[int, int], measured: tuple[Measure, int] | None = None
    ) -> None:
        needed = {*stores.values(), *([] if measured is None else [measured[1]])}
        for i in range(len(tape.lines) - 1, -1, -1):
            if i in needed:
                needed |= {which for kind, which in tape.lines[i][1] if kind == "value"}
        new: dict[str, dict[Any, int]] = {
            kind: {} for kind in ("value", "list", "number", "row", "scalar")
        }

        def name(kind: str, which: Any) -> Ref:  # in the order of use, whatever else the tape holds
            return kind, new[kind].setdefault(which, len(new[kind])) if kind in new else which

        lines = []
        for i in sorted(needed):
            lines.append((tape.lines[i][0], tuple([name(*ref) for ref in tape.lines[i][1]])))
            name("value", i)
        ends = [(name("list", h)[1], name("value", v)[1]) for h, v in stores.items()]
        self.homes = [tape.homes[h] for h in new["list"]]
        self.rows = [tape.rows[i] for i in new["row"]]
        self.scalars = [tape.scalars[i] for i in new["scalar"]]
        self.written = {home for home, _ in ends}
        self.read = {refs[0][1] for operator, refs in lines if operator == "load"}
        self.kernel = Kernel(
            tuple(lines),
            tuple(sorted(ends)),
            None if measured is None else (measured[0], new["value"][measured[1]]),
            tuple([home.dtype for home in self.homes]),
            tuple([row.dtype for row in self.rows]),
            tuple([scalar.dtype for scalar in self.scalars]),
            self.homes[0].tensors[0].device,
        )
        like = torch.empty(0, dtype=torch.float64, device=self.kernel.device)
        self.numbers = numbers([tape.numbers[i] for i in new["number"]] or [0.0], like)

    def misfits(self) -> list[int]:
        """Which tensors have gaps, or another order in one list than in another."""
        if all([home.contiguous for home in self.homes]):
            return []
        return [i for i in range(len(self.homes[0].tensors)) if not self._fits(i)]

    def _fits(self, i: int) -> bool:
        if any([home.flats[i] is None for home in self.homes]):
            return False
        strides = {home.tensors[i].stride() for home in self.homes}
        return len(strides) == 1 or all([home.tensors[i].is_contiguous() for home in self.homes])

    def plainly(self, i: int) -> Tensor | None:
        """Do it for the i-th tensors, line by line; returns the value to be measured."""
        rows = [row[i : i + 1] for row in self.rows]
        tensors = [torch.atleast_1d(home.tensors[i]) for home in self.homes]
        values = plain(self.kernel, 1)(self.numbers, *rows, *self.scalars, *tensors)
        return None if values is None else values[0]
