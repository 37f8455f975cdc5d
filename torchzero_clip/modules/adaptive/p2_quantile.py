"""P2Quantile: a limit at a quantile of all past norms, kept in five numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Fraction
from torchzero_clip.modules.adaptive.criterion import Criterion, below, none_yet


class P2Quantile(Criterion):
    """The q-quantile of all past norms by the P² estimator: five markers, no window

    The markers stand at the minimum, q/2, q, (1+q)/2 and the maximum; a middle one that is a whole
    rank off moves by one, along a parabola through its neighbours. A spike stays the highest marker
    and draws the one below it up: at q = 0.95, one of 100 times the level is forgotten after 500
    steps or so, one of a million can leave the estimate many times too high for ten thousand. A
    lasting change of level is followed as fast as new norms outnumber old.

    Args:
        q: Between 0 and 1.

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
        """The quantile of the norms so far."""
        heights, seen = state["heights"], state["seen"]
        place = (seen - 1).clamp(0, 4) * group["q"]  # among the first, which are in order
        both = torch.stack([place.floor(), place.ceil()], dim=1).long()
        low, high = heights.gather(1, both).unbind(1)
        first = torch.lerp(low, high, (place - place.floor()).to(low.dtype))
        return torch.where(seen < 5, first, heights[:, 2])

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        heights, positions, seen = state["heights"], state["positions"], state["seen"]
        x = norm.to(heights.dtype)
        first = torch.where(torch.arange(5, device=x.device) == seen[:, None], x[:, None], heights)
        moved, ranks = self._move(x, heights, positions, group["q"])
        full = (seen >= 5)[:, None]
        return {
            "heights": torch.where(full, moved, first.sort(dim=1).values),
            "positions": torch.where(full, ranks, positions),
            "seen": seen + 1,
        }

    def _move(
        self, x: Tensor, heights: Tensor, positions: Tensor, q: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        low, *middle, high = heights.unbind(1)
        h = [torch.minimum(x, low), *middle, torch.maximum(x, high)]
        n = list((positions + below(x[:, None], heights)).unbind(1))
        n[0], n[4] = positions[:, 0], positions[:, 4] + 1
        ranks = n[4] - 1
        for i, share in ((1, q / 2), (2, q), (3, (1 + q) / 2)):
            off = (1 + ranks * share - n[i]).trunc().clamp(-1, 1)
            up, down, rises = n[i + 1] - n[i], n[i] - n[i - 1], off > 0
            d = off * (torch.where(rises, up, down) > 1)
            rise_up, rise_down = (h[i + 1] - h[i]) / up, (h[i] - h[i - 1]) / down
            bend = ((down + d) * rise_up + (up - d) * rise_down) / (up + down)
            curved = h[i] + d * bend
            inside = (h[i - 1] < curved) & (curved < h[i + 1])
            slope = torch.where(inside, bend, torch.where(rises, rise_up, rise_down))
            h[i], n[i] = h[i] + d * slope, n[i] + d
        return torch.stack(h, dim=1), torch.stack(n, dim=1)
