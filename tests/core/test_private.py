"""A torch without one of the names that it calls its own: another way, or a sentence."""

from __future__ import annotations

import ast
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torchzero_clip
from tests.engines.test_replays import Twins, headline
from tests.helpers import ROOT, Named, at_once, close, gradients, parameters, seed, train
from tests.modules.rows.row import with_lr
from tests.table import Case, every
from torchzero_clip import (
    LR,
    Adagrad,
    Adam,
    AdaptiveClip,
    ClipNorm,
    ClipValue,
    Guard,
    Modular,
    Momentum,
    Normalize,
    Transform,
    WeightDecay,
    ZStat,
)
from torchzero_clip.core import torch_private
from torchzero_clip.core.sharding import layout, owned_tensors
from torchzero_clip.core.sharding.layout import Layout, local
from torchzero_clip.engines.compiled.replay import native_forms
from torchzero_clip.engines.compiled.replay.native_forms import forms_of
from torchzero_clip.source import SourceError

PACKAGE = Path(torchzero_clip.__file__).parent
FOREACH = [name for name in dir(torch) if name.startswith("_foreach_")]
CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "adam": lambda: [ClipNorm(1.0, dim="global"), Adam(amsgrad=True), WeightDecay(0.1), LR(0.1)],
    "momentum": lambda: [AdaptiveClip(ZStat()), Momentum(0.9, nesterov=True), LR(0.1)],
    "adagrad": lambda: [ClipValue(0.5), Adagrad(), Normalize(), LR(0.1)],
}
REPEATS = [name for name, told in torch_private.NAMES.items() if torch_private.ANEW in told.without]
WHEN_IMPORTED = ("torch.utils._python_dispatch", "torch.utils._pytree")


def take_away(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Have torch be without this name."""
    home, _, name = path.rpartition(".")
    if path in ("torch.Tensor._base", "torch._ops.OpOverload._schema"):  # each object has one
        owner = Tensor if name == "_base" else torch._ops.OpOverload
        monkeypatch.setattr(owner, name, property(Gone(name)), raising=False)
    else:
        monkeypatch.delattr(importlib.import_module(home), name)


class Gone:
    """What an attribute that is gone does when it is asked for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, owner: Any) -> Any:
        raise AttributeError(f"it has no {self.name}")


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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
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


# --- another way


@every()
def test_rules_step_without_any_foreach_operator(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for gone in (False, True):
        with monkeypatch.context() as patch:
            for name in FOREACH if gone else ():
                patch.delattr(torch, name)
            seed()
            params = parameters(case.shapes)
            train(params, Modular(list(params.items()), *with_lr(case.make(), 0.1)), range(3))
        ends.append(params)
    close(*ends, rtol=2e-5, atol=1e-6)


ONE = [
    *[(f"{name}{end}", 0) for name in ("abs", "neg", "sign", "sqrt") for end in ("", "_")],
    *[(f"{name}{end}", 1) for name in ("add", "sub", "mul", "div") for end in ("", "_")],
    *[(f"{name}{end}", 1) for name in ("clamp_min", "clamp_max") for end in ("", "_")],
    *[(f"{name}{end}", 2) for name in ("lerp", "addcmul") for end in ("", "_")],
    *[("clone", 0), ("copy_", 1), ("reciprocal_", 0), ("norm", 0)],
]
ONE = [row for row in ONE if f"_foreach_{row[0]}" in FOREACH]  # `clone` is there since torch 2.12
"""Foreach operators, and how many lists they take besides."""


@at_once("short, count", ONE)
def test_a_step_needs_no_foreach_operator(short: str, count: int) -> None:
    for name, make in CHAINS.items():
        expected, _ = trained(make)
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(torch, f"_foreach_{short}")
            close(trained(make, compile=name == "adam")[0], expected, rtol=2e-5, atol=1e-6)


@at_once("short, count", ONE)
def test_one_after_the_other_gives_what_a_foreach_operator_gives(short: str, count: int) -> None:
    name = f"_foreach_{short}"
    lists = [[t.abs() + 0.1 for t in gradients(seed=i).values()] for i in range(count)]
    ends = []
    for gone in (False, True):
        tensors = [t.abs() for t in gradients(seed=9).values()]
        args = [2] if short == "norm" else lists
        with pytest.MonkeyPatch.context() as patch:
            if gone:
                patch.delattr(torch, name)
            made = torch_private.foreach(short, tensors, *args)
        ends.append(tensors if short.endswith("_") else list(made))
    close(*ends)


@pytest.mark.parametrize("name", ["adam", "momentum", "adagrad"])
def test_without_a_fused_optimizer_its_update_is_made_of_operators(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = trained(CHAINS[name])
    take_away(
        monkeypatch, f"torch._fused_{ {'adam': 'adamw', 'momentum': 'sgd'}.get(name, name) }_"
    )
    close(trained(CHAINS[name])[0], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("compile", [False, True])
def test_tensors_that_tell_no_base_are_copied_together(
    compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = trained(CHAINS["momentum"], compile=compile)
    take_away(monkeypatch, "torch.Tensor._base")
    assert torch_private.base(torch.ones(2)[:1]) is None
    close(trained(CHAINS["momentum"], compile=compile)[0], expected)


def test_a_guard_that_stops_the_program_looks_at_the_flag_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_away(monkeypatch, "torch._assert_async")
    p = torch.nn.Parameter(torch.ones(2))
    opt = Modular([p], Guard("assert"), LR(0.1))
    p.grad = torch.ones(2)
    opt.step()
    p.grad = torch.full((2,), torch.nan)
    with pytest.raises(RuntimeError, match="Guard: "):
        opt.step()


def test_tensors_that_do_not_say_that_they_have_no_values_are_taken_for_others() -> None:
    t = torch.ones(2)
    assert torch_private.fake_mode(t) is None
    t.fake_mode = "a mode"  # type: ignore[attr-defined]
    assert torch_private.fake_mode(t) == "a mode"


def test_fake_numbers_of_the_host_are_known_where_torch_keeps_them() -> None:
    assert torch_private.known_number(torch.tensor(2.0)) == 2
    fake = torch.ones(())
    fake.fake_mode, fake.constant = "a mode", torch.tensor(3.0)  # type: ignore[attr-defined]
    assert torch_private.known_number(fake) == 3
    del fake.constant  # type: ignore[attr-defined]
    assert math.isnan(torch_private.known_number(fake))


def test_torch_takes_a_class_for_its_own_in_a_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(torch.Tensor):
        pass

    def taken() -> bool:
        tensors: list[Any] = [torch.ones(2).as_subclass(Other)]
        return torch.utils._foreach_utils._has_foreach_support(tensors, torch.device("cuda"))

    with torch_private.taken_for_plain(Other):
        assert taken()
    assert not taken()
    take_away(monkeypatch, "torch.optim.optimizer._foreach_supported_types")
    take_away(monkeypatch, "torch.utils._foreach_utils._foreach_supported_types")
    with torch_private.taken_for_plain(Other):
        pass


def test_parameters_of_fsdp1_that_do_not_say_so_are_taken() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    assert not torch_private.is_flat(p)
    p._fsdp_flattened = True  # type: ignore[attr-defined]
    assert torch_private.is_flat(p)


def test_without_a_way_to_hide_a_function_from_torch_compile_it_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert torch_private.untraced(trained) is not trained
    take_away(monkeypatch, "torch._disable_dynamo")
    assert torch_private.untraced(trained) is trained


def test_without_dlpacks_table_steps_are_repeated_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Tensor, "__dlpack_c_exchange_api__", raising=False)
    native_forms.native_function.cache_clear()
    try:
        assert forms_of([torch.ones(2)]) is None
        Twins(headline).warm()
    finally:
        native_forms.native_function.cache_clear()


def test_a_part_that_is_on_its_way_is_waited_for_by_the_name_that_torch_documents(
    monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    coming = AsyncCollectiveTensor(torch.ones(2))
    sharded = DTensor.from_local(coming, alone, [Shard(0)], run_check=False)
    monkeypatch.delattr(AsyncCollectiveTensor, "trigger_wait")
    assert type(local(sharded)) is Tensor


def test_kernels_of_a_triton_that_launches_otherwise_are_left_to_it() -> None:
    """Without `run`, or where it takes something else, and in the interpreter, which has none."""

    def run(x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None: ...

    for kernel in (None, SimpleNamespace(), SimpleNamespace(run=run)):
        assert torch_private.launcher(kernel) is None


def test_parts_that_torch_does_not_name_are_asked_for_and_sharded_steps_done_anew(
    monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    expected, opt = trained_in_parts(alone)
    assert opt.engine.replays.count > 0
    monkeypatch.setattr(layout, "parts", list)  # what there is without `_local_tensor`
    params, opt = trained_in_parts(alone)
    close(params, expected)
    assert opt.engine.replays.count == 0
    assert "which tensors hold the parts" in opt.explain()


def test_ranks_that_cannot_be_named_are_asked_in_steps_done_anew(
    monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    expected, _ = trained_in_parts(alone)
    take_away(monkeypatch, "torch.distributed.distributed_c10d._resolve_process_group")
    params, opt = trained_in_parts(alone)
    close(params, expected)
    assert opt.engine.replays.count == 0
    assert "has no torch.distributed.distributed_c10d._resolve_process_group" in opt.explain()


def trained_in_parts(mesh: Any) -> tuple[Named, Any]:
    """A sharded model after some steps, and its optimizer."""
    whole = {name: p.detach() for name, p in parameters().items() if p.dim()}
    parts = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in whole.items()}
    params = {name: torch.nn.Parameter(t) for name, t in parts.items()}
    opt = Modular(list(params.items()), ClipNorm(1.0, dim="global"), Adam(), LR(0.1), compile=True)
    opt.engine = opt.engine.twin()
    for _ in range(4):
        for p in params.values():
            p.grad = torch.ones_like(p)
        opt.step()
    return {name: local(p.detach()) for name, p in params.items()}, opt


# --- a sentence


@pytest.fixture
def alone() -> Iterator[Any]:
    """A mesh of this process."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_without_a_mesh_that_has_no_groups_the_matrix_of_an_owner_raises_a_sentence(
    monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    torch_private.mesh_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.device_mesh.DeviceMesh", lambda device, mesh: None)
        with pytest.raises(
            torch_private.Missing, match="has no _init_backend, which is for the mesh"
        ):
            owned_tensors.hold(torch.ones(2), torch.ones(2), 0)
    assert owned_tensors.owner_of(owned_tensors.hold(torch.ones(2), torch.ones(2), 0)) == 0


class Renamed:
    """FSDP's placement behind tensor parallelism, in a torch that calls its `split_factor` else."""

    dim = 0

    def is_partial(self) -> bool:
        return False


def test_a_placement_that_does_not_say_what_is_split_first_is_an_error_and_never_a_wrong_part() -> (
    None
):
    mesh: Any = SimpleNamespace(size=lambda i: 2)
    assert Layout(mesh, (Shard(0), Shard(0)), (8,)).extents((0, 1)) == [(2, 4)]
    assert Layout(mesh, (_StridedShard(0, split_factor=2), Shard(0)), (8,)).extents((0, 1)) == [
        (4, 6)
    ]
    with pytest.raises(torch_private.Missing, match="has no split_factor"):
        Layout(mesh, (Renamed(), Shard(0)), (8,)).extents((0, 1))


@pytest.mark.parametrize("path", [name for name in REPEATS if not name.startswith(WHEN_IMPORTED)])
def test_a_step_that_cannot_be_recorded_is_done_anew(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, replayed = trained(CHAINS["adam"], compile=True)
    assert replayed.engine.replays.count > 0
    take_away(monkeypatch, path)
    params, opt = trained(CHAINS["adam"], compile=True)
    close(params, expected)
    assert opt.engine.replays.count == 0
    assert path in opt.engine.replays.why or path.rpartition(".")[2] in opt.engine.replays.why


def test_a_file_that_would_call_what_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    opt = Modular([torch.zeros(1)], ClipNorm(1.0, dim="global"), LR(0.1))
    with monkeypatch.context() as patch:
        patch.delattr(torch, "_foreach_norm")
        with pytest.raises(SourceError, match=r"call torch\._foreach_norm, which torch .* not"):
            opt.to_source()
    take_away(monkeypatch, "torch._C.DisableTorchFunctionSubclass")
    with pytest.raises(
        torch_private.Missing, match=r"has no torch\._C\.DisableTorchFunctionSubclass"
    ):
        opt.to_source()


BEFORE = """
import importlib, json, sys
import torch, torch._dynamo, torch._subclasses.fake_tensor

for path in sys.argv[1:]:
    home, _, name = path.rpartition(".")
    home = importlib.import_module(home)
    gone = getattr(home, name)
    delattr(home, name)
    for module in [module for module in sys.modules if module.startswith("torchzero_clip")]:
        del sys.modules[module]
    from torchzero_clip import LR, Adam, ClipNorm, Modular
    setattr(home, name, gone)  # which torch itself needs
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    opt = Modular(params, ClipNorm(1.0), Adam(), LR(0.1), compile=True)
    for _ in range(4):
        for p in params:
            p.grad = torch.ones(3)
        opt.step()
    try:
        said, raised = opt.explain(), False
    except RuntimeError as error:
        said, raised = str(error), True
    replays = opt.engine.replays
    print(json.dumps([path, params[1][0].item(), replays.count, replays.why, said, raised]))
"""


def test_the_package_is_imported_and_steps_without_what_repeats_need() -> None:
    paths = [name for name in REPEATS if name.startswith(WHEN_IMPORTED)]
    command = [sys.executable, "-c", BEFORE, *paths]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    said = [json.loads(line) for line in run.stdout.splitlines()]
    assert [path for path, *_ in said] == paths
    for path, value, count, why, plan, raised in said:
        assert value == pytest.approx(0.6, abs=1e-4)
        assert (count, path in why) == (0, True)
        assert f"has no {path}" in plan
        assert raised == (torch_private.NAMES[path].without == torch_private.NEITHER)


# --- all of them


def test_every_name_is_taken_away_here() -> None:
    text = Path(__file__).read_text()
    for path in torch_private.NAMES:
        name = path.rpartition(".")[2].replace("_foreach_*", "FOREACH")
        fused = name.startswith("_fused_") and "torch._fused_{" in text
        assert path in REPEATS or fused or name in text, path


def test_without_a_way_out_of_modes_numbers_are_computed_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_away(monkeypatch, "torch.utils._python_dispatch._disable_current_modes")
    with torch_private.without_modes():
        assert torch.arange(3).tolist() == [0, 1, 2]
