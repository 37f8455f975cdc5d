"""Names of optimizers that are chains here, or torch's: what to write instead."""

from __future__ import annotations

from typing import NoReturn

import torch

SHOWN = {"sgd": {"momentum": 0.9}}  # where a chain with the defaults would lack its main link


def __getattr__(name: str) -> NoReturn:
    """Raise a sentence for `from torchzero_clip import AdamW` and the like.

    An ImportError, since of an AttributeError the statement keeps no word.
    """
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
