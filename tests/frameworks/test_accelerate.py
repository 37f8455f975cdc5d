"""Accelerate drives a chain as it drives torch's optimizers, sharded parameters included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.frameworks.common import CHAINS, FREE, averaged, blank, data, need, network, values
from tests.helpers import equal
from torchzero_clip import Modular

accelerate = need("accelerate")
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # advice on the kernel and on what is not configured
]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """Its state is shared by all accelerators of a process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Run:
    """A model, an optimizer and a scheduler, prepared."""

    def __init__(self, chain: str, **kwargs: Any) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, **kwargs)
        links = {**CHAINS, **FREE}[chain]()
        opt = Modular((net := network()).named_parameters(), *links)
        cycle = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=16)
        loader = torch.utils.data.DataLoader(data(), batch_size=None)
        prepared = self.accelerator.prepare(net, opt, cycle, loader)
        self.net, self.opt, self.scheduler, self.loader = prepared

    def epoch(self) -> None:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.net):
                self.accelerator.backward(nn.functional.mse_loss(self.net(x), y))
                self.opt.step()
                self.scheduler.step()
                self.opt.zero_grad()  # here: in the last batch of several it would come too early


def by_hand(chain: str, every: int = 1) -> dict[str, Tensor]:
    """The loop that Accelerate stands for."""
    net = network()
    opt = Modular(net.named_parameters(), *CHAINS[chain]())
    cycle = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=16)
    for i, (x, y) in enumerate(2 * data()):
        (nn.functional.mse_loss(net(x), y) / every).backward()
        if (i + 1) % every == 0:
            opt.step()
            cycle.step()
            opt.zero_grad()
    return values(net)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("chain", CHAINS)
def test_it_trains_as_a_loop_by_hand_does(chain, every):
    run = Run(chain, gradient_accumulation_steps=every)
    run.epoch()
    run.epoch()
    assert equal(values(run.net), by_hand(chain, every))


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_resumed_run_is_the_run_without_a_break(chain, precision, tmp_path):
    straight = Run(chain, mixed_precision=precision)
    straight.epoch()
    straight.accelerator.save_state(str(tmp_path))
    straight.epoch()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    resumed = Run(chain, mixed_precision=precision)
    blank(resumed.net)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.epoch()
    assert equal(values(straight.net), values(resumed.net))


def test_metrics_are_read_from_the_optimizer_inside():
    run = Run("clip")
    run.epoch()
    assert "ClipNorm/norm" in run.opt.optimizer.metrics()


def test_a_state_that_is_saved_in_an_evaluation_is_averaged_and_goes_on(tmp_path):
    straight = Run("free")
    straight.epoch()
    straight.opt.eval()
    straight.accelerator.save_state(str(tmp_path))
    shown = values(straight.net)
    straight.opt.train()
    assert equal(shown, averaged(straight.opt.optimizer, straight.net))
    assert not equal(shown, values(straight.net))
    straight.epoch()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    resumed = Run("free")
    blank(resumed.net)
    resumed.accelerator.load_state(str(tmp_path))
    assert equal(shown, values(resumed.net))
    resumed.opt.train()
    resumed.epoch()
    assert equal(values(straight.net), values(resumed.net))
