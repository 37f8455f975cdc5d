"""Statistics over buckets: of devices, meshes and processes, combined into those of units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.norms.shards import gather, merge_shards
from torchzero_clip.core.tensorlist import TensorList


def statistics_of(
    buckets: Sequence[Bucket], lists: Sequence[TensorList], m: norms.Measure
) -> Tensor:
    """The statistic of every tensor, a column each; of a sharded one that of all its shards."""
    home = buckets[0].device
    parts = [some.statistics(m).to(home) for some in lists]
    return of_all_shards(buckets, torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], m)


def of_all_shards(buckets: Sequence[Bucket], stats: Tensor, m: norms.Measure) -> Tensor:
    """The statistics of whole tensors from those of the parts here."""
    if not any([bucket.part.sharded for bucket in buckets]):
        return stats
    layouts = [layout for bucket in buckets for layout in bucket.layouts]
    return merge_shards(stats, [1] * len(layouts), layouts, [None] * len(layouts), m)


def across(
    stats: Tensor, sizes: Tensor, m: norms.Measure, positions: Sequence[int], count: int, group: Any
) -> tuple[Tensor, Tensor]:
    """Statistics and sizes of units that go on in the other processes of a group.

    `positions` are those of the units here among the `count` that there may be in all.
    """
    mine = dict(zip(positions, torch.cat([stats, sizes.unsqueeze(0)]).unbind(1), strict=True))
    none = torch.zeros(len(stats) + 1, dtype=stats.dtype, device=stats.device)
    columns = [mine.get(i, none) for i in range(count)]
    every = gather(torch.stack(columns, dim=1), group).permute(1, 2, 0)
    here = torch.stack([every[:, i] for i in positions], dim=1)
    return norms.merge(here[:-1], here[-1], m), here[-1].sum(dim=1)
