"""Divisions by hand: which tensors of two groups are measured together, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from torchzero_clip.core.cohort import Cohort
from torchzero_clip.core.division import Division, layer_of
from torchzero_clip.core.norms import SliceRows

SHAPES = [(2, 3), (3,), (4,)]
NAMES = ["head.weight", "body.bias", "head.bias"]


def cohorts(names: Sequence[str | None] = NAMES) -> list[Cohort]:
    """Two parameters in the first group, one in the second."""
    params: list[Tensor] = [torch.zeros(shape) for shape in SHAPES]
    return [
        Cohort(0, [0, 1], list(names[:2]), params[:2], torch.float32),
        Cohort(1, [0], list(names[2:]), params[2:], torch.float32),
    ]


def rows(t: Tensor) -> tuple[int, ...]:
    return (1,) if t.dim() == 2 else ()


@pytest.mark.parametrize(
    ("scope", "unit_of", "sizes", "columns"),
    [
        (None, [0, 1, 2], [6, 3, 4], [0, 1, 2]),
        ("group", [0, 0, 1], [9, 4], [0, 1, 2, -1]),
        ("layer", [0, 1, 0], [10, 3], [0, 2, 1, -1]),
        ("global", [0, 0, 0], [13], [0, 1, 2]),
    ],
)
def test_tensors_of_a_unit_stand_side_by_side_filled_up_with_none(
    scope: Any, unit_of: list[int], sizes: list[int], columns: list[int]
) -> None:
    made = Division(cohorts(), scope, None, "Rule")
    assert (made.unit_of, made.sizes, made.columns) == (unit_of, sizes, columns)
    assert made.count == len(sizes)
    assert made.entries == [0 if i < 0 else [6, 3, 4][i] for i in columns]


SHARED = None, "group", "layer", "global"


def test_only_units_of_several_groups_are_shared() -> None:
    shared = [Division(cohorts(), x, None, "Rule").shared for x in SHARED]
    assert shared == [False, False, True, True]
    assert not Division(cohorts()[:1], "global", None, "Rule").shared


def test_a_unit_in_two_groups_takes_the_entry_of_the_first() -> None:
    vectors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    assert Division(cohorts(), "layer", None, "Rule").of_first_group(vectors).tolist() == [1, 2]
    assert Division(cohorts(), "group", None, "Rule").of_first_group(vectors).tolist() == [1, 4]


def test_a_tensor_without_the_dims_is_one_slice_of_no_size() -> None:
    made = Division(cohorts(), [1], rows, "Rule")
    assert made.lengths == [2, 1, 1]
    assert made.slices == [[2, 1], [1], [1]]
    assert made.sizes == [3, -1, -1]
    small = made.smaller_than(1)
    assert small is not None
    assert small.tolist() == [False, False, True, True]


def test_small_units_are_flagged_where_there_are_any() -> None:
    made = Division(cohorts(), None, None, "Rule")
    assert made.smaller_than(1) is None
    assert made.smaller_than(3) is None
    small = made.smaller_than(4)
    assert small is not None
    assert small.tolist() == [False, True, False]


def test_layers_need_names_and_are_named_by_all_but_the_last_dot() -> None:
    assert [layer_of(x) for x in ("a.b.weight", "weight", "a.bias")] == ["a.b", "", "a"]
    with pytest.raises(ValueError, match="Rule: dim='layer' needs the names"):
        Division(cohorts([None] * 3), "layer", None, "Rule")


def test_units_have_the_names_of_what_they_are() -> None:
    groups: list[dict[str, Any]] = [{"param_names": NAMES[:2]}, {"param_names": NAMES[2:]}]

    def names(scope: Any) -> list[str]:
        return list(Division(cohorts(), scope, rows, "Rule").ids(groups).names().values())

    assert names(None) == NAMES
    assert names("group") == ["group 0", "group 1"]
    groups[0]["name"] = "decayed"
    assert names("group") == names("global") == ["decayed", "group 1"]
    groups[1]["name"] = "decayed"
    assert names("group") == ["group 0", "group 1"]
    assert names("layer") == ["head", "body"]
    assert names([1]) == ["head.weight[0]", "head.weight[1]", "body.bias[0]", "head.bias[0]"]
    nameless = Division(cohorts([None] * 3), None, None, "Rule").ids(groups).names()
    assert nameless[1, 0, -1] == "parameter 0 of group 1"


def test_state_is_double_where_one_parameter_is() -> None:
    mixed = [*cohorts()[:1], Cohort(1, [0], [None], [torch.zeros(4).double()], torch.float64)]
    assert Division(cohorts(), None, None, "Rule").dtype == torch.float32
    assert Division(mixed, None, None, "Rule").dtype == torch.float64


def test_slices_that_lie_in_one_piece_are_known() -> None:
    """Of a matrix its rows and not its columns; a vector without the dim is one."""
    cohort, other = cohorts()
    made = Division([cohort, other], (1,), rows, "Rule")
    assert made.rows[cohort] == SliceRows(((2, 1), (1,)), ((1,), ()), (3, 3), (2, 1), True)
    assert made.rows[other] == SliceRows(((1,),), ((),), (4,), (1,), True)
    assert not Division([cohort], (0,), lambda t: (0,), "Rule").rows[cohort].whole
    stack = Cohort(0, [0], [None], [torch.zeros(2, 1, 3, 5)], torch.float32)
    for dims, whole in (((2, 3), True), ((1, 3), True), ((0, 1), False), ((0, 2, 3), True)):
        got = Division([stack], dims, lambda t, dims=dims: dims, "Rule").rows[stack]
        assert got.whole == whole, dims
        assert got.lengths[0] * got.counts[0] == 30
    empty = Cohort(0, [0], [None], [torch.zeros(0, 3)], torch.float32)
    assert not Division([empty], (1,), rows, "Rule").rows[empty].whole


def test_a_vector_of_known_numbers_is_made_once() -> None:
    cohort, other = cohorts()
    made = Division([cohort, other], (1,), rows, "Rule")
    numbers = made.constant([0.5, 2.0, -1.0])
    assert numbers.tolist() == [0.5, 0.5, 2.0, -1.0]
    assert made.constant([0.5, 2.0, -1.0]) is numbers
    assert made.flags([True, False, False]).tolist() == [True, True, False, False]
    assert [t is numbers for t in made.vectors][:1] == [True], "where replays look"
