"""An audit says what share of the updates of parameters in half precision rounding loses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import at_once
from torchzero_clip import LR, Adam, Modular
from torchzero_clip.audit import audit, lost_updates
from torchzero_clip.audit.lost_updates import lost_in


def ones(rows: int = 40) -> list[Parameter]:
    """A matrix whose first quarter is small enough for a step of 1e-4, and a vector of ones."""
    matrix = torch.ones(rows, 8)
    matrix[: rows // 4] = 2.0**-10
    return [Parameter(matrix.bfloat16()), Parameter(torch.ones(80).bfloat16())]


def nearest(params: Any) -> Modular:
    return Modular(params, Adam(), LR(1e-4), rounding="nearest")


def theirs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


@at_once(
    "make, dtype",
    [(theirs, torch.bfloat16), (nearest, torch.bfloat16), (nearest, torch.float16)],
)
def test_the_share_is_that_of_the_entries_that_stay(make: Any, dtype: torch.dtype) -> None:
    found = lost_in(make, [Parameter(p.detach().to(dtype)) for p in ones()])
    assert found is not None
    assert (found.moving, found.stayed) == (400, 320)  # 2⁻¹⁰ moves by 1e-4, 1 does not
    assert found.share == 0.8


def test_the_report_has_it_as_a_line_and_as_data() -> None:
    report = audit(theirs, ones())
    assert "80% do not change in half precision: their updates are lost" in str(report)
    assert report.as_dict()["lost"]["stayed"] == 320


def test_what_is_made_up_for_later_is_not_called_lost() -> None:
    made = audit(lambda ps: Modular(ps, Adam(), LR(1e-4), rounding="exact"), ones())
    assert 'half precision: rounding="exact" corrects this in later steps.' in str(made)


def test_parameters_in_float32_and_those_without_values_have_no_such_line() -> None:
    high = [Parameter(p.detach().float()) for p in ones()]
    assert audit(torch.optim.AdamW, high).lost is None
    with torch.device("meta"):
        low = [Parameter(torch.empty(8, 8, dtype=torch.bfloat16))]
    assert audit(torch.optim.AdamW, low).lost is None


def test_gradients_that_are_there_are_taken() -> None:
    params = ones()
    for p in params:
        p.grad = torch.zeros_like(p)
    params[1].grad = torch.full_like(params[1], 1.0)
    found = lost_in(lambda ps: torch.optim.SGD(ps, lr=0.5), params)
    assert found is not None
    assert (found.moving, found.stayed) == (80, 0)


def test_names_frozen_parameters_and_those_without_entries_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lost_updates, "SAMPLE_SIZE", 100)
    frozen = Parameter(torch.ones(7).bfloat16(), requires_grad=False)
    rows = [("w", ones()[0]), ("b", frozen), ("c", Parameter(torch.ones(()).bfloat16()))]
    seen: list[tuple[str, Tensor]] = []

    def make(pairs: Any) -> Any:
        seen.extend(pairs)
        return torch.optim.SGD([p for _, p in pairs], lr=1e-9)

    found = lost_in(make, rows)
    assert found is not None
    assert [name for name, _ in seen] == ["w", "b", "c"] * 2
    assert [tuple(p.shape) for _, p in seen[:3]] == [(13, 8), (3,), ()]  # 100 of 328 entries
    assert found.share == 1.0


def test_neither_parameters_nor_random_numbers_are_changed() -> None:
    params, state = ones(), torch.get_rng_state()
    before = [p.detach().clone() for p in params]
    audit(lambda ps: torch.optim.SGD(ps, lr=1.0), params)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert all(p.grad is None for p in params)
    assert torch.equal(torch.get_rng_state(), state)


def test_torch_s_capturable_optimizers_which_need_an_accelerator_are_tried_without() -> None:
    found = lost_in(lambda ps: torch.optim.AdamW(ps, lr=1e-4, capturable=True), ones())
    assert found is not None
    assert found.stayed == 320


def test_a_step_that_a_cpu_cannot_do_is_told_and_the_rest_of_the_report_holds() -> None:
    def make(params: Any) -> Any:
        def step() -> None:
            if params[0].device.type == "cpu":
                raise RuntimeError("no kernel for this device\nand more")
            torch._foreach_mul_([p.grad for p in params], 0.5)

        return step

    report = audit(make, ones())
    assert report.capturable
    assert "the step failed on the CPU: RuntimeError: no kernel for this device\n" in f"{report}\n"
