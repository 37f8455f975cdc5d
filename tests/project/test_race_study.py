"""The demo's race over several seeds: runs come out the same again, and the page has all chains."""

from __future__ import annotations

import math
import statistics

import torch

from benchmarks.studies.race import (
    DEMO,
    LOWER,
    RATES,
    SEEDS,
    Row,
    chain_text,
    losses,
    missing,
    one,
    results,
    table,
    told,
)
from examples.race.chains import CHAINS
from tests.helpers import ROOT


def test_a_run_comes_out_the_same_again_and_another_seed_does_not() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    first, again, other = (one("ZClip", LOWER, seed, steps=2) for seed in (0, 0, 1))
    torch.set_num_threads(threads)
    assert first == again
    assert first.loss != other.loss


def test_a_chain_of_the_demo_gets_the_other_rate_and_nothing_else() -> None:
    assert chain_text("no clipping", LOWER) == "Adam(), LR(0.0005)"
    assert all(chain_text(name, DEMO).endswith("Adam(), LR(0.005)") for name in CHAINS)


def test_the_file_has_every_chain_at_every_rate_with_every_seed() -> None:
    rows = results()
    assert not list(missing(rows))
    assert len(rows) == len(CHAINS) * len(RATES) * len(SEEDS)


def test_a_figure_is_the_median_of_the_seeds_with_the_lowest_and_the_highest() -> None:
    rows = [Row("ZClip", DEMO, seed, loss) for seed, loss in enumerate([0.4, 0.3, 0.9])]
    assert told(rows, "ZClip", DEMO) == "0.40 (0.30 to 0.90)"


def test_the_home_page_shows_all_chains_and_says_what_the_seeds_show() -> None:
    rows, page = results(), (ROOT / "docs" / "index.md").read_text()
    assert table(rows) in page
    assert f"the median of {('three', 'four', 'five')[len(SEEDS) - 3]}\nseeds" in page
    for rate in RATES:
        worst = max(max(losses(rows, name, rate)) for name in CHAINS if name != "no clipping")
        assert min(losses(rows, "no clipping", rate)) > worst
        assert all(map(math.isfinite, losses(rows, "no clipping", rate)))
        assert statistics.median(losses(rows, "no clipping", rate)) > 2
