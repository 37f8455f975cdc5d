"""Batches by hand: what goes together, in which order, and that each comes back to its place."""

from __future__ import annotations

from torchzero_clip.core.stacks import batches, in_order


def test_one_kind_is_one_batch_wherever_its_members_stand() -> None:
    assert batches("abaab") == [[0, 2, 3], [1, 4]]
    assert batches([]) == []


def test_a_batch_has_no_more_entries_than_it_may_unless_one_alone_has_more() -> None:
    sizes = [2, 3, 1, 9, 1, 4]
    assert batches("aaaaaa", sizes, 5) == [[0, 1], [2], [3], [4, 5]]
    assert batches("abaaba", sizes, 5) == [[0, 2], [1, 4], [3], [5]]


def test_one_that_may_not_come_behind_the_last_of_its_kind_begins_another_batch() -> None:
    values = [1, 5, 2, 6, 4, 3]
    rises = batches("aaabba", joins=lambda before, i: values[i] > values[before])
    assert rises == [[0, 1], [2, 5], [3], [4]]


def test_what_is_made_of_batches_comes_back_in_the_order_of_the_places() -> None:
    asked = []

    def doubled(some: list[int]) -> list[int]:
        asked.append(some)
        return [2 * i for i in some]

    assert in_order([[1, 3], [0], [2]], doubled) == [0, 2, 4, 6]
    assert asked == [[1, 3], [0], [2]]
