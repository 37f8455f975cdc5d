"""The builders of verl and Automodel make chains, which train as their own AdamW and clip do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from tests.frameworks import builders
from tests.frameworks.builders import Automodel, Verl, train
from tests.frameworks.common import need
from tests.helpers import equal, state_of

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]
LIMIT = 0.8
HERE = builders.__name__


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def verl(limit: float, name: str = "", **values: Any) -> Any:
    need("verl")
    ours = {"optimizer_impl": HERE, "optimizer": name} if name else {}
    return Verl(limit, **ours, override_optimizer_config=values or None)


def automodel(limit: float, name: str = "", **values: Any) -> Any:
    need("nemo_automodel")
    return Automodel(limit, _target_=f"{HERE}.{name}" if name else "torch.optim.AdamW", **values)


BUILDERS: list[Callable[..., Any]] = [verl, automodel]


@pytest.mark.parametrize("build", BUILDERS)
def test_a_chain_trains_as_their_adamw_behind_their_clip_does(build):
    theirs, ours = build(LIMIT), build(math.inf, "ClippedAdamW", max_norm=LIMIT)
    wanted, found = train(theirs), train(ours)
    assert (type(theirs.opt), type(ours.opt)) == (torch.optim.AdamW, builders.ClippedAdamW)
    assert min(theirs.norms) < LIMIT < max(theirs.norms)
    assert len(ours.norms) == builders.STEPS
    torch.testing.assert_close(ours.norms, theirs.norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(list(found), list(wanted), rtol=1e-4, atol=1e-6)
    assert ours.opt.param_groups[0]["lr"] == theirs.opt.param_groups[0]["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize("build", BUILDERS)
def test_what_the_configuration_says_is_in_the_group(build):
    (group,) = build(math.inf, "ClippedAdamW", max_norm=0.25, eps=1e-7).opt.param_groups
    said = {"max_norm": 0.25, "eps": 1e-7, "weight_decay": 0.1}
    assert {key: group[key] for key in said} == said
    assert tuple(group["betas"]) == (0.9, 0.95)


@pytest.mark.parametrize("build", BUILDERS)
def test_what_no_link_reads_is_an_error(build):
    with pytest.raises(ValueError, match=r"weight_decay=0.1, but no transform .* add WeightDecay"):
        build(math.inf, "NoDecayAdam")


def test_overrides_of_automodel_make_groups_whose_rates_its_schedule_scales():
    slow = [{"pattern": "norm", "lr_mult": 0.5, "wd_mult": 0.0}]
    run = automodel(math.inf, "ClippedAdamW", param_group_overrides=slow)
    train(run)
    found = [(group["lr"], group["weight_decay"]) for group in run.opt.param_groups]
    assert found == [pytest.approx((1e-3, 0.1)), pytest.approx((5e-4, 0.0))]


def test_a_chain_without_decay_takes_the_decay_of_zero_that_automodel_sets():
    run = automodel(math.inf, "NoDecayAdam", weight_decay=0.0)
    train(run)
    assert run.opt.param_groups[0]["weight_decay"] == 0


def test_without_state_made_first_a_parameter_that_got_no_gradient_cannot_be_loaded(tmp_path):
    """Automodel makes the missing state of torch's Adam alone: hence `with_state`."""
    for name in ("with_state", "ZClippedAdamW"):
        run, resumed = automodel(math.inf, name), automodel(math.inf, name)
        ids = next(builders.batches())
        run.model(input_ids=ids, labels=ids).loss.backward()
        run.step()
        run.save(tmp_path / name)
        if name == "with_state":
            resumed.load(tmp_path / name)
            assert equal(state_of(resumed.opt), state_of(run.opt))
        else:
            with pytest.raises(CheckpointException, match=r"Missing key .*spare.weight.Adam/step"):
                resumed.load(tmp_path / name)
