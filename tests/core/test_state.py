"""State: its dtypes by those of parameters, and numbers of it as entries of one vector."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import at_once
from torchzero_clip.core.state import (
    counter,
    share_vectors,
    state_dtype,
    statistic,
    statistic_dtype,
    zeros_like_state,
)
from torchzero_clip.core.tensor_kinds import shared_memory


@at_once(
    "dtype, shaped, single",
    [
        (torch.float16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.complex64, torch.complex64, torch.float32),
        (torch.complex128, torch.complex128, torch.float64),
    ],
)
def test_state_is_no_narrower_than_float32(
    dtype: torch.dtype, shaped: torch.dtype, single: torch.dtype
) -> None:
    p = torch.ones(2, 3, dtype=dtype)
    assert state_dtype(p) == zeros_like_state(p).dtype == zeros_like_state(p, (4,)).dtype == shaped
    assert statistic_dtype(p) == statistic(0.5, p).dtype == single
    assert zeros_like_state(p, (4,)).shape == (4,)
    assert counter(p).dtype == torch.float32


def test_a_value_keeps_its_dtype_unless_one_is_asked_for() -> None:
    p, flag = torch.ones(2), torch.tensor(True)
    assert statistic(flag, p).dtype == torch.bool
    assert statistic(2, p, torch.float64).dtype == torch.float64


def test_a_value_that_is_neither_a_tensor_nor_a_number_is_an_error() -> None:
    for value in ("a", [1.0], None):
        with pytest.raises(TypeError, match="init_unit must return tensors or numbers, got"):
            statistic(value, torch.ones(2))


def test_numbers_share_a_vector_and_what_is_one_tensor_twice_does_not() -> None:
    twice = torch.tensor(1.0)
    states = [{"a": torch.tensor(float(i)), "b": twice, "c": torch.ones(2)} for i in range(3)]
    share_vectors(states, ["a", "b", "c", "none"])
    whole = shared_memory([state["a"] for state in states])
    assert whole is not None
    assert whole.tolist() == [0, 1, 2]
    assert all(state["b"] is twice for state in states)


def test_numbers_of_several_vectors_move_to_one_vector_and_then_stay() -> None:
    states = [{"a": torch.tensor(float(i))} for i in range(4)]
    share_vectors(states[:1] + states[2:], ["a"])
    moved = list[str]()
    share_vectors(states, ["a"], moved.append)
    share_vectors(states, ["a"], moved.append)
    assert moved == ["a"]
    whole = shared_memory([state["a"] for state in states])
    assert whole is not None
    assert whole.tolist() == [0, 1, 2, 3]
    share_vectors([states[0], states[3]], ["a"], moved.append)  # the others pause
    assert moved == ["a", "a"]
    assert shared_memory([states[0]["a"], states[3]["a"]]) is not None


def test_numbers_do_not_move_if_an_error_comes_first() -> None:
    """The recorder of a step raises this error, because it must not change state."""
    states = [{"a": torch.tensor(float(i))} for i in range(2)]
    before = [state["a"] for state in states]

    def refuse(key: str) -> None:
        raise RuntimeError(key)

    with pytest.raises(RuntimeError, match="a"):
        share_vectors(states, ["a"], refuse)
    assert all(state["a"] is t for state, t in zip(states, before, strict=True))
