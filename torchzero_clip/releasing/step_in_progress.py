"""A step on its way: who has moved, what links wrote for those that follow, and all records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Step
from torchzero_clip.core.cohort import Cohort
from torchzero_clip.core.division import UnitIds, UnitRecord


class Running:
    """A step on its way: the groups as its parameters see them, and those that have not moved.

    Args:
        groups: The parameter groups; their live values are taken now.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.places = {
            p: (index, place)
            for index, group in enumerate(groups)
            for place, p in enumerate(group["params"])
        }
        self.left = [dict.fromkeys(group["params"]) for group in groups]
        pairs = zip(groups, self.left, strict=True)
        self.groups = [{**g, "params": left, "chain": Held(g["chain"])} for g, left in pairs]
        self.records: dict[tuple[int, int], dict[str, Any]] = {}
        self.drawn: tuple[str, ...] = ()  # the counts of steps that have counted this one

    def leave(self, index: int, place: int, p: Tensor, record: dict[str, Any]) -> None:
        """Note that a parameter has moved."""
        del self.left[index][p]
        self.records[index, place] = record

    def end(self, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Bring what links wrote for the groups into these; returns the records of the step."""
        for group, seen in zip(groups, self.groups, strict=False):  # one may have been added
            held = seen["chain"]
            group["chain"].clear()
            group["chain"].update(held, **held.written)
        found: dict[str, list[Any]] = {}
        for _, record in sorted(self.records.items(), key=lambda row: row[0]):
            for path, one in record.items():
                found.setdefault(path, []).append(one)
        joined = {
            path: Joint(some) if isinstance(some[0], UnitRecord) else some[-1]
            for path, some in found.items()
        }
        if lost := found.get("rounding"):
            moving = torch.stack([x["moving"] for x in lost])
            stayed = moving * torch.stack([x["lost"] for x in lost])
            total = moving.sum()
            joined["rounding"] = {"moving": total, "lost": stayed.sum() / total.clamp(min=1)}
        return joined


class StepOfOne(Step):
    """The step of the parameter at a place of a group, which is given with its index."""

    released = True
    where: tuple[int, dict[str, Any], int]

    def cohorts(self, *_: Any) -> Sequence[tuple[Cohort, Sequence[Any]]]:
        index, group, place = self.where
        ((grad,),) = self.gradients.of([[group["params"][place]]], moves=True)
        return [(cohort, [grad]) for cohort in self.roster.cohorts(index, group, {place: grad})]


class Held(dict[str, Any]):
    """What links keep once for a group: every parameter reads what the step before left, such as a
    count of steps, and what they write is for the next.
    """

    def __init__(self, chain: Mapping[str, Any]) -> None:
        super().__init__(chain)
        self.written: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.written[key] = value


class Joint:
    """The records that a link left for single parameters, as one; joined when they are read."""

    shared, scope = False, None

    def __init__(self, records: Sequence[UnitRecord]) -> None:
        self.records, self.groups, self.division = records, records[0].groups, self

    @property
    def norm(self) -> Tensor:
        """The norms of all units."""
        return self._joined([record.norm for record in self.records])

    @property
    def limits(self) -> list[Tensor]:
        """The limits of all units: a tensor is in one group, so one vector does."""
        rows = [(record.limits[0], record.norm) for record in self.records]
        each = [torch.as_tensor(limit, device=norm.device).expand_as(norm) for limit, norm in rows]
        return [self._joined(each)]

    @property
    def ratios(self) -> list[Tensor]:
        """The divisors of all units."""
        return [self._joined([record.ratios[0] for record in self.records])]

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        return vectors[0]

    def order(self, groups: Sequence[Mapping[str, Any]]) -> list[int] | None:
        return self.ids(groups).order

    def ids(self, groups: Sequence[Mapping[str, Any]]) -> UnitIds:
        each = [record.division.ids(groups) for record in self.records]
        lengths = [n for ids in each for n in ids.lengths or ()]
        rows = tuple([row for ids in each for row in ids.rows])
        return UnitIds(rows, tuple(lengths) if each[0].lengths is not None else None)

    def _joined(self, vectors: Sequence[Tensor]) -> Tensor:
        home = self.records[0].norm
        return torch.cat([vector.to(home) for vector in vectors])
