"""A recorder of the torch calls of a rule. The recorded calls become the lines of a file.

A rule runs as usual, on a stand-in: one parameter that represents all parameters, so that every
list has one tensor. A call of a list function, `torch._foreach_*`, is written unchanged. A call
with a single tensor of a list is written as a comprehension over the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchzero_clip.source.operations import Operations
from torchzero_clip.source.symbols import Kind, SourceError, Value, Write, operand
from torchzero_clip.source.wording import called, method, name_of, part, repeated, wrapped
from torchzero_clip.source.written_numbers import WrittenNumber, plain

HOST_READS = (
    "__bool__",
    "item",
    "tolist",
    "__float__",
    "__int__",
    "__index__",
    "nonzero",
    "__len__",
)
"""Methods that read the data of a tensor on the host."""
SHAPES = ("shape.__get__", "ndim.__get__", "dim", "ndimension", "size", "stride")
"""Methods and attributes that depend on the shape of a tensor."""
FACTORIES = ("arange", "zeros", "ones", "full", "tensor", "linspace", "empty", "as_tensor")
"""Functions that create a tensor from numbers."""


class OpRecorder(Operations, TorchFunctionMode):
    """A function mode that records the calls on tensors that represent values.

    Args:
        operators: Functions of the core that read tensors, each with the function that records it.
    """

    def __init__(self, operators: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.operators = operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch call on the stand-in, and record it if an operand represents a value."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func in self.operators:
            return self.operators[func](self, *args)
        name = name_of(func)
        base = name.rpartition(".")[2]
        values = list(self._values([*args, *kwargs.values()]))
        if not values and base not in FACTORIES:
            return func(*_plain(args), **_plain(kwargs))
        if base in HOST_READS and self.knows(args[0]) is not None:
            raise SourceError(
                f"the transform calls {base.strip('_')} on a tensor, which reads the value of "
                "the tensor"
            )
        if base == "numel":
            return self._numel(args[0])
        if name.removeprefix("torch.Tensor.") in SHAPES and values[0].kind == "list":
            raise SourceError("the transform uses the shape of a parameter as Python numbers")
        if base == "to":
            return self._to(func, args, kwargs)
        if base == "__getitem__" and _is_whole_slice(*args):
            return args[0]
        if base == "view" and not args[0].dim():
            return args[0]  # a 0-dim tensor, although the rule expects a vector here
        if base == "tensor" and not values and isinstance(args[0], (list, tuple)):
            raise SourceError("the transform creates a tensor from the shapes of parameters")
        with self.not_recording():
            out = func(*_plain(args), **_plain(kwargs))
        return self._recorded(name, base, args, kwargs, values, out)

    def _recorded(
        self, name: str, base: str, args: Any, kwargs: Any, values: list[Value], out: Any
    ) -> Any:
        """Record a call that torch has run, and return the result of the call.

        Args:
            name: The name of the function, with the module or class.
            base: The last part of the name.
            args: The positional arguments.
            kwargs: The keyword arguments.
            values: The values that the arguments represent.
            out: The result of the call on the stand-in.
        """
        if base.endswith("_") and not base.endswith("__"):
            self._in_place(name, base, args, kwargs)
            return args[0] if isinstance(out, Tensor) else out
        if base == "__setitem__":
            raise SourceError("the transform assigns to elements of a tensor by index")
        if isinstance(out, Tensor) and self.knows(out) is not None:
            return out
        is_foreach = base.startswith("_foreach_")
        if is_foreach:
            args = self._repeated(args)
            values = list(self._values([*args, *kwargs.values()]))
        over_lists = any(value.kind in ("list", "sizes") for value in values)
        write = self._call(name, args, kwargs)
        if base in FACTORIES and "device" in kwargs and self.like is not None:
            values = [*values, self.like]
        if base == "stack" and over_lists and len(args) == 1 and not kwargs:
            return self.record("tensor", out, write, values)
        if base == "unbind" and len(args) == 1 and not kwargs and values[0].kind == "tensor":
            self.record("tuple", out[0], method(values[0], "unbind"), values)
            return out
        if base == "tensor" and over_lists:  # a vector of the sizes of all parameters
            size = args[0][0].value
            u = self.update
            sizes = self.new("list", lambda n: operand(size, n), values, each=True)
            write = lambda n: f"torch.tensor({n(sizes)}, device={n(u)}[0].device)"
            return self.record("tensor", out, write, [sizes, u])
        if is_foreach:
            clones = base == "_foreach_clone"
            self.record("tuple", out[0], write, values, foreach=True, clones=clones)
            return out
        kind: Kind = "list" if over_lists else "tensor"
        if isinstance(out, Tensor):
            self.record(kind, out, write, values, each=over_lists)
            self._note_view(out, args)
            return out
        if isinstance(out, tuple) and out and all(isinstance(t, Tensor) for t in out):
            fields = []
            if type(out).__module__ == "torch.return_types":
                fields = [f".{f}" for f in ("values", "indices") if hasattr(out, f)]
            for i, t in enumerate(out):
                write_part = part(write, fields[i] if fields else f"[{i}]")
                self.record(kind, t, write_part, values, each=over_lists)
        return out

    def _in_place(self, name: str, base: str, args: Any, kwargs: Any) -> None:
        """Record a call that writes its first argument in place."""
        is_foreach = base.startswith("_foreach_")
        values = list(self._values([*args, *kwargs.values()]))
        over_lists = any(value.kind in ("list", "sizes") for value in values)
        if over_lists and is_foreach:
            args = self._repeated(args)
            values = list(self._values([*args, *kwargs.values()]))
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        written = self.knows(first)
        if written is None:
            raise SourceError(
                f"the transform calls {base} on a tensor that is neither state nor the update"
            )
        each = over_lists and not is_foreach
        by_number = base == "_foreach_mul_" and isinstance(args[1], WrittenNumber)
        self.add(
            self._call(name, args, kwargs),
            values,
            writes=[written],
            each=each,
            foreach=not each,
            alone=len(args) == 1 and not each,
            copies=base == "_foreach_copy_" and len(values) == 2,
            scales=by_number and values[-1].live is not None,
        )

    def _repeated(self, args: Any) -> Any:
        """Return the arguments of a list function, with a list in place of each single tensor."""
        operands = []
        for x in args:
            value = self.knows(x[0]) if isinstance(x, (list, tuple)) and len(x) == 1 else None
            if value is not None and value.kind == "tensor":
                u = self.update
                copies = self.new("list", repeated(value, u), [value, u])
                with self.not_recording():
                    x = [self.learn(x[0].clone(), copies)]
            operands.append(x)
        return tuple(operands)

    def _numel(self, x: Tensor) -> Any:
        """Return the number of elements of a tensor, as a written number if it varies."""
        value = self.knows(x)
        assert value is not None
        if value.kind == "tensor":
            # a vector has an element for each parameter, although there is only the stand-in
            return 2 if x.dim() else 1
        return self.size(value, x.numel())

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a conversion. Statistics become float64, and lists get the dtype of the update."""
        with self.not_recording():
            out = func(*args, **kwargs)
        value = self.knows(args[0])
        if out is args[0] or value is None:
            return out
        if value.kind == "tensor":
            if args[0].dtype in (torch.bool, torch.float32) and out.dtype == torch.float64:
                return self.record("tensor", out, method(value, "double"), [value])
            return args[0]
        if out.dtype == args[0].dtype:
            write = method(value, "clone")
            return self.record("list", out, write, [value], each=True, foreach=True, clones=True)
        u = self.update
        write = lambda n: f"{wrapped(value, n)}.to({n(u)}.dtype)"
        return self.record("list", out, write, [value, u], each=True)

    def _note_view(self, out: Tensor, args: Any) -> None:
        """Record that a result shares memory with an operand, so that writes change both."""
        for x in args:
            value = self.knows(x) if isinstance(x, Tensor) else None
            if value is not None and x.numel() and out.data_ptr() == x.data_ptr():
                self.known[id(out)][1].root = value

    def _values(self, args: Any) -> Iterator[Value]:
        """Yield the values that the arguments represent."""
        for x in args:
            if isinstance(x, (list, tuple)):
                yield from self._values(x)
            elif (value := self.knows(x)) is not None:
                yield value

    def _call(self, name: str, args: Any, kwargs: Any) -> Write:
        """Return the function that writes a call, with values in place of tensors and numbers."""
        operands = [self._as_value(x) for x in args]
        keywords = {key: self._as_value(x) for key, x in kwargs.items()}
        like = self.like  # the attribute may change before the call is written
        return lambda names: called(name, operands, keywords, like, names)

    def _as_value(self, x: Any) -> Any:
        """Return an argument with values in place of tensors and numbers."""
        if isinstance(x, (list, tuple)):
            return type(x)([self._as_value(item) for item in x])
        value = self.knows(x)
        return x if value is None else value


def _is_whole_slice(x: Tensor, index: Any) -> bool:
    """Return whether an index selects every element of a vector."""
    sliced = isinstance(index, slice) and x.dim() > 0
    return sliced and index.indices(len(x)) == (0, len(x), 1)


def _plain(x: Any) -> Any:
    """Return an argument with plain numbers in place of written numbers."""
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)([_plain(item) for item in x])
    if isinstance(x, dict):
        return {key: _plain(item) for key, item in x.items()}
    return plain(x)
