"""Which rule: the score, the troubles, the command, and a page that says what the files say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.which_rule import __main__ as command
from benchmarks.which_rule.report import picture, tables
from benchmarks.which_rule.runs import (
    CALM,
    OPTIMIZERS,
    RULES,
    Case,
    Norms,
    Rate,
    Row,
    chain_of,
    read,
    spike_score,
)
from benchmarks.which_rule.troubles import SAME, SIZES, TROUBLES, BadBatches, HeavyTails, Nothing

DOCS = command.ROOT / "docs"
SMALL, CPU = SIZES["small"], torch.device("cpu")
QUICK = ["--seeds", "1", "--steps", "3"]


# ---------------------------------------------------------------------- the score


def test_a_spike_is_ten_deviations_from_the_values_before() -> None:
    """Zeros and twos have mean 1 and deviation 1."""
    calm = [0.0, 2.0, 0.0, 2.0]
    assert spike_score([*calm, 11.0], window=4) == 100.0
    assert spike_score([*calm, -9.0], window=4) == 100.0
    assert spike_score([*calm, 10.9], window=4) == 0.0
    assert spike_score([*calm, 4.0], window=4, deviations=3.0) == 100.0


def test_the_score_is_a_percentage_of_the_values_that_have_a_window_before_them() -> None:
    calm = [0.0, 2.0, 0.0, 2.0]
    assert spike_score([*calm, 11.0, 0.0, 2.0, 0.0], window=4) == 25.0
    assert spike_score([100.0, *calm], window=4) == 0.0
    assert spike_score(calm, window=4) == 0.0


def test_what_is_no_number_is_a_spike_and_what_never_changes_is_none() -> None:
    assert spike_score([1.0] * 6, window=4) == 0.0
    assert spike_score([0.0, 2.0, 0.0, 2.0, math.nan, math.inf], window=4) == 100.0


# ---------------------------------------------------------------------- the troubles


def test_bad_batches_are_noise_to_learn_from_and_clean_to_be_judged_by() -> None:
    torch.manual_seed(0)
    bad = BadBatches(SMALL, command.TEXT, CPU, seed=0, calm=False)
    bad.share = 1.0
    loss, clean = bad.losses()
    assert loss > 9 * clean
    assert not clean.requires_grad


@pytest.mark.parametrize("trouble", sorted(SAME))
def test_without_their_trouble_these_are_where_nothing_is_wrong(trouble: str) -> None:
    losses = []
    for kind in (TROUBLES[trouble], Nothing):
        torch.manual_seed(0)
        task = kind(SMALL, command.TEXT, CPU, seed=0, calm=True)
        losses.append((task.losses()[0].item(), task.test().item(), task.rate("Adam")))
    assert losses[0] == losses[1]


def test_the_errors_are_students_t() -> None:
    """With one degree of freedom half of them are within 1, and a quarter beyond 2.414."""
    task = HeavyTails(SMALL, command.TEXT, CPU, seed=0, calm=False)
    task.degrees = 1.0
    sizes = (task.errors(40_000) / task.noise).abs()
    assert (sizes < 1).float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert (sizes > 1 + math.sqrt(2)).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_no_letter_is_both_learned_and_held_out() -> None:
    task = Nothing(SMALL, command.TEXT, CPU, seed=0, calm=True)
    letters = len(command.TEXT.read_text())
    learned = len(task.windows) + task.context  # windows begin one letter apart
    tested = (letters - task.context) // 10 + task.context
    assert learned + tested <= letters


def test_the_large_size_learns_from_a_window() -> None:
    """It takes a GPU to train; that it fits together shows here."""
    task = Nothing(SIZES["large"], command.TEXT, CPU, seed=0, calm=True)
    task.loss(task.windows[:1]).backward()
    assert all(p.grad is not None for p in task.model.parameters())


# ---------------------------------------------------------------------- the command


@pytest.mark.slow
def test_every_rule_meets_every_trouble(tmp_path: Path) -> None:
    command.main(["--out", str(tmp_path), *QUICK])
    rows = read(tmp_path / "which_rule.csv", Row)
    seen = {(row.trouble, row.optimizer, row.rule) for row in rows}
    assert seen == expected()
    assert len(rows) == len(seen)
    assert all(math.isfinite(row.final_loss) != bool(row.diverged) for row in rows)


def test_a_run_can_be_repeated(tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        chosen = ["--troubles", "bad batches", "--rules", "AdaGC"]
        command.main(["--out", str(tmp_path), *QUICK, *chosen])
        texts.append((tmp_path / "which_rule.csv").read_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "--out: give a folder for the results"),
        (["--out", "nowhere"], "--out: there is no folder nowhere"),
        (["--table", "--out", "."], "--out: there is no which_rule.csv in ."),
        (["--out", ".", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["--out", ".", "--text", "lost.txt"], "--text: there is no file lost.txt"),
        (["--out", ".", "--rules", "ZCilp"], "invalid choice: 'ZCilp'"),
        (["--out", ".", "--device", "abacus"], "--device: 'abacus'"),
    ],
)
def test_a_wrong_argument_gets_a_sentence(
    given: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        command.main(given)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


# ---------------------------------------------------------------------- the results


def expected() -> set[tuple[str, str, str]]:
    every = {(t, o, r) for t in TROUBLES for o in OPTIMIZERS for r in RULES}
    return every | {(t, o, CALM) for t in TROUBLES for o in OPTIMIZERS if t not in SAME}


def test_the_results_are_complete_and_of_the_chains_that_the_code_has() -> None:
    rows = read(command.RESULTS / "which_rule.csv", Row)
    norms = read(command.RESULTS / "which_rule_norms.csv", Norms)
    medians = {(n.trouble, n.optimizer): n.q50 for n in norms}
    seen = {(row.trouble, row.optimizer, row.rule, row.seed) for row in rows}
    assert seen == {(*key, seed) for key in expected() for seed in range(5)}
    assert len(rows) == len(seen)
    for row in rows:
        calm = row.rule == CALM
        rule = dict(RULES["no clipping" if calm else row.rule])
        if rule.get("max_norm") == "q50":
            rule["max_norm"] = medians[row.trouble, row.optimizer]
        task = Case(SMALL, command.TEXT, CPU).make(row.trouble, 0, calm)
        chain = chain_of(rule, row.optimizer, task.rate(row.optimizer))
        assert json.loads(row.chain) == chain.to_config()


def test_the_learning_rates_are_the_best_without_trouble() -> None:
    lines = read(command.RESULTS / "which_rule_rates.csv", Rate)
    for trouble, optimizer in {(line.trouble, line.optimizer) for line in lines}:
        own = [x for x in lines if (x.trouble, x.optimizer) == (trouble, optimizer)]
        best = min(own, key=lambda line: line.final_loss)
        assert TROUBLES[trouble].rates[optimizer] == best.lr


def test_the_page_shows_the_tables_of_the_files() -> None:
    page = (DOCS / "which_rule.md").read_text()
    flat = "\n".join(line.strip() for line in page.splitlines())
    for name, table in tables(command.RESULTS).items():
        assert table in flat, f"which_rule.md: the table {name} differs: run --table"


def test_the_pictures_are_of_the_files() -> None:
    rows = read(command.RESULTS / "which_rule.csv", Row)
    for trouble in TROUBLES:
        file = DOCS / "assets" / f"which_rule_{trouble.replace(' ', '_')}.svg"
        assert file.read_text() == picture(rows, trouble), "draw again: --pictures docs/assets"
