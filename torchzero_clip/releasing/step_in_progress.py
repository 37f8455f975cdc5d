"""A step in progress: the parameters that are updated so far, and the records of the links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Step
from torchzero_clip.core.cohort import Cohort
from torchzero_clip.core.division import UnitIds, UnitRecord


class StepInProgress:
    """A step in progress, and the parameter groups for this step.

    Args:
        groups: The parameter groups. The step uses their present hyperparameters.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.places = {
            p: (index, place)
            for index, group in enumerate(groups)
            for place, p in enumerate(group["params"])
        }
        self.unmoved = [dict.fromkeys(group["params"]) for group in groups]
        pairs = zip(groups, self.unmoved, strict=True)
        self.groups = [
            {**group, "params": unmoved, "chain": DelayedDict(group["chain"])}
            for group, unmoved in pairs
        ]
        self.records: dict[tuple[int, int], dict[str, Any]] = {}
        self.drawn: tuple[str, ...] = ()  # the step counts that this step has advanced already

    def leave(self, index: int, place: int, p: Tensor, record: dict[str, Any]) -> None:
        """Record that a parameter was updated, together with the records of the links."""
        del self.unmoved[index][p]
        self.records[index, place] = record

    def end(self, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Write the group state of links into the groups, and return the records of the step."""
        for group, seen in zip(groups, self.groups, strict=False):  # a group may be new
            delayed = seen["chain"]
            group["chain"].clear()
            group["chain"].update(delayed, **delayed.written)
        of_links: dict[str, list[Any]] = {}
        for _, records in sorted(self.records.items(), key=lambda item: item[0]):
            for path, record in records.items():
                of_links.setdefault(path, []).append(record)
        joined = {
            path: JointRecord(records) if isinstance(records[0], UnitRecord) else records[-1]
            for path, records in of_links.items()
        }
        if rounding := of_links.get("rounding"):
            moving = torch.stack([x["moving"] for x in rounding])
            stayed = moving * torch.stack([x["lost"] for x in rounding])
            total = moving.sum()
            joined["rounding"] = {"moving": total, "lost": stayed.sum() / total.clamp(min=1)}
        return joined


class StepOfOne(Step):
    """The step of a single parameter.

    The attribute `where` has the index of the parameter's group, the group, and the index of the
    parameter in the group.
    """

    released = True
    where: tuple[int, dict[str, Any], int]

    def cohorts(self, *_: Any) -> Sequence[tuple[Cohort, Sequence[Any]]]:
        index, group, place = self.where
        ((grad,),) = self.gradients.of([[group["params"][place]]], moves=True)
        return [(cohort, [grad]) for cohort in self.roster.cohorts(index, group, {place: grad})]


class DelayedDict(dict[str, Any]):
    """The group state of links. New values take effect in the next step.

    So every parameter of a step reads the values of the previous step, such as a count of steps.
    """

    def __init__(self, chain: Mapping[str, Any]) -> None:
        super().__init__(chain)
        self.written: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.written[key] = value


class JointRecord:
    """One record for all parameters. It joins the records that a link made for each parameter.

    The tensors are joined at the first read.
    """

    shared = False
    scope = None

    def __init__(self, records: Sequence[UnitRecord]) -> None:
        self.records = records
        self.groups = records[0].groups
        self.division = self

    @property
    def norm(self) -> Tensor:
        """The norms of all units."""
        return self._joined([record.norm for record in self.records])

    @property
    def limits(self) -> list[Tensor]:
        """The limits of all units, in a list with one vector. Each tensor is in one group."""
        pairs = [(record.limits[0], record.norm) for record in self.records]
        limits = [
            torch.as_tensor(limit, device=norm.device).expand_as(norm) for limit, norm in pairs
        ]
        return [self._joined(limits)]

    @property
    def ratios(self) -> list[Tensor]:
        """The divisors of all units."""
        return [self._joined([record.ratios[0] for record in self.records])]

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        return vectors[0]

    def ids(self, groups: Sequence[Mapping[str, Any]]) -> UnitIds:
        parts = [record.division.ids(groups) for record in self.records]
        rows = tuple([row for ids in parts for row in ids.rows])
        if parts[0].lengths is None:
            return UnitIds(rows, None)
        return UnitIds(rows, tuple([n for ids in parts for n in ids.lengths or ()]))

    def _joined(self, vectors: Sequence[Tensor]) -> Tensor:
        home = self.records[0].norm
        return torch.cat([vector.to(home) for vector in vectors])
