"""Metrics: the values that the links measured in a step, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.division import UNITS, UnitIds, UnitRecord


def metrics_of(records: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics, by name, from the records of the links.

    All tensors are copies, because the next step may overwrite the memory of the records. The
    elements of vectors are in the order of the parameters.
    """
    metrics: dict[str, Any] = {}
    for path, record in records.items():
        if isinstance(record, dict):
            values = {name: _copied(value) for name, value in record.items() if name != UNITS}
        else:
            limit, ratio = _of_units(record)
            vectors = {"norm": record.norm, "limit": limit, "factor": 1 / ratio}
            vectors["clipped"] = ratio > 1
            values = {name: _plain(value) for name, value in vectors.items()}
        ids = _ids_of(record)
        for name, value in values.items():
            metrics[f"{path}/{name}"] = _in_order(value, ids.order if ids else None)
    return metrics


def _ids_of(record: Any) -> UnitIds | None:
    """Return the units of a record, or None if the record has none."""
    if isinstance(record, dict):
        return record.get(UNITS)
    return record.division.ids(record.groups)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _in_order(value: Any, order: list[int] | None) -> Any:
    """Return the elements of a vector in a given order. Return any other value unchanged."""
    if order is None or not isinstance(value, Tensor) or value.shape != (len(order),):
        return value
    return value[torch.tensor(order).to(value.device, non_blocking=True)]


def units_of(records: Mapping[str, Any]) -> dict[str, UnitIds]:
    """For each metric that may be a vector, return the units of the elements, by name."""
    units: dict[str, UnitIds] = {}
    for path, record in records.items():
        if (ids := _ids_of(record)) is None:
            continue
        names = ["limit", "factor", "clipped"]
        if isinstance(record, dict):
            names = [name for name in record if name != UNITS]
        elif not ids.one_norm:
            names.append("norm")
        units.update(dict.fromkeys([f"{path}/{name}" for name in names], ids.in_order()))
    return units


def _of_units(record: UnitRecord) -> list[Tensor]:
    """Return the limits and the ratios of the units, or of the groups if they share one norm."""
    units = record.division
    norm = record.norm
    limits = [
        x.expand_as(norm) if isinstance(x, Tensor) else torch.full_like(norm, x)
        for x in record.limits
    ]
    if units.shared and units.scope == "global" and len(norm) == 1:
        return [torch.cat(limits), torch.cat(list(record.ratios))]
    return [units.of_first_group(limits), units.of_first_group(record.ratios)]


def _plain(value: Tensor) -> Tensor:
    """Return a vector in float32 or bool. A vector with one element becomes a 0-dim tensor."""
    value = value[0] if value.numel() == 1 else value
    return value if value.dtype == torch.bool else value.to(torch.float32, copy=True)
