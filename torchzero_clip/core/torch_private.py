"""The private names of torch that the library uses. No other file uses private names of torch.

Every supported version of torch has these names, unless `WITHOUT` has an entry for the name.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types as kinds_in_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as kinds_in_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

NAMES = {
    "torch._foreach_*": "running an operator on many tensors at once",
    "torch._fused_adamw_": "Adam in one pass over memory",
    "torch._fused_sgd_": "momentum in one pass over memory",
    "torch._fused_adagrad_": "Adagrad in one pass over memory",
    "torch._assert_async": "a guard that stops the program without a synchronization",
    "torch.Tensor._base": "finding the vector that small tensors of state are parts of",
    "torch._compile._disable_dynamo": "functions that `torch.compile` calls without tracing them",
    "FunctionType._dynamo_marked_constant": "results that are constants for `torch.compile`",
    "torch._subclasses.fake_tensor.FakeTensor": "recording a step without values",
    "torch._subclasses.fake_tensor.FakeTensorMode": "recording a step without values",
    "torch._C._set_throw_on_mutable_data_ptr": "refusing rules that read values by their address",
    "FakeTensor.fake_mode": "telling fake tensors from others",
    "FakeTensor.constant": "known numbers of the host in a recorded step",
    "torch._ops.OpOverload._schema": "finding the tensors that an operator writes",
    "torch.utils._python_dispatch.TorchDispatchMode": "seeing the operators of a step",
    "torch.utils._python_dispatch._disable_current_modes": "real tensors in a recorded step",
    "torch.utils._pytree.tree_flatten": "finding tensors among arguments",
    "torch.utils._pytree.tree_leaves": "finding tensors among arguments",
    "torch.utils._pytree.tree_map_only": "finding tensors among arguments",
    "torch.utils._pytree.tree_unflatten": "finding tensors among arguments",
    "torch._C.DisableTorchFunctionSubclass": "one parameter in place of all in `to_source()`",
    "torch.optim.optimizer._foreach_supported_types": "torch's fast paths for fake tensors",
    "torch.utils._foreach_utils._foreach_supported_types": "torch's fast paths for fake tensors",
    "FlatParameter._fsdp_flattened": "refusing the flat parameters of FSDP1",
    "DTensor._local_tensor": "reading the shard of this rank",
    "DeviceMesh(_init_backend=...)": "a mesh without process groups, for the owner of a matrix",
    "torch.distributed.distributed_c10d._resolve_process_group": "process groups by their names",
    "torch.distributed._composable_state._module_state_mapping": "finding models that "
    "`fully_shard` has sharded after the optimizer was created",
    "_StridedShard.split_factor": "the shards of FSDP after tensor parallelism",
    "torch.Tensor.__dlpack_c_exchange_api__": "the addresses of many tensors in one call",
    "triton.compiler.CompiledKernel.run": "launching compiled kernels of Triton",
}
"""How the library uses each name.

`_step_supports_amp_scaling` is not listed, because GradScaler reads this name.
"""
WITHOUT = {
    "torch._foreach_clone": "Since torch 2.12. Before, tensors are copied one by one, and "
    "`torch.compile` runs a step without tracing it.",
    "torch.Tensor.__dlpack_c_exchange_api__": "Without it, addresses are read one by one.",
    "triton.compiler.CompiledKernel.run": "Without it, Triton checks all arguments of a launch.",
}
"""For some names, what the library does if a version of torch does not have the name."""

RESULTS_KEPT = 4096
"""The largest number of results that a function with `cached` keeps."""
RUN = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"]
"""The parameters of `CompiledKernel.run` after the grid, the stream and the function."""


def fake_tensors() -> tuple[Any, Any]:
    """Return the class of fake tensors, and a mode that makes them."""
    return FakeTensor, FakeTensorMode(allow_non_fake_inputs=True)


def without_memory(t: Tensor) -> None:
    """Make any read of a tensor's address raise an error."""
    torch._C._set_throw_on_mutable_data_ptr(t)


def schema(operator: Any) -> Any:
    """Return the schema of an operator: its arguments, the tensors that it writes, its results."""
    return operator._schema


def without_torch_function() -> Any:
    """Return a context in which torch treats subclasses of Tensor as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which operators run at once, even if a mode would record them."""
    return cast(AbstractContextManager[Any], _disable_current_modes())


def base(t: Tensor) -> Tensor | None:
    """Return the tensor that this tensor is a view of."""
    return t._base


def is_flat(param: Tensor) -> bool:
    """Return whether this is a flat parameter of FSDP1, made of parts of several parameters."""
    return getattr(param, "_fsdp_flattened", False)


def foreach(name: str, tensors: list[Tensor], *args: Any, **options: Any) -> Any:
    """Call torch's foreach operator of this name. If the name ends in "_", it returns nothing."""
    return getattr(torch, f"_foreach_{name}")(tensors, *args, **options)


def has_foreach(name: str) -> bool:
    """Return whether torch has a foreach operator of this name."""
    return hasattr(torch, f"_foreach_{name}")


def clones(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies of tensors."""
    return list(foreach("clone", tensors)) if has_foreach("clone") else [t.clone() for t in tensors]


def cached(function: F) -> F:
    """Keep the last results of a function. `torch.compile` traces the function instead."""
    keeper = lru_cache(RESULTS_KEPT)(function)

    @wraps(function)
    def result(*args: Any) -> Any:
        return function(*args) if torch.compiler.is_compiling() else keeper(*args)

    return cast(F, result)


def traced(function: F) -> F:
    """Let `torch.compile` trace a function from torch 2.12 on. Older versions just call it."""
    return function if has_foreach("clone") else cast(F, torch.compiler.disable(function))


def untraced(function: F) -> F:
    """Let `torch.compile` call a function without tracing it."""
    return cast(F, _disable_dynamo(function))  # `torch.compiler.disable` imports the compiler


def constant(function: F) -> F:
    """Let `torch.compile` call a function while it traces, and take the result as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def fused(name: str, **options: Any) -> Callable[..., Any]:
    """Return torch's fused optimizer of this name with these options."""
    return partial(getattr(torch, f"_fused_{name}_"), **options)


def is_fused(function: Callable[..., Any] | None, name: str) -> bool:
    """Return whether a function is torch's fused optimizer of this name, with options."""
    own = getattr(function, "func", None)
    return own is not None and own is getattr(torch, f"_fused_{name}_", None)


def name_of_fused(function: Callable[..., Any]) -> str:
    """Return the name of a fused optimizer for use in a sentence."""
    for name, words in {"adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}.items():
        if is_fused(function, name):
            return f"torch's fused {words}"
    own = getattr(function, "func", function)
    return getattr(own, "__name__", "a fused optimizer")


def assert_async(fine: Tensor, words: str) -> None:
    """Stop the program with a message if a flag is False. The check does not synchronize."""
    torch._assert_async(fine, words)


def is_strided(placement: Any) -> bool:
    """Return whether a placement splits a tensor after the later dims of the mesh.

    Raise TypeError for an unknown kind of shard, because its ranges would be wrong.
    """
    from torch.distributed.tensor import Shard

    if type(placement) is Shard:
        return False
    if not hasattr(placement, "split_factor"):
        raise TypeError(f"the placement must be a Shard or FSDP's strided shard, got {placement!r}")
    return True


@lru_cache(maxsize=1024)
def mesh_of(device: str, rank: int) -> Any:
    """Return a mesh of one rank. It has no process groups, and nothing is sent on it."""
    from torch.distributed.device_mesh import DeviceMesh

    with without_modes():
        return DeviceMesh(device, [rank], _init_backend=False)


def parts(tensors: Iterable[Any]) -> list[Any]:
    """Return this rank's shards of DTensors. Return plain tensors themselves.

    A collective that computes a shard may still be running.
    """
    return [getattr(t, "_local_tensor", t) for t in tensors]


def group_named(name: str) -> Any:
    """Return the process group that has this name now."""
    distributed: Any = torch.distributed
    return distributed.distributed_c10d._resolve_process_group(name)


def name_of(x: Any) -> Any:
    """Return the name of a process group. Return any other object unchanged."""
    return getattr(x, "group_name", x)


def modules_with_sharding() -> list[torch.nn.Module]:
    """Return the modules to which `fully_shard`, or a similar function of torch, was applied."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    state: Any = importlib.import_module("torch.distributed._composable_state")
    return list(state._module_state_mapping)


def exchange_table() -> Any:
    """Return DLPack's table of C functions in a capsule, or None if torch has none."""
    return getattr(Tensor, "__dlpack_c_exchange_api__", None)


def launcher(kernel: Any) -> Callable[..., None] | None:
    """Return a function that launches a compiled Triton kernel on the current device.

    The arguments of this function are the number of programs and the arguments of the kernel.
    Return None for an unknown version of Triton, and for Triton's interpreter.
    """
    run: Any = getattr(kernel, "run", None)
    try:
        driver: Any = importlib.import_module("triton.runtime").driver
        hooks: Any = importlib.import_module("triton").knobs.runtime
    except (ImportError, AttributeError):
        return None
    if run is None or list(inspect.signature(run).parameters)[5:] != RUN:
        return None
    device = driver.active.get_current_device()

    def start(programs: int, *given: Any) -> None:
        grid = programs, 1, 1
        stream = driver.active.get_current_stream(device)
        around = hooks.launch_enter_hook, hooks.launch_exit_hook
        metadata = None
        if any([getattr(hook, "calls", hook) for hook in around]):  # for a profiler
            metadata = kernel.launch_metadata(grid, stream, *given)
        run(*grid, stream, kernel.function, kernel.packed_metadata, metadata, *around, *given)

    return start


def fake_mode(t: Tensor) -> Any:
    """Return the mode that made a fake tensor, or None for other tensors."""
    return getattr(t, "fake_mode", None)


def known_number(t: Tensor) -> float:
    """Return the number in a CPU tensor, or NaN if the tensor is fake and its value is unknown."""
    real = t if fake_mode(t) is None else cast(FakeTensor, t).constant
    with without_modes():
        return float("nan") if real is None else real.item()


@contextmanager
def taken_for_plain(kind: type) -> Iterator[None]:
    """Let torch use its foreach operators for tensors of this class inside a `with` block."""
    lists: list[list[Any]] = [kinds_in_optimizers, kinds_in_utils]
    for kinds in lists:
        kinds.append(kind)
    try:
        yield
    finally:
        for kinds in lists:
            kinds.remove(kind)
