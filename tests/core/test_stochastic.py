"""Bits by hand: the hash, what carries into bfloat16 and how often, and the places of elements."""

from __future__ import annotations

import torch

from torchzero_clip.core.formats.stochastic import (
    Elements,
    carried,
    halves_,
    keys_of,
    mix_,
    rounded,
)


def lowbias32(x: int) -> int:
    """The published hash, in whole numbers of Python."""
    x = (x ^ 0) * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def test_the_hash_is_what_its_factors_say() -> None:
    values = [0, 1, 2, 12345, 2**31 - 1, -1, -(2**31)]
    found = mix_(torch.tensor(values, dtype=torch.int32))
    assert found.tolist() == [signed(lowbias32(x % 2**32)) for x in values]


def test_halves_are_those_of_the_hash() -> None:
    low, high = halves_(torch.arange(100, dtype=torch.int32))
    whole = mix_(torch.arange(100, dtype=torch.int32))
    assert low.tolist() == [x % 2**16 for x in whole.tolist()]
    assert high.tolist() == [(x >> 16) % 2**16 for x in whole.tolist()]


def test_a_number_goes_to_its_neighbours_as_often_as_it_is_near_them() -> None:
    step = 2.0**-7  # of bfloat16 between 1 and 2
    for share in (0.0, 0.125, 0.5, 0.75):
        x = torch.full((2**16,), 1 + share * step)
        noise = torch.arange(2**16, dtype=torch.int32)  # every pattern of the bits once
        found = carried(x, noise, torch.bfloat16)
        assert {1.0, 1 + step} >= set(found.tolist())
        assert (found > 1).float().mean().item() == share


def test_numbers_that_bfloat16_has_stay_and_so_does_nan() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, torch.nan])
    for key in range(50):
        found = rounded(
            x, torch.tensor(key, dtype=torch.int32), torch.zeros((), dtype=torch.int32), 0
        )
        assert found.float().equal(x) or found[:-1].float().equal(x[:-1])
        assert found[-1].isnan()


def test_the_bits_of_an_element_hang_on_its_place_alone() -> None:
    x, key = torch.rand(64), torch.tensor(7, dtype=torch.int32)
    whole = rounded(x, key, torch.tensor(0, dtype=torch.int32), 1)
    cut = [
        rounded(x[i : i + 16], key, torch.tensor(i, dtype=torch.int32), 1) for i in (0, 16, 32, 48)
    ]
    assert torch.cat(cut).equal(whole)


def test_keys_part_places_links_and_seeds() -> None:
    device = torch.device("cpu")
    rows = [keys_of([0, 1, 2], numbers, device) for numbers in ((0, 0), (0, 1), (1, 0))]
    assert len(set(torch.cat(rows).tolist())) == 9
    assert keys_of([2], (1, 0), device).equal(rows[2][2:])


def test_elements_go_by_the_memory_of_the_parameter() -> None:
    made = Elements([torch.zeros(2, 3), torch.zeros(3, 2).t()], [None, None])
    assert made.index(0, torch.zeros(2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert made.index(1, torch.zeros(2, 3)).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert not made.contiguous
    assert made.follow(1, torch.zeros(3, 2).t())
    assert not made.follow(1, torch.zeros(2, 3))
