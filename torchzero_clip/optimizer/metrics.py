"""Metrics: the measurements of the links by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.division import UNITS, UnitIds, UnitRecord


def metrics_of(records: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics, by name, of the records that the links left, whose memory the next step may
    write.
    """
    out: dict[str, Any] = {}
    for path, record in records.items():
        if isinstance(record, dict):
            values = {name: _copied(value) for name, value in record.items() if name != UNITS}
            out.update({f"{path}/{name}": value for name, value in values.items()})
            continue
        limit, ratio = _of_units(record)
        values = {"norm": record.norm, "limit": limit, "factor": 1 / ratio, "clipped": ratio > 1}
        out.update({f"{path}/{name}": _plain(value) for name, value in values.items()})
    return out


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def units_of(records: Mapping[str, Any]) -> dict[str, UnitIds]:
    """The units of the entries of each metric that may be a vector."""
    out: dict[str, UnitIds] = {}
    for path, record in records.items():
        if isinstance(record, dict):
            ids = record.get(UNITS)
            out.update({f"{path}/{name}": ids for name in record if ids and name != UNITS})
        else:
            ids = record.division.ids(record.groups)
            names = ["limit", "factor", "clipped"] + ["norm"] * (not ids.one_norm)
            out.update({f"{path}/{name}": ids for name in names})
    return out


def _of_units(record: UnitRecord) -> list[Tensor]:
    """Limits and ratios of the units, or of every group where the groups share one norm."""
    units, norm = record.division, record.norm
    limits = [
        x.expand_as(norm) if isinstance(x, Tensor) else torch.full_like(norm, x)
        for x in record.limits
    ]
    if units.shared and units.scope == "global" and len(norm) == 1:
        return [torch.cat(limits), torch.cat(list(record.ratios))]
    return [units.of_first_group(limits), units.of_first_group(record.ratios)]


def _plain(value: Tensor) -> Tensor:
    value = value[0] if value.numel() == 1 else value
    return value if value.dtype == torch.bool else value.to(torch.float32, copy=True)
