"""NVIDIA's tests of emerging optimizers, on Lion, Signum and LaProp of chains."""

from __future__ import annotations

import sys
import types
import typing

from .emerging_classes import OurLaProp, OurLion, OurSignum

SOURCE = "NVIDIA-NeMo/Emerging-Optimizers"
COMMIT = "fd7729267109a8848709e9406bf19e53e970c3f4"
FILES = {"tests/test_scalar_optimizers.py": "2c44aa0d1ed7"}
PATHS = ["tests", "."]
SETTINGS: dict[str, str] = {}

LEFT_OUT = {
    "UpdateFunctionTest|MAdamUpdateTest": "about functions of theirs alone",
    "SimplifiedAdEMAMix": "no chain is this method",
    "init_group|logs_error": "about a method or a message of theirs",
}
DIFFERS = {
    "closure_unsupported": "a closure is taken, where theirs refuse it",
    "state_keys": "an entry of the state is named after its link, as `EMA/ema`, not `exp_avg`",
}


def make_importable() -> None:
    """They need Python 3.12 for a decorator, and for type parameters in a file of no tests."""
    from absl import flags
    from typing_extensions import override

    vars(typing).setdefault("override", override)
    registry = types.ModuleType("emerging_optimizers.registry")
    vars(registry).update(register_optimizer=lambda name: lambda cls: cls)
    if sys.version_info < (3, 12):
        sys.modules[registry.__name__] = registry
    flags.FLAGS.mark_as_parsed()


def put_ours() -> None:
    make_importable()
    from emerging_optimizers import scalar_optimizers

    vars(scalar_optimizers).update(Lion=OurLion, Signum=OurSignum, LaProp=OurLaProp)
