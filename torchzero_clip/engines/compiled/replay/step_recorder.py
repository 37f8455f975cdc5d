"""The step recorder: it runs a step on tensors without values and writes the step graph.

Inside of `with recorder:`, each PyTorch operator, each launch of a compiled program and each
collective becomes a node of a `torch.fx.Graph`. The tensors are fake tensors, which have a shape
and a dtype but no values. So the model does not change while a step is recorded. Code that reads
the value of a tensor on the host raises an error, because such a step cannot be replayed.

`Replays` records a step and passes the graph to `CompiledStep`. `Replays` also calls `python` to
turn the graph into a Python function, for steps that cannot be compiled. The schema of an operator
tells which arguments the operator writes, so the recorder needs no list of PyTorch's functions.
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
from torchzero_clip.engines.compiled.replay.pruning import form, prune, written_arguments

READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__}
"""The methods that read the values of a tensor without calling a PyTorch operator."""


class Refused(Exception):
    """Raised if a step cannot be replayed. It is raised before the step changes anything."""


class StepRecorder(TorchDispatchMode):
    """A recorder, which writes the step graph of all operations inside of `with recorder:`.

    Args:
        grads: The gradients of the step.

    Attributes:
        graph: The step graph. Its nodes are operators, launches and calls of functions of this
            library, in the order in which they ran.
        leaves: The value of each input of the graph. A value is a tensor that existed before the
            step, or a function of this library.
        created: The tensors that were allocated during recording and that replays use, such as
            constants.
        gradients: The gradient buffers of the current step. Each key is a tuple with the index of
            each gradient in the buffer. Launches find their gradients in this dictionary.
    """

    def __init__(self, grads: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.leaves = list[Any]()
        self.created: list[Tensor] = []
        self.gradients: dict[tuple[int, ...], Buffer] = {}
        self._gradient_keys: dict[int, tuple[int, ...]] = {}  # by the id of a gradient buffer
        self._grads = {id(g): i for i, g in enumerate(grads)}
        _, self._fake = fake_tensors()
        self._paused = False
        self._nodes: dict[int, Node] = {}  # by the id of a tensor
        self._alive: list[Any] = []  # objects whose ids are keys, which must not be reused
        self._functions = _Functions(self)

    def __enter__(self) -> StepRecorder:
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which operations run normally and are not recorded."""
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    def memory(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Allocate and return tensors for all replays. The tensors live as long as the graph."""
        with self.paused():
            tensors = make()
        self.created += tensors
        return tensors

    # ------------------------------------------------------------------ operators of PyTorch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func.namespace == "prim":  # asks for the form of a tensor
            return self.fake_result(func, *args, **kwargs)
        name = str(func)
        signature = schema(func)
        if "c10d" in func.namespace:
            raise Refused(
                f"{name} communicates with other ranks, but a recorded step supports "
                "communication only for norms"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused(
                f"{name} draws random numbers, which a recorded step cannot do: replace each "
                "random number with a hash of group['step']"
            )
        returns_tensors = any(["Tensor" in str(result.type) for result in signature.returns])
        if not (returns_tensors or signature.is_mutable):
            if any([isinstance(t, Tensor) for t in tree_leaves((args, kwargs))]):
                raise Refused(
                    f"{name} copies a value to the CPU, which a recorded step cannot do: "
                    "replace the Python branch on this value with torch.where"
                )
            return func(*args, **kwargs)
        inputs = self._graph_arguments((args, kwargs))
        result = self.fake_result(func, *args, **kwargs)
        node = self.graph.call_function(_quicker(func, args, kwargs), *inputs)
        node.meta["operator"] = func
        if name.startswith("aten.lift_fresh"):  # a constant: each replay gets its own copy
            self.created.append(args[0])
            node.meta["form"] = form(result)
            node = self.graph.call_function(torch.clone, (node,))
            node.meta["operator"] = torch.ops.aten.clone.default
        returned = _returned_argument(signature, args, kwargs)
        if returned is not None and torch.Tag.inplace_view in func.tags:
            self._nodes.pop(id(returned))  # the same tensor has another form from here on
        return self._remember(result if returned is None else returned, node)

    def fake_result(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with fake tensors, and return its result. Nothing is written."""
        with self.paused(), self._fake:
            args, kwargs = tree_map_only((Tensor, float), self._as_fake, (args, kwargs))
            result = function(*args, **kwargs)
        tree_map_only(Tensor, without_memory, result)  # reading its address raises an error
        return result

    def _as_fake(self, x: Tensor | float) -> Any:
        """Return a fake tensor for a tensor, and return a number unchanged unless it is NaN.

        NaN becomes 0.0. PyTorch caches calls on fake tensors, and the key of the cache contains the
        numbers. NaN is unequal to itself, so the cache would never find it.
        """
        if isinstance(x, float):
            return x if x == x else 0.0
        return x if fake_mode(x) is self._fake else self._fake.from_tensor(x)

    def _graph_arguments(self, arguments: Any) -> Any:
        """Return nested arguments with each tensor replaced by its node."""
        leaves, structure = tree_flatten(arguments)
        leaves = [self._node(t) if isinstance(t, Tensor) else t for t in leaves]
        return tree_unflatten(leaves, structure)

    def _node(self, t: Tensor) -> Node:
        """Return the node of a tensor. A tensor from before the step becomes an input node."""
        if id(t) not in self._nodes:
            self._remember(t, self._input(t))
        return self._nodes[id(t)]

    def _input(self, x: Any) -> Node:
        """Add an input to the graph. The graph itself does not store the value of the input."""
        self.leaves.append(x)
        return self.graph.placeholder(f"leaf{len(self.leaves)}")

    def _remember(self, result: Any, node: Node) -> Any:
        """Store which node returned a result. A list of tensors also gets a node for each item."""
        if isinstance(result, Tensor):
            self._alive.append(result)
            if id(result) not in self._nodes:
                self._nodes[id(result)] = node
                node.meta["form"] = form(result)
        elif isinstance(result, (tuple, list)):
            for i, t in enumerate(result):
                if isinstance(t, Tensor) and id(t) not in self._nodes:
                    item = self.graph.call_function(operator.getitem, (node, i))
                    item.meta["item"] = True
                    self._remember(t, item)
        return result

    # ------------------------------------------------------------------ functions of this library

    def call(
        self,
        function: Callable[..., Any],
        args: Any,
        result: Any,
        writes: bool = False,
        writes_arguments: bool = False,
    ) -> Any:
        """Record the call of a function of this library as one node, and return the result.

        Args:
            function: The function that a replay calls.
            args: The arguments of the call.
            result: The result of the call as fake tensors.
            writes: Whether the function may write to memory that existed before the step. If True,
                the call is replayed even if its result is not used.
            writes_arguments: Whether the function may write to its arguments.
        """
        inputs = (self._input(function), *map(self._argument, args))
        node = self.graph.call_function(_call, inputs)
        node.meta["writes"] = writes
        node.meta["writes_arguments"] = writes_arguments
        return self._remember(result, node)

    def _argument(self, x: Any) -> Any:
        """Return `x` as an argument for a graph, or a new input if the graph cannot print `x`."""
        if isinstance(x, Tensor):
            return self._node(x)
        if type(x) in (list, tuple):
            return [self._argument(item) for item in x]
        x = name_of(x)  # a name, because a process group may be created again
        return x if type(x) in (int, float, bool, str) or x is None else self._input(x)

    def launch(self, launch: Launch, runner: Callable[[], Any]) -> Tensor | None:
        """Record a launch, which is one run of a compiled program.

        Args:
            launch: The launch.
            runner: A weak reference to the `Runner` that runs the program in replays.

        Returns:
            A fake tensor for the statistics that the program measures, or None if the program
            measures no statistics.
        """
        statistics = None
        if launch.program.measured is not None:
            device = launch.program.device
            statistics = self.fake_result(
                torch.empty, (1, launch.width), dtype=wide(device), device=device
            )
        buffers = [self._gradient_keys.get(id(buffer), buffer) for buffer in launch.buffers]
        self._alive += launch.buffers
        for key, buffer in zip(buffers, launch.buffers, strict=True):
            if isinstance(key, tuple):
                self.gradients[key] = buffer
        relaunch = Relaunch(launch, runner, buffers, self.gradients)
        arguments = launch.numbers, launch.vectors, launch.scalars
        return self.call(relaunch, arguments, statistics, writes=True)

    def open(self, gradients: Buffer) -> None:
        """Mark a buffer as a gradient buffer, so that each replay uses new gradients instead."""
        self._alive.append(gradients)
        self._gradient_keys[id(gradients)] = tuple([self._grads[id(t)] for t in gradients.tensors])

    def changing(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether any of `tensors` is a gradient, which is a new tensor in every step."""
        return not self._grads.keys().isdisjoint(map(id, tensors))

    @property
    def takes_gradients(self) -> bool:
        """Whether a PyTorch operator in the graph receives a gradient.

        The result of such an operator may depend on the layout of the gradient. Launches of
        compiled programs accept gradients of any layout.
        """
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        pairs = zip(inputs, self.leaves, strict=True)
        return any([bool(node.users) and id(x) in self._grads for node, x in pairs])

    # ------------------------------------------------------------------ the end

    def end(self, outputs: Sequence[Tensor], fixed: Sequence[Tensor]) -> list[Tensor]:
        """Complete and prune the graph.

        Args:
            outputs: The tensors that the step returns.
            fixed: Tensors that no operator writes, such as hyperparameters.

        Returns:
            A new tensor for each output. Every replay writes its outputs to these tensors.
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
        """Drop all references to tensors of the step.

        The memory is then free at once, without a run of the garbage collector.
        """
        self._nodes.clear()
        self._alive.clear()
        del self._functions.recorder, self._functions, self._fake


class _Functions(TorchFunctionMode):
    """The part of the recorder that handles function calls before they become operators.

    Each call of a collective is recorded as one node. A function of this library that may read CPU
    tensors is also recorded as one node. Methods that read a tensor without calling an operator
    raise `Refused`.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if recorder._paused:
            return func(*args, **kwargs)
        if func in READS:
            raise Refused(
                f"{func.__name__} copies a tensor to the CPU, which a recorded step "
                "cannot do: replace the Python branch on this tensor with torch.where"
            )
        collective_form = form_of(func)
        if collective_form is not None:
            result = recorder.fake_result(collective_form, *args)
            return recorder.call(func, args, result, writes=True, writes_arguments=True)
        if not is_one_operator(func):
            return func(*args, **kwargs)
        function = func.__wrapped__
        if not all([t.is_cpu for t in tree_leaves(args) if isinstance(t, Tensor)]):
            return function(*args, **kwargs)
        result = recorder.fake_result(function, *args, **kwargs)
        return recorder.call(function, args, result)


class _Caught(Exception):
    """Raised by `_Catch`. It carries the operator that was called, and the arguments."""


class _Catch(TorchDispatchMode):
    """A mode that raises `_Caught` at the first operator, so that no operator runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Caught(func, args, kwargs or {})


def _quicker(func: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    """Return a public function of PyTorch that calls an operator with the same arguments.

    Calling this function takes half the time of calling the operator. If there is no such function,
    the operator itself is returned.
    """
    name = schema(func).name.rpartition("::")[2]
    for namespace in (torch, Tensor):
        function: Any = getattr(namespace, name, None)
        try:
            if function is not None:
                with _Catch():  # type: ignore[no-untyped-call]
                    function(*args, **kwargs)
        except _Caught as caught:
            same = caught.args[0] is func and _equal(caught.args[1:], (args, kwargs))
            if same and _has_name(function):
                return function
        except Exception:  # the function has other arguments
            continue
    return func


def _has_name(function: Any) -> bool:
    """Return whether a graph can refer to a function by its name when it prints Python code."""
    graph = Graph()
    graph.call_function(function)
    try:
        graph.python_code("self")
    except RuntimeError:
        return False
    return True


def _equal(arguments: Any, others: Any) -> bool:
    """Return whether nested arguments are equal. Tensors are equal if they are the same object."""
    a, structure = tree_flatten(arguments)
    b, other_structure = tree_flatten(others)
    equal = [x is y if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=False)]
    return structure == other_structure and all(equal)


def python(graph: Graph) -> Callable[..., Any]:
    """Return a Python function that runs a graph. Its arguments are the inputs of the graph."""
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(code.src, space)
    return partial(space.pop("forward"), None)  # popped, or the function would refer to itself


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` with `args`.

    A node of a graph cannot call an input of the graph. So the node calls `_call`, and the function
    is an argument.
    """
    return function(*args)


def _returned_argument(signature: Any, args: Any, kwargs: Any) -> Any:
    """Return the argument that an operator writes and returns, or None if the result is new."""
    alias = signature.returns[0].alias_info if len(signature.returns) == 1 else None
    if alias is None or not alias.is_write:
        return None
    pairs = written_arguments(signature, args, kwargs)
    return next((x for names, x in pairs if names == alias.before_set), None)
