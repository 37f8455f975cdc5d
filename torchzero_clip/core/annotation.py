"""Annotations of fields: which are live, and which are numbers or truths."""

from __future__ import annotations

import ast
import sys
from typing import Annotated, Any, TypeVar, get_args, get_origin

T = TypeVar("T")

Live = Annotated[T, "torchzero_clip.Live"]
"""`beta: Live[float]` is a hyperparameter that lives in `param_groups` and is read every step."""


def is_live(cls: type, name: str, hint: Any) -> bool:
    """Whether a field's annotation, as far as it was `evaluated`, is Live[...]."""
    if isinstance(hint, str):  # a local name, or one imported under TYPE_CHECKING
        tree = ast.parse(hint, mode="eval").body
        found = [node for node in ast.walk(tree) if _says_live(node)]
        outermost, anywhere = tree in found, bool(found)
    else:
        outermost, anywhere = _is_mark(hint), _has_mark(hint)
    if anywhere and not outermost:
        raise TypeError(
            f"{cls.__name__}: the annotation of '{name}' has Live inside another type; "
            "write Live around the whole, as in Live[float | None]"
        )
    return outermost


def evaluated(cls: type, hint: Any) -> Any:
    """An annotation that is text, evaluated where that can be."""
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, dict(vars(sys.modules[cls.__module__])), dict(vars(cls)))
    except Exception:
        return hint


def kind_of(hint: Any) -> tuple[type, bool] | None:
    """float, int or bool where an annotation says so, and whether None may stand there."""
    inner = get_args(hint)[0] if _is_mark(hint) else hint
    options = [option for option in get_args(inner) or (inner,) if option is not type(None)]
    known = len(options) == 1 and options[0] in (float, int, bool)
    return (options[0], len(get_args(inner)) > 1) if known else None


def _is_mark(hint: Any) -> bool:
    return get_origin(hint) is Annotated and "torchzero_clip.Live" in hint.__metadata__


def _has_mark(hint: Any) -> bool:
    return _is_mark(hint) or any(_has_mark(inner) for inner in get_args(hint))


def _says_live(node: ast.AST) -> bool:
    held = node.value if isinstance(node, ast.Subscript) else None
    return getattr(held, "id", getattr(held, "attr", None)) == "Live"
