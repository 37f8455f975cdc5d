"""Buffers: which tensors share memory, and which fill their memory without gaps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchzero_clip.engines.buffers import Buffer, Buffers, disjoint

WHOLE = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("tensor", "separate"),
    [
        (torch.zeros(3), True),
        (torch.zeros(0), True),
        (WHOLE, False),
        (WHOLE[2:], False),
        (WHOLE[:, 1:3], False),
        (WHOLE.view(-1)[7:8], False),
    ],
)
def test_a_tensor_that_begins_anywhere_in_another_shares_its_memory(
    tensor: Tensor, separate: bool
) -> None:
    other = torch.zeros(2)
    assert disjoint([Buffer([other, WHOLE]), Buffer([tensor])]) == separate
    assert disjoint([Buffer([tensor]), Buffer([WHOLE, other])]) == separate


def test_neighbors_in_one_storage_share_no_memory() -> None:
    assert disjoint([Buffer([WHOLE[:2]]), Buffer([WHOLE[2:]])])
    assert not disjoint([Buffer([WHOLE[:3], WHOLE[2:]])])


def test_dense_tensors_fill_their_memory_in_any_order_of_dims() -> None:
    channels_last = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    negated = torch.complex(WHOLE, WHOLE).conj().imag
    tensors = [WHOLE, WHOLE.t(), channels_last, WHOLE[:, ::2], negated, torch.zeros(()).expand(3)]
    assert Buffer(tensors).dense == [True, True, True, False, False, False]
    assert Buffer([WHOLE, torch.zeros(0, 2)]).dense == [True, True]


def test_a_kept_buffer_is_used_while_its_tensors_stay_where_they_are() -> None:
    buffers = Buffers()
    tensors = [torch.zeros(2), torch.zeros(3, 4)]
    first = buffers.find("key", tensors)
    assert buffers.find("key", list(tensors)) is first
    tensors[1].data = torch.zeros(3, 4)
    assert buffers.find("key", tensors) is not first
