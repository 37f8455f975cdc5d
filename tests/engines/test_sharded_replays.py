"""Steps of sharded parameters are recorded and replayed, here on the only rank of a group.

Tests on several ranks are in tests/processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.engines.test_replays import never_replayed, replays
from tests.helpers import equal
from tests.processes.apart import listened
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Clipper,
    Group,
    Modular,
    State,
    TensorList,
    Transform,
    ZClip,
    attach,
    captured,
)
from torchzero_clip.core.sharding.collectives import exchange, gather, sum_
from torchzero_clip.core.sharding.layout import local

SHAPES = [(5, 4), (4,), (3, 4), (1,)]


def start() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh with only this process."""
    start()
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def headline() -> Sequence[Transform]:
    return ClipNorm(1.0, dim="global"), Adam(), LR(1e-2)


def model(mesh: Any, chain: Sequence[Transform], **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for shape in SHAPES]
    params = [Parameter(distribute_tensor(t, mesh, [Shard(0)])) for t in whole]
    opt: Any = Modular(params, *chain, compile=True, **options)
    opt.engine = opt.engine.twin()
    return opt


def params_of(opt: Modular) -> list[Any]:
    return [p for group in opt.param_groups for p in group["params"]]


def give(opt: Modular, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params_of(opt):
        g = torch.randn(p.shape, generator=generator)
        p.grad = distribute_tensor(g, p.device_mesh, p.placements)


def holds(opt: Modular) -> list[Any]:
    """Return everything that a step may have changed."""
    rows = []
    for p in params_of(opt):
        state = {name: local(torch.as_tensor(x)) for name, x in opt.state[p].items()}
        rows.append([local(p.detach()), None if p.grad is None else local(p.grad), state])
    return [rows, [group["chain"] for group in opt.param_groups], opt.metrics()]


class Pair:
    """The same sharded model twice: one replays steps, the other runs every step without replay."""

    def __init__(self, mesh: Any, chain: Callable[[], Sequence[Transform]], **options: Any) -> None:
        self.both = [model(mesh, chain(), **options) for _ in range(2)]
        self.fast, slow = self.both
        never_replayed(slow)
        self.count = 0

    def step(self, change: Callable[[Modular], Any] = lambda opt: None) -> bool:
        """Run a step of both optimizers, which must agree; return whether it was replayed."""
        before, logs = replays(self.fast).count, list[list[Any]]()
        for opt in self.both:
            give(opt, self.count)
            change(opt)
            logs.append([])
            with listened(logs[-1]):
                opt.step()
        self.count += 1
        assert logs[0] == logs[1]
        assert equal(holds(self.fast), holds(self.both[1]))
        return replays(self.fast).count == before + 1

    def warm(self) -> Pair:
        """Run steps, the last of which must be replayed."""
        assert [self.step() for _ in range(5)][-1]
        return self


def test_a_step_is_replayed_with_one_collective_and_explain_names_it(mesh: Any) -> None:
    opt = Modular(params_of(model(mesh, headline())), *headline(), compile=True)
    assert "Steps of this chain can be recorded and replayed." in opt.explain()
    for seed in range(4):
        give(opt, seed)
        opt.step()
    log: list[Any] = []
    with listened(log):
        opt.step()
    assert len(log) == 1
    assert opt.explain().splitlines()[-2:] == [
        "Steps are replayed from a recording, 3 so far.",
        "A replayed step is 3 calls of compiled code. PyTorch runs the rest: gather, "
        "aten.index.Tensor.",
    ]


# ---------------------------------------------------------------------- what changes


def other_part(opt: Modular) -> None:
    """Move the local part of a parameter to other memory."""
    p = params_of(opt)[0]
    p._local_tensor = p._local_tensor.clone()


def other_state(opt: Modular) -> None:
    state = opt.state[params_of(opt)[0]]
    if "Adam/exp_avg" in state:
        state["Adam/exp_avg"] = state["Adam/exp_avg"].clone()


def moved_state(opt: Modular) -> None:
    held = opt.state[params_of(opt)[0]].get("Adam/exp_avg")
    if held is not None:
        held._local_tensor = held._local_tensor.clone()


def gaps(opt: Modular) -> None:
    """Give the local part of a gradient memory with gaps."""
    p = params_of(opt)[0]
    p.grad._local_tensor = torch.stack([local(p.grad)] * 2, -1)[..., 0]


def without(opt: Modular) -> None:
    params_of(opt)[1].grad = None


@pytest.mark.parametrize("change", [other_part, other_state, moved_state, without])
def test_a_step_after_a_change_runs_without_replay(
    change: Callable[[Modular], Any], mesh: Any
) -> None:
    pair = Pair(mesh, headline).warm()
    assert not pair.step(change)
    assert any([pair.step() for _ in range(6)])


def test_gradients_with_gaps_in_memory_are_allowed(mesh: Any) -> None:
    pair = Pair(mesh, headline).warm()
    pair.step(gaps)
    assert any([pair.step() for _ in range(6)])


def test_replays_sum_gradients_that_are_only_partly_summed(mesh: Any) -> None:
    """Tensor parallelism leaves such gradients; their collective comes before the links'."""

    def partly(opt: Modular) -> None:
        for p in params_of(opt)[:2]:
            p.grad = DTensor.from_local(p.grad.full_tensor(), mesh, [Partial()], run_check=False)

    pair = Pair(mesh, headline)
    assert [pair.step(partly) for _ in range(5)][-1]
    assert all([p.grad.placements == (Shard(0),) for p in params_of(pair.fast)])


def test_replays_of_replicated_parameters_need_no_collective(mesh: Any) -> None:
    p = Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    opt = Modular([p], *headline(), compile=True)
    log: list[Any] = []
    with listened(log):
        for seed in range(4):
            give(opt, seed)
            opt.step()
    assert replays(opt).count > 0
    assert log == []


def test_a_rank_without_elements_replays_steps_as_well() -> None:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        p = Parameter(
            DTensor.from_local(torch.empty(0, 2), mesh, [Shard(0)], shape=(1, 2), stride=(2, 1))
        )
        opt = Modular([p], Adam(), LR(0.1), compile=True)
        for _ in range(4):
            p.grad = torch.zeros_like(p)
            opt.step()
        assert replays(opt).count > 0
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------- collectives


class Asks(Transform):
    """A rule that calls every collective and does not use the results."""

    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        x = u.tensors[0].detach().reshape(-1).clone()
        world = dist.group.WORLD
        gather(x, world)
        exchange(x, world, [len(x)], [len(x)])
        sum_(x, world)
        return u


def test_a_collective_whose_result_is_not_used_is_replayed(mesh: Any) -> None:
    """Another rank may use the result, or run the step without replay."""
    opt = model(mesh, [Asks(), LR(0.1)])
    logs: list[list[Any]] = []
    for seed in range(5):
        give(opt, seed)
        logs.append([])
        with listened(logs[-1]):
            opt.step()
    assert replays(opt).count > 0
    names = ["all_gather_single", "all_to_all_single", "all_reduce"]
    assert [name.replace("into_tensor", "single") for name, *_ in logs[0]] == names
    assert logs == [logs[0]] * 5


class Sums(Transform):
    """u ← 2u + the sum of 2u over ranks, by a collective"""

    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        pairs = [(x, x.clone()) for x in [t * 2 for t in u.tensors]]
        return TensorList([x + sum_(copy, None) for x, copy in pairs])


@pytest.mark.parametrize("backend", ["plain", "native"])
def test_a_collective_writes_only_its_own_tensor(
    backend: str, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy that it receives is not pruned, although nothing else writes to it."""
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: x.mul_(2))  # two equal ranks
    for chain in (lambda: [Sums(), LR(0.1)], lambda: [ZClip(warmup_steps=2), Sums(), LR(0.1)]):
        pair = Pair(mesh, chain)
        for opt in pair.both:
            opt.engine.backend = backend
        pair.warm()
        give(pair.fast, 0)
        grads = [local(p.grad).clone() for p in params_of(pair.fast)]
        pair.fast.step()
        assert equal([local(p.grad) for p in params_of(pair.fast)], grads)


class Talks(Transform):
    """A rule that calls `torch.distributed` itself."""

    pure = True

    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        self.call = call

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        self.call(torch.ones(1))
        return u


def functional(x: Tensor) -> None:
    x = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
    torch.ops._c10d_functional.wait_tensor(x)


functional.pure = dist.all_reduce.pure = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("call", [dist.all_reduce, functional])
def test_a_rule_that_calls_torch_distributed_is_not_replayed_and_explain_says_so(
    call: Callable[[Tensor], Any], mesh: Any
) -> None:
    opt = model(mesh, [Talks(call), LR(0.1)])
    for seed in range(4):
        give(opt, seed)
        opt.step()
    assert replays(opt).count == 0
    assert (
        "communicates with other ranks, but a recorded step supports communication only for norms"
        in opt.explain()
    )
    assert "c10d" in opt.explain()


def test_a_process_group_that_was_created_again_is_found_by_its_name(mesh: Any) -> None:
    pair = Pair(mesh, headline).warm()
    dist.destroy_process_group()
    start()
    init_device_mesh("cpu", (1,))
    assert pair.step()


def clipped(opt: Any, chain: Sequence[Transform], compile: bool) -> Any:
    return Clipper(params_of(opt), *chain, compile=compile)


def attached(opt: Any, chain: Sequence[Transform], compile: bool) -> Any:
    return attach(opt, *chain, compile=compile)


@pytest.mark.parametrize("make", [clipped, attached])
def test_steps_of_clippers_and_attached_rules_are_replayed(make: Any, mesh: Any) -> None:
    found = []
    for compile in (False, True):
        sgd = torch.optim.SGD(params_of(model(mesh, [LR(1.0)])), lr=0.1)
        rule = make(sgd, [ClipNorm(1.0, dim="global"), ClipNorm(0.5)], compile)
        for seed in range(6):
            give(sgd, seed)
            if make is clipped:
                rule.step()
            sgd.step()
        found.append([local(p.detach()) for p in params_of(sgd)])
        assert not compile or "Steps are replayed" in rule.explain()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_steps_that_wait_for_other_ranks_cannot_be_captured(mesh: Any) -> None:
    stage = [Parameter(torch.ones(3))]
    for opt in (
        model(mesh, headline()),
        Modular(stage, *headline(), compile=True, process_group=dist.group.WORLD),
    ):
        with pytest.raises(ValueError, match=r"captured: .* communicates with other ranks"):
            captured(opt)


def test_pipeline_stages_are_replayed_with_their_process_group(mesh: Any) -> None:
    group = dist.group.WORLD
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(2, 2))]
    opt = Modular(params, *headline(), compile=True, process_group=group)
    logs: list[list[Any]] = []
    for _ in range(5):
        for p in params:
            p.grad = torch.ones_like(p)
        logs.append([])
        with listened(logs[-1]):
            opt.step()
    assert replays(opt).count > 0
    assert logs == [logs[0]] * 5
    assert len(logs[0]) == 1
