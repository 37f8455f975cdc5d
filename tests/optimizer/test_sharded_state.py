"""Checkpoints with whole tensors load into sharded optimizers, and other shards are refused.

One process plays the second of two ranks. Loading needs no communication.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchzero_clip import LR, Adafactor, Adam, Modular, Shampoo, Transform, take_over
from torchzero_clip.core.sharding.layout import Layout, layout_of, local, part_of

SHAPES = [(5, 4), (3,), (4, 4)]


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of two ranks, seen from the second rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def values(number: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def trained(rule: Transform, dtype: torch.dtype = torch.float32, **options: Any) -> Modular:
    """Return an optimizer of whole parameters after two steps."""
    params = [torch.nn.Parameter(t) for t in values(0, dtype)]
    opt = Modular(params, rule, LR(0.1), **options)
    for number in (1, 2):
        for p, grad in zip(params, values(number, dtype), strict=True):
            p.grad = grad
        opt.step()
    return opt


def shards(
    mesh: Any, rule: Transform, like: Modular, placement: Any = None, **options: Any
) -> Modular:
    """Return an optimizer of the same parameters, sharded over the ranks."""
    params: list[Tensor] = []
    for whole in params_of(like):
        layout = Layout(mesh, (placement or Shard(0),), tuple(whole.shape))
        params.append(torch.nn.Parameter(layout.wrap(layout.part(whole.detach()).clone())))
    return Modular(params, rule, LR(0.1), **options)


def params_of(opt: Modular) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


@pytest.mark.parametrize("load", [Modular.load_state_dict, take_over])
@pytest.mark.parametrize("rule", [Adam, Adafactor])
def test_a_rank_keeps_its_shards_of_the_whole_tensors_in_a_checkpoint(
    mesh: Any, rule: Callable[[], Transform], load: Callable[..., Any]
) -> None:
    before = trained(rule())
    opt = shards(mesh, rule(), before)
    load(opt, copy.deepcopy(before.state_dict()))
    for whole, p in zip(params_of(before), params_of(opt), strict=True):
        for key, t in before.state[whole].items():
            mine = opt.state[p][key]
            assert isinstance(mine, DTensor) == (t.shape == p.shape)
            assert torch.equal(local(mine), part_of(t, layout_of(mine)))
            if t.shape == p.shape:  # the whole tensor does not stay in memory
                assert local(mine).untyped_storage().nbytes() == 4 * local(mine).numel()


def test_a_whole_compensation_of_kahan_is_added_to_the_shards_of_exact_weights(mesh: Any) -> None:
    before = trained(Adam(), torch.bfloat16, rounding="kahan")
    saved = copy.deepcopy(before.state_dict())
    whole = trained(Adam(), torch.bfloat16, rounding="exact")
    with torch.no_grad():
        for p, value in zip(params_of(whole), params_of(before), strict=True):
            p.copy_(value)
    opt = shards(mesh, Adam(), before, rounding="exact")
    for one in (whole, opt):
        with pytest.warns(UserWarning, match="compensation of 'kahan'"):
            one.load_state_dict(copy.deepcopy(saved))
    for ours, theirs in zip(params_of(opt), params_of(whole), strict=True):
        assert torch.equal(local(ours), part_of(theirs, layout_of(ours)))
        remainder = whole.state[theirs]["rounding/remainder"]
        mine = opt.state[ours]["rounding/remainder"]
        assert torch.equal(local(mine), part_of(remainder, layout_of(ours)))


@pytest.mark.parametrize("rule", [Adam, Shampoo])
def test_shards_in_a_checkpoint_are_refused_by_whole_parameters(
    mesh: Any, rule: Callable[[], Transform]
) -> None:
    plain = trained(rule())
    opt = shards(mesh, rule(), plain)
    opt.init_state()
    saved = opt.state_dict()
    before = copy.deepcopy(plain.state_dict())
    message = r"as a DTensor with \(Shard\(dim=0\),\) on a mesh of shape \(2,\), but this optimizer"
    with pytest.raises(ValueError, match=f"{message} needs a plain tensor: load the checkpoint"):
        plain.load_state_dict(saved)
    for index, state in plain.state_dict()["state"].items():
        for key, t in state.items():
            assert torch.equal(torch.as_tensor(t), torch.as_tensor(before["state"][index][key]))


def test_shards_along_another_dim_are_refused(mesh: Any) -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    plain = Modular([matrix], Adam(), LR(0.1))
    columns, rows = [shards(mesh, Adam(), plain, Shard(dim)) for dim in (1, 0)]
    columns.init_state()
    with pytest.raises(ValueError, match=r"as a DTensor with \(Shard\(dim=1\),\).* needs a DTens"):
        rows.load_state_dict(columns.state_dict())
