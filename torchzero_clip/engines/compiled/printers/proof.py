"""Proof: before a kernel takes part in a step, it is held against torch, once a card and version.

It runs in memory of its own, on drawn entries and the numbers, vectors and scalars of that step:
over several blocks and within one, at even and at odd addresses. Torch's operators do the same. A
file beside the kernels notes that both agree. Where they do not, or where nothing runs, no kernel
is trusted any more on devices of this kind.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.formats import wide_of
from torchzero_clip.core.norms import SliceRows
from torchzero_clip.core.outside import warn
from torchzero_clip.core.private import fake_mode
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers.build import compiler, machine, place
from torchzero_clip.engines.compiled.printers.cpp import Call
from torchzero_clip.engines.compiled.printers.program import Launch, Program

ROWS = SliceRows(((3, 1), (5, 1)) * 2, ((1,),) * 4, (1400, 343, 3, 7), (3, 5) * 2, True)
"""The slices of the four tensors that a kernel is tried on."""
SIZES = [4200, 1715, 9, 35]
PROVEN, WRONG = set[Program](), set[str]()
"""The programs whose kernels agree, and the kinds of devices on which one does not."""


def known(launch: Launch) -> bool:
    """Whether a launch needs no proof: its program has one, or nothing is computed."""
    return launch.program in PROVEN or fake_mode(launch.buffers[0].tensors[0]) is not None


def proven(launch: Launch, call: Call | None, source: Any, *modules: str) -> Call | None:
    """What calls a kernel, where it may: `source` is its text, which `modules` run."""
    program, device = launch.program, launch.program.device
    if call is None or known(launch):
        return call
    words = [f"{name} {import_module(name).__version__}" for name in modules]
    words += [torch.cuda.get_device_name(device)] if device.type == "cuda" else compiler() or []
    mark = place(source(program), *words).with_suffix(".proven")
    try:
        if not mark.exists():
            _compare(launch, call)
    except Exception as error:  # also of what compiles it
        WRONG.add(device.type)
        said = [str(error), *words, machine(), program.source(), source(program)]
        (page := mark.with_suffix(".txt")).write_text("\n".join(said))
        warn(
            f"compile=True: a kernel does not do what torch's operators do ({', '.join(words)}): "
            f"steps run operator by operator from here on, which is slower; please send us {page}"
        )
        return None
    mark.touch()
    PROVEN.add(program)
    return call


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
