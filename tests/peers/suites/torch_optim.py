"""torch's `test_optim.py` over every published name and ten chains.

They stand in `optim_db`, torch's own table, in the place of torch's optimizers, with the inputs
that torch has for the optimizers of the same name.
"""

from __future__ import annotations

import sys
import types

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
    r"test_fused_error_on_params_on_meta_": "chains accept parameters on the meta device, but "
    "torch's fused kernels raise an error",
    r"test_load_state_dict_post_hook_(mars_adamw|soap)_": "the test recognizes its hook by a "
    "learning rate that is the default of "
    "this method",
    r"test_non_empty_state_(SGD|scion)_": "without momentum, the state of a parameter is an "
    "empty dict",
    r"test_fused_matches_forloop_(klsoap|kron|shampoo|soap|soap_hyperball)_": "the state "
    "contains a Python number, which marks that a matrix has "
    "started, and the test expects only tensors",
    r"test_param_group_with_lrscheduler_goes_right_direction_schedule_free_sgd_": "its default "
    "learning rate is 1, and the schedulers of this test "
    "increase it",
    r"test_step_is_noop_for_zero_grads_ASGD_": "ASGD shrinks weights by its `lambd`, as torch's "
    "ASGD does",
    r"test_step_is_noop_for_zero_grads_yogi_": "the averages of Yogi start at 1e-6, as in the "
    "authors' code",
    r"test_complex_2d_(lamb|lambc|lars)_": "the norm of a complex tensor differs from the norms "
    "of its real and "
    "imaginary parts",
    r"test_complex_AGC_": "as pairs of real numbers, a complex matrix has other rows",
    r"test_complex_stable_spam_": "a complex element is clipped by its magnitude",
}


def put_ours() -> None:
    from torch.testing._internal import common_optimizers

    from .torch_table import table

    common_optimizers.optim_db[:] = table()
    others = {  # which it imports; two have rows of their own, chains have no `differentiable`
        "test_lrscheduler": "TestLRScheduler",
        "test_optim": "TestDifferentiableOptimizer",
        "test_swa_utils": "TestSWAUtils",
    }
    for name, cls in others.items():
        other = types.ModuleType(f"optim.{name}")
        setattr(other, cls, None)
        sys.modules[other.__name__] = other
