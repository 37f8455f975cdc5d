"""The identity of units: the same entry of two steps may belong to other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchzero_clip.core.bucket import Bucket


class UnitIds(NamedTuple):
    """The units of one step.

    `rows` are the index of a group, places in it and the names there; `lengths` is how many slices
    each tensor has, where the units are slices; `one_norm`: the units are groups that share a norm.
    """

    rows: tuple[tuple[int, tuple[int, ...], tuple[str | None, ...]], ...]
    lengths: tuple[int, ...] | None = None
    one_norm: bool = False

    def names(self) -> dict[tuple[int, int, int], str]:
        """The name of each unit, under (group, place, slice), by which units are sorted."""
        flat = [
            (g, place, f"parameter {place} of group {g}" if name is None else name)
            for g, places, names in self.rows
            for place, name in zip(places, names, strict=True)
        ]
        if self.lengths is None:
            return {(g, place, -1): name for g, place, name in flat}
        rows = zip(flat, self.lengths, strict=True)
        return {(g, place, i): f"{name}[{i}]" for (g, place, name), n in rows for i in range(n)}


def ids_of(buckets: Sequence[Bucket], scope: Any, lengths: Sequence[int] | None) -> UnitIds:
    """The units of some buckets at a scope; `lengths` where they are slices."""
    if scope in ("group", "global"):
        indexes = sorted({bucket.index for bucket in buckets})
        rows = tuple([(g, (-1,), (f"group {g}",)) for g in indexes])
        return UnitIds(rows, one_norm=scope == "global")
    if scope == "layer":
        first: dict[str, tuple[int, int]] = {}
        for g, group in enumerate(buckets[0].step.groups):
            for place, name in enumerate(group["param_names"]):
                first.setdefault(layer_of(name), (g, place))
        layers = dict.fromkeys([layer_of(n) for b in buckets for n in b.names if n is not None])
        return UnitIds(tuple([(first[x][0], (first[x][1],), (x,)) for x in layers]))
    tensors = tuple([(b.index, tuple(b.places), tuple(b.names)) for b in buckets])
    return UnitIds(tensors, None if lengths is None else tuple(lengths))


def layer_of(name: str) -> str:
    """The module that a parameter belongs to: all of its name before the last dot."""
    return name.rpartition(".")[0]
