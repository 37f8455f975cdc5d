"""The method of a file that returns the averaged weights of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchzero_clip.core.chain import Chain
from torchzero_clip.core.engine import Group
from torchzero_clip.core.link import Link
from torchzero_clip.core.transform import averages
from torchzero_clip.source.symbols import Raw, SourceError, atom, binary


class Term:
    """The text of an expression. The method `averaged` of a rule receives it in place of a tensor.

    Args:
        text: The expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def to(self, dtype: Term) -> Term:
        """Return the text that converts the expression to a dtype."""
        return Term(f"{atom(self.text)}.to({dtype.text})")

    @property
    def dtype(self) -> Term:
        """The text of the dtype of the expression."""
        return Term(f"{atom(self.text)}.dtype")

    def _joined(self, symbol: str, other: Any) -> Term:
        """Return the text of a binary operator with another term or a number."""
        right = other.text if isinstance(other, Term) else repr(other)
        return Term(binary(symbol, Raw(self.text), Raw(right), str))

    def __getitem__(self, index: int) -> Term:
        return Term(f"{atom(self.text)}[{index}]")

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

    __radd__ = __add__
    __rmul__ = __mul__


def averaged_weights(links: Sequence[Link], live: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the method, or nothing if no link averages weights.

    If several links average the weights of a parameter, the last one counts.

    Args:
        links: The links of the chain.
        live: The hyperparameters, by key.
    """
    group = {key: x if x is None else Term(f'group["{key}"]') for key, x in live.items()}
    averaging = [*_averaging(links)][::-1]
    if not averaging:
        return
    last = next((i for i, (_, of_all) in enumerate(averaging) if of_all), len(averaging)) + 1
    yield "    @torch.no_grad()"
    yield "    def averaged_weights(self, p: Tensor) -> Tensor:"
    yield '        """Return the averaged weights of a parameter."""'
    yield "        state: dict[str, Tensor] = self.state[p]"
    lines = [line for link, _ in averaging[:last] for line in _lines(link, link.values(group))]
    if any("weights = " in line for line in lines):
        yield "        weights: Tensor"
    yield from lines
    yield "        return p.detach().clone()"


def _averaging(links: Sequence[Link], of_all: bool = True) -> Iterator[tuple[Link, bool]]:
    """Yield the links that average weights, and whether they average all parameters."""
    for link in links:
        if averages(link.transform):
            yield link, of_all
        yield from _averaging(link.children, of_all and isinstance(link.transform, Chain))


def _lines(link: Link, group: Group) -> Iterator[str]:
    """Yield the lines of the file that return the averaged weights of one link."""
    names = list(link.state_names(torch.empty(2, 3, device="meta")))
    try:
        average = link.transform.averaged(Term("p"), {name: Term(name) for name in names}, group)
        text: str = average.text
    except (AttributeError, SyntaxError, TypeError) as error:
        raise SourceError(
            f"to_source: {link.path} cannot be exported as plain PyTorch code, because its method "
            "averaged() may use only sums and products of state and hyperparameters: "
            f"{error}"
        ) from None
    used = [name for name in names if name in text]
    yield f'        if "{link.path}/{names[0]}" in state:'
    yield from [f'            {name} = state["{link.path}/{name}"]' for name in used]
    if "group[" in text:
        yield "            groups = self.param_groups"
        yield '            group = next(g for g in groups if any(q is p for q in g["params"]))'
        yield f"            weights = {text}"
        yield "            return weights"
    elif text in used:
        yield f"            return {text}.clone()"
    else:
        yield f"            return {text}"
