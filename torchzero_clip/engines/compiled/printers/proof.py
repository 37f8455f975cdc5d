"""Proof: before a kernel takes part in a step, it is held against torch, once a card and version.

One of lists runs in memory of its own, on drawn entries and the numbers, vectors and scalars of
that step: over several blocks and within one, at even and at odd addresses. Torch's operators do
the same. One of vectors runs in the first step that needs it, on what is there, and what torch
makes of that stays. A file beside the kernels notes that both agree. Where they do not, or where
nothing runs, no kernel is trusted any more on devices of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.foreach import copy_into
from torchzero_clip.core.formats import wide_of
from torchzero_clip.core.norms import SliceRows
from torchzero_clip.core.norms.numeric import vector_norm
from torchzero_clip.core.small_tensors import copies
from torchzero_clip.core.torch_private import fake_mode
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers.build import compiler, machine, place
from torchzero_clip.engines.compiled.printers.cpp import Call
from torchzero_clip.engines.compiled.printers.operators import REDUCTIONS
from torchzero_clip.engines.compiled.printers.pointer_tables import capturing
from torchzero_clip.engines.compiled.printers.program import Launch, Program
from torchzero_clip.engines.compiled.printers.vectors import (
    Region,
    Segment,
    VectorNode,
    VectorOperand,
)

Parts: TypeAlias = "Callable[[Region], list[Tensor]]"
"""What gives the tensors of a region; none of a value in a loop."""
ROWS = SliceRows(((3, 1), (5, 1)) * 2, ((1,),) * 4, (1400, 343, 3, 7), (3, 5) * 2, True)
"""The slices of the four tensors that a kernel is tried on."""
SIZES = [4200, 1715, 9, 35]
PROVEN, WRONG = set[Program](), set[str]()
"""The programs whose kernels agree, and the kinds of devices on which one does not."""


def known(launch: Launch) -> bool:
    """Whether a launch needs no proof: its program has one, or nothing is computed."""
    return launch.program in PROVEN or fake_mode(launch.buffers[0].tensors[0]) is not None


def proven(launch: Launch, call: Call | None, source: Any) -> Call | None:
    """What calls a kernel, where it may: `source` makes its text."""
    program = launch.program
    if call is None or known(launch):
        return call
    trial = Trial(source(program), program.device)
    if not trial.known:
        try:
            _compare(launch, call)
        except Exception as error:  # also of what compiles it
            trial.said += [str(error), program.source()]
    if trial.passed():
        PROVEN.add(program)
    return call if program in PROVEN else None


class Trial:
    """Whether what a text is compiled to does what torch does, on a device.

    Attributes:
        known: Whether it was found so before.
        said: What was otherwise.
    """

    def __init__(self, text: str, device: torch.device) -> None:
        modules = ["torch", "triton"] if "import triton" in text else ["torch"]
        words = [f"{name} {import_module(name).__version__}" for name in modules]
        words += [torch.cuda.get_device_name(device)] if device.type == "cuda" else compiler() or []
        self.said, self._text, self._kind, self._words = list[str](), text, device.type, words
        self._mark = place(text, *words).with_suffix(".proven")
        self.known, self._vague = self._mark.exists(), False

    def run(self, nodes: Segment, call: Callable[[], None], parts: Parts) -> None:
        """Do a launch; or nodes, by a call and by torch, whose numbers stay where they differ.

        `parts` are the tensors of a region; none are of a value in a loop.
        """
        every = [node for node in nodes if isinstance(node, VectorNode)]
        written = [t for node in every for t in parts(node.out)]
        if self.known or not written or capturing(written[0].device):
            call()
            return
        before, right, sizes = copies(written), list[Tensor](), list[float]()
        with suppress(Exception):  # what torch cannot do tells nothing of a kernel
            sizes = _by_torch(every, parts, written[0])
            right = copies(written)
        copy_into(written, before)
        try:
            call()
            for t, x, size in zip(written, right, sizes, strict=False):
                torch.testing.assert_close(t, x, rtol=1e-4, atol=1e-6 * size, equal_nan=True)
        except Exception as error:  # also of what compiles it
            if not right:
                raise
            self.said.append(str(error))
            copy_into(written, right)
        self._vague |= not any(map(_size, right))  # nothing but zeros, or no numbers

    def passed(self) -> bool:
        """Whether nothing was otherwise, which is noted; else a warning tells of it."""
        page = self._mark.with_suffix(".txt" if self.said else ".proven")
        with suppress(OSError):  # a folder may go, or be read alone
            if self.said or not self._vague:
                page.write_text("\n".join([*self.said, *self._words, machine(), self._text]))
        if not self.said:
            return True
        WRONG.add(self._kind)
        warn(
            "compile=True: a kernel does not do what torch's operators do "
            f"({', '.join(self._words)}): steps run operator by operator from here on, which is "
            f"slower; please send us {page}"
        )
        return False


def _by_torch(nodes: Sequence[VectorNode], parts: Parts, like: Tensor) -> list[float]:
    """Do nodes by torch's operators; how large numbers were on the way to each of the tensors."""
    values, sizes, found = dict[Region, Tensor](), dict[Any, float](), list[float]()

    def operand(x: VectorOperand, node: VectorNode) -> Tensor | float:
        if isinstance(x, Region):
            there = parts(x)
            return (torch.stack(there).view(x.shape) if there else values[x]).to(node.dtype)
        # a root is no power by a tensor; a number may be larger than a dtype holds
        return x if node.name == "pow" else like.new_full((), x, dtype=torch.float64).to(node.dtype)

    for node in nodes:
        given = [operand(x, node) for x in node.given]
        made = _made(node, *given).to(node.out.dtype).expand(node.out.shape)
        rows = [max(_size(t), sizes.get(x, 0.0)) for t, x in zip(given, node.given, strict=True)]
        product = rows[1] * rows[2] if node.name == "addcmul" else 0.0
        values[node.out], sizes[node.out] = made, max(_size(made), product, *rows)
        if there := parts(node.out):
            copy_into(there, made.unbind() if len(there) > 1 else [made])
        found += [sizes[node.out]] * len(there)
    return found


def _size(x: Any) -> float:
    """The largest finite number of a tensor."""
    x = torch.as_tensor(x).double().abs().nan_to_num(0, 0, 0)
    return float(x.amax()) if x.numel() else 0.0


def _made(node: VectorNode, *given: Any) -> Any:
    """What torch makes of a node."""
    name, x = node.name, given[0]
    if name == "norm":
        return vector_norm(x, node.power)
    if name in REDUCTIONS:
        over = tuple(range(len(node.out.shape), x.dim()))
        if name.startswith("norm"):
            return torch.linalg.vector_norm(x, float(name.removeprefix("norm")), over)
        return getattr(torch, name)(x, over)
    if name == "where":
        return torch.where(given[1] != 0, x, given[2])
    return x if name in ("copy", "fill") else getattr(torch, name)(*given)


def _compare(launch: Launch, call: Call) -> None:
    """Raise where a call does otherwise than torch, beyond rounding."""
    ours, right = _drawn(launch), _drawn(launch)
    found, wanted = call(ours, SIZES), right.plainly(range(4))
    near = 2e-2 if 2 in [dtype.itemsize for dtype in launch.program.buffers] else 1e-4
    rows: list[Any] = [[*_numbers(ours), found], [*_numbers(right), wanted]]
    torch.testing.assert_close(*rows, rtol=near, atol=max(near / 64, 1e-5), equal_nan=True)


def _numbers(launch: Launch) -> list[Tensor]:
    """What was written; a lower half with the upper one, since alone it is no number."""
    nodes, stores = launch.program.nodes, dict(launch.program.stores)
    made = {i: launch.buffers[i].tensors for i in stores}
    for i, (name, given) in [(i, nodes[value]) for i, value in stores.items()]:
        if name == "lower":
            high = next(j for j, value in stores.items() if nodes[value] == ("upper", given))
            made[i] = list(map(wide_of, made[high], made[i]))
    return [t for tensors in made.values() for t in tensors]


def _drawn(launch: Launch) -> Launch:
    """A launch on drawn entries, none of them near 0, with the numbers of another one: in place of
    those that are none, with which all comes to the same, 1.
    """
    program, draw, buffers = launch.program, torch.Generator().manual_seed(0), list[Buffer]()
    for dtype in program.buffers:
        rows = [torch.rand(2, n + 1, generator=draw, device="cpu") for n in SIZES]
        some = [(x + 0.5).div_(64).copysign_(y - 0.3).to(program.device, dtype) for x, y in rows]
        cut = [(t[i % 2 :][: SIZES[i]], ROWS.counts[i]) for i, t in enumerate(some)]
        buffers.append(Buffer([t.view(count, -1) for t, count in cut]))
    vectors, scalars = [
        [x.nan_to_num(1, 1, 1) for x in y] for y in (launch.vectors, launch.scalars)
    ]
    vectors = [v[torch.arange(16, device="cpu") % len(v)] for v in vectors]
    given = [x if x - x == 0 else 1.0 for x in launch.numbers], vectors, scalars
    return Launch(program, SIZES, None, buffers, *given, rows=ROWS if launch.rows else None)
