"""Repeated: the lines that a tape noted, as a function of live values and gradients."""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.engines.compiled.buffers import Buffer
from torchzero_clip.engines.compiled.program import Launch
from torchzero_clip.engines.compiled.recording import inverse


class Line(NamedTuple):
    """An assignment of the function: its text, and the names that it makes, uses and changes.

    `copies` is the name whose values the one that it makes has, in the same form.
    """

    text: str
    makes: tuple[str, ...]
    uses: frozenset[str]
    changes: frozenset[str] = frozenset()
    copies: str | None = None


class Repeated:
    """The function of a tape, in two parts: what hangs on live values alone, and the rest."""

    def __init__(self, early: Callable[..., Any], late: Callable[..., Any]) -> None:
        self._early, self._late = early, late
        self._live, self._made = b"", ()

    def __call__(
        self,
        live: Sequence[float],
        gradients: Sequence[Buffer],
        run: Callable[[Launch], Tensor | None],
    ) -> list[Tensor]:
        """Do the step again with these live values and gradients."""
        bits = array("d", live).tobytes()
        if bits != self._live:
            self._made, self._live = self._early(live), bits
        out: list[Tensor] = self._late(self._made, gradients, run)
        return out


class Again:
    """A launch with other tensors and numbers."""

    def __init__(self, launch: Launch, count: int) -> None:
        self._launch, self._form = launch._replace(buffers=[], vectors=[], scalars=[]), f"{count}d"
        self._memory = bytearray(8 * max(count, 1))
        self._numbers = torch.frombuffer(self._memory, dtype=torch.float64)

    def __call__(
        self,
        run: Callable[[Launch], Tensor | None],
        buffers: list[Buffer],
        numbers: Sequence[float],
        vectors: list[Tensor],
        scalars: list[Tensor],
    ) -> Tensor | None:
        struct.pack_into(self._form, self._memory, 0, *numbers)
        program, sizes = self._launch.program, self._launch.sizes
        return run(Launch(program, buffers, self._numbers, vectors, scalars, sizes))


def repeated(
    lines: Sequence[Line],
    space: Mapping[str, Any],
    returned: str,
    wanted: set[str],
    at_home: set[str],
) -> Repeated:
    """The function of lines that returns this, for which some names are wanted.

    `space` has what the lines find by name; what is `at_home` may change under several names.
    """
    lines = _needed(_without_copies(lines, wanted | at_home), wanted)
    first = _of_live_values(lines)
    rest = [line for line in lines if line not in first]
    shared = listed(sorted({name for line in first for name in line.makes}))
    early = ["def early(live):", *[line.text for line in first], f"return ({shared})"]
    late = ["def late(early, gradients, run):", *([f"{shared} = early"] if shared else [])]
    late += [*[line.text for line in rest], f"return {returned}"]
    found = {**space, "inverse": inverse}
    for text in (early, late):
        exec(compile("\n    ".join(text), "<torchzero_clip tape>", "exec"), found)
    return Repeated(found["early"], found["late"])


def listed(names: Sequence[str]) -> str:
    """Names as the inside of a tuple."""
    return "".join([f"{name}, " for name in names])


def _needed(lines: Sequence[Line], wanted: set[str]) -> list[Line]:
    """The lines that make what is wanted, and those that change memory."""
    wanted, kept = set(wanted), []
    for line in reversed(lines):
        if line.changes or not wanted.isdisjoint(line.makes):
            wanted |= line.uses
            kept.append(line)
    return kept[::-1]


def _without_copies(lines: Sequence[Line], kept: set[str]) -> list[Line]:
    """The lines without copies, of what is not `kept`, that nothing tells from their source."""
    written, known = _written(lines), dict[str, str]()
    found = []
    for line in lines:
        text, uses, copies = line.text, line.uses, line.copies
        if not known.keys().isdisjoint(uses):
            text = "".join([known.get(word, word) for word in re.split(r"(\W)", text)])
            uses = frozenset([known.get(name, name) for name in uses])
            copies = known.get(copies or "", copies)
        makes = set(line.makes)
        if copies and written.isdisjoint({copies, *makes}) and kept.isdisjoint({copies, *makes}):
            known |= dict.fromkeys(makes, copies)
        else:
            found.append(line._replace(text=text, uses=uses))
    return found


def _of_live_values(lines: Sequence[Line]) -> list[Line]:
    """The lines that depend on nothing but live values, and whose results nothing writes to."""
    written, known = _written(lines), set[str]()
    found = []
    for line in lines:
        mine = all([name in known or name.startswith("live") for name in line.uses])
        if mine and not line.changes and written.isdisjoint({*line.makes, *line.uses}):
            known |= {*line.makes}
            found.append(line)
    return found


def _written(lines: Sequence[Line]) -> set[str]:
    """The names of what is written to, and of what it was made from, which it may be a view of."""
    written: set[str] = set()
    for line in reversed(lines):
        if line.changes:
            written |= line.changes
        elif not written.isdisjoint(line.makes):
            written |= line.uses
    return written
