"""Description: a transform before it runs, a dataclass whose fields are its arguments."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Iterator, Mapping
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
from torchzero_clip.core.live_reads import refuse_live_reads
from torchzero_clip.core.names import hint

RESERVED = frozenset({"params", "param_names", "grads", "chain"})
ON_NORMS = ("clip", "norm_group")  # what a group says to rules about norms


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
class Description:
    """Subclasses become dataclasses: annotated fields are the arguments, `check` validates them.

    Objects are immutable and hold no state, so one object may serve several optimizers.
    """

    registry: ClassVar[dict[str, type[Description]]] = {}
    live: ClassVar[tuple[str, ...]] = ()
    borrows: ClassVar[tuple[tuple[str, str, int | None], ...]] = ()
    """Live values that are those of another link where they are None: the name, the name there, and
    which entry of it, or None."""
    open_fields: ClassVar[tuple[str, ...]] = ()
    """Attributes that a subclass may declare as fields, to make them arguments; no others."""
    pure: ClassVar[bool] = False
    """Set in a class whose `update`, `limit` and the like hang on their arguments alone, and branch
    on no value: with compile=True its steps may be replayed. Classes that inherit say so anew."""
    impure: ClassVar[str] = ""
    """Set in a class that cannot be pure: why, and what to do where steps shall be replayed."""
    asks: ClassVar[tuple[str, ...]] = ()
    """Fields that are functions, and are asked through `Notes.ask`."""
    _kinds: ClassVar[dict[str, Allowed]] = {}  # of fields that are numbers or truths
    _own_init: ClassVar[bool] = False
    _finished = False  # whether it is checked, and may no longer change
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._own_init = cls._own_init or "__init__" in vars(cls)
        inherited = dict(getattr(cls, "__dataclass_fields__", {}))
        dataclasses.dataclass(eq=False, repr=False, init=not cls._own_init)(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        cls.__dataclass_fields__ = fields  # without ClassVars, which would give fields their place
        own = [f for name, f in fields.items() if inherited.get(name) is not f]
        for field in own:
            if holder := _name_taken(cls, field):
                raise TypeError(
                    f"{cls.__name__}: the field '{field.name}' has the name of {holder}; "
                    "call it something else"
                )
        said = {field.name: read(cls, field.name, field.type) for field in own}
        live = [name for name, (lives, _) in said.items() if lives]
        if taken := {*RESERVED, *ON_NORMS}.intersection(live):
            raise TypeError(f"{cls.__name__}: '{min(taken)}' is taken in param_groups")
        cls.live = (*[name for name in cls.live if name not in said], *live)
        kinds = {**cls._kinds, **{name: kind for name, (_, kind) in said.items()}}
        cls._kinds = {name: kind for name, kind in kinds.items() if kind is not None}
        refuse_live_reads(cls, cls.live)
        known, ours = cls.registry.setdefault(cls.__name__, cls), __name__.partition(".")[0]
        if cls.__module__.startswith(ours) or not known.__module__.startswith(ours):
            cls.registry[cls.__name__] = cls  # a class elsewhere does not change what rules name
        _check_after_init(cls)

    def check(self) -> None:
        """Raise ValueError or TypeError for arguments that make no sense together; annotations say
        what each may be, as `require` does.
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
        """Raise a sentence unless the argument, or each of `length` of them, is within bounds.

        `bounds` are `at_least`, `above`, `below`, `at_most`; `optional` is for None, in place of
        the argument or of one of those. Annotations say the same.
        """
        self._require(name, Allowed(int if integer else float, optional, Within(**bounds), length))

    def require_one_of(self, name: str, choices: tuple[Any, ...]) -> None:
        """Raise a sentence unless the argument is one of the choices."""
        self._require(name, Allowed(choices=choices))

    def _require(self, name: str, kind: Allowed) -> None:
        value = getattr(self, name)
        if (error := kind.error(value)) is not None:  # to show a tensor is to read it
            raise error(f"{type(self).__name__}: {name} must be {kind}, got {got(value)}")

    def _check_all(self) -> None:
        """Arguments are what their annotations say before `check` asks them; numbers without bounds
        are such, whatever it looks at.
        """
        kinds = self._kinds.items()
        numbers = [name for name, x in kinds if x.bounds is None and x.python_type in (float, int)]
        for name, kind in kinds:
            if name not in numbers:
                self._require(name, kind)
        self.check()
        for name in numbers:
            self._require(name, self._kinds[name])

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """A checked copy with other values in some fields; itself for its own numbers."""
        held = [getattr(self, name) for name in values]
        own = all(map(operator.is_, held, values.values()))
        if own and all([isinstance(x, (int, float)) for x in held]):
            return self
        other = copy.copy(self)
        vars(other).update(values)
        other._check_all()
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

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same class and arguments; functions and tensors must be one."""
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
            way = live if name in self.live else "make a new one"
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be set: a transform is an immutable "
                f"description that optimizers share; {way} instead"
            )
        super().__setattr__(name, value)

    def arguments(self) -> dict[str, Any]:
        """The arguments, other than defaults, that make an equal object."""
        taken = {f.name for f in dataclasses.fields(self) if f.init}
        return {name: value for name, value in self.not_default().items() if name in taken}

    def not_default(self) -> dict[str, Any]:
        """The fields whose value is not their default."""
        values = {f: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {f.name: value for f, value in values.items() if not is_default(f, value)}

    def __repr__(self) -> str:
        parts = [f"{name}={shown(value)}" for name, value in self.arguments().items()]
        return f"{type(self).__name__}({', '.join(parts)})"


def _check_after_init(cls: type[Description]) -> None:
    """Wrap `cls.__init__` so that the finished object is checked, once, and then sealed."""
    init: Any = cls.__init__
    takes_all = init.__code__.co_flags & inspect.CO_VARKEYWORDS

    @functools.wraps(init)
    def checked(self: Description, *args: Any, **kwargs: Any) -> None:
        for name in () if takes_all else kwargs:
            if name not in _arguments(init):
                why = unannotated(cls, name)
                told = f"there is no argument {name!r}: {why}" if why else ""
                told = told or no_argument(init, name, cls.open_fields)
                raise TypeError(f"{cls.__name__}: {told}")
        init(self, *args, **kwargs)
        if type(self) is cls:
            for field in dataclasses.fields(cls):
                kept = live_value if field.name in cls.live else python_number
                vars(self)[field.name] = kept(getattr(self, field.name))
            self._check_all()
            vars(self)["_finished"] = True

    cls.__init__ = checked  # type: ignore[method-assign, assignment]


def _arguments(init: Any) -> list[str]:
    """The names that a constructor takes."""
    code = inspect.unwrap(init).__code__
    return list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


def no_argument(init: Any, name: str, open_fields: tuple[str, ...] = ()) -> str:
    """What to say of a name that a constructor does not take."""
    known = _arguments(init)
    if name in open_fields:
        return f"there is no argument {name!r}, which its class may declare; it takes {known}"
    if near := hint(name, known):
        return f"there is no argument {name!r}{near}"
    if name in ("lr", "learning_rate", "weight_decay"):
        link = class_with("weight_decay" if name == "weight_decay" else "lr")
        return f"there is no argument {name!r}: put {link}(...) into the chain"
    return f"there is no argument {name!r}; it takes {known}"


def unannotated(cls: type, name: str) -> str:
    """Return what to write if a class has an attribute that an annotation would make an argument.

    It is empty for other names.
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
        f"{name} is a class attribute without an annotation, so write {name}: {live} = {value!r} "
        "in the class"
    )


def class_with(argument: str) -> str:
    """The name of our class that takes such an argument before its others, for advice."""
    ours = [c for c in Description.registry.values() if c.__module__.startswith("torchzero_clip.")]
    having = [(c.__name__, [*c.__dataclass_fields__]) for c in ours]
    found = [(own.index(argument), len(own), name) for name, own in having if argument in own]
    return min(found, default=(0, 0, "a link"))[2]


def _name_taken(cls: type[Description], field: dataclasses.Field[Any]) -> str | None:
    """What else a new field's name stands for, in words: it would take the place of that."""
    name, default = field.name, getattr(field.default, "fget", field.default)
    if getattr(default, "__qualname__", "").startswith(f"{cls.__qualname__}."):
        return f"a method of {cls.__name__}"  # the class body gave its name to both
    bases = cls.__mro__[1:]
    declared = [f.name for b in bases if dataclasses.is_dataclass(b) for f in dataclasses.fields(b)]
    opened = itertools.chain(*[vars(base).get("open_fields", ()) for base in bases])
    if name in declared or name in opened:
        return None
    return next((f"an attribute of {b.__name__}" for b in bases if name in vars(b)), None)
