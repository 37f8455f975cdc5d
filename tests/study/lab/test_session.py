"""A session: its answers are those of simulation, as far as somebody asked, and a run may grow."""

from __future__ import annotations

import base64
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchzero_clip import LR, ClipNorm, Modular, Recorder, Trace, simulate
from torchzero_clip.study.lab import session as session_of
from torchzero_clip.study.lab import simulations
from torchzero_clip.study.lab.session import LabSession, number, packed, recorded, spelt
from torchzero_clip.study.simulate_command import rule as read_rule

RULES = ["ClipNorm(max_norm=2.0, dim='global')", "ZClip(max_norm=None)", "AutoClip()", "AdaGC()"]


def numbers(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float64)


def norms(steps: int, units: int = 1, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    made = (0.3 * torch.randn(steps, units, generator=source)).exp()
    made[::37] *= 20
    return made


def a_file(folder: Path, made: Tensor, name: str = "run.csv") -> Path:
    Trace(made).write(folder / name)
    return folder / name


def answered(session: LabSession, text: str, path=(), start: int = 0, bad=()) -> tuple[dict, dict]:
    """All that a rule would have done, and what is said of it at the end."""
    lines = [*session.simulate(text, path, start, session.version, bad)]
    assert lines[-1] == {"end": True}
    parts = [line for line in lines if "from" in line]
    assert [line["from"] for line in parts][:1] == [start]
    made = {
        name: torch.cat([numbers(part[name]) for part in parts])
        for name in ("limit", "left", "clipped")
    }
    return made, [line["summary"] for line in lines if "summary" in line][-1]


@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("text", RULES)
def test_an_answer_is_what_simulate_says(
    text: str, units: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(simulations, "PART_STEPS", 40)
    session = LabSession(a_file(tmp_path, norms(100, units)))
    bad = [37, 74, 80]
    made, told = answered(session, text, bad=bad)
    trace = session.trace
    assert trace is not None
    spike = torch.zeros(len(trace))
    spike[bad] = 1.0
    trace = Trace(trace.norms, trace.names, trace.known, {"spike": spike})
    done = simulate(trace, read_rule(text))
    (metrics,) = done.metrics.values()
    limit = metrics["limit"].square().sum(1).sqrt()
    torch.testing.assert_close(made["limit"], limit)
    torch.testing.assert_close(made["left"], done.left[:, 0])
    assert torch.equal(made["clipped"], metrics["clipped"].sum(1).double())
    false, missed = done.alarms()
    expected = [done.clipped.double().mean(), done.left.max(), false, missed]
    assert [*told.values()] == pytest.approx([x.item() for x in expected])


def test_what_was_asked_from_a_step_on_is_the_end_of_all(tmp_path: Path) -> None:
    session = LabSession(a_file(tmp_path, norms(100)))
    whole, part = (answered(session, RULES[1], start=start)[0] for start in (0, 63))
    assert torch.equal(whole["left"][63:], part["left"])


def test_all_positions_of_a_slider_walk_at_once_and_each_as_if_alone(
    tmp_path: Path, monkeypatch
) -> None:
    session = LabSession(a_file(tmp_path, norms(60)))
    first = answered(session, "ZClip(max_norm=None)", ["z_thresh"])[0]
    (slider,) = [
        slider
        for slider in session.rule("ZClip(max_norm=None)", (), "")["sliders"]
        if slider["name"] == "z_thresh"
    ]
    moved = session.rule("ZClip(max_norm=None)", ["z_thresh"], slider["positions"][20])

    def never(*_: object) -> None:
        raise AssertionError("it walks again")

    with monkeypatch.context() as patch:
        patch.setattr(simulations.Walk, "_simulate_part", never)
        second = answered(session, moved["text"], ["z_thresh"])[0]
    alone = answered(LabSession(tmp_path / "run.csv"), moved["text"])[0]
    assert torch.equal(second["left"], alone["left"])
    assert not torch.equal(second["left"], first["left"])


def test_first_steps_are_answered_before_later_ones_are_simulated(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(simulations, "PART_STEPS", 10)
    session = LabSession(a_file(tmp_path, norms(100)))
    done: list[int] = []
    go = simulations.Walk._simulate_part
    monkeypatch.setattr(
        simulations.Walk, "_simulate_part", lambda walk, trace: (done.append(1), go(walk, trace))[1]
    )
    lines = session.simulate("ZClip()", (), 0, session.version, ())
    first = next(lines)
    assert (len(numbers(first["left"])), len(done)) == (10, 1)
    assert len([line for line in lines if "left" in line]) == 9


def test_of_a_long_run_there_is_a_preview_before_anything_else_is_walked(
    tmp_path: Path, monkeypatch
) -> None:
    """One row of so many, as if these were all; what comes after it is exact."""
    monkeypatch.setattr(simulations, "PREVIEW_ROWS", 10)
    monkeypatch.setattr(session_of, "LONG_WALK", 90)
    monkeypatch.setattr(simulations, "PART_STEPS", 40)
    session = LabSession(a_file(tmp_path, norms(103, 2)))
    text = "ZClip(max_norm=None)"
    lines = session.simulate(text, (), 0, session.version, ())
    first = next(lines)
    (walk,) = session._walks.values()
    assert session.trace is not None
    assert walk.ahead(session.trace) == 103
    rows = numbers(first["rows"]).long()
    assert first["every"] == 11
    assert (rows // 11).tolist() == [*range(10)]
    assert len(set((rows % 11).tolist())) > 3  # what comes back at every 11th step is not all
    thin = Trace(session.trace.norms[rows], session.trace.names)
    done = simulate(thin, read_rule(text))
    assert torch.equal(numbers(first["left"]), done.left[:, 0])
    assert first["share"] == pytest.approx(done.clipped.double().mean().item())
    assert first["seconds"] > 0
    later = [line for line in lines if "summary" in line]
    assert [line["steps"] for line in later] == [40, 80, 103]
    assert later[0]["seconds"] > later[-1]["seconds"] == 0
    assert "every" not in next(session.simulate(text, (), 0, session.version, ()))  # it is known
    quick = session.simulate("ClipNorm(1.0)", (), 0, session.version, ())
    assert "every" not in next(quick)
    other = LabSession(tmp_path / "run.csv")
    assert "every" not in next(other.simulate(text, (), 40, other.version, ()))  # the page has one


def test_the_end_of_a_long_run_is_that_of_the_walk_over_all_rows(
    tmp_path: Path, monkeypatch
) -> None:
    session, bad = LabSession(a_file(tmp_path, norms(300))), [37, 74, 80]
    whole = answered(session, RULES[1], bad=bad)
    monkeypatch.setattr(session_of, "LONG_WALK", 90)
    again = LabSession(tmp_path / "run.csv")
    assert "every" in next(again.simulate(RULES[1], (), 0, again.version, bad))
    made, told = answered(again, RULES[1], bad=bad)
    assert all(torch.equal(made[name], whole[0][name]) for name in made)
    assert told == whole[1]


def test_infinite_and_huge_norms_are_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("step,grad_norm\n1,1\n2,1e300\n3,inf\n4,nan\n5,0\n6,2\n7,5e-324\n")
    session = LabSession(path)
    told = session.run(0, 0)
    seen = [1.0, 1e300, math.inf, math.nan, 0.0, 2.0, 5e-324]
    assert numbers(told["norms"]).tolist() == pytest.approx(seen, rel=0, abs=0, nan_ok=True)
    assert (told["largest"], told["broken"], told["median"]) == (1e300, 2, 1.0)
    for text in told["catalogue"]:
        assert session.rule(text, (), "")["sliders"]
        answered(session, text)
    made, summary = answered(session, "ClipNorm(float('inf'))")
    assert made["left"][1:3].tolist() == [1e300, math.inf]
    assert made["limit"][1] == math.inf
    assert summary["largest"] == "infinite"
    path.write_text("step,grad_norm\n1,1e300\n2,1e300\n3,2\n")
    assert answered(LabSession(path), "ClipNorm(float('inf'))")[1]["largest"] == 1e300
    assert answered(LabSession(path), "ClipNorm(1e200)")[0]["limit"].tolist() == [1e200] * 3


def test_a_run_that_is_followed_grows_and_its_walks_go_on(tmp_path: Path) -> None:
    made = norms(100)
    path = tmp_path / "run.csv"
    session = LabSession(path, follow=True)
    assert session.run(0, 0)["steps"] == 0
    assert "No such file" in session.run(0, 0)["notes"][0]
    version = -1
    for steps in (1, 30, 31, 100):
        a_file(tmp_path, made[:steps])
        before, (version, seen) = version, session.refresh()
        assert seen == steps
        assert before in (-1, version)
        told = session.run(max(steps - 1, 0), version)
        assert numbers(told["norms"]).tolist() == pytest.approx(made[steps - 1 : steps, 0].tolist())
        grown = answered(session, RULES[1])[0]
        fresh = answered(LabSession(path), RULES[1])[0]
        assert torch.equal(grown["left"], fresh["left"])


def test_a_run_that_became_another_begins_anew(tmp_path: Path) -> None:
    session = LabSession(a_file(tmp_path, norms(20)), follow=True)
    version, _ = session.refresh()
    answered(session, RULES[1])
    a_file(tmp_path, norms(25, seed=1))
    again, steps = session.refresh()
    assert (again, steps) == (version + 1, 25)
    fresh = answered(LabSession(tmp_path / "run.csv"), RULES[1])[0]
    assert torch.equal(answered(session, RULES[1])[0]["left"], fresh["left"])


def test_a_file_that_is_not_followed_is_read_once(tmp_path: Path) -> None:
    session = LabSession(a_file(tmp_path, norms(20)))
    a_file(tmp_path, norms(30))
    assert session.refresh()[1] == 20


def test_without_a_file_there_are_recorded_runs_with_their_bad_steps() -> None:
    session = LabSession()
    assert {"language_trouble", "ppo", "atlas_spike_x1000"} <= recorded().keys()
    assert len(session.run(0, 0)["spikes"]) == 34
    session.choose("atlas_burst")
    assert session.run(0, 0)["spikes"] == [*range(200, 210), 600]
    with pytest.raises(ValueError, match=r"run must be one of \['diffusion'.*, got '../x'"):
        session.choose("../x")


def test_another_column_can_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text("step,a/grad_norm,b/grad_norm,loss\n1,1,2,3\n2,1,2,3\n")
    session = LabSession(tmp_path / "run.csv")
    told = session.run(0, 0)
    assert (told["column"], told["columns"]) == ("a/grad_norm", ["a/grad_norm", "b/grad_norm"])
    session.column("b/grad_norm")
    assert numbers(session.run(0, 0)["norms"]).tolist() == [2.0, 2.0]
    assert numbers(LabSession(tmp_path / "run.csv", "loss").run(0, 0)["norms"]).tolist() == [
        3.0,
        3.0,
    ]


def test_a_rule_comes_with_the_line_that_copies_it(tmp_path: Path) -> None:
    session = LabSession(a_file(tmp_path, norms(20, 2)))
    told = session.rule("AdaptiveClip(ZStat(z_thresh=3.0))", ["criterion", "z_thresh"], "4")
    assert told["text"] == "AdaptiveClip(criterion=ZStat(z_thresh=4.0))"
    space: dict[str, object] = {}
    model = torch.nn.Linear(2, 1)
    exec(told["chain"], {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, space)
    assert set(space) == {"AdaptiveClip", "ClipNorm", "ZStat", "attach"}


def test_a_rule_of_tensors_on_a_run_with_one_norm_says_what_it_is_elsewhere(tmp_path: Path) -> None:
    session = LabSession(a_file(tmp_path, norms(20)))
    assert (
        "is applied to each tensor. For one norm in training too, write"
        in session.rule("ClipNorm(1.0)", (), "")["note"]
    )
    assert session.rule("ClipNorm(1.0, dim='global')", (), "")["note"] == ""


def test_numbers_of_a_page_are_read_as_they_were_spelt() -> None:
    for x in (0.97, 1e-08, 3.0, 1 / 3, float("inf"), None):
        assert number(spelt(x)) == x
    assert numbers(packed(torch.tensor([1.5, float("inf")]))).tolist() == [1.5, float("inf")]
    with pytest.raises(ValueError, match="the value must be a number, got 'much'"):
        number("much")


@pytest.mark.parametrize(("cell", "steps"), [("0.5", 6), ("0.5e", 5)])
def test_a_line_without_an_end_is_said_unless_the_run_is_on_its_way(
    cell: str, steps: int, tmp_path: Path
) -> None:
    path = a_file(tmp_path, norms(5))
    with open(path, "a", newline="") as file:
        file.write(f"6,{cell}")
    session = LabSession(path)
    said = (
        "may be incomplete, but Trace uses this line"
        if steps == 6
        else "is incomplete, so Trace skips this line"
    )
    assert said in session.run(0, 0)["notes"][0]
    assert session.run(0, 0)["steps"] == steps
    following = LabSession(path, follow=True)
    assert (following.run(0, 0)["notes"], following.run(0, 0)["steps"]) == ([], 5)


def test_what_rounding_lost_in_a_recorded_run_is_told(tmp_path: Path) -> None:
    params = [torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 2.0**-10]).bfloat16())]
    opt = Modular(params, ClipNorm(9.0), LR(1e-4), rounding="nearest")
    recorder = Recorder(opt)
    for i in range(6):
        params[0].grad = torch.ones_like(params[0])
        params[0].grad[: 3 - i % 2] *= i % 3  # steps move 1 or 2 entries, or all four
        opt.step()
    recorder.to_csv(tmp_path / "run.csv")
    history = recorder.history()
    moving, share = (torch.tensor(history[f"rounding/{x}"]) for x in ("moving", "lost"))
    told = LabSession(tmp_path / "run.csv").run(0, 0)
    known = moving[1:]  # metrics begin to be measured behind the first call
    assert told["lost"] == pytest.approx(((share * moving)[1:].sum() / known.sum()).item())
    assert 0.5 < told["lost"] < 0.8
    assert "lost" not in LabSession(a_file(tmp_path, norms(20), "other.csv")).run(0, 0)


def test_rows_that_were_skipped_or_lie_behind_a_way_back_are_marked(tmp_path: Path) -> None:
    rows = ["step,stands_for,Guard/skipped,ClipNorm/norm,recover/back,recover/left_out"]
    rows += ["1,1,0,1.0,,", "2,1,1,,,", "3,1,1,1.0,,", "4,1,1,1.0,30,10", "5,1,2,,,"]
    (tmp_path / "run.csv").write_text("\n".join(rows) + "\n")
    session = LabSession(tmp_path / "run.csv")
    told = sorted(session.run(0, session.version)["marks"])
    assert told == [(1, "skipped", 1), (3, "back", 30), (3, "left_out", 10), (4, "skipped", 1)]
    assert sorted(session.run(3, session.version)["marks"]) == told[1:]


def test_the_ratio_of_a_watch_may_be_looked_at_in_the_place_of_norms(tmp_path: Path) -> None:
    rows = ["step,ClipNorm/norm,Watch/ratio/0,Watch/ratio/1", "1,1.0,0.1,0.2", "2,1.0,0.1,0.3"]
    (tmp_path / "run.csv").write_text("\n".join(rows) + "\n")
    session = LabSession(tmp_path / "run.csv")
    assert session.run(0, session.version)["columns"] == ["ClipNorm/norm", "Watch/ratio"]
    session.column("Watch/ratio")
    assert session.run(0, session.version)["units"] == 2
