"""Averaged: the lines of a file that give the weights for evaluation of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchzero_clip.core.chain import Chain
from torchzero_clip.core.engine import Group
from torchzero_clip.core.link import Link
from torchzero_clip.core.transform import averages
from torchzero_clip.source.symbols import ATOM, BINARY, SourceError


class Term:
    """An expression that stands for a tensor or number: its text, and how tight it binds."""

    def __init__(self, text: str, tight: int = ATOM) -> None:
        self.text, self.tight = text, tight

    def to(self, dtype: Term) -> Term:
        return Term(f"{self._within(ATOM)}.to({dtype.text})")

    @property
    def dtype(self) -> Term:
        return Term(f"{self._within(ATOM)}.dtype")

    def _within(self, tight: int) -> str:
        return self.text if self.tight >= tight else f"({self.text})"

    def _joined(self, operator: str, other: Any) -> Term:
        sign, tight = BINARY[operator]
        right = other if isinstance(other, Term) else Term(repr(other))
        return Term(f"{self._within(tight)} {sign} {right._within(tight + 1)}", tight)

    def __getitem__(self, index: int) -> Term:
        return Term(f"{self._within(ATOM)}[{index}]")

    def __add__(self, other: Any) -> Term:
        return self._joined("add", other)

    def __sub__(self, other: Any) -> Term:
        return self._joined("sub", other)

    def __mul__(self, other: Any) -> Term:
        return self._joined("mul", other)

    def __truediv__(self, other: Any) -> Term:
        return self._joined("truediv", other)

    def __rsub__(self, other: Any) -> Term:
        return Term(repr(other))._joined("sub", self)

    __radd__, __rmul__ = __add__, __mul__


def averaged_weights(links: Sequence[Link], live: Mapping[str, Any]) -> Iterator[str]:
    """The method of the file, where a link has weights for evaluation, and these live values; the
    last one that knows a parameter counts.
    """
    group = {key: x if x is None else Term(f'group["{key}"]') for key, x in live.items()}
    found = [*_found(links)][::-1]
    last = next((i for i, (_, known) in enumerate(found) if known), len(found)) + 1
    if not found:
        return
    yield "    @torch.no_grad()"
    yield "    def averaged_weights(self, p: Tensor) -> Tensor:"
    yield '        """The weights for evaluation in place of a parameter\'s."""'
    yield "        state: dict[str, Tensor] = self.state[p]"
    lines = [line for link, _ in found[:last] for line in _of(link, link.values(group))]
    if any("weights = " in line for line in lines):
        yield "        weights: Tensor"
    yield from lines
    yield "        return p.detach().clone()"


def _found(links: Sequence[Link], known: bool = True) -> Iterator[tuple[Link, bool]]:
    """The links with weights for evaluation, and whether they know all parameters."""
    for link in links:
        if averages(link.transform):
            yield link, known
        yield from _found(link.children, known and isinstance(link.transform, Chain))


def _of(link: Link, group: Group) -> Iterator[str]:
    """The lines for a link."""
    names = list(link.state_names(torch.empty(2, 3, device="meta")))
    try:
        made = link.transform.averaged(Term("p"), {name: Term(name) for name in names}, group)
        text: str = made.text
    except (AttributeError, TypeError) as error:
        raise SourceError(
            f"{link.path} cannot be written as a file of plain torch: its weights for evaluation "
            f"are more than sums and products of state and live values ({error}); use the library "
            "for it"
        ) from None
    used = [name for name in names if name in text]
    yield f'        if "{link.path}/{names[0]}" in state:'
    yield from [f'            {name} = state["{link.path}/{name}"]' for name in used]
    if "group[" in text:
        yield "            groups = self.param_groups"
        yield '            group = next(g for g in groups if any(q is p for q in g["params"]))'
        yield f"            weights = {text}"
        yield "            return weights"
    else:
        yield f"            return {text if text not in used else f'{text}.clone()'}"
