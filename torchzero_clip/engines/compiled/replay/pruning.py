"""Pruning: remove the nodes of a step graph that make no difference.

`prune` changes a graph in place, after a step was recorded and before it is lowered. It removes
three kinds of nodes:

- views that have the form of their source;
- copies that stay equal to their source as long as they are used;
- nodes whose result is not used.

It needs no list of PyTorch's functions: the schema of an operator tells which arguments the
operator writes, and whether its result may be a view. `lowering` and `regions` use the functions
that read schemas as well.
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
    """Remove nodes that make no difference from a graph.

    Args:
        graph: The step graph.
        fixed: Inputs of the graph that no node writes, directly or through another input.
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
    """Yield each node that has a single input node now, and that input node."""
    for node in list(graph.nodes):
        if len(node.all_input_nodes) == 1:
            yield node, node.all_input_nodes[0]


def has_effect(node: Node) -> bool:
    """Return whether a node does more than return its result."""
    return node.op != "call_function" or writes(node)


def writes(node: Node) -> bool:
    """Return whether a node writes to memory that existed before the node ran."""
    operator = node.meta.get("operator")
    return node.meta.get("writes", False) or (operator is not None and schema(operator).is_mutable)


def may_alias(node: Node) -> bool:
    """Return whether the result of a node may share memory with its input."""
    operator = node.meta.get("operator")
    if operator is None:
        return bool(node.meta.get("item", False))
    return any([result.alias_info is not None for result in schema(operator).returns])


def arguments(signature: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each argument in the schema of an operator, and its value in a call."""
    for i, argument in enumerate(signature.arguments):
        default = argument.default_value
        yield argument, args[i] if i < len(args) else kwargs.get(argument.name, default)


def written_arguments(signature: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the alias set of each argument that an operator writes, and its value in a call."""
    for argument, value in arguments(signature, args, kwargs):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            yield alias.before_set, value


def _memory(node: Node, fixed: Collection[Node]) -> Node | None:
    """Return the node that allocated the memory of a node.

    Returns None for memory that existed before the step, except memory of `fixed` inputs. Two such
    inputs may share memory, so they all count as one.
    """
    while may_alias(node):
        node = node.all_input_nodes[0]
    return node if node in fixed or node.op != "placeholder" else None


def _users(node: Node) -> list[Node]:
    """Return the users of a node and the users of its views."""
    users = list(node.users)
    for user in node.users:
        if may_alias(user) and not writes(user):
            users += _users(user)
    return users


def _written_at(order: Mapping[Node, int], fixed: Collection[Node]) -> dict[Node | None, list[int]]:
    """Return, for each memory as `_memory` names it, the positions of nodes that write it."""
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
