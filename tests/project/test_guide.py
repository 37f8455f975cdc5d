"""The guide: its statistics against known values, runs that go on where they stopped."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torchzero_clip
from benchmarks.guide import runs
from benchmarks.guide.__main__ import main
from benchmarks.guide.comparison import SAME, Comparison, compared, correct, signed
from benchmarks.guide.paired import (
    averages,
    coverage,
    doubled_ranks,
    holm,
    interval,
    left_out,
    middle,
    shift,
    wilcoxon,
)
from benchmarks.guide.picture import picture
from benchmarks.guide.report import BESIDE, budget, compare, losses, results, tables, wanted
from benchmarks.guide.runs import (
    BEYOND,
    BY_MATRICES,
    CASES,
    GRID,
    MATRICES,
    METHODS,
    SEEDS,
    SIZE,
    TEXT,
    TUNING,
    Row,
    best,
    beyond,
    one,
)
from benchmarks.guide.troubles import BadBatches, Exploding, HeavyTails, Nothing
from benchmarks.rows import read
from tests.helpers import some

DOCS = Path(__file__).parents[2] / "docs"


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


def every_sign(count: int) -> Iterator[list[float]]:
    """All choices of signs for the sizes 1 to count, which stand for all ranks without ties."""
    for signs in itertools.product((-1.0, 1.0), repeat=count):
        yield [sign * size for sign, size in zip(signs, range(1, count + 1), strict=True)]


def test_the_shift_is_the_median_of_the_means_of_all_pairs() -> None:
    assert averages([3.0, 1.0]).tolist() == [1.0, 2.0, 3.0]
    assert shift([3.0, 1.0]) == 2.0
    assert shift([1.0, 2.0, 9.0]) == 3.5  # of 1, 1.5, 2, 5, 5.5, 9
    assert interval([2.5] * 5) == (2.5, 2.5)


def test_the_interval_covers_the_shift_exactly_as_often_as_it_says() -> None:
    """All signs of sizes without ties together are a symmetric distribution around zero."""
    for count in (6, 10):
        held = [low <= 0 <= high for low, high in map(interval, every_sign(count))]
        assert sum(held) / len(held) == coverage(count)
    assert (left_out(10), round(coverage(10), 3)) == (8, 0.951)  # as in the tables of the test
    assert (left_out(20), round(coverage(20), 3)) == (52, 0.952)


def test_the_interval_excludes_zero_exactly_if_the_test_rejects() -> None:
    for away in every_sign(9):
        low, high = interval(away)
        assert (low > 0 or high < 0) == (wilcoxon(away) <= 0.05)


def test_the_interval_of_few_pairs_is_from_the_least_to_the_largest() -> None:
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert coverage(3) == 0.75


def test_the_interval_of_drawn_pairs_holds_their_shift_as_often_as_it_says() -> None:
    source = random.Random(0)
    draws = [[source.gauss(1.0, 1.0) for _ in range(10)] for _ in range(1000)]
    held = sum(low <= 1.0 <= high for low, high in map(interval, draws))
    assert held / len(draws) == pytest.approx(coverage(10), abs=0.02)


# ---------------------------------------------------------------------- a comparison


def difference(*away: float, tests: int = 1) -> Comparison:
    """A comparison of these differences, corrected for so many tests like it."""
    family = [
        compared("", "own", "other", dict(enumerate(away)), dict.fromkeys(range(len(away)), 0.0))
        for _ in range(tests)
    ]
    correct(family)
    return family[0]


def test_a_verdict_needs_the_corrected_test_and_the_interval() -> None:
    clear = difference(*[-1 - 0.1 * i for i in range(10)])
    assert str(clear) == "1.4 better (1.2 to 1.7)"
    many = difference(*[-1 - 0.1 * i for i in range(10)], tests=100)
    assert str(many) == "not significantly better (uncorrected interval: 1.2 to 1.7)"
    lost = difference(*[1 + 0.1 * i for i in range(10)], tests=100)
    assert str(lost) == "not significantly worse (uncorrected interval: 1.2 to 1.7)"
    assert (many.family, many.pairs, many.equal) == (100, 10, 0)
    unclear = difference(*[(-1) ** i * (1 + i) for i in range(10)])
    span = f"{signed(unclear.low)} to {signed(unclear.high)}"
    assert str(unclear) == f"not significantly different ({span})"
    assert unclear.with_p() == f"not significantly different ({span}; p = {unclear.p:.2g})"
    assert unclear.low < 0 < unclear.high


def test_equal_pairs_are_counted_and_keep_zero_in_the_interval() -> None:
    mostly = difference(*[0.0] * 14, *[-1 - 0.1 * i for i in range(6)])
    assert mostly.equal == 14
    assert mostly.p <= 0.05  # the test skips the zeros
    assert mostly.high == 0.0
    assert mostly.verdict == SAME


def test_runs_without_a_result_are_counted_in_the_place_of_a_number() -> None:
    own, other = dict.fromkeys(range(10), math.inf), dict.fromkeys(range(10), 3.0)
    lost = compared("", "own", "other", own, other, failing="not within 400 steps")
    correct([lost])
    assert str(lost) == "worse (10 of 10 not within 400 steps, against 0 of 10)"


def test_numbers_have_two_digits_and_no_exponent() -> None:
    assert [signed(x) for x in (0.0, -0.123, 75.0, 637.4, 1e6, -1e6)] == [
        "0", "−0.12", "+75", "+637", "+∞", "−∞"
    ]  # fmt: skip


# ---------------------------------------------------------------------- the troubles


def test_bad_batches_are_noise_to_learn_from_and_clean_to_be_judged_by() -> None:
    torch.manual_seed(0)
    bad = BadBatches(SIZE, TEXT, seed=0)
    bad.share = 1.0
    loss, clean = bad.losses()
    assert loss > 9 * clean
    assert not clean.requires_grad


def test_no_letter_is_both_learned_and_held_out() -> None:
    task = Nothing(SIZE, TEXT, seed=0)
    letters = len(TEXT.read_text())
    learned = len(task.windows) + SIZE.context  # windows begin one letter apart
    tested = (letters - SIZE.context) // 10 + SIZE.context
    assert learned + tested <= letters


def test_an_exploding_gradient_is_far_above_any_limit_from_the_first_step_on() -> None:
    torch.manual_seed(0)
    norms = {}
    for kind, gain in ((Exploding, Exploding.gain), (Exploding, 0.5)):
        task = kind(SIZE, TEXT, seed=0)
        with torch.no_grad():
            task.model[1].rnn.weight_hh_l0.copy_(gain * torch.eye(2 * SIZE.width))
        loss, _ = task.losses()
        loss.backward()
        norms[gain] = torch.nn.utils.get_total_norm(p.grad for p in task.model.parameters())
    assert norms[Exploding.gain] > 10 * norms[0.5]
    assert norms[Exploding.gain] > 10


def test_labels_have_the_tails_of_students_t_and_are_judged_without_them() -> None:
    task = HeavyTails(SIZE, TEXT, seed=0)
    found = (task.errors(200_000) / task.noise).flatten().abs()
    for away, share in ((1.0, 0.4768), (10.0, 0.04208), (100.0, 0.002668)):  # of t with 1.2
        assert (found > away).double().mean().item() == pytest.approx(share, rel=0.1)
    task.noise = 100.0
    loss, clean = task.losses()
    assert loss > 100 * clean
    assert not clean.requires_grad


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
    tuned = dict(zip(GRID, (3.0, 1.0, math.inf), strict=True))
    rows = rows_of("bad batches", "StableAdam", tuned, [0.0])
    assert best(rows, "bad batches", "StableAdam") == GRID[1]
    assert best(rows[1:], "bad batches", "StableAdam") is None
    assert not set(TUNING) & set(SEEDS)


def test_where_an_end_of_the_grid_is_best_what_lies_beyond_is_tuned_as_well() -> None:
    tuned = dict(zip(GRID, (3.0, 2.0, 1.0), strict=True))
    assert (beyond(tuned), beyond({GRID[0]: 1.0})) == ((10.0,), ())
    rows = rows_of("bad batches", "StableAdam", tuned, [])
    assert best(rows, "bad batches", "StableAdam") is None
    for loss, rate in ((0.5, 10.0), (1.5, GRID[-1])):
        more = [Row("bad batches", "StableAdam", 10.0, seed, loss) for seed in TUNING]
        assert best(rows + more, "bad batches", "StableAdam") == rate


def test_the_budget_says_where_the_seeds_of_tuning_disagree() -> None:
    def rows(second: float) -> tuple[Row, ...]:
        """One seed finds 1 better than 3 by a bit, the other has `second` at 3."""
        losses = {GRID[0]: (3.0, 3.0), GRID[1]: (1.0, 1.0), GRID[2]: (1.1, second)}
        return tuple(
            Row("bad batches", "StableAdam", rate, seed, loss)
            for rate, found in losses.items()
            for seed, loss in zip(TUNING, found, strict=True)
        )

    assert [budget(rows(x)).splitlines()[2].split(" | ")[-1] for x in (1.2, 0.8)] == ["0 |", "1 |"]


def test_runs_are_compared_as_pairs_of_one_seed_and_corrected_for_their_number() -> None:
    tuned = dict(zip(GRID, (2.0, 1.0, 2.0), strict=True))
    noise = [10.0 * seed for seed in range(20)]  # between seeds, far more than between methods
    small = [x + 1 + (-1) ** i * 0.1 * i for i, x in enumerate(noise)]
    rows = rows_of("bad batches", "Adam, no clipping", tuned, [x + 1 for x in noise])
    rows += rows_of("bad batches", "Adam, global 1", tuned, noise)
    rows += rows_of("bad batches", "Adam, AGC", tuned, small)
    first, second, third = compare(tuple(rows)).values()
    assert (first.method, first.other, first.pairs) == ("Adam, global 1", "Adam, no clipping", 20)
    assert (first.shift, first.low, first.high) == (-1.0, -1.0, -1.0)
    assert first.corrected == pytest.approx(3 * 2 / 2**20)
    assert str(first) == "1 better (1 to 1)"
    assert second.verdict == "not significantly different"
    assert (third.method, third.other) == ("Adam, AGC", "Adam, global 1")


def test_differences_are_of_the_digits_that_the_file_has() -> None:
    tuned = dict(zip(GRID, (2.0, 1.0, 2.0), strict=True))
    rows = rows_of("bad batches", "Adam, no clipping", tuned, [1.413, 1.5, 1.7])
    rows += rows_of("bad batches", "Adam, global 1", tuned, [1.412, 1.499, 1.699])
    (only,) = compare(tuple(rows)).values()
    assert (only.shift, only.low, only.high) == (-0.001, -0.001, -0.001)


def test_a_run_that_diverged_is_worse_than_any_that_did_not() -> None:
    tuned = dict(zip(GRID, (2.0, 1.0, 2.0), strict=True))
    rows = rows_of("bad batches", "SGD, no clipping", tuned, [math.inf] * 10)
    rows += rows_of("bad batches", "SGD, global 1", tuned, [3.0] * 10)
    (only,) = compare(tuple(rows)).values()
    assert str(only) == "better (0 of 10 diverged, against 10 of 10)"
    assert "∞, 10 of 10 diverged" in tables(tuple(rows))["bad_batches"]


def test_work_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, started = tmp_path / "guide.csv", []

    def stub(*wanted: object) -> Row:
        started.append(wanted)
        if len(started) == 4:
            raise KeyboardInterrupt
        return Row(*wanted, 1.0)

    monkeypatch.setattr(runs, "one", stub)
    monkeypatch.setattr(runs, "CASES", {"bad batches": ("Adam, global 1", "SPAM")})
    with pytest.raises(KeyboardInterrupt):
        runs.work(file, minutes=10.0)
    assert [runs.key(row) for row in read(file, Row)] == started[:3]
    assert runs.work(file, minutes=0.0) == 3
    total = 2 * ((len(GRID) + 1) * len(TUNING) + len(SEEDS))
    assert runs.work(file, minutes=10.0) == total
    assert len({runs.key(row) for row in read(file, Row)}) == total == len(started) - 1
    main(["--table", "--out", str(file)])


@pytest.mark.parametrize("method", some([*METHODS], one_in=4))
def test_every_method_trains(method: str) -> None:
    assert math.isfinite(one("bad batches", method, 1.0, 0, steps=2).final_loss)


@pytest.mark.parametrize("trouble", ["exploding", "heavy tails"])
@pytest.mark.parametrize(
    "method", some(["Adam, global 1", "Muon, clip outside", "SOAP, clip inside"], one_in=3)
)
def test_other_models_train(trouble: str, method: str) -> None:
    assert math.isfinite(one(trouble, method, 1.0, 0, steps=40).final_loss)


def test_a_run_can_be_repeated() -> None:
    first, second = (one("bad batches", "Adam, AdaGC", 1.0, 0, steps=20) for _ in range(2))
    assert first == second


# ---------------------------------------------------------------------- the results


@pytest.mark.parametrize("trouble", CASES)
def test_a_picture_has_an_interval_for_each_comparison_with_no_clipping(trouble: str) -> None:
    drawn = picture(results(), trouble)
    with_none = [m for t, m, other in wanted() if t == trouble and other.endswith("no clipping")]
    assert drawn.count("<circle") == len(with_none)
    assert "nan" not in drawn


def test_the_results_are_of_the_methods_and_rates_that_the_code_has() -> None:
    rows = results()
    assert len({runs.key(row) for row in rows}) == len(rows)
    chosen = {
        (trouble, method): best(rows, trouble, method)
        for trouble, methods in CASES.items()
        for method in methods
    }
    for row in rows:
        assert row.method in CASES[row.trouble]
        tuning = row.seed in TUNING and row.rate in (*GRID, *BEYOND.values())
        assert tuning or (row.seed in SEEDS and row.rate == chosen[row.trouble, row.method])


def test_all_methods_of_a_trouble_have_the_same_seeds() -> None:
    rows = results()
    for trouble, methods in CASES.items():
        first, *others = (set(losses(rows, trouble, method)) for method in methods)
        assert all(other == first for other in others)
    assert set(compare(rows)) == set(wanted())


@pytest.mark.slow
def test_the_command_prints_the_tables_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--table"])
    printed, text = capsys.readouterr().out, (DOCS / "guide.md").read_text()
    for name, table in tables(results()).items():
        if f"<!-- guide: {name} -->" in text:
            assert table in printed
            assert table in text
    for found in compare(results()).values():
        assert found.with_p() in printed


WRONG = ("bad batches", "exploding", "heavy tails")  # what a limit is for


@pytest.mark.parametrize("trouble", WRONG)
def test_what_the_pages_say_of_all_troubles_holds(trouble: str) -> None:
    made = compare(results())
    limit, none, decayed = "Adam, global 1", "Adam, no clipping", "AdamW with warm-up"
    better = [
        (limit, none),
        (f"{decayed}, global 1", f"{decayed}, no clipping"),
        ("SGD, global 1", "SGD, no clipping"),
        ("Muon, clip outside", "Muon, no clipping"),
    ]
    assert all(made[(trouble, *pair)].verdict == "better" for pair in better)
    assert made[trouble, f"{decayed}, no clipping", limit].verdict == "worse"
    for pair in (("Adam, each tensor 1", limit), ("Adam, AdaGC", "Adam, AdaGC, global")):
        assert made[(trouble, *pair)].verdict != "better"
    for rule in ("ZClip", "AutoClip, 10 %", "ClipNormGrowth", "ClipNormByEMA", "AdaGC", "AGC"):
        found = made.get((trouble, f"Adam, {rule}", limit))
        assert found is None or found.verdict != "better" or found.shift > -0.01
    diverged = all(map(math.isinf, losses(results(), trouble, "SGD, no clipping").values()))
    assert diverged == (trouble != "exploding")


def test_what_the_pages_say_of_two_troubles_holds() -> None:
    made = compare(results())
    limit, decayed = "Adam, global 1", "AdamW with warm-up"
    for method in ("StableAdam", "SPAM", "Stable-SPAM", "Adam, SkipSpike"):
        assert made["bad batches", method, limit].verdict == "worse"
    for method in (limit, f"{decayed}, global 1"):
        none = f"{method.split(',')[0]}, no clipping"
        assert made["nothing wrong", method, none].verdict == "not significantly different"


def test_what_the_pages_say_of_methods_for_matrices_holds() -> None:
    made, rows, limit = compare(results()), results(), "Adam, global 1"
    for name in MATRICES:
        outside, none = f"{name}, clip outside", f"{name}, no clipping"
        for trouble in ("bad batches", "heavy tails"):
            assert made[trouble, outside, none].verdict == "better"
            assert made[trouble, outside, limit].verdict == "better"
            loss = [
                middle(torch.tensor([*losses(rows, trouble, m).values()])) for m in (none, limit)
            ]
            assert loss[0] > 1.5 * loss[1]
    beside = [x for (_, *pair), x in made.items() if tuple(pair) in BESIDE and limit in pair]
    assert {x.verdict for x in beside} == {"better"}
    for trouble in ("bad batches", "heavy tails"):
        found = made[trouble, "SOAP, clip outside", "Muon, clip outside"]
        assert found.verdict == "not significantly different"


def test_what_the_pages_say_was_not_run_was_not() -> None:
    later = {"Adam, ClipNormGrowth", "Adam, SkipSpike", "Adam, SkipSpike, global 1"}
    later |= {"Adam, global 0.3", "Adam, global 0.1"}
    later |= {"StableAdam", "SPAM", "Stable-SPAM", "SGD, AGC"}
    assert {*METHODS} - {*CASES["heavy tails"]} == later
    by_matrices = {*BY_MATRICES} - {"Muon, no clipping", "Muon, clip outside"}
    assert {*METHODS} - {*CASES["exploding"]} == later | by_matrices
    sgd = {name for name in METHODS if name.startswith("SGD")}
    assert {*METHODS} - {*CASES["nothing wrong"]} == by_matrices | sgd


def test_the_first_table_of_the_choice_has_complete_chains_that_step() -> None:
    page = (DOCS / "which_rule.md").read_text().partition("\n## ")[0]
    chains = re.findall(r"^\| [^|`]+ \| `([^`]+)` \|", page, re.MULTILINE)
    assert len(chains) == page.count("\n| ") - 1
    assert len(chains) >= 12
    for chain in chains:
        hidden = torch.nn.Linear(4, 4)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), hidden, torch.nn.Linear(4, 1))
        before = [p.detach().clone() for p in model.parameters()]
        names = vars(torchzero_clip) | {"model": model}
        opt = eval(f"Modular(model.named_parameters(), {chain})", names)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        for p, old in zip(model.parameters(), before, strict=True):
            assert p.isfinite().all()
            assert not torch.equal(p, old)
