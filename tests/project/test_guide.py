"""The guide: its statistics against known values, runs that go on where they stopped."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch

from benchmarks.guide import runs
from benchmarks.guide.__main__ import main
from benchmarks.guide.paired import doubled_ranks, holm, interval, wilcoxon
from benchmarks.guide.report import compare
from benchmarks.guide.runs import GRID, METHODS, TUNING, Row, best, one
from benchmarks.rows import read
from benchmarks.which_rule.__main__ import TEXT
from benchmarks.which_rule.runs import Case
from benchmarks.which_rule.troubles import SIZES

# ---------------------------------------------------------------------- statistics


def test_wilcoxon_of_darwins_maize() -> None:
    """The smaller sum of ranks is 24; of 2¹⁵ choices of signs 676 give it or less."""
    maize = [6, 8, 14, 16, 23, 24, 28, 29, 41, -48, 49, 56, 60, -67, 75]
    assert wilcoxon(maize) == pytest.approx(0.041259765625, abs=1e-12)


def test_wilcoxon_of_differences_that_agree_is_two_in_all_choices_of_signs() -> None:
    assert wilcoxon([1.0, 2.0, 3.0, 4.0, 5.0]) == 2 / 2**5
    assert wilcoxon([-1.0] * 20) == 2 / 2**20
    assert wilcoxon([0.0, 0.0]) == 1.0


def test_wilcoxon_is_the_share_of_choices_of_signs_that_are_as_far_out() -> None:
    """Ties and zeros too."""
    source = random.Random(0)
    for _ in range(20):
        away = [source.choice([-3.0, -1.0, 0.0, 1.0, 2.0]) for _ in range(8)]
        ranks = doubled_ranks([abs(d) for d in away if d])
        signs = [d > 0 for d in away if d]
        least = min(sum(itertools.compress(ranks, s)) for s in (signs, [not x for x in signs]))
        every = itertools.product([False, True], repeat=len(ranks))
        sums = [sum(itertools.compress(ranks, choice)) for choice in every]
        share = 2 * sum(x <= least for x in sums) / len(sums)
        assert wilcoxon(away) == pytest.approx(min(share, 1.0))


def test_equal_sizes_share_their_mean_rank() -> None:
    assert doubled_ranks([3.0, 1.0, 3.0, 9.0]) == [5, 2, 5, 8]


def test_holm_multiplies_by_how_many_are_left_and_never_falls() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    source, held = random.Random(0), 0
    for seed in range(100):
        low, high = interval([source.gauss(1.0, 1.0) for _ in range(20)], seed=seed)
        held += low <= 1.0 <= high
    assert 88 <= held <= 100
    assert interval([2.5] * 5) == (2.5, 2.5)


# ---------------------------------------------------------------------- the runs


def rows_of(
    trouble: str, method: str, tuned: dict[float, float], results: list[float]
) -> list[Row]:
    rate = min(tuned, key=lambda r: tuned[r])
    return [
        *(Row(trouble, method, r, seed, loss) for r, loss in tuned.items() for seed in TUNING),
        *(Row(trouble, method, rate, seed, loss) for seed, loss in enumerate(results)),
    ]


def test_a_rate_is_chosen_on_seeds_that_no_result_uses() -> None:
    tuned = dict(zip(GRID, (3.0, 1.0, 2.0, math.inf), strict=True))
    rows = rows_of("bad batches", "StableAdam", tuned, [0.0])
    assert best(rows, "bad batches", "StableAdam") == GRID[1]
    assert best(rows[1:], "bad batches", "StableAdam") is None
    assert not set(TUNING) & set(runs.SEEDS)


def test_runs_are_compared_as_pairs_of_one_seed_and_corrected_for_their_number() -> None:
    tuned = dict.fromkeys(GRID, 1.0)
    noise = [10.0 * seed for seed in range(20)]  # between seeds, far more than between methods
    rows = rows_of("bad batches", "Adam, no clipping", tuned, [x + 1 for x in noise])
    rows += rows_of("bad batches", "Adam, global 1", tuned, noise)
    rows += rows_of(
        "bad batches",
        "Adam, AGC",
        tuned,
        [x + 1 + (-1) ** i * 0.1 * i for i, x in enumerate(noise)],
    )
    first, second = compare(rows)
    assert (first.method, first.other, first.pairs) == ("Adam, global 1", "Adam, no clipping", 20)
    assert (first.median, first.low, first.high) == (-1.0, -1.0, -1.0)
    assert first.chance == pytest.approx(2 * 2 / 2**20)
    assert (first.verdict, second.verdict) == ("better", "no difference")


def test_work_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, started = tmp_path / "guide.csv", []

    def stub(case: Case, *wanted: object) -> Row:
        started.append(wanted)
        if len(started) == 4:
            raise KeyboardInterrupt
        return Row(*wanted, 1.0)

    monkeypatch.setattr(runs, "one", stub)
    monkeypatch.setattr(runs, "TROUBLES", ["bad batches"])
    with pytest.raises(KeyboardInterrupt):
        runs.work(file, TEXT, minutes=10.0)
    assert [runs.key(row) for row in read(file, Row)] == started[:3]
    assert runs.work(file, TEXT, minutes=0.0) == 3
    total = len(METHODS) * (len(GRID) * len(TUNING) + len(runs.SEEDS))
    assert runs.work(file, TEXT, minutes=10.0) == total
    assert len({runs.key(row) for row in read(file, Row)}) == total == len(started) - 1
    main(["--table", "--out", str(file)])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str) -> None:
    case = Case(SIZES["small"], TEXT, torch.device("cpu"), steps=2)
    assert math.isfinite(one(case, "bad batches", method, 1.0, 0).final_loss)
