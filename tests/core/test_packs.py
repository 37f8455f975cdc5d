"""Packs by hand: which tensors share a call, and that each comes back as it was alone."""

from __future__ import annotations

import pytest
import torch

from tests.engines.accelerated import as_on_an_accelerator
from torchzero_clip.core.small_tensors import expanded, in_stacks, packs, shares, unpacked


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    """Of 4, 6, 12 (which is large here), 4, 20 with gaps, and 9 entries."""
    made = [torch.arange(float(n)) + 1 for n in (4, 6, 12, 4, 20, 9)]
    made[4] = made[4].view(2, 10)[:, ::2]
    return made


def test_large_tensors_and_those_with_gaps_stay_alone_and_a_full_pack_is_followed_by_another(
    tensors: list[torch.Tensor],
) -> None:
    with as_on_an_accelerator():  # large are ten entries, and 24 fill a pack
        assert packs(tensors) == [[0, 1, 3, 5], [2], [4]]
        assert packs([torch.ones(9)] * 6) == [[0, 1], [2, 3], [4, 5]]


def test_kinds_do_not_mix() -> None:
    one, two = torch.ones(2), torch.ones(2, dtype=torch.float64)
    assert packs([one, two, one, two]) == [[0, 2], [1, 3]]
    assert packs([one, one, one], ["a", "b", "a"]) == [[0, 2], [1]]


def test_a_tensor_without_entries_has_its_place_wherever_it_stands() -> None:
    none, one = torch.ones(0, 4), torch.ones(2)
    assert packs([none, one, none]) == [[0, 1, 2]]
    assert packs([none, none]) == [[0, 1]]
    with as_on_an_accelerator():
        made = in_stacks([none, one, none], lambda x: x.flatten(1).sum(1), torch.sum)
    assert [x.item() for x in made] == [0.0, 2.0, 0.0]


def test_calls_are_shared_on_an_accelerator_alone_and_by_more_than_a_few() -> None:
    assert not shares([torch.ones(1)] * 5)
    with as_on_an_accelerator():
        assert shares([torch.ones(1)] * 3)
        assert not shares([torch.ones(1)] * 2)


def test_a_pack_comes_apart_in_the_shapes_of_its_tensors() -> None:
    some = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0], [4.0]]), torch.tensor(5.0)]
    whole = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    for a, b in zip(unpacked(whole, some), some, strict=True):
        assert a.equal(b)


def test_numbers_and_rows_are_laid_at_every_entry() -> None:
    some = [torch.zeros(2), torch.zeros(1, 3)]
    a, b = expanded([torch.tensor(7.0), torch.tensor(8.0, dtype=torch.float64)], some)
    assert a.tolist() == [7, 7]
    assert b.tolist() == [[8, 8, 8]]
    assert b.dtype == torch.float32
    twice = [torch.zeros(2, 2)] * 2
    c, d = expanded([torch.tensor([1.0, 2.0]), torch.tensor(3.0)], twice)
    assert c.tolist() == [[1, 2], [1, 2]]
    assert d.tolist() == [[3, 3], [3, 3]]


def test_tensors_of_one_shape_and_kind_are_done_in_one_call() -> None:
    some = [torch.full((2,), float(i)) for i in range(5)] + [torch.ones(3)]
    asked = []

    def stacked(x: torch.Tensor, kind: str) -> torch.Tensor:
        asked.append((tuple(x.shape), kind))
        return x * 2

    def alone(x: torch.Tensor, kind: str) -> torch.Tensor:
        asked.append((tuple(x.shape), kind))
        return x * 2

    kinds = ["a", "a", "b", "a", "b", "a"]
    with as_on_an_accelerator():
        made = in_stacks(some, stacked, alone, kinds)
    assert sorted(asked) == [((2, 2), "b"), ((3,), "a"), ((3, 2), "a")]
    for x, t in zip(made, some, strict=True):
        assert x.equal(t * 2)
