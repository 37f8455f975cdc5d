"""Shorter: a graph without what makes no difference: views of the same form, copies that stay equal
to what they were made of, and what nobody takes.

What an operator writes is said by its schema, and what a view is by the forms of its tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from torchzero_clip.core.private import schema

COPIES = ("aten::clone", "aten::_to_copy")


def form(t: Tensor) -> tuple[Any, ...]:
    """All that says how a tensor lies in its memory."""
    return t.dtype, t.device, t.shape, t.stride(), t.storage_offset()


def shorten(graph: Graph, fixed: Collection[Node]) -> None:
    """Take out of a graph what makes no difference; the `fixed` inputs are never written."""
    for node in list(graph.nodes):
        source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
        alike = source is not None and node.meta.get("form", 0) == source.meta.get("form", 1)
        if alike and views(node) and not writes(node):
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code(is_impure_node=acts)
    order = {node: i for i, node in enumerate(graph.nodes)}
    written = _written(graph, order, fixed)
    for node in list(graph.nodes):
        source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
        operator = node.meta.get("operator")
        if source is None or operator is None or schema(operator).name not in COPIES:
            continue
        same = node.meta["form"][:4] == source.meta.get("form", ())[:4]
        last = max([order[user] for user in _users(node)], default=0)
        mine, theirs = _memory(node, fixed), _memory(source, fixed)
        returned = any([user.op == "output" for user in _users(node)])
        changed = [i for i in written.get(theirs, ()) if order[node] < i < last]
        if same and not (returned or changed or mine in written):
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code(is_impure_node=acts)


def acts(node: Node) -> bool:
    """Whether a node does more than make what it returns."""
    return node.op != "call_function" or writes(node)


def writes(node: Node) -> bool:
    """Whether a node writes to memory that was there before."""
    operator = node.meta.get("operator")
    return node.meta.get("writes", False) or (operator is not None and schema(operator).is_mutable)


def views(node: Node) -> bool:
    """Whether what a node makes may lie in the memory of what it takes."""
    operator = node.meta.get("operator")
    if operator is None:
        return bool(node.meta.get("part", False))
    return any([made.alias_info is not None for made in schema(operator).returns])


def _memory(node: Node, fixed: Collection[Node]) -> Node | None:
    """The node that made the memory of this one; None for all memory that was there before."""
    while views(node):
        node = node.all_input_nodes[0]
    return node if node in fixed or node.op != "placeholder" else None


def _users(node: Node) -> list[Node]:
    """The users of a node, and those of its views."""
    found = list(node.users)
    for user in node.users:
        found += _users(user) if views(user) and not writes(user) else []
    return found


def _written(
    graph: Graph, order: dict[Node, int], fixed: Collection[Node]
) -> dict[Node | None, list[int]]:
    """The places in the graph where each memory is written."""
    found: dict[Node | None, list[int]] = {}
    for node in graph.nodes:
        if not writes(node):
            continue
        operator = node.meta.get("operator")
        targets = [None] if operator is None else _targets(node, operator)
        for target in targets:
            memory = None if target is None else _memory(target, fixed)
            found.setdefault(memory, []).append(order[node])
    return found


def _targets(node: Node, operator: Any) -> list[Any]:
    """The arguments that an operator writes."""
    targets: list[Any] = []
    for i, argument in enumerate(schema(operator).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            targets += given if isinstance(given, (list, tuple)) else [given]
    return [target for target in targets if isinstance(target, Node)]
