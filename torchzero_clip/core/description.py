"""What a transform is before it runs: a dataclass whose fields are its hyperparameters."""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args, get_origin

import torch
from torch import Tensor
from typing_extensions import Self, dataclass_transform

T = TypeVar("T")

Live = Annotated[T, "torchzero_clip.Live"]
"""`beta: Live[float]` is a hyperparameter that lives in `param_groups` and is read every step."""

RESERVED = frozenset({"params", "param_names", "grads", "chain"})


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
class Description:
    """Subclasses become dataclasses: annotated fields are the arguments, `check` validates them.

    Objects are immutable and hold no state, so one object may serve several optimizers.
    """

    registry: ClassVar[dict[str, type[Description]]] = {}
    live: ClassVar[tuple[str, ...]] = ()
    _kinds: ClassVar[dict[str, tuple[type, bool]]] = {}  # of fields that are numbers or truths
    _own_init: ClassVar[bool] = False
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._own_init = cls._own_init or "__init__" in vars(cls)
        inherited = dict(getattr(cls, "__dataclass_fields__", {}))
        base_methods = {n for b in cls.__mro__[1:] for n, v in vars(b).items() if callable(v)}
        dataclasses.dataclass(eq=False, repr=False, init=not cls._own_init)(cls)
        live, cls._kinds = list(cls.live), dict(cls._kinds)
        for field in dataclasses.fields(cls):
            if inherited.get(field.name) is field:
                continue
            if field.name in base_methods or _is_method(cls, field.default):
                raise TypeError(
                    f"{cls.__name__}: the field '{field.name}' has the name of a method; "
                    "call it something else"
                )
            live = [name for name in live if name != field.name]
            cls._kinds.pop(field.name, None)
            if kind := _kind(_evaluated(cls, field.type)):
                cls._kinds[field.name] = kind
            if _is_live(cls, field.name, field.type):
                if field.name in RESERVED:
                    raise TypeError(f"{cls.__name__}: '{field.name}' is taken in param_groups")
                live.append(field.name)
        cls.live = tuple(live)
        known = cls.registry.get(cls.__name__)
        ours = __name__.partition(".")[0]
        if (
            known is None
            or not known.__module__.startswith(ours)
            or cls.__module__.startswith(ours)
        ):
            cls.registry[cls.__name__] = cls  # a class elsewhere does not change what rules name
        _check_after_init(cls)

    def check(self) -> None:
        """Raise ValueError or TypeError for arguments that make no sense (see `require`)."""

    def require(
        self,
        name: str,
        *,
        at_least: float = -math.inf,
        above: float = -math.inf,
        below: float = math.inf,
        at_most: float = math.inf,
        integer: bool = False,
        optional: bool = False,
        length: int | None = None,
    ) -> None:
        """Raise a sentence unless the argument, or each of `length` of them, is within bounds."""
        value = getattr(self, name)
        if optional and value is None:
            return
        limits = {"at least": at_least, "above": above, "below": below, "at most": at_most}
        words = [f"{word} {bound:g}" for word, bound in limits.items() if math.isfinite(bound)]
        kind = "an integer" if integer else "a number"
        kind = kind if length is None else f"{length} numbers" + ", each" * bool(words)
        wanted = " ".join([kind, *([" and ".join(words)] if words else [])]) + " or None" * optional
        sentence = f"{type(self).__name__}: {name} must be {wanted}, got {value!r}"
        if length is not None:
            if not isinstance(value, (tuple, list)):
                raise TypeError(sentence)
            if len(value) != length:
                raise ValueError(sentence)
        for x in value if length is not None else (value,):
            if isinstance(x, Tensor) and x.numel() == 1:
                if x.device.type != "cpu" or torch.compiler.is_compiling():
                    continue  # reading it would wait for the device
                x = x.item()
            if isinstance(x, bool) or not isinstance(x, int if integer else (int, float)):
                raise TypeError(sentence)
            inside = at_least <= x <= at_most
            inside &= (x > above or above == -math.inf) and (x < below or below == math.inf)
            if not inside:
                raise ValueError(sentence)

    def require_one_of(self, name: str, choices: tuple[Any, ...]) -> None:
        """Raise a sentence unless the argument is one of the choices."""
        value = getattr(self, name)
        if not any(value is c or (type(value) is type(c) and value == c) for c in choices):
            raise ValueError(
                f"{type(self).__name__}: {name} must be one of {list(choices)}, got {value!r}"
            )

    def _check_types(self) -> None:
        """Numbers and truths must be what their annotation says, whatever `check` looks at."""
        for name, (kind, optional) in self._kinds.items():
            value = getattr(self, name)
            if kind is bool and not isinstance(value, bool):
                raise TypeError(
                    f"{type(self).__name__}: {name} must be True or False, got {value!r}"
                )
            if kind is not bool:
                self.require(name, integer=kind is int, optional=optional)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """A checked copy with other values in some fields."""
        other = copy.copy(self)
        vars(other).update(values)
        other.check()
        other._check_types()
        return other

    def children(self) -> Iterator[tuple[str | None, Description]]:
        """The descriptions inside this one, each with the label that names it, if any."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Description):
                yield None, value
            elif isinstance(value, (tuple, list)):
                yield from ((None, v) for v in value if isinstance(v, Description))
            elif isinstance(value, Mapping):
                yield from ((str(k), v) for k, v in value.items() if isinstance(v, Description))

    def walk(self) -> Iterator[Description]:
        """This description and all inside it."""
        yield self
        for _, child in self.children():
            yield from child.walk()

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("_finished"):
            where = (
                f"set optimizer.param_groups[i]['{name}'] instead"
                if name in self.live
                else "make a new one instead"
            )
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be set: a transform is an immutable "
                f"description that optimizers share; {where}"
            )
        super().__setattr__(name, value)

    def arguments(self) -> dict[str, Any]:
        """The arguments, other than defaults, that make an equal object."""
        values = {f: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return {f.name: value for f, value in values.items() if not _is_default(f, value)}

    def __repr__(self) -> str:
        parts = [f"{name}={_shown(value)}" for name, value in self.arguments().items()]
        return f"{type(self).__name__}({', '.join(parts)})"


def _check_after_init(cls: type[Description]) -> None:
    """Wrap `cls.__init__` so that the finished object is checked, once, and then sealed."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: Description, *args: Any, **kwargs: Any) -> None:
        if unknown := _unknown(init, kwargs):
            raise TypeError(f"{cls.__name__}: {_no_argument(init, unknown[0])}")
        init(self, *args, **kwargs)
        if type(self) is cls:
            self.check()
            self._check_types()
            vars(self)["_finished"] = True

    cls.__init__ = checked  # type: ignore[method-assign, assignment]


def _unknown(init: Any, kwargs: dict[str, Any]) -> list[str]:
    """The names that a constructor does not take."""
    code = init.__code__
    if code.co_flags & inspect.CO_VARKEYWORDS:
        return []
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [name for name in kwargs if name not in known]


def _no_argument(init: Any, name: str) -> str:
    code = init.__code__
    known = list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"there is no argument {name!r}: did you mean {near[0]!r}?"
    if name in ("lr", "learning_rate", "weight_decay"):
        link = "WeightDecay(...)" if name == "weight_decay" else "LR(...)"
        return f"there is no argument {name!r}: put {link} into the chain"
    return f"there is no argument {name!r}; it takes {known}"


def _is_method(cls: type, default: Any) -> bool:
    """Whether the default of a field is a function of the class body, which took its name."""
    return getattr(default, "__qualname__", "").startswith(f"{cls.__qualname__}.")


def _is_live(cls: type, name: str, hint: Any) -> bool:
    """Whether a field's annotation is Live[...]; an annotation may be text nobody can evaluate."""
    outermost, anywhere = _marks(cls, hint)
    if anywhere and not outermost:
        raise TypeError(
            f"{cls.__name__}: the annotation of '{name}' has Live inside another type; "
            "write Live around the whole, as in Live[float | None]"
        )
    return outermost


def _evaluated(cls: type, hint: Any) -> Any:
    """An annotation that is text, evaluated where that can be."""
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, dict(vars(sys.modules[cls.__module__])), dict(vars(cls)))
    except Exception:
        return hint


def _kind(hint: Any) -> tuple[type, bool] | None:
    """float, int or bool where an annotation says so, and whether None may stand there."""
    inner = get_args(hint)[0] if _is_mark(hint) else hint
    options = [option for option in get_args(inner) or (inner,) if option is not type(None)]
    known = len(options) == 1 and options[0] in (float, int, bool)
    return (options[0], len(get_args(inner)) > 1) if known else None


def _marks(cls: type, hint: Any) -> tuple[bool, bool]:
    """Whether Live is the outermost of an annotation, and whether it is anywhere in it."""
    hint = _evaluated(cls, hint)
    if isinstance(hint, str):  # a local name, or one imported under TYPE_CHECKING
        tree = ast.parse(hint, mode="eval").body
        found = [node for node in ast.walk(tree) if _says_live(node)]
        return bool(found) and found[0] is tree, bool(found)
    return _is_mark(hint), _has_mark(hint)


def _is_mark(hint: Any) -> bool:
    return get_origin(hint) is Annotated and "torchzero_clip.Live" in hint.__metadata__


def _has_mark(hint: Any) -> bool:
    return _is_mark(hint) or any(_has_mark(inner) for inner in get_args(hint))


def _says_live(node: ast.AST) -> bool:
    if not isinstance(node, ast.Subscript):
        return False
    return getattr(node.value, "id", getattr(node.value, "attr", None)) == "Live"


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return type(value) is type(default) and not isinstance(value, Tensor) and bool(value == default)


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, Tensor):
        return repr(value.item())
    if callable(value) and not isinstance(value, Description):
        if inspect.isbuiltin(value):  # the qualified name of torch.tanh is not one to call it by
            return f"{value.__module__}.{value.__name__}"
        return str(getattr(value, "__qualname__", repr(value)))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_shown(v) for v in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)
