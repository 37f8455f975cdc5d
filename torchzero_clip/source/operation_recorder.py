"""OpRecorder: the operations of torch that a rule asks for, as the lines of a file.

A rule runs as ever, on one parameter that stands for all: every list has one tensor. A function
that takes lists, `torch._foreach_*`, is written as it is; one that takes a tensor of a list is
written for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchzero_clip.source.operations import Operations
from torchzero_clip.source.symbols import ATOM, Names, SourceError, Value, operand
from torchzero_clip.source.wording import called, method, name_of, part, repeated, wrapped
from torchzero_clip.source.written_numbers import WrittenNumber, plain

WAITS = ("__bool__", "item", "tolist", "__float__", "__int__", "__index__", "nonzero", "__len__")
SHAPES = ("shape.__get__", "ndim.__get__", "dim", "ndimension", "size", "stride")
FACTORIES = ("arange", "zeros", "ones", "full", "tensor", "linspace", "empty", "as_tensor")


class OpRecorder(Operations, TorchFunctionMode):
    """Writes down what is asked of the tensors that it knows.

    Args:
        operators: What functions of the core are, which look at tensors, by themselves.
    """

    def __init__(self, operators: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.operators = operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func in self.operators:
            return self.operators[func](self, *args)
        name = name_of(func)
        base = name.rpartition(".")[2]
        found = list(self._values([*args, *kwargs.values()]))
        if not found and base not in FACTORIES:
            return func(*_plain(args), **_plain(kwargs))
        if base in WAITS and self.knows(args[0]) is not None:
            raise SourceError(f"it reads {base.strip('_')} of a tensor on the host")
        if base == "numel":
            return self._numel(args[0])
        if name.removeprefix("torch.Tensor.") in SHAPES and found[0].kind == "list":
            raise SourceError("it reads the shape of a parameter on the host")
        if base == "to":
            return self._to(func, args, kwargs)
        if base == "__getitem__" and _is_all(*args):
            return args[0]
        if base == "view" and not args[0].dim():
            return args[0]  # one number, where rules expect a vector
        if base == "tensor" and not found and isinstance(args[0], (list, tuple)):
            raise SourceError("it makes a vector of numbers from the shapes of parameters")
        with self.resting():
            out = func(*_plain(args), **_plain(kwargs))
        return self._recorded(name, base, args, kwargs, found, out)

    def _recorded(
        self, name: str, base: str, args: Any, kwargs: Any, found: list[Value], out: Any
    ) -> Any:
        if base.endswith("_") and not base.endswith("__"):
            self._in_place(name, base, args, kwargs, found)
            return args[0] if isinstance(out, Tensor) else out
        if base == "__setitem__":
            raise SourceError("it writes entries of a tensor one at a time")
        if isinstance(out, Tensor) and self.knows(out) is not None:
            return out
        foreach = base.startswith("_foreach_")
        args = self._repeated(args) if foreach else args
        found = list(self._values([*args, *kwargs.values()])) if foreach else found
        lists = [value for value in found if value.kind in ("list", "sizes")]
        write = self._call(name, args, kwargs)
        if base in FACTORIES and "device" in kwargs and self.like is not None:
            found = [*found, self.like]
        if base == "stack" and lists and len(args) == 1 and not kwargs:
            return self.made("tensor", out, write, found)
        if base == "unbind" and len(args) == 1 and not kwargs and found[0].kind == "tensor":
            self.made("tuple", out[0], method(found[0], "unbind"), found, unbinds=True)
            return out
        if base == "tensor" and lists:  # numbers of parameters as one vector
            size, u = args[0][0].value, self.update
            self.add(lambda n: operand(size, n), found, inner := Value("list"), each=True)
            write = lambda n: (f"torch.tensor({n(inner)}, device={n(u)}[0].device)", ATOM)
            return self.made("tensor", out, write, [inner, u])
        if foreach:
            self.made("tuple", out[0], write, found, foreach=True, clones=base == "_foreach_clone")
            return out
        kind = "list" if lists else "tensor"
        if isinstance(out, Tensor):
            made = self.made(kind, out, write, found, each=bool(lists))
            self._note_view(out, args)
            return made
        if isinstance(out, tuple) and out and all(isinstance(t, Tensor) for t in out):
            fields = []
            if type(out).__module__ == "torch.return_types":
                fields = [f".{f}" for f in ("values", "indices") if hasattr(out, f)]
            for i, t in enumerate(out):
                one = part(write, fields[i] if fields else f"[{i}]")
                self.made(kind, t, one, found, each=bool(lists))
        return out

    def _in_place(self, name: str, base: str, args: Any, kwargs: Any, found: list[Value]) -> None:
        lists = [value for value in found if value.kind in ("list", "sizes")]
        args = self._repeated(args) if lists and base.startswith("_foreach_") else args
        found = list(self._values([*args, *kwargs.values()]))
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        written = self.knows(first)
        if written is None:
            raise SourceError(f"it writes a tensor that is no state, with {base}")
        each = bool(lists) and not base.startswith("_foreach_")
        self.add(
            self._call(name, args, kwargs),
            found,
            writes=[written],
            effect=True,
            each=each,
            foreach=not each,
            alone=len(args) == 1 and not each,
            copies=base == "_foreach_copy_" and len(found) == 2,
            scales=base == "_foreach_mul_"
            and isinstance(args[1], WrittenNumber)
            and found[-1].live is not None,
        )

    def _repeated(self, args: Any) -> Any:
        """Operands of a list operator: one tensor for all becomes a list of it."""
        out = []
        for x in args:
            value = self.knows(x[0]) if isinstance(x, (list, tuple)) and len(x) == 1 else None
            if value is not None and value.kind == "tensor":
                made, over = Value("list"), self.update
                self.add(repeated(value, over), [value, over], made)
                with self.resting():
                    x = [self.learn(x[0].clone(), made)]
            out.append(x)
        return tuple(out)

    def _numel(self, x: Tensor) -> Any:
        value = self.knows(x)
        assert value is not None
        if value.kind == "tensor":
            return 2 if x.dim() else 1  # a vector has an entry a parameter, though here it is one
        return self.size(value, x.numel())

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Conversions: statistics are float64 throughout, and lists have the update's dtype."""
        with self.resting():
            out = func(*args, **kwargs)
        value = self.knows(args[0])
        if out is args[0] or value is None:
            return out
        if value.kind == "tensor":
            if args[0].dtype in (torch.bool, torch.float32) and out.dtype == torch.float64:
                return self.made("tensor", out, method(value, "double"), [value])
            return args[0]
        made, u = value.made, self.update
        if made is not None and made.unbinds:
            vector = made.args[0]  # of an unbound vector: that converts it at once
            dtype = self.dtype()
            write = lambda n: (f"{wrapped(vector, n)}.to({n(dtype)}).unbind()", ATOM)
            return self.made("tuple", out, write, [vector, dtype])
        if out.dtype == args[0].dtype:
            clones = {"each": True, "foreach": True, "clones": True}
            return self.made("list", out, method(value, "clone"), [value], **clones)
        write = lambda n: (f"{wrapped(value, n)}.to({n(u)}.dtype)", ATOM)
        return self.made("list", out, write, [value, u], each=True)

    def _note_view(self, out: Tensor, args: Any) -> None:
        """A result that lies in the memory of an operand is written with it."""
        for x in args:
            value = self.knows(x) if isinstance(x, Tensor) else None
            if value is not None and x.numel() and out.data_ptr() == x.data_ptr():
                self.known[id(out)][1].root = value

    def _values(self, args: Any) -> Iterator[Value]:
        for x in args:
            if isinstance(x, (list, tuple)):
                yield from self._values(x)
            elif (value := self.knows(x)) is not None:
                yield value

    def _call(self, name: str, args: Any, kwargs: Any) -> Callable[[Names], tuple[str, int]]:
        """How a call is written, with values in the place of tensors and numbers."""
        operands = [self._shown(x) for x in args]
        named = {key: self._shown(x) for key, x in kwargs.items()}
        like = self.like  # of now: later lines may measure more
        return lambda names: called(name, operands, named, like, names)

    def _shown(self, x: Any) -> Any:
        """Operands with their values in the place of tensors and numbers."""
        if isinstance(x, (list, tuple)):
            return type(x)([self._shown(item) for item in x])
        value = self.knows(x)
        return x if value is None else value


def _is_all(x: Tensor, index: Any) -> bool:
    """Whether a part of a vector is all of it."""
    sliced = isinstance(index, slice) and x.dim() > 0
    return sliced and index.indices(len(x)) == (0, len(x), 1)


def _plain(x: Any) -> Any:
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)([_plain(item) for item in x])
    if isinstance(x, dict):
        return {key: _plain(item) for key, item in x.items()}
    return plain(x)
