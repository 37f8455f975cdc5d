"""The metrics of a step as Python numbers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor

GUARD = ("skipped", "consecutive", "why")
KEEPS = {"norm": "amax", "limit": "amin", **dict.fromkeys(GUARD, "amax")}
"""For the last part of a metric's name, the reduction to one value. The default is the mean."""


@overload
def to_floats(metrics: Mapping[str, Any], *, single: Literal[True]) -> dict[str, float]: ...
@overload
def to_floats(
    metrics: Mapping[str, Any], *, single: bool = False
) -> dict[str, float | list[float]]: ...
def to_floats(metrics: Mapping[str, Any], *, single: bool = False) -> Any:
    """Convert metrics to floats and lists of floats, with a single transfer from the device.

    Args:
        metrics: The dict that `metrics()` of an optimizer returns.
        single: Whether to reduce each list to one number, as most loggers require. A list of norms
            becomes the largest norm, and a list of limits the smallest limit. Other lists become
            their mean, so "clipped" becomes the fraction that was clipped. Empty lists are
            skipped.

    Returns:
        A dict with the same names as `metrics`.

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
        raise TypeError(
            f"to_floats: metrics must be a dict, such as the result of metrics(), got {metrics!r}"
        )
    values = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in metrics.items()}
    if single:
        values = {name: _reduced(name, x) for name, x in values.items() if x.numel()}
    devices = [x.device for x in values.values() if x.device.type != "cpu"]
    device = devices[0] if devices else torch.device("cpu")
    flat = [x.reshape(-1).to(device) for x in values.values()]
    numbers = iter(torch.cat(flat).tolist() if flat else ())
    lists = {name: list(itertools.islice(numbers, x.numel())) for name, x in values.items()}
    return {name: lists[name] if x.dim() else lists[name][0] for name, x in values.items()}


def _reduced(name: str, values: Tensor) -> Tensor:
    """Reduce the values of a metric to one number. A Recorder uses the same reduction."""
    reduction = KEEPS.get(name.rpartition("/")[2], "mean")
    number: Tensor = getattr(values, reduction)()
    return number
