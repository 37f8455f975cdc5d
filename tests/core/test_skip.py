"""Skip: a flag on the device, and values that come back where it is set."""

from __future__ import annotations

import pytest
import torch

from torchzero_clip.core.skip import Skip, Skipped

SET, CLEAR = torch.tensor(True), torch.tensor(False)


def test_there_is_nothing_to_skip_before_a_guard_has_spoken() -> None:
    skip = Skip()
    assert not skip
    skip.read("nobody asks")
    skip.hold([torch.ones(1)])
    skip.put_back()


@pytest.mark.parametrize("flags", [[SET], [CLEAR, SET], [SET, CLEAR]])
def test_one_flag_of_several_is_enough(flags: list[torch.Tensor]) -> None:
    skip = Skip()
    for flag in flags:
        skip.add(flag)
    assert bool(skip.on(torch.device("cpu")))
    with pytest.raises(Skipped):
        skip.read("a count on the host")


@pytest.mark.parametrize(("flag", "kept"), [(SET, [1.0, 2.0]), (CLEAR, [7.0, 8.0])])
def test_held_values_come_back_where_the_flag_is_set(flag: torch.Tensor, kept: list[float]) -> None:
    skip, t = Skip(), torch.tensor([1.0, 2.0])
    skip.add(flag)
    skip.hold([t])
    t.copy_(torch.tensor([7.0, 8.0]))
    skip.put_back()
    assert t.tolist() == kept


def test_values_that_are_held_twice_come_back_as_they_were_first() -> None:
    skip, t = Skip(), torch.tensor([1.0])
    skip.add(SET)
    for _ in range(2):
        skip.hold([t])
        t.add_(1)
    skip.put_back()
    assert t.tolist() == [1]


def test_a_flag_that_was_read_and_is_clear_needs_no_copies() -> None:
    skip, t = Skip(), torch.ones(1)
    skip.add(CLEAR)
    skip.read("a count on the host")
    assert skip.why == "a count on the host"
    skip.hold([t])
    skip.add(SET)  # and a later guard asks anew
    t.zero_()
    skip.put_back()
    assert t.tolist() == [0]
    with pytest.raises(Skipped):
        skip.read("again")
