"""Branches: chains in which different parameters pass different links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.argument_values import shown
from torchzero_clip.core.link import Link
from torchzero_clip.core.logical_matrices import entry_of, matrices_of
from torchzero_clip.core.names import without_numbers
from torchzero_clip.core.sharding.layout import layout_of, local
from torchzero_clip.core.traits import Gate
from torchzero_clip.core.transform import TensorwiseTransform

if TYPE_CHECKING:
    from torchzero_clip.optimizer.chain_runner import ChainRunner

DOMINANT_SHARE = 0.9
"""If one branch has more than this share of the squared norm, it dominates the norm."""


def links_for(links: Sequence[Link], name: str, p: Tensor) -> Iterator[Link]:
    """Yield the links that act on a parameter, first to last.

    A link that drops the parameter ends the list.
    """
    for link in [link for link in links if link.transforms]:
        if link.transform.ways(name, p) is None:
            return
        if link.transform.inner:
            yield from _inside(link, name, p)
        else:
            yield link


def parameters(optimizer: ChainRunner) -> list[str]:
    """Return a table with the links, the learning rate and the decay of each parameter.

    Each other hyperparameter whose values differ between groups has a column too. Parameters that
    differ only in their rates and in the numbers in their names share a row.
    """
    rows: dict[Any, list[Any]] = {}
    more = _different_values(optimizer)
    for g, name, p in _named(optimizer):
        group = optimizer.param_groups[g]
        links = list(links_for(optimizer.links, name, p))
        lr = _values(links, "lr", group)
        decays = _values(links, "weight_decay", group)
        labels = ", ".join(map(_label, links)) or "none: it stays as it is"
        others = [str(group[x]) for one in links for k, x in one.keys.items() if k != "lr"]
        shape = f"{tuple(p.shape)}{_matrices(links, name, p)}"
        acting = {inner.path for link in links for inner in link.walk()}
        cells = [shown(group[key]) if one.path in acting else "-" for key, one in more.items()]
        row = without_numbers(name), shape, decays, tuple(cells), labels, tuple(others)
        rows.setdefault(row, []).append((name, (g,), lr))
    table = [("parameter", "shape", "group", "lr", "weight_decay", *more, "links")]
    for (pattern, shape, decays, cells, labels, _), members in rows.items():
        names, groups, rates = zip(*members, strict=True)
        name = f"{pattern} ({len(names)})" if len(names) > 1 else names[0]
        usual = name, shape, _span(groups), _span(rates), _span([decays])
        table.append((*usual, *cells, labels))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def _different_values(optimizer: ChainRunner) -> dict[str, Link]:
    """Return keys whose values differ between groups, and their links, without rates and decays."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    different: dict[str, Link] = {}
    for link in optimizer.keys.links:
        for name, key in link.keys.items():
            if name not in ("lr", "weight_decay") and differs(groups, key):
                different[key] = link
    return different


def differs(groups: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Return whether groups have different values of a hyperparameter."""
    return len({shown(group[key]) for group in groups}) > 1


def several(values: Sequence[Any]) -> str:
    """Return the values of a hyperparameter in several groups as text."""
    if all([isinstance(x, (int, float)) and not isinstance(x, bool) for x in values]):
        return f"{shown(min(values))} to {shown(max(values))}"
    return " or ".join(dict.fromkeys(map(shown, values)))


def _matrices(links: Sequence[Link], name: str, p: Tensor) -> str:
    """Return words for the matrices of a parameter, if a rule has a layout for it."""
    for link in links:
        if entry_of(link.transform, name, p) is not None:
            return f": {matrices_of(link.transform, name, p)}"
    return ""


def unchanged(optimizer: ChainRunner) -> Iterator[str]:
    """Yield sentences about parameters that no link inside a link with branches changes."""
    for link in [link for link in optimizer.keys.links if _divides(link)]:
        names = [name for _, name, p in _named(optimizer) if not list(_inside(link, name, p))]
        if names:
            yield f"{link.path} does not change the updates of {_first_three(names)}"


def without_matrices(optimizer: ChainRunner) -> Iterator[str]:
    """Yield sentences about parameters that a matrix rule does not change, such as vectors."""
    gates = [link for link in optimizer.keys.links if isinstance(link.transform, Gate)]
    inside = {inner.path for gate in gates for inner in gate.walk()}  # `InBasis` has Adam for them
    passed: dict[str, list[str]] = {}
    for _, name, p in _named(optimizer):
        for link in links_for(optimizer.links, name, p):
            rule = link.transform
            keeps = isinstance(rule, TensorwiseTransform) and rule.keeps_matrices
            if keeps and link.path not in inside and rule.matrices_of(name, p) is None:
                passed.setdefault(link.path, []).append(name)
    for path, names in passed.items():
        yield f"{path} has no effect on the updates of {_first_three(names)}"


def _first_three(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def joint_norms(optimizer: ChainRunner) -> Iterator[str]:
    """Yield sentences about rules before the branches whose norm covers all parameters."""
    links = optimizer.links
    for i, link in enumerate(links):
        if getattr(link.transform, "scope", None) != "global":
            continue
        for split in links[i + 1 :]:
            if _divides(split) and len(split.children) > 1:
                shares = _shares(optimizer, split)
                yield f"{link.path} uses one norm over all branches of {split.path}{shares}"


def _shares(optimizer: ChainRunner, split: Link) -> str:
    """Describe which share of the squared norm of the present gradients each branch has."""
    squares = defaultdict[str, float](float)
    sharded = False
    for _, name, p in _named(optimizer):
        if (grad := optimizer.place.of(p)) is None:
            continue
        square = norms.statistics([local(grad)], norms.NAMED["l2"]).square().sum().item()
        sharded = sharded or layout_of(p) is not None
        for i in split.transform.ways(name, p)[:1]:
            squares[split.children[i].path.rpartition("/")[2]] += square
    whole = sum(squares.values())
    if not (0 < whole < float("inf")):
        return ". Call explain() before zero_grad() to see the share of each branch"
    shares = ", ".join([f"{label} {square / whole:.3%}" for label, square in squares.items()])
    first = max(squares, key=squares.__getitem__)
    here = " on this rank" if sharded else ""
    text = f". Shares of the squared norm{here} now: {shares}"
    if squares[first] <= DOMINANT_SHARE * whole or len(squares) < 2:
        return text
    return (
        f"{text}. {first} dominates this norm, so a spike in {first} shrinks the updates of the "
        "other branches. To avoid this, clip inside each branch instead"
    )


def _label(link: Link) -> str:
    """Return the path of a link. The class is added unless the path contains the class."""
    kind = type(link.transform).__name__
    return link.path if kind in link.path.rpartition("/")[2] else f"{link.path} ({kind})"


def _divides(link: Link) -> bool:
    """Return whether a link has branches: parameters pass different links inside it."""
    return bool(link.transforms and link.transform.inner and link.transform.asks)


def _inside(link: Link, name: str, p: Tensor) -> Iterator[Link]:
    """Yield the links inside a link that act on a parameter."""
    for i in link.transform.ways(name, p) or ():
        yield from links_for(link.children[i : i + 1], name, p)


def _named(optimizer: ChainRunner) -> Iterator[tuple[int, str, Any]]:
    """Yield the index of the group, the name and the tensor of each parameter."""
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group {g}, {i}" for i in range(len(group["params"]))]
        yield from [(g, *row) for row in zip(names, group["params"], strict=True)]


def _values(links: Sequence[Link], live: str, group: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the value of a hyperparameter in a group, for each link that has it."""
    return tuple([float(group[link.keys[live]]) for link in links if live in link.keys])


def _span(values: Iterable[tuple[float, ...]]) -> str:
    """Return the smallest value as text, and the largest value if both differ."""
    ordered = sorted(set(values))
    ends = ordered if len(ordered) < 2 else [ordered[0], ordered[-1]]
    return " to ".join([", ".join([f"{x:g}" for x in end]) or "-" for end in ends])
