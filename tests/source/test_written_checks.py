"""torch's generic checks of an optimizer, on files that chains wrote.

They are those of `tests/optimizer/test_torch_checks.py`, with the same inputs, over classes that a
file defines. Those that are about `fused`, which a file does not have, about our own sentences, or
about complex parameters, which it refuses, are here in words of their own, below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    get_error_inputs_for_all_optims,
    optim_inputs_func_adam,
)

from tests.helpers import close, equal
from tests.optimizer import test_torch_checks as checks
from tests.source.files import written
from torchzero_clip import (
    LR,
    AdaGC,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    Masked,
    Modular,
    Normalize,
    Partition,
    Scale,
    SoftClip,
    Transform,
    WeightDecay,
    ZClip,
)

LEFT_OUT = {
    "test_optim_infos_do_not_specify_global_cliquey_kwargs",
    "test_errors",
    "test_optimizer_can_be_printed",
    "test_mixed_device_dtype",
    "test_complex",
    "test_param_groups_weight_decay",
}
CHECKS = {
    name.removeprefix("test_"): check
    for name, check in vars(checks).items()
    if name.startswith("test_") and name not in LEFT_OUT
}


class Preset:
    """AdamW with a rule in front, as a file, with AdamW's arguments and no decay by itself."""

    rule: ClassVar[Callable[[], Transform]]

    def __new__(
        cls,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> Any:
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return cls._file(amsgrad, maximize)(params, **given)

    files: ClassVar[dict[Any, type[Optimizer]]] = {}

    @classmethod
    def _file(cls, amsgrad: bool, maximize: bool) -> type[Optimizer]:
        """Written once: what is no live value is in the file."""
        key = cls, amsgrad, maximize
        if key not in cls.files:
            front = [Scale(-1.0), cls.rule()] if maximize else [cls.rule()]
            chain = *front, Adam(amsgrad=amsgrad), WeightDecay(1e-2), LR(1e-3)
            text = Modular([torch.zeros(1)], *chain).to_source(cls.__name__)
            cls.files[key] = written(text, cls.__name__)
        return cls.files[key]


def is_matrix(name: str, p: Tensor) -> bool:
    return p.dim() > 1


def label(name: str, p: Tensor) -> str:
    return "matrix" if is_matrix(name, p) else "other"


RULES: dict[str, Callable[[], Transform]] = {
    "Headline": lambda: ClipNorm(1.0, dim="global"),
    "SoftClipped": lambda: SoftClip(1.0),
    "Growing": ClipNormGrowth,
    "Adaptive": lambda: ZClip(warmup_steps=3),
    "Relative": AdaGC,
    "Inside": lambda: Masked(ZClip(warmup_steps=3), is_matrix),
    "InPieces": lambda: Partition({"matrix": ClipNorm(0.5), "other": Normalize()}, label),
}
INFOS = [
    OptimizerInfo(
        type(name, (Preset,), {"rule": staticmethod(rule)}),
        optim_inputs_func=optim_inputs_func_adam,
        scheduler_inputs=checks.ADAM.scheduler_inputs,
        supported_impls=(),
        not_og_supported_flags=(),
    )
    for name, rule in RULES.items()
]


QUICK = ("Headline",)
each_preset = pytest.mark.parametrize(
    "info",
    [
        pytest.param(info, marks=() if info.name in QUICK else pytest.mark.slow, id=info.name)
        for info in INFOS
    ],
)


@each_preset
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_what_torch_checks_of_its_optimizers(check: Any, info: OptimizerInfo) -> None:
    more = set(inspect.signature(check).parameters) - {"info"}
    for value in {"strided": (False, True), "dtype": (torch.float32, torch.float64)}.get(
        *more or [""], (None,)
    ):
        check(info, **dict.fromkeys(more, value))


@each_preset
def test_what_torch_refuses_of_all_optimizers(info: OptimizerInfo) -> None:
    for case in get_error_inputs_for_all_optims("cpu", torch.float32):
        given = case.optimizer_error_input
        if "lr" not in given.kwargs:  # whose values are the user's business
            with pytest.raises(case.error_type, match=case.error_regex):
                info.optim_cls(given.params, **given.kwargs)


@each_preset
def test_it_is_printed_as_torch_prints_optimizers(info: OptimizerInfo) -> None:
    shown = repr(info.optim_cls([torch.zeros(2)], lr=0.25))
    assert shown.startswith(f"{info.name} (")
    assert "    lr: 0.25" in shown


@each_preset
def test_several_dtypes_in_one_optimizer(info: OptimizerInfo) -> None:
    """As in the library, each parameter in its own dtype."""
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    rule = info.optim_cls.rule()

    def run(make: Any) -> list[Tensor]:
        torch.manual_seed(2)
        params = [torch.nn.Parameter(torch.randn(3, 4).to(dtype)) for dtype in dtypes]
        opt = make(params)
        for _ in range(5):
            for p in params:
                p.grad = torch.randn(3, 4).to(p.dtype)
            opt.step()
        return params

    chain = rule, Adam(), WeightDecay(1e-2), LR(0.01)
    ours = run(lambda params: Modular(params, *chain, fused=False))
    theirs = run(lambda params: info.optim_cls(params, lr=0.01, weight_decay=1e-2))
    assert [p.dtype for p in theirs] == dtypes
    for p, q in zip(ours, theirs, strict=True):
        half = p.dtype in (torch.bfloat16, torch.float16)
        close([p], [q], *((5e-3, 5e-3) if half else (1e-6, 1e-6)))


@each_preset
def test_where_the_gradient_is_zero_only_the_decay_of_the_group_moves(info: OptimizerInfo) -> None:
    (weight, bias), _ = checks.linear()
    held = weight.detach().clone(), bias.detach().clone()
    groups = [{"params": [weight], "weight_decay": 0.5}, {"params": [bias]}]
    opt = info.optim_cls(groups, lr=0.1, weight_decay=0.0)
    for p in (weight, bias):
        p.grad = torch.zeros_like(p)
    opt.step()
    close([weight], [held[0] * (1 - 0.1 * 0.5)])
    assert equal(bias.detach(), held[1])


@each_preset
def test_complex_parameters_and_sparse_gradients_are_refused(info: OptimizerInfo) -> None:
    whole = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    whole.grad = torch.ones_like(whole)
    sparse = torch.nn.Parameter(torch.zeros(2))
    sparse.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    for p in (whole, sparse):
        with pytest.raises(AssertionError, match="use the library"):
            info.optim_cls([p]).step()
