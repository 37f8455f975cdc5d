"""Proof: compare each new kernel with PyTorch's operators before a step uses the kernel.

`proven` runs a list kernel on random tensors, with the numbers, vectors and scalars of the current
step. Some tensors are longer than a block, and some are shorter. Some addresses are aligned, and
some are not.

`Trial.run` runs a vector kernel in the first step that needs the kernel, on the values of this
step. If the results differ from PyTorch's results, the step uses PyTorch's results.

After a successful comparison, `Trial.passed` writes a file next to the compiled kernels. So each
kernel is compared once per device and version. If a kernel gives different results or cannot run,
this process uses no more kernels on this type of device.
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
"""A function that returns the tensors of a region, or an empty list for a local variable."""
ROWS = SliceRows(((3, 1), (5, 1)) * 2, ((1,),) * 4, (1400, 343, 3, 7), (3, 5) * 2, True)
"""The slices of the four tensors on which a list kernel is compared with PyTorch."""
SIZES = [4200, 1715, 9, 35]
PROVEN = set[Program]()
"""The programs whose kernels agree with PyTorch."""
WRONG = set[str]()
"""The types of devices on which a kernel disagreed with PyTorch."""


def known(launch: Launch) -> bool:
    """Return whether a launch needs no comparison with PyTorch.

    This is so if the program is proven already, or if the tensors are fake.
    """
    return launch.program in PROVEN or fake_mode(launch.buffers[0].tensors[0]) is not None


def proven(launch: Launch, call: Call | None, source: Callable[[Program], Any]) -> Call | None:
    """Return `call`, which runs a kernel, if the kernel agrees with PyTorch. Otherwise return None.

    `source` prints the text of the kernel.
    """
    program = launch.program
    if call is None or known(launch):
        return call
    trial = Trial(source(program), program.device)
    if not trial.known:
        try:
            _compare(launch, call)
        except Exception as error:  # errors of the compiler count as well
            trial.said += [str(error), repr(program)]
    if trial.passed():
        PROVEN.add(program)
    return call if program in PROVEN else None


class Trial:
    """A comparison of a kernel with PyTorch on a device.

    Attributes:
        known: Whether an earlier comparison has succeeded.
        said: The differences, as text.
    """

    def __init__(self, text: str, device: torch.device) -> None:
        modules = ["torch", "triton"] if "import triton" in text else ["torch"]
        words = [f"{name} {import_module(name).__version__}" for name in modules]
        words += [torch.cuda.get_device_name(device)] if device.type == "cuda" else compiler() or []
        self.said = list[str]()
        self._text = text
        self._kind = device.type
        self._words = words
        self._mark = place(text, *words).with_suffix(".proven")
        self.known = self._mark.exists()
        self._vague = False  # whether results were zero, which proves nothing

    def run(self, nodes: Segment, call: Callable[[], None], parts: Parts) -> None:
        """Run the kernel of some nodes. Compare the kernel with PyTorch unless it is proven.

        If the results differ, PyTorch's results replace the results of the kernel. `parts` returns
        the tensors of a region, or an empty list for a local variable.
        """
        vector_nodes = [node for node in nodes if isinstance(node, VectorNode)]
        written = [t for node in vector_nodes for t in parts(node.out)]
        if self.known or not written or capturing(written[0].device):
            call()
            return
        before = copies(written)
        right = list[Tensor]()
        sizes = list[float]()
        with suppress(Exception):  # an error of PyTorch proves nothing about the kernel
            sizes = _by_torch(vector_nodes, parts, written[0])
            right = copies(written)
        copy_into(written, before)
        try:
            call()
            for t, x, size in zip(written, right, sizes, strict=False):
                torch.testing.assert_close(t, x, rtol=1e-4, atol=1e-6 * size, equal_nan=True)
        except Exception as error:  # errors of the compiler count as well
            if not right:
                raise
            self.said.append(str(error))
            copy_into(written, right)
        if not any(map(_size, right)):
            self._vague = True

    def passed(self) -> bool:
        """Return whether the results agreed. Write the outcome to a file, and warn of a failure."""
        page = self._mark.with_suffix(".txt" if self.said else ".proven")
        with suppress(OSError):  # the folder may be removed, or read-only
            if self.said or not self._vague:
                page.write_text("\n".join([*self.said, *self._words, machine(), self._text]))
        if not self.said:
            return True
        WRONG.add(self._kind)
        warn(
            "compile=True: the results of a compiled kernel differ from the results of "
            f"PyTorch's operators ({', '.join(self._words)}). PyTorch's operators are used "
            "from now on, so steps are slower. Please report this as a bug, and attach the "
            f"file {page}"
        )
        return False


def _by_torch(nodes: Sequence[VectorNode], parts: Parts, like: Tensor) -> list[float]:
    """Run nodes by PyTorch's operators, and write the results.

    For each written tensor, return the largest absolute number in its computation. Rounding errors
    are relative to this number.
    """
    values = dict[Region, Tensor]()
    sizes = dict[Any, float]()
    written = list[float]()

    def operand(x: VectorOperand, node: VectorNode) -> Tensor | float:
        if isinstance(x, Region):
            tensors = parts(x)
            value = torch.stack(tensors).view(x.shape) if tensors else values[x]
            return value.to(node.dtype)
        if node.name == "pow":  # PyTorch computes a root for the exponent 0.5, but not for a tensor
            return x
        # through float64, because a number may be too large for the dtype
        return like.new_full((), x, dtype=torch.float64).to(node.dtype)

    for node in nodes:
        operands = [operand(x, node) for x in node.given]
        value = _computed(node, *operands).to(node.out.dtype).expand(node.out.shape)
        pairs = zip(operands, node.given, strict=True)
        on_the_way = [max(_size(t), sizes.get(x, 0.0)) for t, x in pairs]
        if node.name == "addcmul":
            on_the_way.append(on_the_way[1] * on_the_way[2])
        values[node.out] = value
        sizes[node.out] = max(_size(value), *on_the_way)
        tensors = parts(node.out)
        if tensors:
            copy_into(tensors, value.unbind() if len(tensors) > 1 else [value])
        written += [sizes[node.out]] * len(tensors)
    return written


def _size(x: Any) -> float:
    """Return the largest finite |x| of a tensor or number."""
    x = torch.as_tensor(x).double().abs().nan_to_num(0, 0, 0)
    return float(x.amax()) if x.numel() else 0.0


def _computed(node: VectorNode, *operands: Any) -> Any:
    """Compute a node by PyTorch's operators, and return the result."""
    name = node.name
    x = operands[0]
    if name == "norm":
        return vector_norm(x, node.power)
    if name in REDUCTIONS:
        dims = tuple(range(len(node.out.shape), x.dim()))
        if name.startswith("norm"):
            return torch.linalg.vector_norm(x, float(name.removeprefix("norm")), dims)
        return getattr(torch, name)(x, dims)
    if name == "where":
        return torch.where(operands[1] != 0, x, operands[2])
    return x if name in ("copy", "fill") else getattr(torch, name)(*operands)


def _compare(launch: Launch, call: Call) -> None:
    """Raise an error if a kernel differs from PyTorch by more than rounding."""
    ours = _drawn(launch)
    right = _drawn(launch)
    stats = call(ours, SIZES)
    right_stats = right.run_by_torch(range(4))
    half = 2 in [dtype.itemsize for dtype in launch.program.buffers]
    near = 2e-2 if half else 1e-4
    pair: list[Any] = [[*_results(ours), stats], [*_results(right), right_stats]]
    torch.testing.assert_close(*pair, rtol=near, atol=max(near / 64, 1e-5), equal_nan=True)


def _results(launch: Launch) -> list[Tensor]:
    """Return all tensors that a launch has written.

    A lower half of a float32 value has no meaning alone, so it is joined to its upper half.
    """
    nodes = launch.program.nodes
    stores = dict(launch.program.stores)
    written = {i: launch.buffers[i].tensors for i in stores}
    for i, value in stores.items():
        name, operands = nodes[value]
        if name == "lower":
            upper = next(j for j, other in stores.items() if nodes[other] == ("upper", operands))
            written[i] = list(map(wide_of, written[upper], written[i]))
    return [t for tensors in written.values() for t in tensors]


def _drawn(launch: Launch) -> Launch:
    """Return a launch of the same program on random elements that are not near 0.

    The new launch has the numbers, vectors and scalars of the given launch. NaN and infinity are
    replaced by 1, because they would make all results equal.
    """
    program = launch.program
    draw = torch.Generator().manual_seed(0)
    buffers = list[Buffer]()
    for dtype in program.buffers:
        rows = [torch.rand(2, n + 1, generator=draw, device="cpu") for n in SIZES]
        drawn = [(x + 0.5).div_(64).copysign_(y - 0.3).to(program.device, dtype) for x, y in rows]
        # every other tensor begins at an unaligned address
        cut = [(t[i % 2 :][: SIZES[i]], ROWS.counts[i]) for i, t in enumerate(drawn)]
        buffers.append(Buffer([t.view(count, -1) for t, count in cut]))
    numbers = [x if x - x == 0 else 1.0 for x in launch.numbers]
    vectors = [v.nan_to_num(1, 1, 1) for v in launch.vectors]
    vectors = [v[torch.arange(16, device="cpu") % len(v)] for v in vectors]
    scalars = [x.nan_to_num(1, 1, 1) for x in launch.scalars]
    slices = ROWS if launch.rows else None
    return Launch(program, SIZES, None, buffers, numbers, vectors, scalars, rows=slices)
