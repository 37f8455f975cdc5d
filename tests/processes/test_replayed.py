"""Sharded steps are replayed: `replayed.py` and `apart.py` run on several processes."""

from __future__ import annotations

import pytest

from tests.processes.launch import Started, free_port, on_ranks

slow = pytest.mark.slow


def agreed(settings: tuple[str, ...]) -> str:
    return "".join(f"{setting}: 0 wrong\n" for setting in settings)


@pytest.mark.parametrize(
    ("n", "length", "dtype", "settings"),
    [
        (2, "brief", "float32", ("said", "trained", "fsdp")),
        *[
            pytest.param(n, "every", dtype, (setting,), marks=slow)
            for dtype in ("float32", "float64")
            for n, setting in [(2, "fsdp"), (3, "partly"), (2, "tp"), (2, "partly"), (4, "both")]
        ],
        pytest.param(4, "every", "float32", ("trained", "hsdp"), marks=slow),
    ],
)
def test_a_sharded_step_is_repeated_where_a_whole_one_is_and_to_the_bit_as_anew(
    n: int, length: str, dtype: str, settings: tuple[str, ...]
) -> None:
    command = "-m", "tests.processes.replayed", length, dtype, *settings
    for out in on_ranks(n, *command, limit=1800 if length == "every" else 120):
        assert out == agreed(settings)


@pytest.mark.parametrize("steps", [40, pytest.param(2000, marks=slow)])
@pytest.mark.parametrize("setting", ["stages", pytest.param("fsdp", marks=slow)])
def test_ranks_never_part_whatever_happens_to_one_of_them(setting: str, steps: int) -> None:
    """It does steps anew, lacks a gradient, has other live values, or conditions that fail."""
    for out in on_ranks(3, "-m", "tests.processes.apart", steps, setting, limit=100 + steps):
        assert out == agreed((setting,))


def test_a_rank_that_raises_by_itself_is_an_error_on_those_that_repeat() -> None:
    """It ends, as a program does after an error, and nobody waits for it."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    command = "-m", "tests.processes.apart", 6, "raises"
    ranks = [Started(*command, **group, RANK=str(i)) for i in range(3)]
    try:
        told = [rank.ended(limit=60).stdout for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert told[1] == "step 5: ValueError\n"
    for i in (0, 2):
        assert told[i] == "step 5: RuntimeError\n"  # the one that torch raises
