"""Megatron-LM: its registry, names of state, norms and flat shards, by its own files."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.frameworks.as_cuda import AsCuda
from tests.processes.launch import on_ranks
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Clipper,
    Modular,
    WeightDecay,
    ZClip,
    compat,
    megatron_entry,
)

pytestmark = pytest.mark.frameworks
emerging_optimizers = pytest.importorskip("megatron.core.optimizer.emerging_optimizers")
clip_grads = pytest.importorskip("megatron.core.optimizer.clip_grads")
theirs = pytest.importorskip("megatron.core.optimizer.optimizer")
ShardedTensor = pytest.importorskip("megatron.core.dist_checkpointing").ShardedTensor
OptimizerConfig = pytest.importorskip("megatron.core.optimizer").OptimizerConfig
RANKS = "entries", "norm", "tensors", "matrices", "alone", "layers"


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """As `_get_param_groups` makes them."""
    each = {
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "is_expert_parallel": False,
        "default_config": True,
    }
    matrices = [p for p in net.parameters() if p.dim() > 1]
    return [
        {"params": matrices, **each},
        {"params": [p for p in net.parameters() if p.dim() < 2], **each, "wd_mult": 0.0},
    ]


def config(**more: Any) -> Any:
    return OptimizerConfig(
        optimizer="chain", lr=1e-2, weight_decay=0.1, adam_beta2=0.95, clip_grad=0.0, **more
    )


def chain() -> list[Any]:
    return [ZClip(max_norm=1.0), Adam(), WeightDecay(0.0), LR(1.0)]


def made(net: nn.Module, entry: Any, settings: Any) -> Any:
    """What `get_megatron_optimizer` makes of an entry, by its own functions."""
    emerging_optimizers._EMERGING_OPTIMIZERS["chain"] = entry
    pg = SimpleNamespace(tp=None, mp=None)
    inner, init = emerging_optimizers._create_emerging_optimizer(
        settings, groups(net), "chain", [net], pg
    )
    with AsCuda():
        out = theirs.FP32Optimizer(inner, settings, init)
    out.grad_stats_parallel_group = dist.group.WORLD
    out.tp_group = out.expert_tp_group = dist.group.WORLD
    return out


def backward(net: nn.Module, i: int) -> None:
    """Gradients as its DDP leaves them, in main_grad."""
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
    net.zero_grad()
    net(x).square().mean().backward()
    for p in net.parameters():
        vars(p)["main_grad"], p.grad = p.grad, None


def test_the_registry_makes_a_chain_that_trains_as_ours_does() -> None:
    net, other = model(), model()
    settings = config()
    opt = made(net, megatron_entry(*chain()), settings)
    ours = Modular(
        groups(other), ZClip(max_norm=1.0), Adam((0.9, 0.95)), WeightDecay(0.1), LR(1e-2)
    )
    for i in range(8):
        backward(net, i)
        backward(other, i)
        for group in (*opt.optimizer.param_groups, *ours.param_groups):  # as its scheduler does
            group["lr"] = 1e-2 * (1 - i / 10)
            group["weight_decay"] = 0.1 * group["wd_mult"]
        assert opt.step()[0]
        for p in other.parameters():
            p.grad = p.main_grad
        ours.step()
        assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_its_sharded_checkpoint_has_the_names_that_it_reads_and_goes_on() -> None:
    entry, settings = megatron_entry(*chain()), config()
    net = model()
    opt = made(net, entry, settings)
    for i in range(3):
        backward(net, i)
        opt.step()

    def sharded(net: nn.Module) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(name, p) for name, p in net.named_parameters()
        }

    state = opt.sharded_state_dict(sharded(net))
    tensors = {
        x.key: x.data
        for held in state["state"].values()
        if isinstance(held, dict)
        for x in held.values()
    }
    names = {
        f"optimizer.state.{s}.{n}"
        for s in ("exp_avg", "exp_avg_sq")
        for n, _ in net.named_parameters()
    }
    assert set(tensors) == names
    assert state["state"]["common_step"] == 3
    # what its checkpointing does with it: tensors by key, the rest as it is
    saved = {key: t.clone() for key, t in tensors.items()}
    common = copy.deepcopy(state["param_groups"])

    net2 = copy.deepcopy(net)
    again = made(net2, entry, settings)
    empty = again.sharded_state_dict(sharded(net2), is_loading=True)
    held = {
        i: {name: saved[x.key] for name, x in row.items()}
        for i, row in empty["state"].items()
        if isinstance(row, dict)
    }
    for group, there in zip(common, empty["param_groups"], strict=True):
        group["params"] = there["params"].unwrap()
    held["common_step"] = state["state"]["common_step"]
    again.load_state_dict({"state": held, "param_groups": common})
    for i in range(3, 6):
        for one, which in ((net, opt), (net2, again)):
            backward(one, i)
            which.step()
    assert all(map(torch.equal, net.parameters(), net2.parameters()))


def test_norms_and_clips_are_its_own() -> None:
    net, other = model(), model()
    for one in (net, other):
        backward(one, 0)
        for p in one.parameters():
            p.grad = p.main_grad * 30
    with AsCuda():
        norm = clip_grads.get_grad_norm_fp32(
            [p.grad for p in net.parameters()], grad_stats_parallel_group=dist.group.WORLD
        )
        clip_grads.clip_grad_by_total_norm_fp32(net.parameters(), 1.0, norm)
    ours = compat.clip_grad_norm_(other.parameters(), 1.0)
    assert float(norm) == pytest.approx(ours.item(), rel=1e-6)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-6, atol=0)  # theirs adds 1e-6


def test_its_groups_of_norms_are_ours() -> None:
    net, other = model(), model()
    for one in (net, other):
        backward(one, 0)
        for p in one.parameters():
            p.grad = p.main_grad * 30
        for p in list(one.parameters())[:2]:
            vars(p)["grad_norm_group"] = "mtp"
    settings = config()
    opt = made(net, megatron_entry(*chain()), settings)
    with AsCuda():
        norm = opt.clip_grad_norm(1.0)
    clipper = Clipper(other.parameters(), ClipNorm(1.0, dim="global"))
    clipper.step()
    found = dict(zip(("mtp", None), clipper.metrics()["ClipNorm/norm"].tolist(), strict=True))
    assert found[None] == pytest.approx(float(norm), rel=1e-6)
    assert found["mtp"] == pytest.approx(float(opt.grad_norms_by_group["mtp"]), rel=1e-6)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-6, atol=0)


def test_its_optimizers_of_shards_and_of_layers_train_as_a_process_alone_or_refuse() -> None:
    cuts = "Megatron-LM's DistributedOptimizer cuts parameters into flat shards"
    for out in on_ranks(2, "-m", "tests.frameworks.megatron_ranks", *RANKS, limit=200):
        assert out.splitlines() == [
            "entries: as a process alone",
            "norm: as a process alone",
            f"tensors: ClipNorm needs whole tensors, but {cuts}",
            f"matrices: Orthogonalize needs whole tensors, but {cuts}",
            f"alone: ClipNorm computes the global norm over several processes, because {cuts}",
            "layers: as a process alone",
        ]
