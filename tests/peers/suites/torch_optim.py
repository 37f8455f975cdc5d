"""torch's `test_optim.py` over every published name and ten chains.

They stand in `optim_db`, torch's own table, in the place of torch's optimizers, with the inputs
that torch has for the optimizers of the same name.
"""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

from .chains import MATRICES, NAMES, published

SOURCE = "pytorch/pytorch"
COMMIT = "v2.6.0"
FILES = {"test/test_optim.py": "8b6cc66681a0"}
PATHS = ["test"]
SETTINGS = {
    "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu",
    "PYTEST_ADDOPTS": "--noconftest",
    "OMP_NUM_THREADS": "1",
}

LEFT_OUT: dict[str, str] = {}
DIFFERS = {
    r"test_fused_error_on_params_on_meta_": "parameters on the device meta step as others do, "
    "where torch's fused kernels refuse them",
    r"test_load_state_dict_post_hook_(mars_adamw|soap)_": "the learning rate that the test takes "
    "for a sign of its own hook is the default here",
    r"test_non_empty_state_(SGD|scion)_": "without momentum there is no state, and an empty entry "
    "for it",
    r"test_fused_matches_forloop_(klsoap|kron|shampoo|soap|soap_hyperball)_": "that a matrix has "
    "begun is a number of the host in its state, where the test takes all for tensors",
    r"test_param_group_with_lrscheduler_goes_right_direction_schedule_free_sgd_": "its rate is 1 "
    "where none is given, from which schedulers of this test go up",
    r"test_step_is_noop_for_zero_grads_ASGD_": "it shrinks weights by its own `lambd`",
    r"test_step_is_noop_for_zero_grads_yogi_": "its averages begin at 1e-6, as its authors have it",
}
ELEMENTWISE = {"sgd", "adam", "adamw", "adagrad", "rmsprop", "ademamix"}  # of complex numbers too


def put_ours() -> None:
    from torch.testing._internal import common_optimizers as theirs

    from .presets import RULES, preset
    from .torch_inputs import errors, inputs_of

    def row(
        cls: type, inputs: Any, adam: bool, supports_complex: bool, tolerances: Any = ()
    ) -> Any:
        return theirs.OptimizerInfo(
            cls,
            optim_inputs_func=inputs,
            optim_error_inputs_func=partial(errors, adam=adam),
            supported_impls=("fused",),
            not_og_supported_flags=(),
            supports_fused_on=("cpu",),
            supports_complex=supports_complex,
            decorators=tolerances,
        )

    torchs = {info.optim_cls.__name__.lower(): info for info in theirs.optim_db}
    table = []
    for method in NAMES:
        alike = torchs.get(method) if method not in MATRICES else None
        cls = published(method, alike and alike.optim_cls.__name__)  # tests know some by their name
        inputs = alike.optim_inputs_func if alike else partial(inputs_of, method)
        told = alike.decorators if alike else ()
        tolerances = [
            x for x in told if "toleranceOverride" in {type(y).__name__ for y in x.decorators}
        ]
        table.append(row(cls, inputs, False, method in ELEMENTWISE, tolerances))
    table += [row(preset(name), theirs.optim_inputs_func_adam, True, False) for name in RULES]
    theirs.optim_db[:] = table
    for name, cls in {  # suites of their own, which the file would run once more
        "test_lrscheduler": "TestLRScheduler",
        "test_optim": "TestDifferentiableOptimizer",
        "test_swa_utils": "TestSWAUtils",
    }.items():
        other = types.ModuleType(f"optim.{name}")
        setattr(other, cls, None)
        sys.modules[other.__name__] = other
