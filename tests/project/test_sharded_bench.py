"""The benchmark of sharded steps: its rows by hand, and a slice of it on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sharded import HEAD, on_ranks, row


def found(**more: Any) -> dict[str, Any]:
    times = {"foreach": [4e-3, 5e-3], "fused": [3e-3, 2e-3], "default": [3e-3, 1e-3]}
    times |= {"compiled": [1.5e-3, 1e-3]}
    shares = {"default": 0.0, "compiled": 0.95}
    return {"name": "vit", "ranks": 2, "times": times, "shares": shares, "failed": {}, **more}


def test_a_row_has_the_faster_by_hand_and_ratios_of_turns() -> None:
    cells = row(found()).split()
    assert [*cells[:5], cells[8], *cells[12:]] == [
        "vit",
        "2",
        "fused",
        "2.50",
        "0.75",
        "0.50",
        "95",
        "%",
    ]
    assert cells[5:8] == ["(0.38", "to", "1.12)"]
    assert len(HEAD) == len(row(found()))


def test_who_takes_no_sharded_parameters_is_named() -> None:
    told = row(found(failed={"authors": "TypeError: no DTensors"}))
    assert told.endswith("  authors took none (TypeError: no DTensors)")


@pytest.mark.slow
def test_a_slice_races_on_one_rank_and_its_compiled_steps_are_repeated() -> None:
    (one,) = on_ranks(1, ["--only", "quick", "--rounds", "1"])
    assert one["failed"] == {}
    assert {*one["times"]} == {"foreach", "fused", "default", "compiled"}
    assert one["shares"]["compiled"] >= 0.95
    assert one["shares"]["default"] == one["shares"]["fused"] == 0
