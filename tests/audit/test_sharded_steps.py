"""Steps of models whose parameters lie on eight ranks, of a process group that only pretends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers import at_once
from torchzero_clip import (
    AGC,
    LR,
    Adam,
    Centralize,
    ClipNorm,
    Guard,
    Modular,
    Orthogonalize,
    Shampoo,
    Transform,
    ZClip,
)
from torchzero_clip.audit import Ledger, fake_cuda, ledgers, lines, same
from torchzero_clip.core.sharding.owned_tensors import owner_of

RANKS = 8


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    warnings.filterwarnings("ignore")
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


COLLECTIVES: dict[str, tuple[int, Callable[[], Sequence[Transform]]]] = {
    "entries": (0, lambda: [Adam(), LR(0.1)]),
    "a norm of all": (1, lambda: [ClipNorm(1.0, dim="global"), Adam(), LR(0.1)]),
    "a norm each": (1, lambda: [ClipNorm(1.0), Adam(), LR(0.1)]),
    "along the cut": (1, lambda: [ClipNorm(1.0, dim=0), LR(0.1)]),
    "a mean each": (1, lambda: [Centralize(), LR(0.1)]),
    "two of one norm": (1, lambda: [Guard(), ClipNorm(1.0, dim="global"), Adam(), LR(0.1)]),
    "memory": (1, lambda: [ZClip(), Adam(), LR(0.1)]),
    "weights and gradients": (2, lambda: [AGC(), LR(0.1)]),
    "owners": (2, lambda: [Orthogonalize(), LR(0.1)]),
}
"""The most collectives of a step of many matrices of one shape."""


def sharded(mesh: Any) -> Tensor:
    local = torch.empty(4, 16, device="cuda:0")
    whole = {"shape": torch.Size((4 * RANKS, 16)), "stride": (16, 1)}
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **whole)


def parameters(count: int, mesh: Any) -> list[tuple[str, torch.nn.Parameter]]:
    params = [torch.nn.Parameter(sharded(mesh)) for _ in range(count)]
    for p in params:
        p.grad = sharded(mesh)
    return [(f"layer{i}.weight", p) for i, p in enumerate(params)]


def steps(chain: Sequence[Transform], count: int) -> list[Ledger]:
    mesh = init_device_mesh("cuda", (RANKS,))
    with fake_cuda():
        named = parameters(count, mesh)
        return ledgers(lambda _: Modular(named, *chain), [p for _, p in named])


@at_once("name", COLLECTIVES)
def test_collectives_keep_their_budget_and_nothing_waits(name: str) -> None:
    most, make = COLLECTIVES[name]
    for count in (3, 12):
        *_, before, last = steps(make(), count)
        assert len(last.collectives) <= most, lines(last.collectives)
        assert last.of("read", "copy") == [], lines(last.of("read", "copy"))
        assert same(before, last) is None


def test_every_rank_owns_a_matrix_with_state() -> None:
    """The owners are those that real ranks find: a mesh is no tensor of the imagined device."""
    mesh = init_device_mesh("cuda", (RANKS,))
    with fake_cuda():
        named = parameters(RANKS, mesh)
        opt = Modular(named, Shampoo(), LR(0.1))
        for _ in range(2):
            opt.step()
        owners = [owner_of(opt.state[p]["Shampoo/left"]) for _, p in named]
    assert sorted(owners) == list(range(RANKS))
