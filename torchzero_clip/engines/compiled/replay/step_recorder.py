"""Recorder: what a step asks of torch and of programs, written down as a graph and not yet done.

A step runs as ever, on tensors that have a form and no values: whoever reads one fails, and nothing
of the model has changed by then. The schema of each operator says what it writes, so that no list
of torch's functions is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from torchzero_clip.core.norms import is_one_operator
from torchzero_clip.core.sharding.collectives import form_of
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.core.torch_private import (
    TorchDispatchMode,
    fake_mode,
    fake_tensors,
    name_of,
    schema,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    without_memory,
)
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers.program import Launch, Relaunch
from torchzero_clip.engines.compiled.replay.pruning import form, prune, written

READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__}
"""Ways to what a tensor holds that pass no operator."""


class Refused(Exception):
    """Raised where a step does what could not be done again; nothing has happened yet."""


class StepRecorder(TorchDispatchMode):
    """The graph of all that happens between `with recorder:` and the end of the block.

    Attributes:
        graph: The operators, launches and functions of ours, in order.
        leaves: For each input of the graph a tensor that was there before, or a function of ours.
        sessions: For each buffer of gradients the places of these among all.
    """

    def __init__(self, grads: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.leaves = Graph(), list[Any]()
        self.sessions: dict[int, tuple[int, ...]] = {}  # by the identity of the buffer
        self.gradients: dict[tuple[int, ...], Buffer] = {}  # of the step that is done, by places
        self._grads = {id(g): i for i, g in enumerate(grads)}
        (_, self._fake), self._resting = fake_tensors(), False
        self._nodes: dict[int, Node] = {}
        self.made: list[Tensor] = []  # memory and constants that were made on the way
        self._alive: list[Any] = []  # so that no identity is that of two
        self._functions = _Functions(self)

    def __enter__(self) -> StepRecorder:
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def real(self) -> Iterator[None]:
        """What happens inside happens now, and is not written down."""
        before, self._resting = self._resting, True
        try:
            yield
        finally:
            self._resting = before

    def memory(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Memory that is made now, and lasts as long as the graph."""
        with self.real():
            made = make()
        self.made += made
        return made

    # ------------------------------------------------------------------ operators of torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._resting:
            return func(*args, **kwargs)
        if func.namespace == "prim":  # the form of a tensor
            return self.imagined(func, *args, **kwargs)
        name, told = str(func), schema(func)
        if "c10d" in func.namespace:
            raise Refused(f"{name} talks to other ranks: leave that to a rule about norms")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused(f"{name} draws random numbers: make them of group['step']")
        makes = any(["Tensor" in str(made.type) for made in told.returns])
        if not (makes or told.is_mutable):
            if any([isinstance(t, Tensor) for t in tree_leaves((args, kwargs))]):
                raise Refused(f"{name} reads a number on the host: choose by torch.where")
            return func(*args, **kwargs)
        given = self.graph_arguments((args, kwargs))
        out, turned = self.imagined(func, *args, **kwargs), torch.Tag.inplace_view in func.tags
        node = self.graph.call_function(_quicker(func, args, kwargs), *given)
        node.meta["operator"] = func
        if name.startswith("aten.lift_fresh"):  # a constant, of which each replay has its own
            self.made.append(args[0])
            node.meta["form"] = form(out)
            node = self.graph.call_function(torch.clone, (node,))
            node.meta["operator"] = torch.ops.aten.clone.default
        returned = _returned(told, args, kwargs)
        if returned is not None and turned:  # the same tensor has another form from here on
            self._nodes.pop(id(returned))
        return self.learn(out if returned is None else returned, node)

    def imagined(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function gives, without values; nothing is written."""
        with self.real(), self._fake:
            args, kwargs = tree_map_only((Tensor, float), self._without_values, (args, kwargs))
            out = function(*args, **kwargs)
        tree_map_only(Tensor, without_memory, out)  # it has none to look at
        return out

    def _without_values(self, x: Tensor | float) -> Any:
        if isinstance(x, float):  # torch remembers calls by their numbers, and no NaN is another's
            return x if x == x else 0.0
        return x if fake_mode(x) is self._fake else self._fake.from_tensor(x)

    def graph_arguments(self, x: Any) -> Any:
        """The same with nodes in the place of tensors."""
        leaves, form = tree_flatten(x)
        return tree_unflatten([self.node(t) if isinstance(t, Tensor) else t for t in leaves], form)

    def node(self, t: Tensor) -> Node:
        """The node of a tensor; one that was there before becomes an input."""
        if id(t) not in self._nodes:
            self.learn(t, self._input(t))
        return self._nodes[id(t)]

    def _input(self, x: Any) -> Node:
        """An input of the graph, which itself holds nothing of the model."""
        self.leaves.append(x)
        return self.graph.placeholder(f"leaf{len(self.leaves)}")

    def learn(self, out: Any, node: Node) -> Any:
        """Remember the node of a tensor, or those of several that one call made."""
        if isinstance(out, Tensor):
            self._alive.append(out)
            if id(out) not in self._nodes:
                self._nodes[id(out)] = node
                node.meta["form"] = form(out)
        elif isinstance(out, (tuple, list)):
            for i, t in enumerate(out):
                if isinstance(t, Tensor) and id(t) not in self._nodes:
                    item = self.graph.call_function(operator.getitem, (node, i))
                    item.meta["item"] = True
                    self.learn(t, item)
        return out

    # ------------------------------------------------------------------ what is one call

    def call(
        self, function: Callable[..., Any], args: Any, out: Any, writes: bool | str = False
    ) -> Any:
        """Write down a function of ours with tensors among its arguments, and what it made.

        One that `writes`, what was there before or "what it takes", is done whoever takes that.
        """
        given = (self._input(function), *map(self._argument, args))
        node = self.graph.call_function(_done, given)
        node.meta["writes"] = writes
        return self.learn(out, node)

    def _argument(self, x: Any) -> Any:
        """An argument as a graph holds it: what it cannot print is an input."""
        if isinstance(x, Tensor):
            return self.node(x)
        if type(x) in (list, tuple):
            return [self._argument(item) for item in x]
        x = name_of(x)  # a process group may be made anew
        return x if type(x) in (int, float, bool, str) or x is None else self._input(x)

    def launch(self, launch: Launch, runner: Callable[[], Any]) -> Tensor | None:
        """Write down the launch of a program by what runs it later; what it measures."""
        out = None
        if launch.program.measured is not None:
            device = launch.program.device
            out = self.imagined(torch.empty, (1, launch.width), dtype=wide(device), device=device)
        buffers = [self.sessions.get(id(buffer), buffer) for buffer in launch.buffers]
        self._alive += launch.buffers
        pairs = zip(buffers, launch.buffers, strict=True)
        self.gradients.update({b: x for b, x in pairs if isinstance(b, tuple)})
        again = Relaunch(launch, runner, buffers, self.gradients)
        return self.call(again, (launch.numbers, launch.vectors, launch.scalars), out, True)

    def open(self, gradients: Buffer) -> None:
        """Note a buffer of gradients, which is another one in every step."""
        self._alive.append(gradients)
        self.sessions[id(gradients)] = tuple([self._grads[id(t)] for t in gradients.tensors])

    def changing(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a gradient is among them, which is another tensor in every step."""
        return not self._grads.keys().isdisjoint(map(id, tensors))

    @property
    def takes_gradients(self) -> bool:
        """Whether an operator of PyTorch takes a gradient, on whose layout it may depend.

        Launches of programs take gradients of any layout.
        """
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        pairs = zip(inputs, self.leaves, strict=True)
        return any([bool(node.users) and id(x) in self._grads for node, x in pairs])

    # ------------------------------------------------------------------ the function

    def end(self, outputs: Sequence[Tensor], fixed: Sequence[Tensor]) -> list[Tensor]:
        """Complete the graph; returns memory into which each step writes these tensors.

        Those that are `fixed` nobody writes.
        """
        memory = self.memory(
            lambda: [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in outputs]
        )
        for new, t in zip(memory, outputs, strict=True):
            new.copy_(t)
        self.graph.output(None)
        prune(self.graph, {self._nodes[id(t)] for t in fixed if id(t) in self._nodes})
        return memory

    def close(self) -> None:
        """Let go of everything, without a garbage collector."""
        self._nodes.clear()
        self._alive.clear()
        del self._functions.recorder, self._functions, self._fake


class _Functions(TorchFunctionMode):
    """Sees the functions of ours that may look at what tensors on the CPU hold, and those of others
    that do.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS and not self.recorder._resting:
            raise Refused(f"{func.__name__} reads a tensor on the host: choose by torch.where")
        form = form_of(func)
        if not (form or is_one_operator(func)) or self.recorder._resting:
            return func(*args, **kwargs)
        if form is not None:
            out = self.recorder.imagined(form, *args)
            return self.recorder.call(func, args, out, writes="what it takes")
        function = func.__wrapped__
        given = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if not all([t.is_cpu for t in given]):
            return function(*args, **kwargs)
        out = self.recorder.imagined(function, *args, **kwargs)
        return self.recorder.call(function, args, out)


class _Caught(Exception):
    """Raised by `_Catch` with the operator that was asked for."""


class _Catch(TorchDispatchMode):
    """Raises at the first operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Caught(func, args, kwargs or {})


def _quicker(func: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    """The function of torch with this name, where it comes to the same: it takes half the time."""
    name = schema(func).name.rpartition("::")[2]
    for home in (torch, Tensor):
        function: Any = getattr(home, name, None)
        try:
            if function is not None:
                with _Catch():  # type: ignore[no-untyped-call]
                    function(*args, **kwargs)
        except _Caught as caught:
            same = caught.args[0] is func and _equal(caught.args[1:], (args, kwargs))
            if same and _named(function):
                return function
        except Exception:  # it takes other arguments
            continue
    return func


def _named(function: Any) -> bool:
    """Whether a graph can name it."""
    graph = Graph()
    graph.call_function(function)
    try:
        graph.python_code("self")
    except RuntimeError:
        return False
    return True


def _equal(some: Any, others: Any) -> bool:
    (a, form), (b, other) = tree_flatten(some), tree_flatten(others)
    pairs = zip(a, b, strict=False)
    return form == other and all([x is y if isinstance(x, Tensor) else x == y for x, y in pairs])


def python(graph: Graph) -> Callable[..., Any]:
    """A graph as a function of Python."""
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(code.src, space)
    return partial(space.pop("forward"), None)  # else it would hold itself


def _done(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _returned(told: Any, args: Any, kwargs: Any) -> Any:
    """The argument that an operator writes and returns, if it is one of those."""
    made = told.returns[0].alias_info if len(told.returns) == 1 else None
    if made is None or not made.is_write:
        return None
    return next((x for alias, x in written(told, args, kwargs) if alias == made.before_set), None)
