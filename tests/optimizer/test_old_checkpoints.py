"""State dicts that a released version wrote load in this one, bit for bit and without a warning."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.checkpoints import AFTER, BEFORE, CHAINS, SHAPES, Named, flat, here, model, train

FILE = Path(__file__).parent.parent / "data" / "checkpoints-0.1.pt"
OLD: dict[str, Any] = torch.load(FILE, weights_only=True)


def at(values: Tensor, dtype: torch.dtype) -> Named:
    """The model with these values."""
    params = model(dtype)
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    for p, part in zip(params.values(), values.split(sizes), strict=True):
        p.data.copy_(part.view(p.shape))
    return params


def plain(value: Any) -> Any:
    """Nested state with the type, dtype and every digit of what was kept then."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), repr(value.tolist())
    if isinstance(value, dict):
        since = {"fingerprint", "Guard/since"}
        return {k: plain(v) for k, v in value.items() if k not in since}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return type(value), repr(value)


def test_every_chain_has_its_checkpoint() -> None:
    assert OLD["runs"].keys() == CHAINS.keys()


@pytest.mark.parametrize("name", CHAINS)
def test_an_old_checkpoint_loads_bit_for_bit_and_the_run_goes_on_as_it_did(name: str) -> None:
    run, (dtype, make) = OLD["runs"][name], CHAINS[name]
    params = at(run["params"], dtype)
    opt = make(params)
    drawn = name == "stochastic"  # by generators then, and goes on with other draws
    with pytest.warns(UserWarning, match="by other draws") if drawn else nullcontext():
        opt.load_state_dict(copy.deepcopy(run["state"]))
    assert plain(opt.state_dict()) == plain(run["state"])
    train(params, opt, range(BEFORE, BEFORE + AFTER))
    exact = {"rtol": 0.0, "atol": 0.0} if OLD["machine"] == here() else {}
    exact = {"rtol": 2.0**-6, "atol": 1e-3} if drawn else exact
    torch.testing.assert_close(flat(params), run["after"], **exact)
