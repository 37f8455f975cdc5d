"""DeepSpeed takes a chain as its client optimizer; under ZeRO a rank has a piece of everything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.frameworks.common import data, leave, need, network, processes, values
from tests.helpers import equal
from torchzero_clip import LR, Adam, ClipNorm, ClipValue, Modular, Transform, WeightDecay

need("deepspeed")
pytestmark = pytest.mark.frameworks

CLIP: list[Transform] = [ClipNorm(0.1, dim="global"), Adam(), WeightDecay(0.01), LR(1e-2)]
ENTRIES: list[Transform] = [ClipValue(0.01), Adam(), WeightDecay(0.01), LR(1e-2)]


OFF = {"gradient_clipping": 0.0}  # its default is 1


def engine(
    stage: int,
    links: list[Transform],
    clipping: dict[str, float],
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    **kwargs: Any,
) -> Any:
    """What `deepspeed.initialize` makes of a model and a chain, and the chain."""
    import deepspeed

    net = network()
    opt = Modular(groups(net), *links, **kwargs)
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **clipping,
    }
    return deepspeed.initialize(model=net, optimizer=opt, config=config)[0], opt


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """The matrices and the vectors of a model."""
    parts = [[p for p in net.parameters() if p.dim() == dim] for dim in (2, 1)]
    return [{"params": params} for params in parts]


def train(run: Any) -> None:
    for x, y in data():
        run.backward(nn.functional.mse_loss(run(x), y))
        run.step()


def by_hand(
    links: list[Transform], groups: Callable[[nn.Module], Any] = nn.Module.parameters
) -> tuple[dict[str, Tensor], Modular]:
    """The loop that DeepSpeed stands for."""
    net = network()
    opt = Modular(groups(net), *links)
    for x, y in data():
        opt.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        opt.step()
    return values(net), opt


def whole(net: nn.Module, stage: int) -> dict[str, Tensor]:
    """The parameters, gathered where stage 3 has spread them."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
        return values(net)


def main(stage: int, folder: str) -> None:
    import deepspeed

    # its kernel for sums between processes on a CPU would be compiled first
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    pieces = {"process_group": torch.distributed.group.WORLD} if stage else {}
    for name, links, kwargs in (("entries", ENTRIES, {}), ("clip", CLIP, pieces)):
        run, opt = engine(stage, links, OFF, **kwargs)
        train(run)
        expected, mine = by_hand(links)
        torch.testing.assert_close(whole(run.module, stage), expected, rtol=1e-5, atol=1e-6)
        print(f"→ {name}: as one process does")
        if name == "clip":
            norm = mine.metrics()["ClipNorm/norm"]
            torch.testing.assert_close(opt.metrics()["ClipNorm/norm"], norm, rtol=1e-4, atol=0)
            print("→ and measures the same")
        run.save_checkpoint(f"{folder}/{name}")
        train(run)
        other, _ = engine(stage, links, OFF, **kwargs)
        other.load_checkpoint(f"{folder}/{name}")
        train(other)
        assert equal(whole(run.module, stage), whole(other.module, stage))
        print(f"→ {name}: resumes")

    run, _ = engine(stage, CLIP, OFF, two_groups, **pieces)
    train(run)
    separate = [ClipNorm(0.1, dim="group"), *CLIP[1:]]  # because ZeRO makes a step for each group
    expected, _ = by_hand(separate if stage else CLIP, two_groups)
    torch.testing.assert_close(whole(run.module, stage), expected, rtol=1e-5, atol=1e-6)
    print("→ two groups: two norms" if stage else "→ two groups: one norm")

    run, opt = engine(stage, CLIP, {}, **pieces)
    train(run)
    assert opt.metrics()["ClipNorm/norm"].item() == pytest.approx(1.0, rel=1e-4)
    print("→ its own clipping comes first")
    shapes = [tuple(p.shape) for group in opt.param_groups for p in group["params"]]
    print("→ tensors" if shapes == [(32, 10), (32,), (1, 32), (1,)] else "→ pieces")
    leave()


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
def test_deepspeed_trains_as_one_process_does_and_resumes(stage, world, tmp_path):
    said = processes(__file__, world, stage, tmp_path)
    assert said[0] == [
        "→ entries: as one process does",
        "→ entries: resumes",
        "→ clip: as one process does",
        "→ and measures the same",
        "→ clip: resumes",
        "→ two groups: two norms" if stage else "→ two groups: one norm",
        "→ its own clipping comes first",
        "→ pieces" if stage else "→ tensors",
    ]
    assert said == [said[0]] * world


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
