"""Helpers: functions for norms and percentiles, which come before the class in a file."""

from __future__ import annotations

import textwrap

import torch

from torchzero_clip.core import NormRule
from torchzero_clip.core.norms import Measure, measure
from torchzero_clip.source.copied_functions import FUNCTIONS, METHODS
from torchzero_clip.source.symbols import SourceError, numbered

NAMES = {"l2": "_norm", "rms": "_rms", "mad": "_mad", "linf": "_largest", "l0": "_count"}
NAMES |= {"std": "_std", "var": "_var", "sum": "_sum"}
"""The name of the helper for some norms."""
OF_LISTS = {
    "power": """\
norms = torch._foreach_norm(tensors, {p}, dtype=torch.float64)
norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), {p})
return norm""",
    "mean of powers": """\
norms = torch._foreach_norm(tensors, {p}, dtype=torch.float64)
count = max(sum([x.numel() for x in tensors]), 1)
norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), {p}) / count{root}
return norm""",
    "max": """\
sizes = [x.abs().amax() for x in tensors if x.numel()]
none = tensors[0].new_zeros(())
return torch.stack([none, *sizes]).amax().double()""",
    "count": "return torch.stack([x.count_nonzero() for x in tensors]).sum().double()",
    "sum": """\
flat = torch.cat([x.double().flatten() for x in tensors])
return flat.sum().abs()""",
    "spread": """\
flat = torch.cat([x.double().flatten() for x in tensors])
if len(flat) < 2:
    return flat.new_zeros(())
return flat.{spread}()""",
    "mean": "return torch.cat([x.flatten() for x in tensors]).mean(dtype=torch.float64)",
}
"""For each kind of norm, the body of a function that returns the norm of a list of tensors."""
OF_SLICES = {
    "power": """\
norm: Tensor = torch.linalg.vector_norm(x, {p}, dims, True, dtype=torch.float64)
return norm""",
    "mean of powers": """\
norm: Tensor = torch.linalg.vector_norm(x, {p}, dims, True, dtype=torch.float64)
size{size}
return norm / size""",
    "max": "return x.abs().amax(dims, keepdim=True).double()",
    "count": "return (x != 0).sum(dims, keepdim=True).double()",
    "sum": "return x.sum(dims, keepdim=True, dtype=torch.float64).abs()",
    "spread": """\
if x.numel() < 2 * x.sum(dims, keepdim=True).numel():
    return x.sum(dims, keepdim=True, dtype=torch.float64) * 0
return x.double().{spread}(dims, keepdim=True)""",
    "mean": "return x.mean(dims, keepdim=True, dtype=torch.float64)",
}
"""For each kind of norm, the end of a function that returns the norm of each slice of a tensor."""
LISTS = "def NAME(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:"
SLICES = "def NAME(x: Tensor) -> Tensor:"


class Helpers:
    """The helpers that a file needs. The file contains each helper once.

    Every method that writes a helper returns the name of the helper.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        """The text of each helper, by name."""
        self.taken = {*FUNCTIONS, *METHODS}
        """The names of other functions in the file."""

    def need(self, base: str, head: str, about: str, body: str) -> str:
        """Add a helper unless the file has it, and return its name.

        Args:
            base: The name of the helper. If another helper has this name, a number is appended.
            head: The first line of the function, with `NAME` in place of its name.
            about: The docstring.
            body: The lines after the docstring.
        """
        text = textwrap.indent(f'"""{about}"""\n{body}', "    ")
        for name in numbered(base):
            named = f"{head.replace('NAME', name)}\n{text}"
            if name not in self.taken and self.texts.get(name, named) == named:
                break
        self.texts[name] = named
        return name

    def norm(self, m: Measure | None) -> str:
        """Write a function that returns the norm of all tensors, or the mean if `m` is None."""
        if m is None:
            about = "Return the mean of all tensors, in float64."
            return self.need("_mean", LISTS, about, OF_LISTS["mean"])
        about = f"Return the {_words(m)} of all tensors together, in float64."
        return self.need(name_of(m), LISTS, about, _body(OF_LISTS, m))

    def slices(self, rule: NormRule, m: Measure | None) -> str:
        """Write a function that returns the norm of each slice, or the mean if `m` is None."""
        body = (
            f"{_dims(rule)}\nif not dims:\n    return x.new_zeros([1] * n, dtype=torch.float64)\n"
        )
        if m is None:
            about = "Return the mean of each slice, in float64."
            return self.need("_mean_each", SLICES, about, body + OF_SLICES["mean"])
        about = f"Return the {_words(m)} of each slice, in float64."
        return self.need(f"{name_of(m)}_each", SLICES, about, body + _body(OF_SLICES, m))

    def small(self, size: int) -> str:
        """Write a function that tests if a list of tensors has fewer elements than `size`."""
        body = f"""\
entries = sum([x.numel() for x in tensors])
return torch.tensor(entries < {size}, device=tensors[0].device)"""
        about = f"Return whether all tensors together have fewer than {size} elements."
        return self.need("_small", LISTS, about, body)

    def small_slices(self, rule: NormRule, size: int) -> str:
        """Write a function that tests if the slices of a tensor have fewer elements than `size`."""
        body = f"""\
{_dims(rule)}
entries = math.prod([x.shape[d] for d in dims]) if dims else 0
return torch.tensor(entries < {size}, device=x.device)"""
        about = f"Return whether a slice has fewer than {size} elements."
        return self.need("_small_each", SLICES, about, body)

    def layers(self) -> str:
        """Write a function that splits a list of tensors by layer."""
        head = "def NAME(tensors: list[Tensor], layers: list[str]) -> list[list[Tensor]]:"
        body = """\
found: dict[str, list[Tensor]] = {}
for x, layer in zip(tensors, layers, strict=True):
    found.setdefault(layer, []).append(x)
return list(found.values())"""
        return self.need("_by_layer", head, "Return the tensors of each layer.", body)

    def percentile(self) -> str:
        """Write a function that returns a percentile of absolute values."""
        body = """\
sizes = x.abs().flatten()
if not len(sizes):
    return sizes.new_zeros(())
return sizes.kthvalue(int(p * (len(sizes) - 1) / 100) + 1).values"""
        about = "Return the p-th percentile of the magnitudes, rounded down to one of them."
        head = "def NAME(x: Tensor, p: float) -> Tensor:"
        return self.need("_percentile", head, about, body)


def name_of(m: Measure) -> str:
    """Return the name of the helper for a norm."""
    known = {measure(name): helper for name, helper in NAMES.items()}
    return known.get(m, f"_norm_{m.p:g}".replace(".", "_"))


def _body(texts: dict[str, str], m: Measure) -> str:
    """Return the body of a helper for a norm, from the texts for all kinds of norms."""
    kind = "mean of powers" if m.kind == "power" and m.mean else m.kind
    root = ""
    size = " = max(x.numel(), 1) / max(norm.numel(), 1)"
    if m.kind == "power" and m.p != 1:
        root = f"**{1 / m.p:g}"
        size = f": float = (max(x.numel(), 1) / max(norm.numel(), 1)) ** {1 / m.p:g}"
    spread = "std" if m.root else "var"
    return texts[kind].format(p=f"{m.p:g}", root=root, size=size, spread=spread)


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


def _dims(rule: NormRule) -> str:
    """Return the lines that compute the dims of slices."""
    return f"n = x.dim()\ndims = {dims_of(rule)}"


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
