"""The demo: a table at the end, the same one for the same seed, and sentences for mistakes."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from examples import demo

ADAM = '[{"type": "Adam"}, {"type": "LR", "lr": 0.003}]'
COLUMNS = ["chain", "final loss", "worst spike", "steps clipped", "ms in opt.step()"]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "ms in opt.step()"} for row in rows]


def test_it_ends_in_a_table_of_three_chains(capsys: pytest.CaptureFixture[str]) -> None:
    rows = demo.main(["--steps", "12"])
    head, rule, *lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert head.split("   ")[0].strip() == "chain"
    assert [name for name in COLUMNS if name in head] == COLUMNS == list(rows[0])
    assert set(rule) == {"-"}
    assert len(lines) == len(rows) == 3
    for line, row in zip(lines, rows, strict=True):
        assert line.startswith(row["chain"])
        assert f"{row['final loss']:.3f}" in line
        assert row["ms in opt.step()"] > 0


def test_it_begins_with_the_trouble_and_the_chains(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(["--steps", "1"])
    trouble, *chains = capsys.readouterr().out.splitlines()[:4]
    assert trouble.startswith("3.3% of the batches are corrupted")
    assert chains[0] == "  no clipping: Chain(Adam(), LR(lr=0.003))"
    assert "warm-up" not in chains[1]
    assert chains[2].startswith("  ZClip: Chain(ZClip(max_norm=None), Adam(), LR(lr=0.003))")
    assert "25 steps of warm-up" in chains[2]


def test_a_seed_gives_the_same_race_and_another_seed_another() -> None:
    first, again, other = (
        without_times(demo.main(["--steps", "40", "--seed", seed])) for seed in "001"
    )
    assert first == again
    assert first != other


def test_all_chains_begin_with_the_same_weights_and_see_the_same_batches() -> None:
    rows = without_times(demo.main(["--steps", "30", "--chains", ADAM, ADAM]))
    one, two = ({k: v for k, v in row.items() if k != "chain"} for row in rows)
    assert one == two


def test_clipping_saves_the_run_from_corrupted_batches() -> None:
    """With the trouble of the default seed clipping ends far below no clipping."""
    plain, *clipped = demo.main(["--steps", "400"])
    assert plain["steps clipped"] == 0
    for row in clipped:
        assert row["steps clipped"] > 0
        assert row["final loss"] < plain["final loss"] / 1.5
        assert row["worst spike"] < plain["worst spike"]


def test_a_skipped_step_counts_as_clipped() -> None:
    chain = '[{"type": "SkipLarge", "max_norm": 0.0}, {"type": "LR", "lr": 0.1}]'
    (row,) = demo.main(["--steps", "5", "--chains", chain])
    assert row["steps clipped"] == 5


def test_a_run_that_dies_says_so() -> None:
    (row,) = demo.main(["--steps", "40", "--chains", '[{"type": "LR", "lr": 1e9}]'])
    assert math.isnan(row["final loss"])
    assert row["worst spike"] == math.inf


def test_out_holds_the_table_and_the_curves(tmp_path: Path) -> None:
    file = tmp_path / "race.json"
    rows = demo.main(["--steps", "5", "--out", str(file)])
    held = json.loads(file.read_text())
    assert held["table"] == rows
    assert [losses[-1] for losses in held["losses"].values()] == [row["final loss"] for row in rows]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_moves_in_place_in_a_terminal_and_is_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for out, marks in ((Terminal(), 10), (io.StringIO(), 0)):
        monkeypatch.setattr("sys.stdout", out)
        demo.main(["--steps", "10", "--chains", ADAM])
        assert out.getvalue().count("\r") == marks
        assert "10/10" in out.getvalue()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--chains", "[Adam]"], "a chain is JSON, such as"),
        (["--chains", '["Adan"]'], "unknown transform 'Adan': did you mean 'Adam'?"),
        (["--chains", '[{"type": "LR", "lr": -1.0}]'], "LR: lr must be a number at least 0"),
        (["--chains", "[]"], "an empty chain, in []"),
        (["--chains", '["Adam", "Guard"]'], "Guard must come first"),
        (["--device", "abacus"], "--device: 'abacus' cannot be used here"),
        (["--out", "nowhere/at/all.json"], "--out: there is no folder nowhere/at to write into"),
        (["--step", "3", "--seeds", "1"], "unrecognized arguments: --seeds 1"),
    ],
)
def test_a_wrong_argument_gets_a_sentence(
    given: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(given)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_data_ship_with_the_project() -> None:
    assert 4_000 < demo.TEXT.stat().st_size < 20_000
