"""Cost: operators do not grow with the number of tensors, over the whole table."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import set_grads
from tests.modules.contract.common import Count, on_devices, owns_lr
from tests.modules.rows.row import Row
from tests.table import Case, sampled
from torchzero_clip import LR, Adam, Chain, ClipNorm, Modular
from torchzero_clip.core.norms import measure


def calls(case: Case, count: int, device: str) -> Counter[str]:
    """The operators of the third step of a model of so many tensors."""
    shape = (3, 2)
    params = {
        f"layer{i}.{name}": Parameter(torch.ones(shape, device=device))
        for i in range(count // 2)
        for name in ("weight", "bias")
    }
    opt = Modular(params.items(), case.make(), *([] if owns_lr(case) else [LR(0.1)]))
    grads = {name: torch.full(shape, 0.5 + i / count) for i, name in enumerate(params)}
    set_grads(params, {name: g.to(device) for name, g in grads.items()})
    opt.step()
    opt.step()
    with Count() as counter:
        opt.step()
    return counter.calls


MEASURES = {"max": 1, "count": 1, "sum": 1, "spread": 3}  # no foreach operator measures these


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "meta"])
@sampled(lambda case: case.scope != "slices", one_in=2)
def test_the_number_of_operators_does_not_grow_with_the_number_of_tensors(case, device):
    device = device if on_devices(case) else "cpu"  # some need the values
    few, many = calls(case, 4, device), calls(case, 10, device)
    more = {name: round((many[name] - few[name]) / 6) for name in many}  # a branch is no loop
    ord = getattr(case.make(), "ord", 2)
    measures = case.row.measures * MEASURES.get(measure(ord).kind, 0)
    assert sum(more.values()) <= case.loops + measures, +Counter(more)


def test_a_step_of_a_thousand_tensors_takes_a_hundred_operators():
    case = Case(Row(Chain, {}), "chain", lambda: Chain(ClipNorm(1.0, dim="global"), Adam()))
    assert calls(case, 1000, "cpu").total() < 100


def test_the_counter_sees_what_a_loop_does():
    with Count() as counter:
        for t in torch.ones(7, 2).unbind():
            t.add_(1)
    assert counter.calls["aten.add_.Tensor"] == 7
