"""Pruning: a graph without what makes no difference: views of the same form, copies that stay equal
to what they were made of, and what nobody takes.

What an operator writes is said by its schema, and what a view is by the forms of its tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from torchzero_clip.core.torch_private import schema

COPIES = ("aten::clone", "aten::_to_copy")


def form(t: Tensor) -> tuple[Any, ...]:
    """All that says how a tensor lies in its memory."""
    return t.dtype, t.device, t.shape, t.stride(), t.storage_offset()


def prune(graph: Graph, fixed: Collection[Node]) -> None:
    """Take out of a graph what makes no difference; the `fixed` inputs are never written."""
    for node, source in _of_one(graph):
        alike = node.meta.get("form", 0) == source.meta.get("form", 1)
        if alike and views(node) and not writes(node):
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code(is_impure_node=acts)
    order = {node: i for i, node in enumerate(graph.nodes)}
    writings = _writings(order, fixed)
    for node, source in _of_one(graph):
        operator = node.meta.get("operator")
        if operator is None or schema(operator).name not in COPIES:
            continue
        same = node.meta["form"][:4] == source.meta.get("form", ())[:4]
        users = _users(node)
        last = max([order[user] for user in users], default=0)
        mine, theirs = _memory(node, fixed), _memory(source, fixed)
        returned = any([user.op == "output" for user in users])
        changed = [i for i in writings.get(theirs, ()) if order[node] < i <= last]
        if same and not (returned or changed or mine in writings):
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code(is_impure_node=acts)


def _of_one(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """The nodes that take a single other one by now, and that one."""
    for node in list(graph.nodes):
        if len(node.all_input_nodes) == 1:
            yield node, node.all_input_nodes[0]


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
        return bool(node.meta.get("item", False))
    return any([made.alias_info is not None for made in schema(operator).returns])


def arguments(told: Any, args: Any, options: Any) -> Iterator[tuple[Any, Any]]:
    """The arguments in a schema, and what a call gives for each."""
    for i, argument in enumerate(told.arguments):
        usual = argument.default_value
        yield argument, args[i] if i < len(args) else options.get(argument.name, usual)


def written(told: Any, args: Any, options: Any) -> Iterator[tuple[Any, Any]]:
    """The aliases of the arguments that an operator writes, and what a call gives for each."""
    for argument, given in arguments(told, args, options):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            yield alias.before_set, given


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


def _writings(order: Mapping[Node, int], fixed: Collection[Node]) -> dict[Node | None, list[int]]:
    """Where in the order of nodes each memory is written."""
    found: dict[Node | None, list[int]] = {}
    for node, i in order.items():
        operator = node.meta.get("operator")
        if operator is None and writes(node):  # ours, and anything that was there before
            found.setdefault(None, []).append(i)
            for taken in node.all_input_nodes if node.meta["writes"] == "what it takes" else ():
                found.setdefault(_memory(taken, fixed), []).append(i)
        told = () if operator is None else written(schema(operator), node.args, node.kwargs)
        for _, given in told:
            for target in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(target, Node):
                    found.setdefault(_memory(target, fixed), []).append(i)
    return found
