"""Branches: which links each parameter goes through, and whose norm a global rule takes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.link import Link
from torchzero_clip.core.sharding.layout import layout_of, local

MOST = 0.9  # of the square of a norm: a branch with more of it decides
NUMBER = re.compile(r"\b\d+\b")


def way(links: Sequence[Link], name: str, p: Tensor) -> Iterator[Link]:
    """The links that act on a parameter, first to last; none come after one that leaves it out."""
    for link in [link for link in links if link.transforms]:
        if link.transform.ways(name, p) is None:
            return
        yield from _inside(link, name, p) if link.transform.inner else [link]


def parameters(optimizer: Any) -> list[str]:
    """A table of what acts on each parameter, with its learning rate and decay.

    Those that are alike but for their rates and the numbers in their names share a row.
    """
    rows: dict[Any, list[Any]] = {}
    for g, name, p in _named(optimizer):
        group, links = optimizer.param_groups[g], list(way(optimizer.links, name, p))
        rate, decay = [_values(links, live, group) for live in ("lr", "weight_decay")]
        told = ", ".join(map(_told, links)) or "none: it stays as it is"
        others = tuple([str(group[x]) for one in links for k, x in one.keys.items() if k != "lr"])
        kind = NUMBER.sub("*", name), str(tuple(p.shape)), decay, told, others
        rows.setdefault(kind, []).append((name, (g,), rate))
    table = [("parameter", "shape", "group", "lr", "weight_decay", "links")]
    for (pattern, shape, decay, told, _), each in rows.items():
        names, groups, rates = zip(*each, strict=True)
        name = f"{pattern} ({len(names)})" if len(names) > 1 else names[0]
        table.append((name, shape, _span(groups), _span(rates), _span([decay]), told))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def fallen(optimizer: Any) -> Iterator[str]:
    """Sentences about parameters that no link changes inside a link with branches."""
    for link in [one for one in optimizer.keys.links if _divides(one)]:
        names = [name for _, name, p in _named(optimizer) if not list(_inside(link, name, p))]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"{link.path} leaves {', '.join(names[:3])}{more} as they come"


def joint(optimizer: Any) -> Iterator[str]:
    """Whose norm a rule takes that measures all parameters in front of branches."""
    links = optimizer.links
    for i, link in enumerate(links):
        if getattr(link.transform, "scope", None) != "global":
            continue
        for split in [one for one in links[i + 1 :] if _divides(one) and len(one.children) > 1]:
            shares = _shares(optimizer, split)
            yield f"{link.path} takes one norm over all branches of {split.path}{shares}"


def _shares(optimizer: Any, split: Link) -> str:
    """How much of the square of the norm each branch has, where there are gradients."""
    squares, sharded = defaultdict[str, float](float), False
    for _, name, p in _named(optimizer):
        if (grad := optimizer.place.of(p)) is None:
            continue
        square = norms.statistics([local(grad)], norms.NAMED["l2"]).square().sum().item()
        sharded = sharded or layout_of(p) is not None
        for i in split.transform.ways(name, p)[:1]:
            squares[split.children[i].path.rpartition("/")[2]] += square
    whole = sum(squares.values())
    if not (0 < whole < float("inf")):
        return "; how much of it each has is told while gradients are there, before zero_grad()"
    told = ", ".join([f"{label} {square / whole:.3%}" for label, square in squares.items()])
    first = max(squares, key=squares.__getitem__)
    here = " on this rank" if sharded else ""
    said = f"; of its square{here} now {told}"
    if squares[first] <= MOST * whole or len(squares) < 2:
        return said
    return (
        f"{said}: it is the norm of {first} in effect, and a spike there shrinks the steps of the "
        "others; with a rule inside each branch they have norms of their own"
    )


def _told(link: Link) -> str:
    """The path of a link, and its class where that has no place in it."""
    kind = type(link.transform).__name__
    return link.path if kind in link.path.rpartition("/")[2] else f"{link.path} ({kind})"


def _divides(link: Link) -> bool:
    """Whether parameters go different ways inside a link."""
    return bool(link.transforms and link.transform.inner and link.transform.asks)


def _inside(link: Link, name: str, p: Tensor) -> Iterator[Link]:
    for i in link.transform.ways(name, p) or ():
        yield from way(link.children[i : i + 1], name, p)


def _named(optimizer: Any) -> Iterator[tuple[int, str, Any]]:
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group {g}, {i}" for i in range(len(group["params"]))]
        yield from [(g, *row) for row in zip(names, group["params"], strict=True)]


def _values(links: Sequence[Link], live: str, group: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple([float(group[link.keys[live]]) for link in links if live in link.keys])


def _span(values: Iterable[tuple[float, ...]]) -> str:
    """The least and the greatest, where there are several."""
    found = sorted(set(values))
    ends = found[:1] + found[1:][-1:]
    return " to ".join([", ".join([f"{x:g}" for x in each]) or "-" for each in ends])
