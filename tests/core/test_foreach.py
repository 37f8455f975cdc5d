"""Operators on lists: operands of every form, and the same numbers one by one and in packs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.accelerated import as_on_an_accelerator
from tests.helpers import at_once
from torchzero_clip.core.foreach import (
    STAND_INS,
    arguments,
    copies,
    copy_into,
    fill_,
    foreach,
    operand,
    stand_in,
)

SHAPES = [(2,), (3,), (2, 2), (12,), ()]


def lists(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def test_a_vector_of_another_length_is_a_sentence() -> None:
    words = r"one element per tensor of the TensorList, here 5, got shape \(2,\)"
    with pytest.raises(ValueError, match=words):
        operand(torch.ones(2), lists())


def test_a_number_stays_one_and_a_vector_is_taken_apart() -> None:
    some = lists()
    assert operand(2.0, some) == 2.0
    assert [x.item() for x in operand(torch.arange(5.0), some)] == [0, 1, 2, 3, 4]
    assert operand(torch.ones(1), some, as_it_is=True).dim() == 0
    assert len(operand(torch.ones(1), some)) == 5


@at_once(
    "name, operands",
    [
        ("mul", [torch.arange(5.0)]),
        ("mul", [3.0]),
        ("add", [lists(1)]),
        ("add", [lists(1, torch.bfloat16)]),
        ("div", [torch.tensor(4.0)]),
        ("lerp", [lists(1), torch.arange(5.0)]),
        ("clamp", [-0.5, 0.5]),
        ("sqrt", []),
    ],
)
def test_in_packs_as_one_by_one(name: str, operands: list[Any]) -> None:
    tensors = lists()
    alone = foreach(name, lists(), arguments(name, tensors, operands) if operands else [])
    with as_on_an_accelerator():
        given = arguments(name, tensors, operands) if operands else []
        made = foreach(name, tensors, given)
    torch.testing.assert_close(made, list(alone), rtol=0, atol=0, equal_nan=True)


@at_once("dtype", [torch.float32, torch.float64])
def test_a_list_moves_toward_a_vector_of_any_dtype(dtype: torch.dtype) -> None:
    """Products such as `u.dot(u)` are vectors in float64, whatever the dtype of the list is."""
    moved = foreach("lerp", lists(), arguments("lerp", lists(), [torch.arange(5).to(dtype), 0.5]))
    for i, (t, start) in enumerate(zip(moved, lists(), strict=True)):
        torch.testing.assert_close(t, (start + i) / 2)


@at_once("name", STAND_INS)
def test_an_operator_without_a_foreach_is_the_same_in_packs(name: str) -> None:
    tensors = lists()
    rows: list[Any] = [lists(1)] if name in ("hypot", "atan2", "eq") else []
    if name == "where":
        rows = [[t > 0 for t in lists(2)], lists(1)]
    alone = stand_in(name, tensors, rows)
    with as_on_an_accelerator():
        made = stand_in(name, tensors, rows)
    assert all(a.equal(b) for a, b in zip(made, alone, strict=True))


def test_a_value_is_put_where_a_mask_holds() -> None:
    alone, shared = lists(), lists()
    masks = [t > 0 for t in alone]
    fill_(alone, masks, 0.0)
    with as_on_an_accelerator():
        fill_(shared, masks, 0.0)
    for t, mask, old, other in zip(alone, masks, lists(), shared, strict=True):
        assert t.equal(torch.where(mask, 0.0, old))
        assert other.equal(t)


@at_once("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_copies_are_new_memory_with_these_values(dtype: torch.dtype) -> None:
    some = lists()
    made = copies(some, dtype)
    for a, b in zip(made, some, strict=True):
        assert a.equal(b.to(dtype))
        assert a.data_ptr() != b.data_ptr()
    copy_into(some, [torch.zeros_like(t) for t in some])
    assert not any(t.any() for t in some)
