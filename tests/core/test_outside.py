"""A warning names the line of the user, however deep in the library it is given."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from tests.helpers import at_once
from torchzero_clip import LR, Adam, ClipNorm, Clipper, Modular, Momentum, Transform, attach, compat
from torchzero_clip.grads import clip_grad_norm_


def loads_another(saved: list[Transform], here: list[Transform]) -> None:
    state = Modular([param()], *saved).state_dict()
    Modular([param()], *here).load_state_dict(state)


def param() -> Parameter:
    return Parameter(torch.ones(3))


def attached() -> torch.optim.Optimizer:
    opt = torch.optim.SGD([param()], lr=0.1)
    attach(opt, ClipNorm(1.0))
    return opt


@at_once(
    "gives",
    [
        lambda: Modular([param()], Adam()),  # without a learning rate
        lambda: Momentum(1.0),
        lambda: clip_grad_norm_([param()], 1.0),  # there is no gradient
        lambda: Clipper([param()], ClipNorm(1.0)).step(),
        lambda: loads_another([ClipNorm(1.0), LR(0.1)], [ClipNorm(1.0), LR(0.2)]),
        lambda: compat.clip_grad_norm_((p for p in ()), 1.0),
        lambda: copy.copy(attached()),
    ],
)
def test_it_is_the_line_of_whoever_called(gives: Callable[[], Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gives()
    assert caught
    assert {Path(each.filename).name for each in caught} == {Path(__file__).name}
