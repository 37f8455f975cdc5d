"""AdamW with a rule in front, and what torch's tests give to it and see refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

from torchzero_clip import (
    AGC,
    LR,
    AdaGC,
    Adam,
    AutoClip,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Modular,
    Normalize,
    Partition,
    Scale,
    SoftClip,
    SpikeClip,
    Transform,
    WeightDecay,
    ZClip,
    named,
)
from torchzero_clip.published import NAMES, matrices


class Preset(Modular):
    """AdamW with a rule in front."""

    rule: ClassVar[Callable[[], Transform]]  # in a staticmethod

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool = True,
    ) -> None:
        front = [Scale(-1.0), self.rule()] if maximize else [self.rule()]
        adam = Adam(betas, eps, amsgrad=amsgrad)
        super().__init__(params, *front, adam, WeightDecay(weight_decay), LR(lr), fused=fused)


RULES: dict[str, Callable[[], Transform]] = {
    "ClipNorm": lambda: ClipNorm(1.0, dim="global"),
    "ClipValue": lambda: ClipValue(0.5),
    "Normalize": lambda: Normalize(1.0),
    "SoftClip": lambda: SoftClip(1.0),
    "ClipNormGrowth": ClipNormGrowth,
    "ZClip": lambda: ZClip(warmup_steps=3),
    "AutoClip": AutoClip,
    "AdaGC": AdaGC,
    "AGC": AGC,
    "SpikeClip": SpikeClip,
}


class Method(Modular):
    """A published method; what is for matrices alone has plain steps for the rest."""

    method: ClassVar[str]

    def __init__(
        self, params: Any, *, maximize: bool = False, fused: bool = True, **arguments: Any
    ) -> None:
        front = [Scale(-1.0)] if maximize else []
        super().__init__(params, *front, method(self.method, **arguments), fused=fused)


def method(name: str, **arguments: Any) -> Transform:
    """The chain of a name, which takes parameters of any shape."""
    chain = named(name, **arguments)
    if NAMES[name].__module__ != matrices.__name__:
        return chain
    label: Callable[[str, Tensor], str] = lambda _, p: "matrices" if p.dim() > 1 else "rest"  # noqa: E731
    return Partition({"matrices": chain, "rest": Scale(1e-3)}, label)


def inputs_of(name: str, device: Any = None, dtype: Any = None) -> list[OptimizerInput]:
    """Settings of a published method: as it is, and each with one argument that many have."""
    takes = inspect.signature(NAMES[name]).parameters
    given: list[dict[str, Any]] = [{}, {"lr": 0.01}]
    given += [{"weight_decay": 0.1}] if "weight_decay" in takes else []
    if not any(getattr(tfm, "reads_grads", False) for tfm in named(name).walk()):
        given += [{"maximize": True}]  # those need the gradient itself turned
    if "soap" in name:  # of gradients of rank one Adam would make 1 of what is rounding
        given = [{"eps": 1e-2, **kwargs} for kwargs in given]
    return [OptimizerInput(params=None, kwargs=kwargs, desc=str(kwargs)) for kwargs in given]


def errors(device: Any, dtype: Any, adam: bool = True) -> list[ErrorOptimizerInput]:
    """What torch refuses for all its optimizers and for AdamW, in our words where they are ours."""
    mine = {"Tensor lr must be 1-element": (TypeError, "LR: lr must be a number")}
    found = get_error_inputs_for_all_optims(device, dtype)
    for error in found:
        if error.error_regex in mine:
            error.error_type, error.error_regex = mine[error.error_regex]
    for kwargs, regex in (
        ()
        if not adam
        else (
            ({"betas": (1.0, 0.0)}, "Adam: betas must be 2 numbers, each at least 0 and below 1"),
            ({"weight_decay": -1}, "WeightDecay: weight_decay must be a number at least 0, got -1"),
            ({"eps": -1.0}, "Adam: eps must be a number at least 0, got -1.0"),
        )
    ):
        given = OptimizerInput(params=None, kwargs=kwargs)
        found.append(ErrorOptimizerInput(given, error_type=ValueError, error_regex=regex))
    indices = torch.tensor([[0, 1]])
    weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
    weight.grad = torch.sparse_coo_tensor(indices, torch.ones(2), (2,), check_invariants=True)
    found.append(
        ErrorOptimizerInput(
            OptimizerInput(params=[weight], kwargs={}),
            error_on=OptimizerErrorEnum.STEP_ERROR,
            error_type=TypeError,
            error_regex="sparse gradients are not supported",
        )
    )
    return found
