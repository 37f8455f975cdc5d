"""The private names of torch are in one file, and a version without an optional name works."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torchzero_clip
from tests.engines.test_replays import Twins, headline
from tests.helpers import Named, close, parameters, train
from torchzero_clip import (
    LR,
    Adagrad,
    Adam,
    AdaptiveClip,
    ClipNorm,
    ClipValue,
    Modular,
    Momentum,
    Normalize,
    Transform,
    WeightDecay,
    ZStat,
)
from torchzero_clip.core import torch_private
from torchzero_clip.core.sharding.layout import Layout, local
from torchzero_clip.core.sharding.owned_tensors import hold, owner_of
from torchzero_clip.engines.compiled.replay import native_forms
from torchzero_clip.engines.compiled.replay.native_forms import forms_of
from torchzero_clip.source import SourceError

PACKAGE = Path(torchzero_clip.__file__).parent
CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "adam": lambda: [ClipNorm(1.0, dim="global"), Adam(amsgrad=True), WeightDecay(0.1), LR(0.1)],
    "momentum": lambda: [AdaptiveClip(ZStat()), Momentum(0.9, nesterov=True), LR(0.1)],
    "adagrad": lambda: [ClipValue(0.5), Adagrad(), Normalize(), LR(0.1)],
}


def trained(make: Callable[[], list[Transform]], **options: Any) -> tuple[Named, Modular]:
    params = parameters()
    opt = Modular(list(params.items()), *make(), **options)
    return train(params, opt), opt


# --- one place


def private_names(tree: ast.AST) -> Iterator[str]:
    """The names with an underscore in front that are asked of other objects than `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.ImportFrom):
            yield from f"{node.module}.{'.'.join(a.name for a in node.names)}".split(".")
        elif isinstance(node, ast.Import):
            yield from ".".join(a.name for a in node.names).split(".")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            yield from [x.value for x in node.args if isinstance(x, ast.Constant)]
            for text in [x for x in node.args if isinstance(x, ast.JoinedStr)]:
                yield from [x.value for x in text.values if isinstance(x, ast.Constant)]


def own_names(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives: to functions, classes, attributes, modules and fields."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield getattr(node, "attr", None) or node.id
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)  # vars(self)["_judge"]


FOREIGN = {
    "_replace": "of a named tuple",
    "_fields": "of a named tuple",
    "_asdict": "of a named tuple",
    "_getframe": "of sys",
    "_buffers": "of a module, whose buffers may be None, which named_buffers() leaves out",
    "_optimizer": "of the optimizer that Lightning wraps",
    "_step_supports_amp_scaling": "what GradScaler asks an optimizer for",
}


def test_no_other_file_reaches_a_name_that_torch_calls_its_own() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    known = {*FOREIGN, *[path.stem for path in trees]}
    known |= {name for tree in trees.values() for name in own_names(tree)}
    for path in set(trees) - {Path(torch_private.__file__)}:
        asked = [n for n in private_names(trees[path]) if isinstance(n, str) and n[:1] == "_"]
        assert [n for n in asked if not n.startswith("__") and n not in known] == [], path


@pytest.mark.parametrize(
    "line",
    [
        "torch._foreach_mul_(x, 2)",
        "from torch._C import x",
        "import torch._C",
        "getattr(torch, f'_foreach_{name}')",
        "func._schema",
        "DeviceMesh('cpu', [0], _init_backend=False)",
    ],
)
def test_the_test_finds_every_way_to_reach_one(line: str) -> None:
    assert [name for name in private_names(ast.parse(line)) if str(name).startswith("_")]


def test_the_table_has_every_private_name_of_the_file() -> None:
    tree = ast.parse(Path(torch_private.__file__).read_text())
    known = " ".join(torch_private.NAMES)
    asked = {name for name in private_names(tree) if isinstance(name, str) and name[:1] == "_"}
    inside = {
        "_C",
        "_subclasses",
        "_foreach_utils",
        "_python_dispatch",
        "_pytree",
    }  # of other names
    missing = [name for name in asked - inside if name not in known and name[:2] != "__"]
    assert missing == []


# --- versions without an optional name


@pytest.mark.parametrize("name", CHAINS)
def test_a_step_needs_no_foreach_clone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has it since 2.12."""
    compile = name == "adam"
    expected, _ = trained(CHAINS[name], compile=compile)
    monkeypatch.delattr(torch, "_foreach_clone", raising=False)
    tensors = [torch.ones(2), torch.zeros(3)]
    close(dict(enumerate(torch_private.clones(tensors))), dict(enumerate(tensors)))
    close(trained(CHAINS[name], compile=compile)[0], expected)


def test_steps_are_replayed_without_the_table_of_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Tensor, "__dlpack_c_exchange_api__", raising=False)
    native_forms.native_function.cache_clear()
    try:
        assert forms_of([torch.ones(2)]) is None
        Twins(headline).warm()
    finally:
        native_forms.native_function.cache_clear()


def test_another_version_of_triton_launches_its_kernels_itself() -> None:
    """The kernel has no `run`, as in the interpreter, or a `run` with other parameters."""

    def run(x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None: ...

    for kernel in (None, SimpleNamespace(), SimpleNamespace(run=run)):
        assert torch_private.launcher(kernel) is None


def test_a_file_that_calls_an_operator_that_torch_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opt = Modular([torch.zeros(1)], ClipNorm(1.0, dim="global"), LR(0.1))
    monkeypatch.delattr(torch, "_foreach_norm")
    with pytest.raises(SourceError, match=r"needs torch\._foreach_norm, which torch .* not"):
        opt.to_source()


def test_a_step_that_cannot_be_recorded_runs_without_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, replayed = trained(CHAINS["adam"], compile=True)
    assert replayed.engine.replays.count > 0
    monkeypatch.delattr(torch._C, "_set_throw_on_mutable_data_ptr")
    params, opt = trained(CHAINS["adam"], compile=True)
    close(params, expected)
    assert opt.engine.replays.count == 0
    assert "_set_throw_on_mutable_data_ptr" in opt.engine.replays.why
    assert "_set_throw_on_mutable_data_ptr" in opt.explain()


# --- single names


@pytest.fixture
def alone() -> Iterator[Any]:
    """A mesh of this process."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_shard_that_a_collective_still_brings_is_waited_for_by_a_public_method(
    monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    coming = AsyncCollectiveTensor(torch.ones(2))
    sharded = DTensor.from_local(coming, alone, [Shard(0)], run_check=False)
    monkeypatch.delattr(AsyncCollectiveTensor, "trigger_wait")
    assert type(local(sharded)) is Tensor


def test_the_mesh_of_an_owner_has_one_rank(alone: Any) -> None:
    assert owner_of(hold(torch.ones(2), torch.ones(2), 0)) == 0


class UnknownShard:
    """A placement with a dim that is neither torch's Shard nor FSDP's strided shard."""

    dim = 0

    def is_partial(self) -> bool:
        return False


def test_an_unknown_kind_of_shard_is_an_error_and_never_a_wrong_range() -> None:
    mesh: Any = SimpleNamespace(size=lambda i: 2)
    assert Layout(mesh, (Shard(0), Shard(0)), (8,)).extents((0, 1)) == [(2, 4)]
    strided = (_StridedShard(0, split_factor=2), Shard(0))
    assert Layout(mesh, strided, (8,)).extents((0, 1)) == [(4, 6)]
    with pytest.raises(TypeError, match="the placement must be a Shard or FSDP's strided shard"):
        Layout(mesh, (UnknownShard(), Shard(0)), (8,)).extents((0, 1))


def test_tensors_without_a_fake_mode_are_not_fake() -> None:
    t = torch.ones(2)
    assert torch_private.fake_mode(t) is None
    t.fake_mode = "a mode"  # type: ignore[attr-defined]
    assert torch_private.fake_mode(t) == "a mode"


def test_fake_numbers_of_the_host_are_known_if_torch_keeps_them() -> None:
    assert torch_private.known_number(torch.tensor(2.0)) == 2
    fake = torch.ones(())
    fake.fake_mode = "a mode"  # type: ignore[attr-defined]
    fake.constant = torch.tensor(3.0)  # type: ignore[attr-defined]
    assert torch_private.known_number(fake) == 3
    fake.constant = None  # type: ignore[attr-defined]
    assert math.isnan(torch_private.known_number(fake))


def test_torch_takes_a_class_for_its_own_only_in_a_block() -> None:
    class Other(torch.Tensor):
        pass

    def taken() -> bool:
        tensors: list[Any] = [torch.ones(2).as_subclass(Other)]
        return torch.utils._foreach_utils._has_foreach_support(tensors, torch.device("cuda"))

    with torch_private.taken_for_plain(Other):
        assert taken()
    assert not taken()


def test_flat_parameters_of_fsdp1_are_known_by_their_mark() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    assert not torch_private.is_flat(p)
    p._fsdp_flattened = True  # type: ignore[attr-defined]
    assert torch_private.is_flat(p)
