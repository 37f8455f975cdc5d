"""FSDP2 as Accelerate sets it up: it exchanges the parameters in the groups of the optimizer."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.frameworks.common import (
    DISTRIBUTED,
    blank,
    data,
    leave,
    need,
    network,
    processes,
    values,
)
from torchzero_clip import Modular

need("accelerate")
pytestmark = pytest.mark.frameworks
WHAT = ("as one process does", "resumes")


def prepared(chain: str) -> tuple[Any, Any, Any]:
    """An accelerator under FSDP2, a model and a chain."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # On CPU it would take DDP, although its FSDP2 runs there: this is what it sets on a GPU.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    net = network()
    prepared = accelerator.prepare(net, optimizer(net, chain))
    prepared[1].optimizer.init_state()
    return accelerator, *prepared


def optimizer(net: nn.Module, chain: str) -> Modular:
    return Modular(net.named_parameters(), *DISTRIBUTED[chain]())


def train(net: nn.Module, opt: Any, backward: Any) -> None:
    for x, y in data():
        opt.zero_grad()
        backward(nn.functional.mse_loss(net(x), y))
        opt.step()


def whole(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor() for name, p in values(net).items()}


def main(folder: str) -> None:
    for chain in DISTRIBUTED:
        check(chain, f"{folder}/{chain}")
    leave()


def check(chain: str, folder: str) -> None:
    accelerator, net, opt = prepared(chain)
    (group,) = opt.optimizer.param_groups
    assert all(a is b for a, b in zip(group["params"], net.parameters(), strict=True))
    assert group["param_names"] == [name for name, _ in net.named_parameters()]
    alone = network()
    mine = optimizer(alone, chain)
    train(net, opt, accelerator.backward)
    train(alone, mine, torch.Tensor.backward)
    for name, p in whole(net).items():
        assert p.shape == alone.get_parameter(name).shape
        torch.testing.assert_close(p, alone.get_parameter(name).data, rtol=1e-6, atol=1e-6)
    print(f"→ {chain}: as one process does")

    accelerator.save_state(folder)
    train(net, opt, accelerator.backward)
    accelerator, resumed, opt = prepared(chain)
    blank(resumed)
    accelerator.load_state(folder)
    train(resumed, opt, accelerator.backward)
    for name, p in whole(net).items():
        assert torch.equal(p, whole(resumed)[name]), name
    print(f"→ {chain}: resumes")


@pytest.mark.parametrize("world", [1, 2])
def test_sharded_training_is_that_of_one_process_and_resumes(world, tmp_path):
    expected = [f"→ {chain}: {what}" for chain in DISTRIBUTED for what in WHAT]
    assert processes(__file__, world, tmp_path) == [expected] * world


if __name__ == "__main__":
    main(sys.argv[1])
