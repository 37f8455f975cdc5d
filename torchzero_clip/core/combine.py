"""Statistics over buckets: of devices, meshes and processes, combined into those of units."""

from __future__ import annotations

from collections.abc import Sequence

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


def total_norm(buckets: Sequence[Bucket], lists: Sequence[TensorList]) -> Tensor:
    """The 2-norm of all tensors together, as torch.nn.utils.clip_grad_norm_ returns it."""
    numel = [n for bucket in buckets for n in bucket.sizes]
    m = norms.NAMED["l2"]
    return overall(buckets, statistics_of(buckets, lists, m), numel, m)


def overall(
    buckets: Sequence[Bucket], stats: Tensor, numel: Sequence[int], m: norms.Measure
) -> Tensor:
    """One norm from the statistics of all tensors."""
    members = [list(range(len(numel)))]
    return norms.finish(*join(stats.unsqueeze(1), members, numel, m, buckets[0], [0]), m)[0]


def join(
    table: Tensor,
    members: Sequence[Sequence[int]],
    numel: Sequence[int],
    m: norms.Measure,
    bucket: Bucket,
    positions: Sequence[int] | None,
) -> tuple[Tensor, Tensor | None]:
    """Statistics of units from a (rows, units, tensors) table, and where needed their sizes.

    With a process group, units that go on in its other processes are those of all; `positions`
    says which groups they are.
    """
    group = None if positions is None else bucket.step.process_group
    if not (m.counts or m.kind == "sum" or group is not None):
        return norms.merge(table, None, m), None
    width = table.shape[2]
    flat = [n for row in members for n in [numel[i] for i in row] + [0] * (width - len(row))]
    counts = norms.numbers(flat, table).view(-1, width)
    stats, sizes = norms.merge(table, counts, m), counts.sum(dim=1)
    if positions is None or group is None:
        return stats, sizes
    return _across(stats, sizes, m, bucket, positions)


def _across(
    stats: Tensor, sizes: Tensor, m: norms.Measure, bucket: Bucket, positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Statistics and sizes of units over all processes of the step's process group."""
    mine = dict(zip(positions, torch.cat([stats, sizes.unsqueeze(0)]).unbind(1), strict=True))
    none = torch.zeros(len(stats) + 1, dtype=stats.dtype, device=stats.device)
    columns = [mine.get(i, none) for i in range(max(len(bucket.step.groups), 1))]
    every = gather(torch.stack(columns, dim=1), bucket.step.process_group).permute(1, 2, 0)
    here = torch.stack([every[:, i] for i in positions], dim=1)
    return norms.merge(here[:-1], here[-1], m), here[-1].sum(dim=1)
