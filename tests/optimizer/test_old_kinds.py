"""Checkpoints of each kind that a released version wrote load in this one, and runs go on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.kinds import (
    AFTER,
    BEFORE,
    KINDS,
    Attached,
    Run,
    Written,
    flat,
    local,
    mark,
    model,
    one_process,
)
from tests.helpers import some

FILE = Path(__file__).parent.parent / "data" / "kinds-0.1.pt"
OLD: dict[str, Any] = torch.load(FILE, weights_only=True)
WAYS: dict[str, dict[str, Any]] = {"fused": {"fused": False}, "compile": {"compile": True}}


CASES = [
    (name, way)
    for name, kind in KINDS.items()
    for way in WAYS
    if not issubclass(kind.run, Written)
    and (way == "compile" or not issubclass(kind.run, Attached))
]
"""Every kind in every way that it has: a file has its own, and a handle leaves none out."""
ROUNDED = {"dadapt_adam", "prodigy", "prodigy in double"}
"""What goes on as it did but for rounding: d enters the sums elsewhere than it did then."""

DRAWN = {"small and stochastic", "stochastic in float16"}
"""What is rounded by other draws than those of generators, as it was then."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*by other draws:UserWarning"),  # which it says
    pytest.mark.filterwarnings("ignore:.*keeps its state in bfloat16:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # one process
]


def resumed(name: str, **ways: Any) -> Run:
    """A run of today that has loaded the checkpoint."""
    run = KINDS[name].start(**ways)
    put(run, name)
    run.load(copy.deepcopy(OLD["runs"][name]["saved"]))
    return run


def put(run: Run, name: str) -> None:
    """Have the parameters be those that were saved."""
    params = [local(p.detach()) for p in run.params.values()]
    saved = OLD["runs"][name]["weights"].split([p.numel() for p in params])
    for p, values in zip(params, saved, strict=True):
        p.copy_(values.view(p.shape))


def goes_on(run: Run, name: str, exact: bool) -> None:
    """Further steps end where those of the run that was saved did."""
    run.steps(range(BEFORE, BEFORE + AFTER))
    near = {"rtol": 0.0, "atol": 0.0} if exact else {}
    near = {"rtol": 2.0**-5, "atol": 1e-2} if name in DRAWN else near
    torch.testing.assert_close(run.end(), OLD["runs"][name]["end"], **near)


def test_every_kind_has_its_checkpoint() -> None:
    assert OLD["runs"].keys() == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_on_bit_for_bit_from_the_checkpoint_of_its_kind(name: str) -> None:
    with one_process(KINDS[name]):
        run = resumed(name)
        assert torch.equal(flat(run.params), OLD["runs"][name]["weights"])
        goes_on(run, name, exact=OLD["machine"] == mark() and name not in ROUNDED)


@pytest.mark.parametrize(("name", "way"), some(CASES, one_in=3))
def test_a_run_goes_on_from_it_in_every_way_of_execution(name: str, way: str) -> None:
    with one_process(KINDS[name]):
        goes_on(resumed(name, **WAYS[way]), name, exact=False)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.run is Written])
def test_the_library_goes_on_from_the_checkpoint_of_a_file_and_todays_file_too(name: str) -> None:
    state, kind = OLD["runs"][name]["saved"]["state"], KINDS[name]
    for run in (Run(model(kind.dtype), kind.links), kind.start()):
        put(run, name)
        run.opt.load_state_dict(copy.deepcopy(state))
        goes_on(run, name, exact=False)
