"""Floats: the metrics of a step as numbers on the host."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor

GUARD = ("skipped", "consecutive", "why")
KEEPS = {"norm": "amax", "limit": "amin", **dict.fromkeys(GUARD, "amax")}  # others the mean
"""How several values become one, by the last part of a name."""


@overload
def to_floats(metrics: Mapping[str, Any], *, single: Literal[True]) -> dict[str, float]: ...
@overload
def to_floats(
    metrics: Mapping[str, Any], *, single: bool = False
) -> dict[str, float | list[float]]: ...
def to_floats(metrics: Mapping[str, Any], *, single: bool = False) -> Any:
    """The metrics as numbers and lists of numbers, with one transfer from the device.

    Args:
        metrics: What `metrics()` gives.
        single: One number for each list, as most loggers want: the largest norm, the smallest
            limit, and the mean of all else, so that "clipped" is the share that was. A list without
            an entry is left out.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular, to_floats
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> opt.step()
        >>> row = to_floats(opt.metrics(), single=True)  # for wandb.log(row)
        >>> print(row["ClipNorm/limit"])
        1.0
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"to_floats: takes what metrics() gives, a dict, got {metrics!r}")
    rows = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in metrics.items()}
    if single:
        rows = {name: _as_one(name, row) for name, row in rows.items() if row.numel()}
    homes = [row.device for row in rows.values() if row.device.type != "cpu"]
    home = homes[0] if homes else torch.device("cpu")
    flat = [row.reshape(-1).to(home) for row in rows.values()]
    numbers = iter(torch.cat(flat).tolist() if flat else ())
    read = {name: list(itertools.islice(numbers, row.numel())) for name, row in rows.items()}
    return {name: read[name] if row.dim() else read[name][0] for name, row in rows.items()}


def _as_one(name: str, row: Tensor) -> Tensor:
    """One number for a vector, as a Recorder has it."""
    kind = KEEPS.get(name.rpartition("/")[2], "mean")
    made: Tensor = getattr(row, kind)()
    return made
