"""torchtitan's container makes chains for parts of a model and saves them flattened, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from tests.frameworks.common import DISTRIBUTED, blank, data, need, network, values
from tests.helpers import equal
from torchzero_clip import LR, Modular

titan = need("torchtitan.components.optimizer")
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # checkpoints of one process warn that it is one
]


def start(chain: str) -> tuple[list[nn.Module], Any, Any]:
    """Two parts of a model, as of a pipeline, their chains and their schedulers."""

    def ours(params: list[dict[str, Any]], **_: Any) -> Modular:
        opt = Modular(params, *DISTRIBUTED[chain]()[:-1], LR(1e-2))
        opt.init_state()
        return opt

    class Optimizers(titan.OptimizersContainer):
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return ours

    group = titan.ParamGroupConfig
    config = Optimizers.Config(
        param_groups=[
            group(pattern="bias$", optimizer_name="Ours", optimizer_kwargs={"lr": 1e-3}),
            group(pattern=".*", optimizer_name="Ours", optimizer_kwargs={"lr": 1e-2}),
        ],
        implementation="foreach",
    )
    first, _, last = network()
    parts = [nn.Sequential(first), nn.ModuleDict({"head": last})]
    opts = Optimizers(config, model_parts=parts)
    schedule = titan.LRSchedulersContainer.Config(warmup_steps=4)
    return parts, opts, schedule.build(optimizers=opts, training_steps=16)


def train(parts: list[nn.Module], opts: Any, schedulers: Any) -> None:
    for x, y in data():
        opts.zero_grad()
        nn.functional.mse_loss(parts[1]["head"](parts[0](x).tanh()), y).backward()
        opts.step()
        schedulers.step()
    opts.zero_grad()


def weights(parts: list[nn.Module]) -> dict[str, Tensor]:
    return {**values(parts[0]), **values(parts[1])}


def state(parts: list[nn.Module], opts: Any, schedulers: Any) -> dict[str, Any]:
    """What torchtitan saves."""
    model = {k: v for part in parts for k, v in part.state_dict().items()}
    return {"model": model, "opt": opts.state_dict(), "lr": schedulers.state_dict()}


@pytest.mark.parametrize("chain", DISTRIBUTED)
def test_it_trains_as_two_chains_by_hand_do(chain):
    run = start(chain)
    train(*run)
    parts, _, _ = start(chain)

    steps = start(chain)
    rates = [steps[2].schedulers[0].lr_lambdas[0](i) for i in range(8)]
    assert rates[:4] == [1 / 4, 2 / 4, 3 / 4, 1.0]  # the warm-up
    opts = [
        Modular(
            [
                {"params": [(n, p) for n, p in part.named_parameters() if n.endswith(end)], "lr": r}
                for end, r in (("bias", 1e-3), ("weight", 1e-2))
            ],
            *DISTRIBUTED[chain]()[:-1],
            LR(1e-2),
        )
        for part in parts
    ]
    for (x, y), rate in zip(data(), rates, strict=True):
        nn.functional.mse_loss(parts[1]["head"](parts[0](x).tanh()), y).backward()
        for opt in opts:
            for group, base in zip(opt.param_groups, (1e-3, 1e-2), strict=True):
                group["lr"] = base * rate
            opt.step()
            opt.zero_grad()
    assert equal(weights(run[0]), weights(parts))


@pytest.mark.parametrize("chain", DISTRIBUTED)
def test_a_resumed_run_is_the_run_without_a_break(chain, tmp_path):
    straight, resumed = start(chain), start(chain)
    train(*straight)
    dcp.save(state(*straight), checkpoint_id=tmp_path)
    train(*straight)
    for part in resumed[0]:
        blank(part)
    load(resumed, tmp_path)
    train(*resumed)
    assert equal(weights(straight[0]), weights(resumed[0]))


def load(run: Any, folder: Path) -> None:
    """Fill the state of a run from a checkpoint, as torchtitan does."""
    parts, opts, schedulers = run
    held = state(*run)
    dcp.load(held, checkpoint_id=folder)
    for part in parts:
        part.load_state_dict({k: held["model"][k] for k in part.state_dict()})
    opts.load_state_dict(held["opt"])
    schedulers.load_state_dict(held["lr"])


@pytest.mark.parametrize("chain", DISTRIBUTED)
def test_state_dict_of_a_chain_that_has_its_state_moves_nothing(chain):
    """Without `init_state` it would take a step with zero gradients: thresholds would learn."""
    parts, opts, schedulers = start(chain)
    before = [repr(opt.state_dict()) for opt in opts]
    state(parts, opts, schedulers)
    assert [repr(opt.state_dict()) for opt in opts] == before


def test_keys_are_names_of_parameters():
    _, opts, _ = start("clip")
    keys = opts.state_dict()
    assert "state.head.weight.Adam/exp_avg" in keys
    assert keys["param_groups.0.bias.lr"] == pytest.approx(1e-3 / 4)
    assert all(isinstance(k, str) for k in keys)
    assert torch.is_tensor(keys["state.0.weight.Adam/step"])
