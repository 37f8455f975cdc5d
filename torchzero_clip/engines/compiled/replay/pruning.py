"""Pruning: remove the nodes of a step graph that do not affect the results.

`prune` changes a graph in place, after a step was recorded and before the graph is lowered.
`prune` removes three kinds of nodes:

- A view with the same dtype, shape, strides and storage offset as its source.
- A copy that stays equal to its source until the last use of the copy.
- A node whose result is not used.

This module needs no list of PyTorch's functions. The schema of an operator tells which arguments
the operator writes, and whether the result may be a view. `lowering` and `regions` also use the
functions of this module that read schemas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from torchzero_clip.core.torch_private import schema

COPIES = ("aten::clone", "aten::_to_copy")


def form(t: Tensor) -> tuple[Any, ...]:
    """Return the dtype, device, shape, strides and storage offset of a tensor."""
    return t.dtype, t.device, t.shape, t.stride(), t.storage_offset()


def prune(graph: Graph, fixed: Collection[Node]) -> None:
    """Remove the nodes of a graph that do not affect its results.

    Args:
        graph: The step graph.
        fixed: Inputs of the graph that no node writes, neither directly nor through another input
            that shares memory.
    """
    for node, source in _with_one_input(graph):
        same_form = node.meta.get("form", 0) == source.meta.get("form", 1)
        if same_form and may_alias(node) and not writes(node):
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    order = {node: i for i, node in enumerate(graph.nodes)}
    written_at = _written_at(order, fixed)
    for node, source in _with_one_input(graph):
        operator = node.meta.get("operator")
        if operator is None or schema(operator).name not in COPIES:
            continue
        same_form = node.meta["form"][:4] == source.meta.get("form", ())[:4]
        users = _users(node)
        last_use = max([order[user] for user in users], default=0)
        is_returned = any([user.op == "output" for user in users])
        writes_of_source = written_at.get(_memory(source, fixed), ())
        source_changes = any([order[node] < i <= last_use for i in writes_of_source])
        copy_changes = _memory(node, fixed) in written_at
        if same_form and not (is_returned or source_changes or copy_changes):
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code(is_impure_node=has_effect)


def _with_one_input(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield each node that has exactly one input node, together with the input node."""
    for node in list(graph.nodes):
        if len(node.all_input_nodes) == 1:
            yield node, node.all_input_nodes[0]


def has_effect(node: Node) -> bool:
    """Return whether a node has an effect other than its result, such as writing to memory."""
    return node.op != "call_function" or writes(node)


def writes(node: Node) -> bool:
    """Return whether a node writes to memory that already existed before the node ran."""
    operator = node.meta.get("operator")
    return node.meta.get("writes", False) or (operator is not None and schema(operator).is_mutable)


def may_alias(node: Node) -> bool:
    """Return whether the result of a node may share memory with an input of the node."""
    operator = node.meta.get("operator")
    if operator is None:
        return bool(node.meta.get("item", False))
    return any([result.alias_info is not None for result in schema(operator).returns])


def arguments(signature: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each argument in the schema of an operator, with the value passed for the argument."""
    for i, argument in enumerate(signature.arguments):
        default = argument.default_value
        yield argument, args[i] if i < len(args) else kwargs.get(argument.name, default)


def written_arguments(signature: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the alias set and the value in a call for each argument that an operator writes."""
    for argument, value in arguments(signature, args, kwargs):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            yield alias.before_set, value


def _memory(node: Node, fixed: Collection[Node]) -> Node | None:
    """Return the node that allocated the memory in which a node has its result.

    For a view of a `fixed` input, this is the input. For any other input of the graph, the function
    returns None. Two such inputs may share memory, so all of them count as the same memory.
    """
    while may_alias(node):
        node = node.all_input_nodes[0]
    return node if node in fixed or node.op != "placeholder" else None


def _users(node: Node) -> list[Node]:
    """Return the nodes that use the result of a node or a view of the result."""
    users = list(node.users)
    for user in node.users:
        if may_alias(user) and not writes(user):
            users += _users(user)
    return users


def _written_at(order: Mapping[Node, int], fixed: Collection[Node]) -> dict[Node | None, list[int]]:
    """Return the positions of the nodes that write to each memory. `_memory` returns the keys."""
    written_at: dict[Node | None, list[int]] = {}

    def note(memory: Node | None, position: int) -> None:
        written_at.setdefault(memory, []).append(position)

    for node, i in order.items():
        operator = node.meta.get("operator")
        if operator is not None:
            for _, value in written_arguments(schema(operator), node.args, node.kwargs):
                for target in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(target, Node):
                        note(_memory(target, fixed), i)
        elif writes(node):  # a launch or collective may write any memory that existed before
            note(None, i)
            if node.meta["writes_arguments"]:
                for source in node.all_input_nodes:
                    note(_memory(source, fixed), i)
    return written_at
