"""The recorded traces: what the code gives, small, and a page that says what the files say."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from benchmarks.rows import read
from benchmarks.traces import __main__ as command
from benchmarks.traces.judge import EVERY, FAMILIES, FIRST, PLANTED, Line, judge, planted
from benchmarks.traces.report import DEFAULTS, defaults
from benchmarks.traces.runs import TRAININGS, Poles, record
from benchmarks.traces.troubles import troubles
from torchzero_clip import Trace

LARGEST = 5_000_000  # bytes of all traces


@pytest.mark.parametrize("name", TRAININGS)
def test_a_recorded_trace_begins_as_the_training_does(name: str) -> None:
    again, kept = record(TRAININGS[name], steps=8), command.load(name)
    assert again.names == kept.names
    torch.testing.assert_close(again.norms, kept.norms[:8], rtol=1e-3, atol=1e-6)
    assert kept.spikes is not None
    assert kept.spikes.any() == (name in ("language_trouble", "images"))


def test_all_traces_together_are_small() -> None:
    files = [*command.TRACES.iterdir()]
    assert {file.name for file in files} == {f"{name}.csv.gz" for name in TRAININGS}
    assert sum(file.stat().st_size for file in files) < LARGEST


def test_the_norms_of_the_atlas_gradients_are_what_their_code_gives() -> None:
    made = dict(troubles())
    assert {file.name for file in command.TROUBLES.iterdir()} == {f"{n}.csv.gz" for n in made}
    for name, trace in made.items():
        kept = Trace.read(command.TROUBLES / f"{name}.csv.gz")
        torch.testing.assert_close(kept.norms, trace.norms, rtol=1e-4, atol=0, equal_nan=True)
        assert kept.spikes is not None
        assert trace.spikes is not None
        assert torch.equal(kept.spikes, trace.spikes)


def test_the_results_are_complete_and_what_the_traces_give() -> None:
    lines = read(command.RESULTS / "simulate.csv", Line)
    every = [(n, f, x) for n in TRAININGS for f, (values, _) in FAMILIES.items() for x in values]
    assert [(x.trace, x.family, x.sensitivity) for x in lines] == every
    assert all(sensitivity in FAMILIES[family][0] for family, sensitivity in DEFAULTS.items())
    families = ["ClipNorm, in medians", "ClipNormGrowth, mul"]
    for name in ("images", "ppo"):
        kept = [x for x in lines if x.trace == name and x.family in families]
        for old, new in zip(kept, judge(name, command.load(name), families), strict=True):
            assert (old.rule, old.spikes) == (new.rule, new.spikes)
            assert new.false == pytest.approx(old.false, abs=2e-3)
            assert new.missed == pytest.approx(old.missed, abs=2e-2)


def test_what_the_page_says_of_them_holds() -> None:
    lines = {
        (x.trace, x.family): x
        for x in read(command.RESULTS / "simulate.csv", Line)
        if x.sensitivity == DEFAULTS[x.family]
    }
    calm = lines["language_trouble", "ClipNorm, in medians"]
    moving = lines["ppo", "ClipNorm, in medians"]
    assert calm.missed == 0
    assert calm.false < 0.01
    assert moving.missed > 0.1
    raw = lines["language_trouble", "ZScoreClip, zmax"]
    assert raw.missed == pytest.approx(0.5, abs=0.05)
    assert lines["language_trouble", "ZClip, z_thresh"].missed < 0.1
    always = [line for (_, family), line in lines.items() if family == "AdaGC, rel"]
    assert all(line.missed == 0 and line.false > 0.9 for line in always)


def test_every_column_of_the_page_says_what_it_counts() -> None:
    lines = read(command.RESULTS / "simulate.csv", Line)
    head, body = defaults(lines).split("<tbody>")
    columns = [c for name in TRAININGS for c in (f"{name}, false alarms", f"{name}, missed")]
    both = re.findall(r'<th scope="col">(false alarms|missed)</th>', head)
    names = re.findall(r'colspan="2".*?<code>(\w+)</code>', head)
    assert [f"{names[i // 2]}, {each}" for i, each in enumerate(both)] == columns
    assert all(row.count("<td ") == len(columns) for row in body.split("<tr>")[1:])


def test_planted_spikes_are_known_and_all_else_is_as_it_was() -> None:
    trace = Trace(torch.rand(400, 3) + 1)
    other = planted(trace)
    assert other.spikes is not None
    assert other.spikes.nonzero().flatten().tolist() == [*range(FIRST, 400, EVERY)]
    factor = torch.where(other.spikes, PLANTED, 1.0)
    torch.testing.assert_close(other.norms, trace.norms * factor.unsqueeze(1))


def test_a_pole_falls_to_the_side_that_it_leans_to_unless_it_is_pushed_back() -> None:
    poles = Poles(2, torch.Generator().manual_seed(0))
    poles.state = torch.tensor([[0.0, 0.0, 0.05, 0.0], [0.0, 0.0, 0.05, 0.0]])
    poles.step(torch.tensor([False, True]))
    assert poles.state[0, 3] > 0 > poles.state[1, 3]
    poles.state[0, 2] = 0.3
    _, over = poles.step(torch.tensor([False, True]))
    assert over.tolist() == [True, False]
    assert poles.state[0].abs().max() <= 0.05  # it began anew


def test_the_command_records_and_judges(tmp_path: Path) -> None:
    command.main(["record", "--runs", "diffusion", "--steps", "5", "--out", str(tmp_path)])
    trace = Trace.read(tmp_path / "diffusion.csv.gz")
    assert len(trace) == 5
    assert math.isfinite(trace.logged["loss"].sum().item())
