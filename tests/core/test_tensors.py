"""Kinds of tensors: plain, fake, of one shape, and numbers that share a vector."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from torchzero_clip.core.tensor_kinds import (
    addresses,
    all_plain,
    all_real,
    is_sharded,
    same_shapes,
    share_memory,
    shared_memory,
    storages,
)


class Sub(torch.Tensor):
    """A tensor of a class of somebody else."""


def test_plain_tensors_are_those_of_torch_and_fake_ones_have_no_values() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    some = [torch.ones(2), Parameter(torch.ones(2))]
    assert all_real(some)
    assert all_plain([*some, fake])
    assert not all_real([*some, fake])
    assert not all_plain([torch.ones(1).as_subclass(Sub)])
    assert not is_sharded(some[0])
    assert addresses(some) == [t.data_ptr() for t in some]
    assert addresses([*some, fake]) is None
    assert storages([some[0], some[0][1:]]) == {some[0].data_ptr()}
    assert storages([torch.empty(0), torch.empty(0, 3)]) == set()


def test_shapes_are_compared_one_by_one() -> None:
    a, b = torch.ones(2, 3), torch.ones(3)
    assert same_shapes([a, b], [a.double(), b])
    assert not same_shapes([a, b], [b, a])


def test_numbers_of_one_kind_become_parts_of_a_vector_and_are_found_as_such() -> None:
    cells = share_memory([torch.tensor(float(i)) for i in range(4)])
    whole = shared_memory(cells)
    assert whole is not None
    assert whole.tolist() == [0, 1, 2, 3]
    whole[1] = 7.0
    assert cells[1].item() == 7
    part = shared_memory(cells[1:3])
    assert part is not None
    assert part.tolist() == [7, 2]
    again = share_memory(cells)
    assert all(a is b for a, b in zip(again, cells, strict=True))
    reordered = share_memory(cells[::-1])
    whole = shared_memory(reordered)
    assert whole is not None
    assert whole.tolist() == [3, 2, 7, 0]


def test_others_share_none() -> None:
    mixed = [torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)]
    assert [a is b for a, b in zip(share_memory(mixed), mixed, strict=True)] == [True, True]
    assert shared_memory(mixed) is None
    cells = share_memory([torch.tensor(float(i)) for i in range(4)])
    assert shared_memory([cells[0], cells[2]]) is None  # with a gap
    assert shared_memory(cells[::-1]) is None
    assert shared_memory([]) is None
    cells[1].data = torch.tensor(9.0)
    assert shared_memory(cells) is None
