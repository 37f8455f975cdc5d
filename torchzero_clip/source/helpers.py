"""Helpers: functions for norms and percentiles, which come before the class in a file."""

from __future__ import annotations

import torch

from torchzero_clip.core import NormRule
from torchzero_clip.core.norms import Measure, measure
from torchzero_clip.source.copied_functions import FUNCTIONS, METHODS
from torchzero_clip.source.symbols import SourceError

NAMES = {"l2": "_norm", "rms": "_rms", "mad": "_mad", "linf": "_largest", "l0": "_count"}
NAMES |= {"std": "_std", "var": "_var", "sum": "_sum"}
"""The name of the helper for some norms."""


class Helpers:
    """The helpers that a file needs. The file contains each helper once.

    Every method that writes a helper returns the name of the helper.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        """The text of each helper, by name."""
        self.taken = {*FUNCTIONS, *METHODS}
        """The names of other functions in the file."""

    def need(self, base: str, text: str) -> str:
        """Add a helper unless the file has it, and return its name.

        Args:
            base: The name of the helper. If another helper has this name, a number is appended.
            text: The source of the helper, with `NAME` in place of its name.
        """
        name = base
        count = 1
        while True:
            named = text.replace("NAME", name)
            if name not in self.taken and self.texts.get(name, named) == named:
                self.texts[name] = named
                return name
            count += 1
            name = f"{base}_{count}"

    def norm(self, m: Measure) -> str:
        """Write a function that returns the norm of all tensors together."""
        base = name_of(m)
        p = f"{m.p:g}"
        if m.kind == "power":
            lines = [f"norms = torch._foreach_norm(tensors, {p}, dtype=torch.float64)"]
            whole = f"torch.linalg.vector_norm(torch.stack(norms), {p})"
            if m.mean:
                lines += ["count = max(sum([x.numel() for x in tensors]), 1)"]
                whole += " / count" if m.p == 1 else f" / count**{1 / m.p:g}"
            lines += [f"norm: Tensor = {whole}", "return norm"]
        elif m.kind == "max":
            lines = ["sizes = [x.abs().amax() for x in tensors if x.numel()]"]
            lines += ["none = tensors[0].new_zeros(())"]
            lines += ["return torch.stack([none, *sizes]).amax().double()"]
        elif m.kind == "count":
            lines = ["return torch.stack([x.count_nonzero() for x in tensors]).sum().double()"]
        else:
            lines = ["flat = torch.cat([x.double().flatten() for x in tensors])"]
            if m.kind == "sum":
                lines += ["return flat.sum().abs()"]
            else:
                lines += ["if len(flat) < 2:", "    return flat.new_zeros(())"]
                lines += [f"return flat.{'std' if m.root else 'var'}()"]
        about = f"Return the {_words(m)} of all tensors together, in float64."
        return self._of_lists(base, about, lines)

    def mean(self) -> str:
        """Write a function that returns the mean of all tensors together."""
        lines = ["return torch.cat([x.flatten() for x in tensors]).mean(dtype=torch.float64)"]
        return self._of_lists("_mean", "Return the mean of all tensors, in float64.", lines)

    def _of_lists(self, base: str, about: str, lines: list[str]) -> str:
        """Write a function whose argument is a list of tensors."""
        head = "def NAME(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:"
        return self.need(base, _function(head, about, lines))

    def slices(self, rule: NormRule, m: Measure | None) -> str:
        """Write a function that returns the norm of each slice, or the mean if `m` is None."""
        lines = [*_dims(rule), "if not dims:"]
        lines += ["    return x.new_zeros([1] * n, dtype=torch.float64)"]
        keep = "dims, keepdim=True"
        if m is None:
            lines += [f"return x.mean({keep}, dtype=torch.float64)"]
        elif m.kind == "power":
            p = f"{m.p:g}"
            norm = f"torch.linalg.vector_norm(x, {p}, dims, True, dtype=torch.float64)"
            if m.mean:
                lines += [f"norm: Tensor = {norm}"]
                power = "" if m.p == 1 else f" ** {1 / m.p:g}"
                size = "max(x.numel(), 1) / max(norm.numel(), 1)"
                lines += [f"size: float = ({size}){power}" if power else f"size = {size}"]
                lines += ["return norm / size"]
            else:
                lines += [f"norm: Tensor = {norm}", "return norm"]
        elif m.kind == "max":
            lines += [f"return x.abs().amax({keep}).double()"]
        elif m.kind == "count":
            lines += [f"return (x != 0).sum({keep}).double()"]
        elif m.kind == "sum":
            lines += [f"return x.sum({keep}, dtype=torch.float64).abs()"]
        else:
            lines += [f"if x.numel() < 2 * x.sum({keep}).numel():"]
            lines += [f"    return x.sum({keep}, dtype=torch.float64) * 0"]
            lines += [f"return x.double().{'std' if m.root else 'var'}({keep})"]
        about = f"Return the {'mean' if m is None else _words(m)} of each slice, in float64."
        base = "_mean_each" if m is None else f"{name_of(m)}_each"
        return self.need(base, _function("def NAME(x: Tensor) -> Tensor:", about, lines))

    def small(self, rule: NormRule, size: int) -> str:
        """Write a function that tests if the slices of a tensor have fewer elements than `size`."""
        lines = [*_dims(rule), "entries = math.prod([x.shape[d] for d in dims]) if dims else 0"]
        lines += [f"return torch.tensor(entries < {size}, device=x.device)"]
        about = f"Return whether a slice has fewer than {size} elements."
        return self.need("_small", _function("def NAME(x: Tensor) -> Tensor:", about, lines))

    def layers(self) -> str:
        """Write a function that splits a list of tensors by layer."""
        head = "def NAME(tensors: list[Tensor], layers: list[str]) -> list[list[Tensor]]:"
        lines = ["found: dict[str, list[Tensor]] = {}"]
        lines += ["for x, layer in zip(tensors, layers, strict=True):"]
        lines += ["    found.setdefault(layer, []).append(x)", "return list(found.values())"]
        return self.need("_by_layer", _function(head, "Return the tensors of each layer.", lines))

    def percentile(self) -> str:
        """Write a function that returns a percentile of absolute values."""
        lines = ["sizes = x.abs().flatten()"]
        lines += ["if not len(sizes):", "    return sizes.new_zeros(())"]
        lines += ["return sizes.kthvalue(int(p * (len(sizes) - 1) / 100) + 1).values"]
        about = "Return the p-th percentile of the magnitudes, rounded down to one of them."
        head = "def NAME(x: Tensor, p: float) -> Tensor:"
        return self.need("_percentile", _function(head, about, lines))


def name_of(m: Measure) -> str:
    """Return the name of the helper for a norm."""
    known = {measure(name): helper for name, helper in NAMES.items()}
    return known.get(m, f"_norm_{m.p:g}".replace(".", "_"))


def _function(head: str, about: str, lines: list[str]) -> str:
    """Return the source of a function from its first line, its docstring and its body."""
    return "\n".join([head, f'    """{about}"""', *[f"    {line}" for line in lines]])


def _words(m: Measure) -> str:
    """Return a norm in words, for a docstring."""
    if m.kind == "max":
        return "largest magnitude"
    if m.kind == "count":
        return "number of nonzero elements"
    if m.kind == "sum":
        return "sum"
    if m.kind == "spread":
        return "standard deviation" if m.root else "variance"
    if not m.mean:
        return "norm" if m.p == 2 else f"norm of order {m.p:g}"
    if m.p == 2:
        return "root mean square"
    return "mean magnitude" if m.p == 1 else f"power mean of order {m.p:g}"


def _dims(rule: NormRule) -> list[str]:
    """Return the lines that compute the dims of slices."""
    return ["n = x.dim()", f"dims = {dims_of(rule)}"]


def dims_of(rule: NormRule) -> str:
    """Return an expression for the dims over which a rule computes norms of a tensor `x`."""
    every = rule.dim if isinstance(rule.dim, (tuple, list)) else (rule.dim,)
    dims = tuple([d for d in every if isinstance(d, int)])
    candidates = [
        f"tuple(sorted({{d % n for d in {dims} if -n <= d < n}}))",
        f"tuple(d for d in range(n) if d not in {dims})",
        f"tuple(d for d in range(n) if d not in {dims} and d - n not in {dims})",
        "tuple(range(1, n)) or (0,)",
        "tuple(range(max(n, 1)))",
        "tuple(range(1, n))",
        "tuple(range(n)) if n > 1 else ()",
    ]
    for text in candidates:
        if all(eval(text, {"n": n}) == rule.dims(torch.empty([2] * n)) for n in range(7)):
            return text
    raise SourceError(f"the dim of {rule!r} is not supported")
