"""optax's tests of convergence, on chains inside JAX's own loop.

`contrib/_common_test.py` takes 30,000 steps towards a minimum: of two parabolas, of Rosenbrock's
valley, of vectors and matrices together. A chain steps for the optimizer of its name, alone or
under a wrapper of optax that chooses its learning rate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from .optax_chain import transformation

SOURCE = "google-deepmind/optax"
COMMIT = "2edbcbe2390da13983b92cbef94ac0460ecde1c5"
FILES = {"optax/contrib/_common_test.py": "510ef3159b7d"}
PATHS = ["."]
SETTINGS = {"JAX_PLATFORMS": "cpu"}
CHOICE = "test_optimizers and not accept and not inject"
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}

ALIKE = ["ademamix", "sgd", "adam", "lamb", "lion", "adopt", "adan", "radam", "adamax"]
OURS: dict[str, tuple[str, dict[str, Any]]] = {  # with the defaults that are others in optax
    **{name: (name, {}) for name in ALIKE},
    "adabelief": ("adabelief", {"rectify": False}),
    "adamw": ("adamw", {"weight_decay": 1e-4}),
    "amsgrad": ("adam", {"amsgrad": True}),
    "muon": ("muon", {"weight_decay": 0.0}),
    "prodigy": ("prodigy", {}),
    "rmsprop": ("rmsprop", {"alpha": 0.9}),
    "yogi": ("yogi", {}),
}
THEIRS = (
    "acprop simplified_ademamix cocob dadapt_adamw dog dowg madgrad momo momo_adam "
    "schedule_free_sgd schedule_free_adamw sophia galore adamaxw noisy_sgd "
    "novograd optimistic_gradient_descent sm3"
)


def put_ours() -> None:
    from optax import contrib
    from optax._src import alias

    def left_out(**_: Any) -> None:
        pytest.skip("no chain has this name")

    chains = {name: partial(transformation, *row) for name, row in OURS.items()}
    for name, factory in (dict.fromkeys(THEIRS.split(), left_out) | chains).items():
        setattr(contrib if hasattr(contrib, name) else alias, name, factory)
