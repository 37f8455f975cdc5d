"""What Recorder.log takes, and what it refuses before anything is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from torchzero_clip import LR, Modular, Recorder


def recorder() -> tuple[Modular, Recorder]:
    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    opt = Modular([p], LR(0.1))
    return opt, Recorder(opt)


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["large", "low", "vast"])
def test_an_integer_beyond_floats_is_refused_at_once(value: int) -> None:
    opt, seen = recorder()
    with pytest.raises(
        ValueError, match=r"^Recorder: log accepts .* converted to float, got an int"
    ):
        seen.log(x=value)
    opt.step()
    assert seen.history() == {"step": [1]}


@pytest.mark.parametrize(
    "value",
    [torch.tensor(1 + 2j), torch.ones(1).to_sparse()],
    ids=["complex", "sparse"],
)
def test_a_tensor_that_is_no_float_is_refused_at_once(value: Any) -> None:
    opt, seen = recorder()
    with pytest.raises(TypeError, match=r"^Recorder: log accepts .* converted to float, got x of "):
        seen.log(x=value)
    opt.step()
    assert seen.history() == {"step": [1]}


@pytest.mark.parametrize("value", [10**300, -(2**63), True, 1e308, torch.tensor([True])], ids=str)
def test_what_a_float_holds_is_recorded(value: Any) -> None:
    opt, seen = recorder()
    seen.log(x=value)
    opt.step()
    assert seen.history()["x"] == [float(value)]


def test_of_several_values_none_is_recorded_if_one_is_refused() -> None:
    opt, seen = recorder()
    with pytest.raises(ValueError, match="got an integer y of"):
        seen.log(x=1.0, y=10**400)
    opt.step()
    assert seen.history() == {"step": [1]}
