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
    "UpdateFunctionTest|MAdamUpdateTest": "the case tests functions that only NVIDIA's library has",
    "SimplifiedAdEMAMix": "this library does not have the method",
    "init_group|logs_error": "the case tests a method or an error message of NVIDIA's classes",
}
DIFFERS = {
    "closure_unsupported": "chains accept a closure, and NVIDIA's optimizers raise an error",
    "state_keys": "the name of a state tensor starts with its link, for example `EMA/ema` "
    "instead of `exp_avg`",
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
