"""What a CUDA graph needs: state that stays where it is.

That a step copies nothing between host and device is checked in `modules/contract/test_devices.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import Named, gradients, parameters, set_grads
from tests.table import GOOD, Case, over
from torchzero_clip import LR, Modular

GRAPHS = [case for case in GOOD if case.traces and case.graphs == 1]  # no choice by the host


def model(chain: list[Any], shapes: Any, device: str, **options: Any) -> tuple[Named, Modular]:
    """Parameters and their optimizer, with `lr` as a tensor on the device."""
    params = {name: Parameter(p.detach().to(device)) for name, p in parameters(shapes).items()}
    opt = Modular(params.items(), *chain, **options)
    for group in opt.param_groups:
        if "lr" in group:
            group["lr"] = torch.full((), 0.1, device=device)
    return params, opt


def ended(case: Case) -> list[Any]:
    """The rule and what makes a step of it."""
    owns_lr = any("lr" in tfm.live for tfm in case.make().walk())
    return [case.make(), *([] if owns_lr else [LR(0.1)])]


def places(opt: Modular) -> dict[Any, Any]:
    """Where everything that is kept lies; what the host keeps, by its value."""
    memories = [*opt.state.values(), *[group["chain"] for group in opt.param_groups]]
    return {
        (i, key): value.data_ptr() if isinstance(value, Tensor) else value
        for i, memory in enumerate(memories)
        for key, value in memory.items()
    }


@over(GRAPHS)
def test_a_step_leaves_its_state_where_it_is(case):
    """A captured step writes where it wrote, and does nothing on the host."""
    params, opt = model(ended(case), case.shapes, "cpu")
    for i in range(2):
        set_grads(params, gradients(case.shapes, i))
        opt.step()
    before, kept = places(opt), [dict(memory) for memory in opt.state.values()]
    set_grads(params, gradients(case.shapes, 2))
    opt.step()
    assert places(opt) == before
    assert len(kept) == len(opt.state)  # held, so that no address is used again
