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
    r"test_step_is_noop_for_zero_grads_ASGD_": "it shrinks weights by its own `lambd`, as "
    "torch's does",
    r"test_step_is_noop_for_zero_grads_yogi_": "its averages begin at 1e-6, as its authors have it",
    r"test_complex_2d_(lamb|lambc|lars)_": "the norm of a complex tensor is not the norms of its "
    "two parts",
    r"test_complex_AGC_": "pairs of real numbers are other rows",
    r"test_complex_stable_spam_": "a complex entry is cut by its magnitude",
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
