"""Private: the names of torch that it calls its own, and what happens where it has one no more.

No other file reaches one. Where there is no other way, `Missing` says which name is gone; a step
that is replayed is then done anew, and `opt.engine.replays.why` is that sentence.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


class Name(NamedTuple):
    """What a name is for, and what happens without it."""

    use: str
    without: str


ANEW = "Steps are done anew, and `opt.engine.replays.why` says so."
SHARDED = "Sharded steps are done anew, and `opt.engine.replays.why` says so."
NEITHER = f"{ANEW} `explain()` raises a sentence."
AUDITS = Name("having torch take fake tensors for its own", "Audits see a tensor after the other.")
NAMES = {
    "torch._foreach_*": Name(
        "an operator on many tensors at once",
        "Slower: a tensor after the other. Without `clone`, torch.compile runs a step as it is.",
    ),
    "torch._fused_adamw_": Name("Adam in one pass", "Slower: by operators on lists."),
    "torch._fused_sgd_": Name("Momentum in one pass", "Slower: by operators on lists."),
    "torch._fused_adagrad_": Name("Adagrad in one pass", "Slower: by operators on lists."),
    "torch._assert_async": Name(
        "guards that stop the program without a wait", "Slower: the host waits for the flag."
    ),
    "torch.Tensor._base": Name(
        "small tensors of state that lie in one vector", "Slower: they are copied together."
    ),
    "torch._C._set_throw_on_mutable_data_ptr": Name(
        "a step that is recorded may read no value by its address", ANEW
    ),
    "torch._disable_dynamo": Name(
        "making an optimizer inside of torch.compile", "torch.compile fails on one that is made."
    ),
    "torch._subclasses.fake_tensor.FakeTensor": Name("values of a step that is recorded", ANEW),
    "torch._subclasses.fake_tensor.FakeTensorMode": Name("recording a step without values", ANEW),
    "torch._ops.OpOverload._schema": Name("what an operator writes", NEITHER),
    "torch.utils._python_dispatch.TorchDispatchMode": Name(
        "seeing the operators of a step", NEITHER
    ),
    "torch.utils._python_dispatch._disable_current_modes": Name(
        "numbers of the host beside tensors that are fake", "Sharded steps cannot be imagined."
    ),
    "torch.utils._pytree.tree_leaves": Name("tensors among arguments", NEITHER),
    "torch.utils._pytree.tree_flatten": Name("tensors among arguments", ANEW),
    "torch.utils._pytree.tree_unflatten": Name("tensors among arguments", ANEW),
    "torch.utils._pytree.tree_map_only": Name("tensors among arguments", ANEW),
    "torch._C.DisableTorchFunctionSubclass": Name(
        "a parameter that stands for all", "`to_source()` raises a sentence."
    ),
    "_fsdp_flattened": Name(
        "refusing the flat parameters of FSDP1", "They are not refused, and their norms are wrong."
    ),
    "fake_mode": Name(
        "tensors that have a form and no values, on which nothing is launched",
        "They are taken for others.",
    ),
    "constant": Name("numbers of the host among tensors that are fake", "They count as changing."),
    "torch.optim.optimizer._foreach_supported_types": AUDITS,
    "torch.utils._foreach_utils._foreach_supported_types": AUDITS,
    "_init_backend": Name("the mesh of an owner", "Sharded matrices raise a sentence."),
    "_local_tensor": Name("the parts here of sharded tensors", f"Slower. {SHARDED}"),
    "torch.distributed.distributed_c10d._resolve_process_group": Name(
        "naming ranks that talk in a step", SHARDED
    ),
    "split_factor": Name("what FSDP splits after others", "A tensor split twice is an error."),
    "__dlpack_c_exchange_api__": Name("where tensors lie", "Slower: they are asked in turn."),
    "triton.compiler.CompiledKernel.run": Name(
        "launches of what Triton has compiled", "Slower: it looks at all arguments each time."
    ),
}
"""Every name, besides `_step_supports_amp_scaling`: torch's GradScaler asks optimizers for it."""


RUN = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"]
"""The parameters of it behind the grid, the stream and the function."""


class Missing(RuntimeError):
    """Raised where there is no other way than by a name that this torch does not have."""


def _found(path: str) -> Any:
    """What torch has under this name; None where there is nothing."""
    home, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(home), name, None)
    except ImportError:
        return None


def _needed(path: str) -> Any:
    """What torch has under this name; raises `Missing` where there is nothing."""
    found = _found(path)
    return _refuse(path) if found is None else found


def _or_refusal(path: str) -> Any:
    """What torch has under this name; a class that nobody can make where there is nothing."""
    found = _found(path)
    refusal = {"__init__": lambda self, *args, **options: _refuse(path)}
    return type(path, (), refusal) if found is None else found


def _refuse(path: str) -> NoReturn:
    raise Missing(f"torch {torch.__version__} has no {path}, which is for {NAMES[path].use}")


FAKE = "torch._subclasses.fake_tensor"
if TYPE_CHECKING:  # classes that others inherit from
    from torch._subclasses import fake_tensor
    from torch.utils import _python_dispatch

    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    FakeTensorMode = fake_tensor.FakeTensorMode
else:
    TorchDispatchMode = _or_refusal("torch.utils._python_dispatch.TorchDispatchMode")
    FakeTensorMode = _or_refusal(f"{FAKE}.FakeTensorMode")
FakeTensor = _or_refusal(f"{FAKE}.FakeTensor")
tree_leaves = _or_refusal("torch.utils._pytree.tree_leaves")
tree_flatten = _or_refusal("torch.utils._pytree.tree_flatten")
tree_unflatten = _or_refusal("torch.utils._pytree.tree_unflatten")
tree_map_only = _or_refusal("torch.utils._pytree.tree_map_only")


def fake_tensors() -> tuple[Any, Any]:
    """The class of tensors that have a form and no values, and a mode that makes them."""
    kind, mode = _needed(f"{FAKE}.FakeTensor"), _needed(f"{FAKE}.FakeTensorMode")
    return kind, mode(allow_non_fake_inputs=True)


def without_memory(t: Tensor) -> None:
    """Have whoever asks this tensor for its address get an error."""
    _needed("torch._C._set_throw_on_mutable_data_ptr")(t)


def schema(operator: Any) -> Any:
    """What an operator of torch takes, writes and returns."""
    found = getattr(operator, "_schema", None)
    return _refuse("torch._ops.OpOverload._schema") if found is None else found


def without_torch_function() -> Any:
    """A context in which subclasses of tensors are plain ones."""
    return _needed("torch._C.DisableTorchFunctionSubclass")()


def without_modes() -> AbstractContextManager[Any]:
    """A context in which tensors are computed with, whatever mode would have them recorded."""
    found = _found("torch.utils._python_dispatch._disable_current_modes")
    return nullcontext() if found is None else cast(AbstractContextManager[Any], found())


def base(t: Tensor) -> Tensor | None:
    """The tensor that this one is a view of."""
    return getattr(t, "_base", None)


def is_flat(param: Tensor) -> bool:
    """Whether this is a flat piece of several parameters, as FSDP1 makes them."""
    return getattr(param, "_fsdp_flattened", False)


def foreach(name: str, tensors: list[Tensor], *args: Any, **options: Any) -> Any:
    """The tensors that torch's foreach operator of this name makes, or nothing where it writes."""
    function = getattr(torch, f"_foreach_{name}", None)
    if function is not None:
        return function(tensors, *args, **options)
    one: Any = torch.linalg.vector_norm if name == "norm" else getattr(Tensor, name)
    if name.startswith("addcmul") and args[2:]:
        args, options = args[:2], {"value": args[2]}
    return [one(t, *[_of(x, i) for x in args], **options) for i, t in enumerate(tensors)]


def _of(x: Any, i: int) -> Any:
    """An operand of the i-th tensor."""
    return x[i] if isinstance(x, (list, tuple)) else x


def has_foreach(name: str) -> bool:
    """Whether torch has a foreach operator of this name."""
    return hasattr(torch, f"_foreach_{name}")


def traced(function: F) -> F:
    """The function, into which torch.compile looks where it can trace a step: since torch 2.12."""
    return function if has_foreach("clone") else cast(F, torch.compiler.disable(function))


def untraced(function: F) -> F:
    """The function, which torch.compile calls and does not look into."""
    found = _found("torch._disable_dynamo")  # that of torch.compiler would import its compiler now
    return function if found is None else cast(F, found(function))


def fused(name: str, **options: Any) -> Callable[..., Any] | None:
    """torch's fused optimizer of this name with these options, or None where it has none."""
    function = getattr(torch, f"_fused_{name}_", None)
    return None if function is None else partial(function, **options)


def is_fused(function: Callable[..., Any] | None, name: str) -> bool:
    """Return whether a function is torch's fused optimizer of this name, with options."""
    own = getattr(function, "func", None)
    return own is not None and own is getattr(torch, f"_fused_{name}_", None)


def name_of_fused(function: Callable[..., Any]) -> str:
    """Return what a fused optimizer is called in a sentence."""
    for name, words in {"adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}.items():
        if is_fused(function, name):
            return f"torch's fused {words}"
    own = getattr(function, "func", function)
    return getattr(own, "__name__", "a fused optimizer")


def assert_async(fine: Tensor, words: str) -> None:
    """Have the device stop the program with these words where a flag is not set."""
    function = getattr(torch, "_assert_async", None)
    if function is not None:
        function(fine, words)
    elif not fine:
        raise RuntimeError(words)


def is_strided(placement: Any) -> bool:
    """Whether this splits a tensor after those behind it on the mesh; raises where it is unsaid."""
    from torch.distributed.tensor import Shard

    plain = type(placement) is Shard
    return not plain and (hasattr(placement, "split_factor") or _refuse("split_factor"))


@lru_cache(maxsize=1024)
def mesh_of(device: str, rank: int) -> Any:
    """A mesh of one rank, on which nothing is sent, and which has no process groups."""
    from torch.distributed.device_mesh import DeviceMesh

    if "_init_backend" not in inspect.signature(DeviceMesh).parameters:
        _refuse("_init_backend")
    with without_modes():
        return DeviceMesh(device, [rank], _init_backend=False)


def parts(tensors: Iterable[Any]) -> list[Any]:
    """The parts here of sharded tensors, which may be on their way; others are all here."""
    return [getattr(t, "_local_tensor", t) for t in tensors]


def group_named(name: str) -> Any:
    """The process group that has this name now."""
    return _needed("torch.distributed.distributed_c10d._resolve_process_group")(name)


def name_of(x: Any) -> Any:
    """The name of a process group; anything else as it is."""
    if not hasattr(x, "group_name"):
        return x
    _needed("torch.distributed.distributed_c10d._resolve_process_group")
    return x.group_name


def exchange_table() -> Any:
    """DLPack's table of functions in C, in a capsule; None where torch gives none."""
    return getattr(Tensor, "__dlpack_c_exchange_api__", None)


def launcher(kernel: Any) -> Callable[..., None] | None:
    """What launches a kernel that Triton has compiled on the current device, given how many
    programs and all arguments; None where there is none, as in its interpreter.
    """
    run: Any = getattr(kernel, "run", None)
    driver, knobs = map(_found, ("triton.runtime.driver", "triton.knobs"))
    known = None not in (run, driver, knobs)
    if not known or list(inspect.signature(run).parameters)[5:] != RUN:
        return None
    device, hooks = driver.active.get_current_device(), knobs.runtime

    def start(programs: int, *given: Any) -> None:
        place = programs, 1, 1, driver.active.get_current_stream(device)
        around, told = (hooks.launch_enter_hook, hooks.launch_exit_hook), None
        if any([getattr(hook, "calls", hook) for hook in around]):  # of a profiler
            told = kernel.launch_metadata(place[:3], place[3], *given)
        run(*place, kernel.function, kernel.packed_metadata, told, *around, *given)

    return start


def fake_mode(t: Tensor) -> Any:
    """What made this tensor, if it has a form and no values; otherwise None."""
    return getattr(t, "fake_mode", None)


def known_number(t: Tensor) -> float:
    """What a tensor of the host holds; NaN where it is fake and that is not known."""
    real = t if fake_mode(t) is None else getattr(t, "constant", None)
    with without_modes():
        return float("nan") if real is None else real.item()


@contextmanager
def taken_for_plain(kind: type) -> Iterator[None]:
    """A block in which torch chooses for tensors of this class as for its own: by lists."""
    lists = [_found(path) or [] for path, name in NAMES.items() if name is AUDITS]
    for kinds in lists:
        kinds.append(kind)
    try:
        yield
    finally:
        for kinds in lists:
            kinds.remove(kind)
