"""Lazy lists: nothing is computed before it is read, and then once."""

from __future__ import annotations

import pytest
import torch

from torchzero_clip.core import TensorList
from torchzero_clip.core.lazy import Joined, Lazy


class Counted(Lazy):
    """Computes a one, and counts how often."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def compute(self) -> list[torch.Tensor]:
        self.times += 1
        return [torch.ones(2)]


def test_a_list_is_computed_once_and_when_it_is_read() -> None:
    u = Counted()
    assert u.pending
    assert u.times == 0
    u.mul_(3.0)
    assert not u.pending
    assert u.tensors[0].tolist() == [3, 3]
    assert u.times == 1


def test_tensors_that_are_set_need_no_computing() -> None:
    u = Counted()
    u.tensors = [torch.zeros(2)]
    assert (u.times, u.pending) == (0, False)


def test_a_class_without_compute_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Lazy must define compute"):
        _ = Lazy().tensors


def test_joined_lists_are_borrowed_and_put_together_when_they_are_read() -> None:
    one, two = Counted(), TensorList([torch.zeros(1), torch.zeros(3)], owned=True)
    whole = Joined([one, two], lambda tensors: [t + 1 for t in tensors])
    assert len(Joined([two, two])) == 4
    assert one.times == 0
    assert [t.tolist() for t in whole.tensors] == [[2, 2], [1], [1, 1, 1]]
    plain = Joined([two])
    plain.add_(5.0)
    assert plain.tensors[0].tolist() == [5]
    assert two.tensors[0].tolist() == [0]
