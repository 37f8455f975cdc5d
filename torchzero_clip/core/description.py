"""Description: the base class of transforms and criteria. It is a dataclass of arguments."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self, dataclass_transform

from torchzero_clip.core.annotation import Allowed, read
from torchzero_clip.core.argument_values import (
    equal,
    got,
    is_default,
    live_value,
    python_number,
    shown,
)
from torchzero_clip.core.bounds import Within
from torchzero_clip.core.live_reads import refuse_fixed_reads, refuse_live_reads
from torchzero_clip.core.names import hint

RESERVED = frozenset({"params", "param_names", "grads", "chain"})
"""The keys of parameter groups that no hyperparameter may have."""
ON_NORMS = ("clip", "norm_group")
"""The keys of parameter groups that rules about norms read."""


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
class Description:
    """The arguments of a transform, before it runs.

    Subclasses become dataclasses. Their annotated fields are the arguments, and `check` validates
    them. Objects are immutable and hold no state, so several optimizers can share one object.
    """

    registry: ClassVar[dict[str, type[Description]]] = {}
    """All subclasses by name."""
    live: ClassVar[tuple[str, ...]] = ()
    """The names of the live hyperparameters."""
    borrows: ClassVar[tuple[tuple[str, str, int | None], ...]] = ()
    """Hyperparameters that use a value of another link if they are None.

    Each item is a tuple of three: the name, the name in the other link, and an index. If the other
    value is a tuple, the index selects one element. Otherwise the index is None.
    """
    open_fields: ClassVar[tuple[str, ...]] = ()
    """Attributes of this class that become arguments if a subclass declares them as fields."""
    _base_types: ClassVar[Mapping[str, tuple[type, ...]]] = {}
    """The types of the arguments that this base class reads, by name.

    A subclass may declare a field of such a name again, but only with values of these types.
    """
    pure: ClassVar[bool] = False
    """True if methods such as `update` and `limit` depend only on their arguments, and never branch
    on a value. With `compile=True` the steps of such a class can be replayed. A subclass does not
    inherit this attribute, so it must set it again."""
    impure: ClassVar[str] = ""
    """The reason why a class cannot be pure, and what to do if its steps should be replayed."""
    asks: ClassVar[tuple[str, ...]] = ()
    """Fields that are functions and are called through `Notes.ask`."""
    _kinds: ClassVar[dict[str, Allowed]] = {}  # the allowed values of fields that can be checked
    _own_init: ClassVar[bool] = False
    _finished = False  # whether the object is checked and may no longer change
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._own_init = cls._own_init or "__init__" in vars(cls)
        inherited = _inherited(cls)
        _refuse_plain_defaults(cls, inherited)
        dataclasses.dataclass(eq=False, repr=False, init=not cls._own_init)(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        cls.__dataclass_fields__ = fields  # without ClassVars, whose order subclasses would inherit
        own = [f for name, f in fields.items() if inherited.get(name) is not f]
        for field in own:
            if holder := _name_taken(cls, field):
                raise TypeError(
                    f"{cls.__name__}: the field '{field.name}' would replace {holder}: choose "
                    "a different name for the field"
                )
        _read_annotations(cls, own)
        cls._check_class()
        _register(cls)
        _check_after_init(cls)

    @classmethod
    def _check_class(cls) -> None:
        """Raise TypeError if the methods of a new class do not fit together."""

    def check(self) -> None:
        """Raise ValueError or TypeError if the arguments do not fit together.

        The library has already checked each argument against its annotation.
        """

    def require(
        self,
        name: str,
        *,
        integer: bool = False,
        optional: bool = False,
        length: int | None = None,
        **bounds: float,
    ) -> None:
        """Raise an error unless an argument is a number within bounds.

        An annotation such as `Annotated[float, Within(above=1)]` has the same effect.

        Args:
            name: The name of the argument.
            integer: Whether the number must be an integer.
            optional: Whether None is allowed as well.
            length: The number of elements, if the argument must be a tuple of such numbers.
            **bounds: The arguments of `Within`: `at_least`, `above`, `below`, `at_most`.
        """
        self._require(name, Allowed(int if integer else float, optional, Within(**bounds), length))

    def require_one_of(self, name: str, choices: tuple[Any, ...]) -> None:
        """Raise an error unless the argument is one of the choices."""
        self._require(name, Allowed(choices=choices))

    def _require(self, name: str, kind: Allowed) -> None:
        value = getattr(self, name)
        if (error := kind.error(value)) is not None:  # the message may read a tensor on the host
            raise error(f"{type(self).__name__}: {name} must be {kind}, got {got(value)}")

    def _check_all(self) -> None:
        """Check all arguments against their annotations, and call `check`.

        Numbers without bounds are checked after `check`, because the error messages of `check` are
        more specific.
        """
        last: list[str] = []
        for name, kind in self._kinds.items():
            if kind.bounds is None and kind.python_type in (float, int):
                last.append(name)
            else:
                self._require(name, kind)
        self.check()
        for name in last:
            self._require(name, self._kinds[name])

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a checked copy with other values in some fields.

        If all values are numbers that the fields already have, return the object itself.
        """
        current = [getattr(self, name) for name in values]
        same = all(map(operator.is_, current, values.values()))
        if same and all([isinstance(x, (int, float)) for x in current]):
            return self
        other = copy.copy(self)
        vars(other).update(values)
        other._check_all()
        return other

    def children(self) -> Iterator[tuple[str | None, Description]]:
        """Yield the descriptions inside this one, each with its label, or None if it has none."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Description):
                yield None, value
            elif isinstance(value, (tuple, list)):
                yield from ((None, v) for v in value if isinstance(v, Description))
            elif isinstance(value, Mapping):
                yield from ((str(k), v) for k, v in value.items() if isinstance(v, Description))

    def walk(self) -> Iterator[Description]:
        """Yield this description and all descriptions inside it."""
        yield self
        for _, child in self.children():
            yield from child.walk()

    def __eq__(self, other: object) -> bool:
        """Return whether the other object has the same class and equal arguments.

        Functions and tensors are equal only if they are the same object.
        """
        if type(self) is not type(other):
            return NotImplemented
        names = type(self).__dataclass_fields__
        return all(equal(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        values = [getattr(self, name) for name in type(self).__dataclass_fields__]
        return hash((type(self), *[x for x in values if isinstance(x, (int, float, str))]))

    def __setattr__(self, name: str, value: Any) -> None:
        if self._finished:
            live = f"set optimizer.param_groups[i]['{name}']"
            way = live if name in self.live else "construct a new transform"
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be set, because transforms are immutable: "
                f"{way} instead"
            )
        super().__setattr__(name, value)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that construct an equal object. Default values are omitted."""
        accepted = {f.name for f in dataclasses.fields(self) if f.init}
        return {name: value for name, value in self.not_default().items() if name in accepted}

    def not_default(self) -> dict[str, Any]:
        """Return the fields whose value is not the default."""
        values = {f: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {f.name: value for f, value in values.items() if not is_default(f, value)}

    def __repr__(self) -> str:
        parts = [f"{name}={shown(value)}" for name, value in self.arguments().items()]
        return f"{type(self).__name__}({', '.join(parts)})"


def _inherited(cls: type[Description]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of the base classes.

    If several base classes have a field of one name, the first one counts, as in dataclasses.
    """
    fields: dict[str, dataclasses.Field[Any]] = {}
    for base in reversed(_descriptions(cls)):
        fields.update(base.__dataclass_fields__)
    return fields


def _descriptions(cls: type[Description]) -> list[type[Description]]:
    """Return the base classes that have fields."""
    return [x for x in cls.__mro__[1:] if issubclass(x, Description) and x is not Description]


def _refuse_plain_defaults(cls: type[Description], arguments: Mapping[str, Any]) -> None:
    """Raise TypeError if a class sets an inherited argument without an annotation.

    The constructor would still use the default of the base class.
    """
    annotated = inspect.get_annotations(cls)
    for name in arguments:
        owner = next((base for base in cls.__mro__ if name in vars(base)), Description)
        is_mixin = owner is not cls and not issubclass(owner, Description)
        if is_mixin or (owner is cls and name not in annotated):
            value = vars(owner)[name]
            way = "choose a different name for the attribute"
            if not hasattr(value, "__get__"):
                kind = _annotation_of(value)
                way = f"write {name}: {f'Live[{kind}]' if name in cls.live else kind} = {value!r}"
            raise TypeError(
                f"{cls.__name__}: the class attribute {name} does not change the default of the "
                f"argument {name}: {way}"
            )


def _annotation_of(value: Any) -> str:
    """Return the annotation of an argument that has this default."""
    if isinstance(value, tuple):
        return f"tuple[{', '.join(map(_annotation_of, value))}]"
    return type(value).__name__


def _read_annotations(cls: type[Description], own: list[dataclasses.Field[Any]]) -> None:
    """Set which fields of a class are live, and which values the fields allow.

    Raise TypeError if a method reads a field in a way that does not fit.

    `own` are the new fields of the class. A new field replaces an inherited field of the same name.
    """
    kinds: dict[str, Allowed | None] = {}
    live: dict[str, bool] = {}
    for base in reversed(_descriptions(cls)):
        kinds.update({name: base._kinds.get(name) for name in base.__dataclass_fields__})
        live.update({name: name in base.live for name in base.__dataclass_fields__})
    for field in own:
        is_live, kind = read(cls, field.name, field.type)
        inherited = kinds.get(field.name)
        for base in cls.__mro__:
            types = vars(base).get("_base_types", {}).get(field.name)
            if types is None:
                continue
            if is_live or not _keeps_meaning(field.default, kind, types, inherited):
                raise TypeError(
                    f"{cls.__name__}: the field '{field.name}' would replace an argument of "
                    f"{base.__name__}: choose a different name for the field"
                )
            kind = kind or inherited
        kinds[field.name] = kind
        live.pop(field.name, None)  # live values are in the order of their last declarations
        live[field.name] = is_live
    was_live = {name for base in _descriptions(cls) for name in base.live}
    cls.live = tuple([name for name, is_live in live.items() if is_live])
    cls._kinds = {name: kind for name, kind in kinds.items() if kind is not None}
    if taken := {*RESERVED, *ON_NORMS}.intersection(cls.live):
        raise TypeError(
            f"{cls.__name__}: '{min(taken)}' cannot be a live hyperparameter, because "
            "param_groups uses this key: choose a different name for the hyperparameter"
        )
    refuse_live_reads(cls, cls.live)
    refuse_fixed_reads(cls, sorted(was_live.difference(cls.live)))


def _keeps_meaning(
    default: Any, kind: Allowed | None, types: tuple[type, ...], inherited: Allowed | None
) -> bool:
    """Return whether a field that a base class reads still has values that the base class allows.

    Args:
        default: The default value of the field.
        kind: The values that the annotation of the field allows, if the library can check them.
        types: The types that the base class allows.
        inherited: The values that the base class allows, if the library can check them.
    """
    if kind is not None and kind.python_type not in (None, *types):
        return False
    values = () if default is dataclasses.MISSING else (default,)
    if kind is not None and kind.choices:
        values = kind.choices
    if inherited is not None:
        return all([inherited.error(value) is None for value in values])
    return all([value is None or isinstance(value, types) for value in values])


def _register(cls: type[Description]) -> None:
    """Add a class to the registry. A class of the user does not replace a class of the library."""
    library = __name__.partition(".")[0]
    known = cls.registry.get(cls.__name__, cls)
    if cls.__module__.startswith(library) or not known.__module__.startswith(library):
        cls.registry[cls.__name__] = cls


def _check_after_init(cls: type[Description]) -> None:
    """Wrap `cls.__init__` so that it checks the finished object once and makes it immutable."""
    init: Any = cls.__init__
    accepts_all = init.__code__.co_flags & inspect.CO_VARKEYWORDS

    @functools.wraps(init)
    def checked(self: Description, *args: Any, **kwargs: Any) -> None:
        for name in () if accepts_all else kwargs:
            if name not in _arguments(init):
                why = unannotated(cls, name)
                if why:
                    why = f"there is no argument {name!r}: {why}"
                else:
                    why = no_argument(init, name, cls.open_fields)
                raise TypeError(f"{cls.__name__}: {why}")
        init(self, *args, **kwargs)
        if type(self) is cls:
            for field in dataclasses.fields(cls):
                convert = live_value if field.name in cls.live else python_number
                vars(self)[field.name] = convert(getattr(self, field.name))
            self._check_all()
            vars(self)["_finished"] = True

    cls.__init__ = checked  # type: ignore[method-assign, assignment]


def _arguments(init: Callable[..., Any]) -> list[str]:
    """Return the names that a constructor accepts."""
    code = inspect.unwrap(init).__code__
    return list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


def no_argument(init: Callable[..., Any], name: str, open_fields: tuple[str, ...] = ()) -> str:
    """Return the error message for a name that a constructor does not accept."""
    known = _arguments(init)
    if name in open_fields:
        return (
            f"there is no argument {name!r}; the arguments are {known}. To add {name!r}, declare "
            "it as a field in the class"
        )
    if near := hint(name, known):
        return f"there is no argument {name!r}{near}"
    if name in ("lr", "learning_rate", "weight_decay"):
        link = class_with("weight_decay" if name == "weight_decay" else "lr")
        return f"there is no argument {name!r}: add {link}(...) to the chain"
    return f"there is no argument {name!r}; the arguments are {known}"


def unannotated(cls: type, name: str) -> str:
    """Return the line to write if an attribute of a class lacks the annotation of an argument.

    Return an empty string for other names.
    """
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    if owner is None or owner.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    value = vars(owner)[name]
    if not isinstance(value, (int, float, str, tuple)):
        return ""
    kind = type(value).__name__
    live = f"Live[{kind}]" if isinstance(value, (int, float)) else kind
    return (
        f"the class attribute {name} needs an annotation to be an argument: write "
        f"{name}: {live} = {value!r} in the class"
    )


def class_with(argument: str) -> str:
    """Return the name of a class of this library that accepts an argument, for an error message.

    The class in which this argument comes earliest is chosen. If there are several such classes,
    the class with the fewest arguments is chosen.
    """
    ours = [c for c in Description.registry.values() if c.__module__.startswith("torchzero_clip.")]
    fields = [(c.__name__, list(c.__dataclass_fields__)) for c in ours]
    found = [(own.index(argument), len(own), name) for name, own in fields if argument in own]
    return min(found, default=(0, 0, "a link"))[2]


def _name_taken(cls: type[Description], field: dataclasses.Field[Any]) -> str | None:
    """Return words for the method or attribute that a new field would replace, or None."""
    name = field.name
    default = getattr(field.default, "fget", field.default)
    if getattr(default, "__qualname__", "").startswith(f"{cls.__qualname__}."):
        return f"a method of {cls.__name__}"  # the class body gave its name to both
    bases = cls.__mro__[1:]
    declared = [f.name for b in bases if dataclasses.is_dataclass(b) for f in dataclasses.fields(b)]
    opened = itertools.chain(*[vars(base).get("open_fields", ()) for base in bases])
    if name in declared or name in opened:
        return None
    return next((f"an attribute of {b.__name__}" for b in bases if name in vars(b)), None)
