"""Progress: the state of `Recover` itself, and the results of all ranks that a check needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.sharding.ranks import rank_and_world
from torchzero_clip.recovering.judging import Look


@dataclass
class Progress:
    """The position of a run, and the recent losses with which a check compares new losses.

    Batches are numbered from 1.

    Attributes:
        rows: A row for each step since the last check. It has the loss, and a number that is not
            zero if a guard skipped the step.
        count: The number of steps. A rollback sets this number back.
        told: For each step in `rows`, whether the step had a loss.
        losses: The losses of the last good steps.
        drawn: The number of batches that the loader has returned.
        ends: The value of `drawn` at the last check and after each step in `rows`.
        bad: The batches of the bad steps since the last snapshot.
        left_out: The batches that training leaves out.
        again: The number of rollbacks since the last new snapshot.
        slow_until: The step until which the learning rate is reduced.
    """

    rows: Tensor
    count: int = 0
    told: list[bool] = field(default_factory=list)
    moved: list[bool] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    drawn: int = 0
    ends: list[int] = field(default_factory=lambda: [0])
    bad: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    again: int = 0
    slow_until: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, including the rows of the steps since the last check."""
        return {**asdict(self), "rows": self.rows[: len(self.told)].tolist()}

    def read(self) -> tuple[list[Look], bool]:
        """Return the steps since the last check, and whether every step had a loss on all ranks.

        All ranks get the same result. Only a check calls this method, because reading the losses
        synchronizes with the GPU.
        """
        losses, why = self.rows[: len(self.told)].unbind(1)
        has_loss, moved = torch.tensor([self.told, self.moved], device=losses.device)
        is_finite = losses.isfinite()
        columns = [losses.where(is_finite, 0), ~is_finite, why > 0, has_loss, moved]
        table = torch.stack(columns, dim=1)
        _, world = rank_and_world()
        if world > 1:
            torch.distributed.all_reduce(table)
        looks: list[Look] = []
        all_have_losses = True
        for loss_sum, broken, skipped, with_loss, moving in table.tolist():  # summed over ranks
            mean = loss_sum / max(with_loss, 1)
            looks.append(Look(mean, broken > 0, skipped > 0, with_loss > 0, moving > 0))
            all_have_losses = all_have_losses and with_loss == world
        return looks, all_have_losses

    def clear(self, check: int) -> None:
        """Make room for the steps until the next check."""
        self.rows = self.rows.new_zeros(check, 2)
        self.told.clear()
        self.moved.clear()


def all_agree(flag: bool, device: torch.device) -> bool:
    """Return whether a flag is set on every rank."""
    if rank_and_world()[1] == 1:
        return flag
    flags = torch.tensor(int(flag), dtype=torch.int32, device=device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN)
    return bool(flags)
