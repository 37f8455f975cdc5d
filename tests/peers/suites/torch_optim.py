"""torch's `test_optim.py` over every published name and ten chains.

They stand in `optim_db`, torch's own table, in the place of torch's optimizers, with the inputs
that torch has for the optimizers of the same name.
"""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

from suites.chains import MATRICES, NAMES, published, takes

SOURCE = "pytorch/pytorch"
COMMIT = "blob 8b6cc66681a0"  # a text from before 2.13; which commits have it was not to be seen
FILES = {"test/test_optim.py": "8b6cc66681a0"}
PATHS = ["test"]
SETTINGS = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"}

LEFT_OUT: dict[str, str] = {}
DIFFERS = {
    r"test_param_groups_(lr|weight_decay)_": "a chain has the same links for all groups: "
    "`maximize`, or a momentum where there is none, in one group alone is refused",
    r"test_fused_error_on_params_on_meta_": "parameters on the device meta step as others do, "
    "where torch's fused kernels refuse them",
    r"test_step_is_noop_for_zero_grads_": "it decays by default, which moves weights without a "
    "gradient: the test knows that of AdamW by its name",
    r"test_load_state_dict_post_hook_mars_adamw_": "the learning rate that the test takes for a "
    "sign of its own hook is the default here",
    r"test_non_empty_state_sgd_": "SGD without momentum has no state, and an empty entry for it",
}
ELEMENTWISE = {"sgd", "adam", "adamw", "adagrad", "rmsprop", "ademamix"}  # of complex numbers too


def inputs(method: str, device: Any = None, dtype: Any = None) -> list[Any]:
    """What is tried with every method: a rate, a decay, the other direction, a rate as a tensor."""
    import torch
    from torch.testing._internal.common_optimizers import OptimizerInput

    decay = {"weight_decay": 0.1} if "weight_decay" in takes(method) else {}
    tried: list[dict[str, Any]] = [{}, {"lr": 1e-3}, decay, {**decay, "maximize": True}]
    tried.append({"lr": torch.tensor(1e-3)})
    return [OptimizerInput(params=None, kwargs=kwargs) for kwargs in tried]


def put_ours() -> None:
    from suites.presets import RULES, Preset, errors
    from torch.testing._internal import common_optimizers as theirs

    named = {info.optim_cls.__name__.lower(): info for info in theirs.optim_db}
    table = []
    for method in NAMES:
        alike = named.get(method) if method not in MATRICES else None
        table.append(
            theirs.OptimizerInfo(
                published(method),
                optim_inputs_func=alike.optim_inputs_func if alike else partial(inputs, method),
                optim_error_inputs_func=partial(errors, adam=False),
                supported_impls=("fused",),
                not_og_supported_flags=(),
                supports_fused_on=("cpu",),
                supports_complex=method in ELEMENTWISE,
            )
        )
    for name, rule in RULES.items():
        table.append(
            theirs.OptimizerInfo(
                type(name, (Preset,), {"rule": staticmethod(rule)}),
                optim_inputs_func=theirs.optim_inputs_func_adam,
                optim_error_inputs_func=errors,
                supported_impls=("fused",),
                not_og_supported_flags=(),
                supports_fused_on=("cpu",),
                supports_complex=False,
            )
        )
    theirs.optim_db[:] = table
    for name, cls in {  # suites of their own, which the file would run once more
        "test_lrscheduler": "TestLRScheduler",
        "test_optim": "TestDifferentiableOptimizer",
        "test_swa_utils": "TestSWAUtils",
    }.items():
        other = types.ModuleType(f"optim.{name}")
        setattr(other, cls, None)
        sys.modules[other.__name__] = other
