"""Names not imported yet, or never: what writes files, recorded runs, optimizers of torch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

STUDY = ("Recorder", "Simulation", "Trace", "simulate")  # of a run that is recorded, as few are
RECOVERING = ("Back", "Recover")  # nor do many go back
SHOWN = {"sgd": {"momentum": 0.9}}  # where a chain with the defaults would lack its main link


def __dir__() -> list[str]:
    """What is there, and what will be when it is asked for."""
    return sorted({*vars(sys.modules["torchzero_clip"]), *STUDY, *RECOVERING, "source"})


def __getattr__(name: str) -> Any:
    """`source` and what stands in `study` or `recovering`; for `from torchzero_clip import AdamW` a
    sentence.

    An ImportError, since of an AttributeError the statement keeps no word.
    """
    if name == "source":  # large, and needed by `to_source` alone
        return importlib.import_module("torchzero_clip.source")
    if name in STUDY:
        return getattr(importlib.import_module("torchzero_clip.study"), name)
    if name in RECOVERING:
        return getattr(importlib.import_module("torchzero_clip.recovering"), name)
    from torchzero_clip.published import NAMES

    known = {key.replace("_", ""): key for key in NAMES}
    key = known.get(name.replace("_", "").lower())
    theirs = isinstance(getattr(torch.optim, name, None), type) and name != "Optimizer"
    if key is None and not theirs:
        raise AttributeError(f"module 'torchzero_clip' has no attribute {name!r}")
    if key is None:
        raise ImportError(
            f"torchzero_clip has no {name}: keep torch.optim.{name}, and put rules in front of it "
            "with attach(optimizer, ClipNorm(1.0))"
        )
    links = ", ".join(map(repr, NAMES[key](**SHOWN.get(key, {}))))
    raise ImportError(
        f"torchzero_clip has no {name}, which is a chain here: Modular(params, {links}), or "
        f'Modular(params, named("{key}", lr=1e-3))'
    )
