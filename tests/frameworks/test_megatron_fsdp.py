"""Megatron-FSDP's `fully_shard_optimizer`, called as it is, around chains.

Its model asks for CUDA. `Model` stands for it, with the three methods that the optimizer calls.
Shards are cut where Megatron-FSDP may cut them, which is not where torch does, and those that are
empty have no gradient.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from tests.frameworks.common import data, leave, need, network, processes, values
from tests.helpers import ROOT, equal, state_of
from torchzero_clip import LR, Adam, ClipNorm, Guard, Modular, WeightDecay, ZClip, attach

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]
WEIGHTS = {(5, 3): 1, (4,): 0, (6, 2): 4}  # shapes, and how many of their rows the first rank has


class Model:
    """What the optimizer knows of the model: gradients are in `.grad` once they are synced."""

    model_auto_sync = False

    def __init__(self, params: Any) -> None:
        self.said: list[str] = []
        for p in params:
            p._megatron_fsdp_model = self

    def finish_grad_sync(self) -> None:
        self.said.append("synced")

    def install_optimized_model_weights(self) -> None:
        self.said.append("installed")

    def zero_grad_buffer(self) -> None:
        self.said.append("zeroed")


def links() -> list[Any]:
    return [Guard(), ZClip(warmup_steps=2), Adam(), WeightDecay(0.1), LR(1e-2)]


def page() -> dict[str, Any]:
    """The names that the page makes before it makes a model."""
    need("megatron_fsdp")
    text = (ROOT / "docs" / "frameworks" / "megatron.md").read_text()
    block = re.search(
        r'^```python title="needs megatron_fsdp .*?"\n(.*?)^model = ', text, re.M | re.S
    )
    assert block, "the page has no block that makes a model"
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


def shard(params: Any, opt: Any) -> Model:
    """As the page does."""
    model = Model(params)
    assert page()["sharded"](opt) is opt
    return model


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(net: nn.Module, opt: Any) -> dict[str, Tensor]:
    for x, y in data():
        nn.functional.mse_loss(net(x), y).backward()
        opt.step()
        opt.zero_grad()
    return values(net)


def test_its_step_of_zero_gradients_leaves_no_trace(alone):
    net = network()
    opt = Modular(net.parameters(), *links())
    opt.init_state()
    before = state_of(opt), values(net)
    shard(net.parameters(), opt)
    assert equal((state_of(opt), values(net)), before)


def test_without_these_lines_it_decays_weights_and_thresholds_learn_a_zero(alone):
    net = network()
    opt, before = Modular(net.parameters(), *links()), values(net)
    Model(net.parameters())
    need("megatron_fsdp").fully_shard_optimizer(opt)
    torch.testing.assert_close(values(net), {k: v * (1 - 1e-3) for k, v in before.items()})
    assert opt.param_groups[0]["chain"]["ZClip/count"] == 1


def test_a_chain_inside_it_is_the_chain(alone):
    net, other = network(), network()
    opt = Modular(net.parameters(), *links())
    model = shard(net.parameters(), opt)
    found, wanted = train(net, opt), train(other, Modular(other.parameters(), *links()))
    assert equal(found, wanted)
    assert model.said == ["synced", "installed", "zeroed"] * len(data())


def test_a_handle_in_front_of_an_optimizer_sees_the_gradients_that_were_synced(alone):
    net = network()
    model = Model(net.parameters())
    opt = need("megatron_fsdp").fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    handle = attach(opt, ClipNorm(0.5, dim="global"))

    def arrive() -> None:
        for p in net.parameters():
            p.grad = torch.full_like(p, 2.0)

    model.finish_grad_sync = arrive  # type: ignore[method-assign]
    before = values(net)
    opt.step()
    moved = torch.cat([(before[k] - v).flatten() for k, v in values(net).items()])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.5))
    assert handle.metrics()["ClipNorm/norm"] == pytest.approx(2 * moved.numel() ** 0.5)


# --- shards, on two ranks

SAID = ["→ all are one", "→ resumed", "→ tensors, groups and columns", "→ attached"]


def part(whole: Tensor) -> Tensor:
    first = WEIGHTS[tuple(whole.shape)]
    here = whole[first:] if dist.get_rank() else whole[:first]
    mesh = dist.init_device_mesh("cpu", (2,))
    size = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(here.clone(), mesh, [Shard(0)], run_check=False, **size)


def gradients(steps: int) -> list[list[Tensor]]:
    rng = torch.Generator().manual_seed(4)
    return [[(1 + i) * torch.randn(s, generator=rng) for s in WEIGHTS] for i in range(steps)]


def start(cut: Any, chain: list[Any] | None = None) -> tuple[list[nn.Parameter], Any]:
    rng = torch.Generator().manual_seed(5)
    params = [nn.Parameter(cut(torch.randn(shape, generator=rng))) for shape in WEIGHTS]
    opt = Modular(params, *(chain or links()))
    if cut is part:
        shard(params, opt)
    return params, opt


def steps(run: Any, grads: list[list[Tensor]], cut: Any) -> list[Tensor]:
    params, opt = run
    for row in grads:
        for p, grad in zip(params, row, strict=True):
            here = cut(grad)
            p.grad = here if cut is torch.clone or here.to_local().numel() else None
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in params]


def both(folder: Path) -> None:
    whole, sharded = start(torch.clone), start(part)
    wanted = [part(p) for p in steps(whole, gradients(8), torch.clone)]
    steps(sharded, gradients(8)[:4], part)
    dcp.save({"optimizer": sharded[1].state_dict()}, checkpoint_id=folder)
    held = [p.detach().clone() for p in sharded[0]]
    found = steps(sharded, gradients(8)[4:], part)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.to_local(), other.to_local(), rtol=1e-5, atol=1e-6)
    print(SAID[0])

    params, opt = start(part)
    read = opt.state_dict()
    dcp.load({"optimizer": read}, checkpoint_id=folder)
    opt.load_state_dict(read)
    for p, at in zip(params, held, strict=True):
        p.detach().to_local().copy_(at.to_local())
    again = steps((params, opt), gradients(8)[4:], part)
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(again, found, strict=True))
    print(SAID[1])
    for link in (ClipNorm(0.5), ClipNorm(0.5, dim="group")):
        ends = [
            steps(start(cut, [link, LR(1.0)]), gradients(1), cut) for cut in (torch.clone, part)
        ]
        for one, other in zip(*ends, strict=True):
            torch.testing.assert_close(part(one).to_local(), other.to_local(), rtol=1e-5, atol=1e-6)
    print(SAID[2])

    params, _ = start(part)
    adamw = torch.optim.AdamW(params, lr=1e-2)
    adamw.register_step_pre_hook(page()["fill"])
    need("megatron_fsdp").fully_shard_optimizer(adamw)
    handle = attach(adamw, ClipNorm(0.5, dim="global"))
    steps((params, adamw), gradients(1), part)
    (row,) = gradients(1)
    norm = torch.cat([g.flatten() for g in row]).norm()
    torch.testing.assert_close(handle.metrics()["ClipNorm/norm"], norm, rtol=1e-5, atol=0)
    print(SAID[3])


def test_shards_of_any_rows_have_the_norms_of_the_whole_and_are_resumed(tmp_path):
    need("megatron_fsdp")
    assert processes(__file__, 2, tmp_path) == [SAID] * 2


if __name__ == "__main__":
    dist.init_process_group("gloo")
    both(Path(sys.argv[1]))
    leave()
