"""optax's tests of convergence, on chains inside JAX's own loop.

`contrib/_common_test.py` takes 30,000 steps towards a minimum: of two parabolas, of Rosenbrock's
valley, of vectors and matrices together. A chain steps for the optimizer of its name, alone or
under a wrapper of optax that chooses its learning rate.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from .optax_chain import average, transformation

SOURCE = "google-deepmind/optax"
COMMIT = "2edbcbe2390da13983b92cbef94ac0460ecde1c5"
FILES = {"optax/contrib/_common_test.py": "510ef3159b7d"}
PATHS = ["."]
SETTINGS = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
CHOICE = "test_optimizers and not accept and not inject"
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}

ALIKE = (
    "ademamix sgd adam lamb lion adopt adan radam adamax prodigy yogi schedule_free_sgd "
    "schedule_free_adamw"
)
OURS: dict[str, tuple[str, dict[str, Any]]] = {  # with the defaults that are others in optax
    **{name: (name, {}) for name in ALIKE.split()},
    "adabelief": ("adabelief", {"rectify": False}),
    "adamw": ("adamw", {"weight_decay": 1e-4}),
    "amsgrad": ("adam", {"amsgrad": True}),
    "dadapt_adamw": ("dadapt_adam", {"decouple": True}),
    "muon": ("muon", {"weight_decay": 0.0}),
    "rmsprop": ("rmsprop", {"alpha": 0.9}),
}
THEIRS = (
    "acprop simplified_ademamix cocob dog dowg madgrad momo momo_adam sophia galore adamaxw "
    "noisy_sgd novograd optimistic_gradient_descent sm3"
)


def quick(name: str) -> bool:
    """Whether a case goes down Rosenbrock's valley, the second of four functions."""
    return int(re.findall(r"\d+", name)[-1]) % 4 == 1


def put_ours() -> None:
    from optax import contrib
    from optax._src import alias

    def left_out(**_: Any) -> None:
        pytest.skip("no method of this library has this name")

    chains = {name: partial(transformation, *row) for name, row in OURS.items()}
    for name, factory in (dict.fromkeys(THEIRS.split(), left_out) | chains).items():
        setattr(contrib if hasattr(contrib, name) else alias, name, factory)

    def averages(state: Any, params: Any) -> Any:
        wrapped = isinstance(state, contrib.ScheduleFreeState)  # optax's own, around a chain
        return theirs(state, params) if wrapped else average(params)

    theirs, contrib.schedule_free_eval_params = contrib.schedule_free_eval_params, averages
