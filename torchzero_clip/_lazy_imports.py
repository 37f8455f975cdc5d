"""Attributes of the package that are imported on first use, and hints for unknown names."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

STUDY = ("Recorder", "Simulation", "Trace", "simulate")
RECOVERING = ("Back", "Recover")
SHOWN = {"sgd": {"momentum": 0.9}}
"""Arguments for the chain in a hint. With default arguments, the chain has no main link."""


def __dir__() -> list[str]:
    """List the attributes of the package, including those that are imported on first use."""
    return sorted({*vars(sys.modules["torchzero_clip"]), *STUDY, *RECOVERING, "source"})


def __getattr__(name: str) -> Any:
    """Import an attribute on first use, or raise an error with the right code for the user.

    The name of an optimizer, as in `from torchzero_clip import AdamW`, raises an ImportError,
    because the import statement drops the message of an AttributeError.
    """
    if name == "source":  # only `to_source` needs this large package
        return importlib.import_module("torchzero_clip.source")
    if name in STUDY:
        return getattr(importlib.import_module("torchzero_clip.study"), name)
    if name in RECOVERING:
        return getattr(importlib.import_module("torchzero_clip.recovering"), name)
    from torchzero_clip.published import NAMES

    known = {key.replace("_", ""): key for key in NAMES}
    key = known.get(name.replace("_", "").lower())
    in_torch = isinstance(getattr(torch.optim, name, None), type) and name != "Optimizer"
    if key is None and not in_torch:
        raise AttributeError(f"module 'torchzero_clip' has no attribute {name!r}")
    if key is None:
        raise ImportError(
            f"torchzero_clip has no class {name}: use torch.optim.{name}, and add transforms with "
            "attach(optimizer, ClipNorm(1.0))"
        )
    links = ", ".join(map(repr, NAMES[key](**SHOWN.get(key, {}))))
    raise ImportError(
        f"torchzero_clip has no class {name}: use the equivalent Modular(params, {links}), or "
        f'Modular(params, named("{key}", lr=1e-3))'
    )
