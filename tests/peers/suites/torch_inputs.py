"""What torch's tests give to a chain, and what they see refused, in the form of torch's table."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

from .chains import defaults

TORCHS = {"Tensor lr must be 1-element": (TypeError, "lr must be a finite number")}
ADAMS = (
    ({"betas": (1.0, 0.0)}, "Adam: betas must be 2 numbers, each of at least 0 and below 1"),
    (
        {"weight_decay": -1},
        "WeightDecay: weight_decay must be a finite number of at least 0, got -1",
    ),
    ({"eps": -1.0}, "Adam: eps must be a finite number of at least 0, got -1.0"),
)
BASE: dict[str, dict[str, Any]] = {  # with which twenty steps show where they go
    "dadapt_adam": {"d0": 0.01, "growth_rate": 1.02},  # from 1e-6 on they would look for a rate
    "prodigy": {"d0": 0.01, "growth_rate": 1.02},
    "schedule_free_sgd": {"lr": 0.01},
    "scion": {"unconstrained": True},  # in its ball weights shrink, whatever the gradient says
    # Of gradients of rank one Adam would make 1 of what is rounding.
    **{name: {"eps": 1e-2} for name in ("soap", "klsoap", "soap_hyperball")},
}


def inputs_of(method: str, device: Any = None, dtype: Any = None) -> list[OptimizerInput]:
    """A published method as it is, and with what many have: a rate, a decay, the other way."""
    base = dict(BASE.get(method, {}))
    tried = [{"lr": torch.tensor(1e-3)}, {"maximize": True}]
    if "weight_decay" in defaults(method):  # by default some decay, which moves weights by itself
        base["weight_decay"] = 0.0
        tried += [{"weight_decay": 0.1}]
    given = [base, *(base | more for more in tried)]
    return [OptimizerInput(params=None, kwargs=kwargs, desc=str(kwargs)) for kwargs in given]


def errors(device: Any, dtype: Any, adam: bool = True) -> list[ErrorOptimizerInput]:
    """What torch refuses for all its optimizers and for Adam, in our words where they are ours."""
    found = get_error_inputs_for_all_optims(device, dtype)
    for error in found:
        if error.error_regex in TORCHS:
            error.error_type, error.error_regex = TORCHS[error.error_regex]
    for kwargs, regex in ADAMS if adam else ():
        given = OptimizerInput(params=None, kwargs=kwargs)
        found.append(ErrorOptimizerInput(given, error_type=ValueError, error_regex=regex))
    indices, ones = torch.tensor([[0, 1]]), torch.ones(2)
    weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
    weight.grad = torch.sparse_coo_tensor(indices, ones, (2,), check_invariants=True)
    found.append(
        ErrorOptimizerInput(
            OptimizerInput(params=[weight], kwargs={}),
            error_on=OptimizerErrorEnum.STEP_ERROR,
            error_type=TypeError,
            error_regex="sparse gradients are not supported",
        )
    )
    return found
