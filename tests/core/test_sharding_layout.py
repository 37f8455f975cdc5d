"""Layouts and owners by hand: where the parts of a tensor lie, and who works on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from torchzero_clip.core.sharding.layout import Layout, full, layout_of, local, part_of, refuse_flat
from torchzero_clip.core.sharding.owned_tensors import spread
from torchzero_clip.core.sharding.owners import owners, owners_of


class Whole:
    """A placement on every rank."""


class Strided(SimpleNamespace):
    """FSDP's placement of a tensor that tensor parallelism has split already."""

    dim = 0

    def is_partial(self) -> bool:
        return False


class Mesh:
    """A mesh of processes that are not there."""

    def __init__(self, *sizes: int, here: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.here = here

    def size(self, dim: int) -> int:
        return self.sizes[dim]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.here


def mesh(*sizes: int, here: tuple[int, ...] = ()) -> Any:
    return Mesh(*sizes, here=here)


def test_parts_are_of_one_size_and_the_last_ones_short_or_empty() -> None:
    layout = Layout(mesh(4), (Shard(0),), (5, 3))
    assert [layout.extents([i])[0] for i in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert layout.extents([1])[1] == (0, 3)
    assert layout.split == {0}


def test_a_dim_that_two_dims_of_the_mesh_split_is_cut_twice() -> None:
    both = Layout(mesh(2, 2), (Shard(0), Shard(0)), (8,))
    order = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [both.extents(at)[0][0] for at in order] == [0, 2, 4, 6]
    strided = Strided(split_factor=2)  # which comes after tensor parallelism
    swapped = Layout(mesh(2, 2), (strided, Shard(0)), (8,))
    assert [swapped.extents(at)[0][0] for at in order] == [0, 4, 2, 6]


def test_a_part_is_cut_from_the_whole_and_a_row_of_one_is_not() -> None:
    layout = Layout(mesh(2, here=(1,)), (Shard(0),), (3, 2))
    assert layout.part(torch.arange(6.0).view(3, 2)).tolist() == [[4, 5]]
    assert layout.part(torch.arange(2.0).view(1, 2)).tolist() == [[0, 1]]


def test_a_part_does_not_keep_the_whole_tensor_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a checkpoint of one rank would contain the whole tensor."""
    monkeypatch.setattr(Layout, "wrap", lambda layout, part: part)
    layout = Layout(mesh(2, here=(1,)), (Shard(0),), (4, 2))
    (part,) = spread([torch.arange(8.0).view(4, 2)], [layout])
    assert part.tolist() == [[4, 5], [6, 7]]
    assert part.untyped_storage().nbytes() == 4 * part.numel()


def test_a_plain_tensor_is_all_here() -> None:
    t = torch.ones(2)
    assert layout_of(t) is None
    assert local(t) is full(t) is part_of(t, None) is t
    refuse_flat([t])


def test_the_dearest_goes_first_and_to_the_rank_that_has_the_least_to_do() -> None:
    assert owners([1, 8, 2, 4], [4, 6]) == [6, 4, 6, 6]
    assert owners([5, 5, 5], range(3)) == [0, 1, 2]
    assert owners([4, 1, 1], range(2), [1, None, None]) == [1, 0, 0]  # what has an owner keeps it


def test_what_is_whole_on_every_rank_has_no_owner() -> None:
    assert owners_of([None, None], [1.0, 2.0]) == [None, None]
