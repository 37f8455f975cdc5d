"""P2Quantile: a criterion whose limit is a quantile of all past norms, in constant memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Fraction
from torchzero_clip.modules.adaptive.criterion import Criterion, below, none_yet


class P2Quantile(Criterion):
    """A quantile of all past norms, computed by the P² estimator, as the limit.

    Use it for a quantile of the whole run. The estimator stores five markers instead of a window of
    norms.

    The markers estimate the minimum, the quantiles q/2, q and (1+q)/2, and the maximum. If the rank
    of a middle marker is off by one or more, the marker moves by one rank. Its new height is on a
    parabola through the neighboring markers.

    A spike stays the highest marker and raises the marker below it. For example, with q = 0.95, the
    estimate forgets a spike of 100 times the usual norm after about 500 steps. After a spike of a
    million times the usual norm, the estimate can be many times too high for ten thousand steps. If
    the norms change to a new level for good, the estimate follows when new norms outnumber old
    norms.

    Args:
        q: The quantile, from 0 to 1.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AdaptiveClip, Modular, P2Quantile
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AdaptiveClip(P2Quantile(0.9)), Adam(), LR(1e-3))

    Reference:
        Jain, Chlamtac, "The P² algorithm for dynamic calculation of quantiles and histograms
        without storing observations", CACM 28 (1985).
    """

    q: Live[Fraction]

    pure = True

    def init_unit(self) -> dict[str, Any]:
        heights = torch.full((5,), math.inf, dtype=torch.float32, device="cpu")
        return {
            "heights": heights,
            "positions": torch.arange(1.0, 6.0, dtype=torch.float32, device="cpu"),
            "seen": 0.0,
        }

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        limit = self.estimate(state, group)
        return none_yet(limit, limit)

    def estimate(self, state: UnitState, group: Group) -> Tensor:
        """Return the estimate of the quantile, from all norms so far."""
        heights = state["heights"]
        seen = state["seen"]
        # the first five norms are the heights themselves, sorted: the quantile lies between two
        rank = (seen - 1).clamp(0, 4) * group["q"]
        neighbors = torch.stack([rank.floor(), rank.ceil()], dim=1).long()
        low, high = heights.gather(1, neighbors).unbind(1)
        early_estimate = torch.lerp(low, high, (rank - rank.floor()).to(low.dtype))
        return torch.where(seen < 5, early_estimate, heights[:, 2])

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        heights = state["heights"]
        positions = state["positions"]
        seen = state["seen"]
        x = norm.to(heights.dtype)
        is_next = torch.arange(5, device=x.device) == seen[:, None]
        filled = torch.where(is_next, x[:, None], heights)
        new_heights, new_positions = self._move(x, heights, positions, group["q"])
        all_filled = (seen >= 5)[:, None]
        return {
            "heights": torch.where(all_filled, new_heights, filled.sort(dim=1).values),
            "positions": torch.where(all_filled, new_positions, positions),
            "seen": seen + 1,
        }

    def _move(
        self, x: Tensor, heights: Tensor, positions: Tensor, q: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the heights and positions of the five markers after a norm x."""
        low, *middle, high = heights.unbind(1)
        h = [torch.minimum(x, low), *middle, torch.maximum(x, high)]
        n = list((positions + below(x[:, None], heights)).unbind(1))
        n[0] = positions[:, 0]
        n[4] = positions[:, 4] + 1
        ranks = n[4] - 1
        for i, share in ((1, q / 2), (2, q), (3, (1 + q) / 2)):
            off = (1 + ranks * share - n[i]).trunc().clamp(-1, 1)
            up = n[i + 1] - n[i]
            down = n[i] - n[i - 1]
            rises = off > 0
            has_room = torch.where(rises, up, down) > 1
            d = torch.where(has_room, off, 0.0)
            slope_up = (h[i + 1] - h[i]) / up
            slope_down = (h[i] - h[i - 1]) / down
            parabolic = ((down + d) * slope_up + (up - d) * slope_down) / (up + down)
            curved = h[i] + d * parabolic
            inside = (h[i - 1] < curved) & (curved < h[i + 1])
            linear = torch.where(rises, slope_up, slope_down)
            h[i] = h[i] + d * torch.where(inside, parabolic, linear)
            n[i] = n[i] + d
        return torch.stack(h, dim=1), torch.stack(n, dim=1)
