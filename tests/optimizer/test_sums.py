"""Checkpoints of when Muon's momentum was a sum go on as if it had been an average all along."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.sums import AFTER, BEFORE, CHAINS, flat, model, names_of, train
from torchzero_clip import EMA, LR, Modular, Momentum

FILE = Path(__file__).parent.parent / "data" / "sums-0.1.pt"
OLD: dict[str, Any] = torch.load(FILE, weights_only=True)
SUM = "momentum_buffer"


def resumed(name: str) -> tuple[Any, Modular]:
    """The run of today after it has loaded the checkpoint."""
    params = model(names_of(name))
    values = OLD[name]["params"].split([p.numel() for p in params.values()])
    for p, part in zip(params.values(), values, strict=True):
        p.data.copy_(part.view(p.shape))
    opt = CHAINS[name](params, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", ".*was given", UserWarning
        )  # groups have their own values
        opt.load_state_dict(copy.deepcopy(OLD[name]["state"]))
    return params, opt


def test_every_chain_has_its_checkpoint() -> None:
    assert OLD.keys() == CHAINS.keys()


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_with_a_sum_goes_on_with_an_average(name: str) -> None:
    params, opt = resumed(name)
    train(params, opt, range(BEFORE, BEFORE + AFTER))
    torch.testing.assert_close(flat(params), OLD[name]["after"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CHAINS)
def test_each_group_has_its_own_share_of_the_sum(name: str) -> None:
    _, opt = resumed(name)
    held = OLD[name]["state"]
    for now, then in zip(opt.param_groups, held["param_groups"], strict=True):
        assert not {"momentum", "dampening"} & now.keys()
        for p, index in zip(now["params"], then["params"], strict=True):
            kept = {key.rpartition("/")[2]: value for key, value in opt.state[p].items()}
            for key, value in held["state"][index].items():
                if key.endswith(SUM):
                    assert torch.equal(kept["ema"], value * (1 - then["momentum"]))
    assert opt.state_dict()["param_groups"][1]["lr"] == 0.02
    again = CHAINS[name](model(names_of(name)), {})
    with pytest.warns(UserWarning, match="was given"):  # groups have values of their own
        again.load_state_dict(opt.state_dict())


def test_a_sum_with_dampening_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    opt = Modular([p], Momentum(0.5, dampening=0.25), LR(1.0))
    p.grad = torch.ones(2)
    opt.step()
    with pytest.raises(ValueError, match=r"a sum with dampening=0.25 where EMA keeps an average"):
        Modular([p], EMA(0.5), LR(1.0)).load_state_dict(opt.state_dict())


def test_a_checkpoint_that_lacks_the_sum_is_refused() -> None:
    broken = copy.deepcopy(OLD["muon"]["state"])
    del broken["state"][0]["Momentum/momentum_buffer"]
    opt = CHAINS["muon"](model(), {})
    with pytest.raises(ValueError, match="the checkpoint lacks 'momentum_buffer' of parameter 0"):
        opt.load_state_dict(broken)


def test_another_chain_is_another_chain() -> None:
    """An average that is debiased was never a sum, and a link more is a link more."""
    p = torch.nn.Parameter(torch.ones(2))
    saved = Modular([p], Momentum(0.5), LR(1.0)).state_dict()
    for links in ((EMA(0.5, debias=True), LR(1.0)), (EMA(0.5), EMA(0.5), LR(1.0))):
        with pytest.raises(ValueError, match="was saved by another chain"):
            Modular([p], *links).load_state_dict(saved)
