"""The benchmarks compare like with like, count what they say they count, and run."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import math
import re
import shutil
import sys
import types

import pytest
import torch
from torch.nn import Parameter

from benchmarks import circumstances, norms, printed, small, versions
from benchmarks.circumstances import MARK
from benchmarks.step import __main__ as command
from benchmarks.step import bars, memory, timing
from benchmarks.step.bars import Bar
from benchmarks.step.chains import (
    COMPILED,
    HEADLINE,
    OURS,
    PEERS,
    RACES,
    UNDOCUMENTED,
    WAYS,
    Race,
    installed,
)
from benchmarks.step.shapes import SHAPES
from benchmarks.step.timing import BARE, Result
from benchmarks.studies import averages, muon, repeated, state_dtype
from scripts.pages import evidence

NOTES = ("# `python -m benchmarks.", "# 20", "# load average ")
"""How the lines about circumstances begin."""
CONTESTANTS = [
    (chain, name)
    for chain, race in RACES.items()
    for name in race.contestants
    if name != OURS and name not in race.differs and (name not in PEERS or installed(name))
]


SCALES = (1.0, 1.5, 0.5, 1.0, 6.0, 1.0)  # Adam would not see a clip of equal gradients


def trained(race, name, loose):
    """The parameters and the gradients after some steps."""
    params, fresh = timing.model([(8, 6), (6,), (3, 4)], loose, "cpu", race.dtype)
    step = race.contestants[name](params)
    for scale in SCALES:
        timing.refill(params, [(grad, source * scale) for grad, source in fresh])
        step()
    return [p.detach() for p in params], [grad for grad, _ in fresh]


@pytest.mark.filterwarnings("ignore")  # what other libraries warn of, where they are installed
@pytest.mark.parametrize("loose", [False, True], ids=["clipped", "loose"])
@pytest.mark.parametrize(("chain", "name"), [c for c in CONTESTANTS if "compiled" not in c[1]])
def test_every_contestant_does_what_ours_does(chain, name, loose):
    race = RACES[chain]
    (params, grads), (ours, our_grads) = trained(race, name, loose), trained(race, OURS, loose)
    away = 1e-5 if name in PEERS else 1e-7  # a hundredth of a step: some add eps elsewhere
    torch.testing.assert_close(params, ours, rtol=1e-4, atol=away)
    if race.kind in ("helper", "grad"):
        torch.testing.assert_close(grads, our_grads, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("chain", [name for name, race in RACES.items() if race.kind == "helper"])
def test_gradients_are_clipped_or_not_as_the_table_says(chain):
    race = RACES[chain]
    for loose in (False, True) if race.loose else (False,):
        params, fresh = timing.model(SHAPES["quick"](), loose, "cpu")
        race.contestants[OURS](params)()
        assert all(torch.equal(grad, source) for grad, source in fresh) == loose


@pytest.mark.parametrize(
    ("name", "tensors", "millions"),
    [
        ("gpt2", 148, 124.4),
        ("resnet50", 161, 25.6),
        ("vit", 152, 5.7),
        ("tiny", 1000, 1.0),
        ("billion", 292, 1017.3),
    ],
)
def test_the_shapes_are_those_of_the_models(name, tensors, millions):
    shapes = SHAPES[name]()
    assert len(shapes) == tensors
    entries = sum(math.prod(shape) for shape in shapes)
    assert entries / 1e6 == pytest.approx(millions, abs=0.1)


def test_allocations_are_seen_where_there_are_any_and_only_there():
    def fresh(params):
        return lambda: [p.detach() * 2 for p in params]

    def in_place(params):
        return lambda: [p.detach().mul_(2) for p in params]

    assert memory.as_large_as_parameters(fresh) == 8
    assert memory.as_large_as_parameters(in_place) == 0


def result(**times):
    return Result("cpu", "gpt2", HEADLINE, "clipped", times)


def test_the_floor_is_at_the_speed_that_memory_had_in_the_round():
    """Memory became three times as slow in the second half, and a step with it."""
    bare = [7.0, 7.0, 21.0, 21.0]
    race = Result("cpu", "gpt2", HEADLINE, "clipped", {COMPILED: [10.0, 10.0, 30.0, 30.0]})
    race.times[BARE], race.share = bare, 8 / 7
    assert race.over_floor(COMPILED) == pytest.approx([10 / 8] * 4)


def test_a_ratio_is_the_median_of_those_within_a_round():
    race = result(a=[1.0, 2.0, 30.0, 4.0, 5.0], b=[2.0, 2.0, 10.0, 4.0, 50.0])
    assert race.ratio("a", "b")[1] == 1.0  # of 0.5, 1, 3, 1, 0.1
    assert race.seconds("a") == 4.0


def test_the_best_of_torch_is_the_fastest_spelling_of_its_kind():
    times = {"torchzero": [0.1] * 3, OURS: [0.2] * 3, "torch fused, graph": [0.5] * 3}
    times |= {"torch fused": [2.0] * 3, "torch foreach, one pass": [1.0] * 3}
    race = result(**times)
    assert race.best() == "torch foreach, one pass"
    assert race.best(graph=True) == "torch fused, graph"
    assert result(**{OURS: [1.0] * 3}).best() is None


def test_a_spelling_that_left_early_is_not_the_fastest_by_its_few_rounds():
    race = result(**{"torch loop": [0.1] * 3, "torch fused": [1.0] * 7, "torch foreach": [1.2] * 7})
    assert race.best() == "torch fused"


def test_bars_are_met_missed_or_not_measured():
    assert Bar("", 0.95, 0.95).met is True
    assert Bar("", 0.96, 0.95).met is False
    assert Bar("", 4.9, 5, at_least=True).met is False
    assert Bar("", math.nan, 5).met is False
    assert Bar("", None, 5).met is None
    assert Bar("", 0.96, 0.95, busy=True).met is None
    assert Bar("", 0.96, None).met is None
    assert "NOT MET" in str(Bar("", 0.96, 0.95))


def test_a_bar_shows_its_spread_and_decides_nothing_on_a_busy_machine():
    bar = bars.of_ratios("of torch: a race", [1.0, 1.1, 1.2, 1.3, 1.4], 1.1)
    assert str(bar).split() == [
        "NOT",
        "MET",
        "1.20",
        "(1.05–1.35)",
        "≤",
        "1.1",
        "of",
        "torch:",
        "a",
        "race;",
        "5",
        "rounds",
    ]
    assert bars.judged([bar], busy=True).startswith("busy ")
    assert bars.judged([bar], busy=False) == str(bar)
    assert str(bars.of_ratios("what", [1.0] * 3, None)).split()[:2] == ["no", "bar"]


def test_the_bars_are_read_off_the_results():
    race = result(**{OURS: [0.9] * 3, "torch fused": [1.0] * 3, "torchzero": [4.0] * 3})
    found = list(bars.of_results([race]))
    assert [(bar.limit, bar.met) for bar in found] == [(1.1, True), (5.0, False)]
    assert [bar.met for bar in bars.of_memory({HEADLINE: 0, "other": 2})] == [True, False]
    assert [bar.met for bar in bars.of_compiling({161: (39.0, 1.0), 1000: (41.0, 1.0)})] == [
        True,
        False,
    ]
    assert all(bar.met is None for bar in bars.unmeasured(found, compiles=True))


@pytest.mark.parametrize(
    ("shapes", "chain", "gradients", "limit"),
    [
        ("gpt2", HEADLINE, "clipped", 1.1),
        ("resnet50", HEADLINE, "clipped", 1.1),
        ("vit", HEADLINE, "clipped", 1.2),
        ("vit", HEADLINE, "within the limit", 0.9),
        ("tiny", HEADLINE, "within the limit", 1.5),
        ("tiny", "clip + Nesterov", "clipped", 1.5),
        ("gpt2", "clip + SGD", "clipped", 1.2),
        ("gpt2", "ClipValue + RMSprop", "clipped", 1.1),
        ("gpt2", "clip + Adagrad", "clipped", 1.1),
        ("gpt2", "clip + Adam, amsgrad", "clipped", 1.1),
        ("gpt2", "clip + Nesterov", "clipped", 1.1),
        ("gpt2", "clip + Adam, bfloat16", "clipped", 1.5),
        ("tiny", "clip_grad_norm_", "clipped", 1.0),
    ],
)
def test_what_an_eager_step_may_take(shapes, chain, gradients, limit):
    times = {OURS: [1.0] * 3, "torch fused": [0.5] * 3, "torch foreach": [2.0] * 3}
    (bar,) = bars.of_results([Result("cpu", shapes, chain, gradients, times)])
    assert bar.limit == limit
    assert bar.value == 2.0
    assert bar.what.startswith("of torch fused: ")


@pytest.mark.parametrize("fastest", WAYS)
def test_our_time_is_divided_by_the_fastest_spelling_in_torch_whichever_it_is(fastest):
    for chain, race in RACES.items():
        if race.kind == "helper":
            continue
        times = {OURS: [1.0] * 3} | {way: [2.0] * 3 for way in WAYS} | {fastest: [0.5] * 3}
        (bar,) = bars.of_results([Result("cpu", "vit", chain, "clipped", times)])
        assert (bar.value, bar.what.partition(":")[0]) == (2.0, f"of {fastest}")


def test_every_optimizer_takes_part_in_each_implementation_that_torch_has():
    optimizers = [race for race in RACES.values() if race.kind != "helper"]
    for race in optimizers:
        ways = set(WAYS) - ({"torch fused"} if race is RACES["ClipValue + RMSprop"] else set())
        assert ways <= set(race.contestants)
    with pytest.raises(TypeError, match="fused"):
        torch.optim.RMSprop([Parameter(torch.zeros(1))], fused=True)


def test_a_use_of_torch_that_is_not_documented_has_a_line_without_a_bar():
    (name,) = UNDOCUMENTED
    times = {OURS: [1.0] * 3, "torch fused": [2.0] * 3, name: [0.5] * 3}
    by_torch, other = bars.of_results([Result("cpu", "vit", HEADLINE, "clipped", times)])
    assert (by_torch.value, by_torch.limit) == (0.5, 1.2)
    assert (other.value, other.limit) == (2.0, None)
    assert name in other.what


@pytest.mark.slow
def test_kept_memory_is_counted_and_none_is_where_nothing_is_clipped():
    kept = {
        (chain, loose): memory.kept_bytes(RACES[chain].contestants[OURS], loose)
        for chain in (HEADLINE, "clip each tensor + AdamW")
        for loose in (False, True)
    }
    assert [*kept.values()] == [0.0, 0.0, 4.0, 0.0]
    assert all(bar.met for bar in bars.of_kept(kept))
    assert [bar.met for bar in bars.of_kept({(HEADLINE, False): 8.0, (HEADLINE, True): 4.0})] == [
        False,
        False,
    ]
    with pytest.raises(TypeError, match="only a step of Modular"):
        memory.kept_bytes(RACES[HEADLINE].contestants["torch fused"])


def test_a_race_gives_everyone_the_same_gradients_in_every_round():
    seen = {"torchzero_clip": [], "torch": []}

    def contestant(name):
        def build(params):
            def step():
                seen[name].append(params[0].grad.sum().item())
                params[0].grad.zero_()
                params[1].grad = None

            return step

        return build

    race = Race({name: contestant(name) for name in seen}, 1)
    times, missing = timing.run(race, [(3, 2), (2,)], False, 0.0, "cpu")
    assert {len(t) for t in times.values()} == {timing.FEWEST}
    assert missing == []
    sums = set(seen["torchzero_clip"]) | set(seen["torch"])
    assert len(sums) == 1
    assert sums != {0.0}


def test_who_is_slow_leaves_after_some_rounds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def takes(seconds):
        def step():
            now[0] += seconds

        return lambda params: step

    taken = {OURS: 1.0, "torch": 5.0, "torch close": 7.4, "torch slow": 7.6, BARE: 0.5}
    taken |= {"other": 2.9, "other slow": 3.1}
    race = Race({name: takes(seconds) for name, seconds in taken.items()}, 1)
    times, _ = timing.run(race, [(2,)], False, 10.0, "cpu")
    left = [name for name, row in times.items() if len(row) == timing.FIRST]
    assert left == ["torch slow", BARE, "other slow"]
    assert {len(times[name]) for name in taken if name not in left} == {timing.FEWEST}
    one = Result("cpu", "gpt2", HEADLINE, "clipped", times)
    assert one.ratio(OURS, "torch slow")[1] == pytest.approx(1 / 7.6)
    assert one.best() == "torch"


def test_a_race_goes_on_for_its_seconds_after_the_first_rounds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    step = lambda: now.__setitem__(0, now[0] + 1.0)  # noqa: E731
    race = Race({OURS: lambda params: step}, 1)
    times, _ = timing.run(race, [(2,)], False, 20.0, "cpu")
    assert len(times[OURS]) == timing.FIRST + 20


def test_who_cannot_run_is_named_and_ours_must(monkeypatch):
    def broken(params):
        raise ValueError("no such thing")

    fine = RACES[HEADLINE].contestants[OURS]
    _, missing = timing.run(Race({OURS: fine, "torch": broken}, 8), [(2,)], False, 0.0, "cpu")
    assert missing == ["torch: ValueError: no such thing"]
    with pytest.raises(ValueError, match="no such thing"):
        timing.run(Race({OURS: broken}, 8), [(2,)], False, 0.0, "cpu")
    monkeypatch.setattr(timing, "installed", lambda name: False)
    race = Race({OURS: fine, "torchzero": broken}, 8)
    assert timing.run(race, [(2,)], False, 0.0, "cpu")[1] == ["torchzero: not installed"]


@pytest.mark.slow
def test_a_smoke_run_prints_every_chain_and_bar_and_writes_them(tmp_path, capsys):
    chains = [HEADLINE, "Normalize + LR", "clip_grad_norm_"]
    command.main(["--quick", "--device", "cpu", "--out", str(tmp_path), "--chains", *chains])
    said = capsys.readouterr()
    for words in (*chains, "torch fused", "smoke run", "allocations as", "; 7 rounds"):
        assert words in said.out
    for words in ("the floor", "← the best of torch", "not measured"):
        assert words in said.err
    notes = [line for line in said.out.splitlines() if line.startswith(MARK)]
    assert [line.startswith("# `python -m benchmarks.step --quick ") for line in notes].count(
        True
    ) == 2
    assert "load average" in notes[2]
    lines = (tmp_path / "step_cpu.csv").read_text().splitlines()
    assert f"# torch: {torch.__version__}" in lines
    table = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert {row["chain"] for row in table} == set(chains)
    assert all(float(row["ms"]) > 0 and float(row["ours_over_it"]) > 0 for row in table)
    assert (tmp_path / "step_cpu.png").stat().st_size > 1000


def test_norms_are_timed_and_held_against_float64(capsys, monkeypatch):
    norms.main(["--quick"])
    said = capsys.readouterr().out
    assert said.count("millionths of error") == len(norms.BARS)
    away = [line for line in said.splitlines() if "millionths" in line and "NOT MET" in line]
    assert away == []
    monkeypatch.setattr(norms, "ours", lambda tensors, order: norms.exact(tensors, order) * 1.00001)
    assert norms.error([10, 5000], 2, torch.float32) == pytest.approx(1e-5, rel=1e-3)


@pytest.fixture
def before(tmp_path):
    """A tree with another version of the library, whose LR subtracts ten times as much."""
    shutil.copytree(versions.ROOT / versions.NAME, tmp_path / versions.NAME)
    page = tmp_path / versions.NAME / "modules" / "descent" / "lr.py"
    lines = page.read_text().splitlines()
    hook = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def affine"))
    assert "lr" in lines[hook + 1]
    lines[hook + 1] = lines[hook + 1].replace('group["lr"]', '10 * group["lr"]')
    page.write_text("\n".join(lines))
    return tmp_path


def modules_of_the_library():
    """Only these: a run may import modules of torch for the first time."""
    return {name: x for name, x in sys.modules.items() if name.partition(".")[0] == versions.NAME}


@pytest.mark.slow
def test_two_versions_of_the_library_run_in_one_process(before):
    """Each steps with its own modules, those that it imports later included."""
    here = modules_of_the_library()
    moved = []
    for version in (versions.Version(versions.ROOT), versions.Version(before)):
        p = Parameter(torch.zeros(3))
        p.grad = torch.ones(3)
        with version.current():
            version.step([["LR", {"lr": 1.0}]], [p], compile=False)()
            lr = importlib.import_module("torchzero_clip.modules.descent.lr")
        assert lr.__file__.startswith(str(version.tree))
        moved.append(p[0].item())
    assert moved == [-1.0, -10.0]
    assert modules_of_the_library() == here


@pytest.mark.slow
def test_a_race_of_versions_gives_a_ratio_for_each_chain_and_leaves_no_modules(before, capsys):
    chains = [HEADLINE, "clip + SGD"]
    here = modules_of_the_library()
    given = [str(before), "--shapes", "quick", "--seconds", "0", "--eager", "--chains", *chains]
    versions.main(given)
    said = capsys.readouterr().out.splitlines()
    assert [line.split("quick, ")[1].split(";")[0] for line in said[1:3]] == chains
    assert "the geometric mean of 2" in said[3]
    assert modules_of_the_library() == here


def test_a_ratio_of_versions_is_the_median_within_a_round():
    one = versions.ratio("what", [2.0, 3.0, 40.0], [1.0, 3.0, 4.0])
    assert one.value == 2.0
    assert "NOT MET" in str(one)
    assert "NOT MET" not in str(versions.ratio("what", [1.0] * 3, [1.0] * 3))


def test_a_folder_without_the_library_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"has no torchzero_clip/__init__\.py: give the folder"):
        versions.Version(tmp_path)


def test_parameters_keep_their_place_when_a_contestant_drops_gradients():
    params, fresh = timing.model([(2, 2)], False, "cpu")
    assert isinstance(params[0], Parameter)
    params[0].grad = None
    timing.refill(params, fresh)
    assert torch.equal(params[0].grad, fresh[0][1])


def test_the_race_of_small_models_prints_ratios_and_bars(capsys, monkeypatch):
    monkeypatch.setattr(small, "TURN", 0.0)
    small.main(["--seconds", "0", "--races", "MLP, clip + Adam", "clip_grad_norm_, 12 tensors"])
    out = capsys.readouterr().out
    line = r"[\d.]+ \([\d.]+–[\d.]+\) +≤ {} +of torch \w+, \d+ µs: {}, {}; \d+ rounds$"
    assert re.search(line.format(1.8, r"MLP, clip \+ Adam", "default"), out, re.M)
    assert re.search(line.format(0.8, r"MLP, clip \+ Adam", "compiled"), out, re.M)
    assert re.search(line.format(1.5, "clip_grad_norm_, 12 tensors", "default"), out, re.M)
    assert ", 1 thread\n# load average" in out


@pytest.mark.slow
def test_compiled_rules_are_raced_beside_a_clip(capsys, monkeypatch):
    monkeypatch.setattr(small, "TURN", 0.0)
    repeated.main(["--seconds", "0"])
    lines = capsys.readouterr().out.splitlines()
    measured, notes = lines[: -len(NOTES)], lines[-len(NOTES) :]
    assert len(measured) == 1 + len(repeated.RULES)
    assert all("≤" in line and "–" in line for line in measured[1:])
    assert all(line.startswith(note) for line, note in zip(notes, NOTES, strict=True))


@pytest.mark.parametrize("name", small.races())
def test_small_races_compare_equal_steps(name):
    race, ends = small.races()[name], {}
    for who, build in race.contestants.items():
        params = small.parameters(race.shapes[:8])
        step = build(params)
        step()
        step()
        ends[who] = [*params, *([p.grad for p in params] if "clip_grad" in name else [])]
    for end in ends.values():
        torch.testing.assert_close(end, ends[small.DEFAULT], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------- Muon


PEERS_HERE = [
    name
    for name in muon.CONTESTANTS
    if not (name.startswith(muon.PEERS) or name.endswith("compiled"))
]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it since 2.9")
def test_contestants_with_muon_do_what_ours_does():
    ends = {}
    for name in PEERS_HERE:
        params = muon.parameters(muon.SETS["quick"], "cpu")
        step = muon.CONTESTANTS[name](params)
        step(), step()
        ends[name] = [p.detach() for p in params]
    start = [p.detach() for p in muon.parameters(muon.SETS["quick"], "cpu")]
    for name, found in ends.items():
        away = 0.15 if name == "torch.optim.Muon" else 1e-5  # which iterates in bfloat16
        for p, q, w in zip(found, ends[muon.OURS], start, strict=True):
            assert (p - q).norm() < away * (q - w).norm(), name


def test_a_race_has_a_row_for_each_contestant_and_ours_beside_itself_is_one():
    names = [muon.OURS, "torch.optim.Muon in float32"]
    times = muon.race(muon.contestants(muon.SETS["quick"], names, "cpu"), 2, "cpu")
    assert {name: len(row) for name, row in times.items()} == dict.fromkeys(names, 2)
    assert muon.report(times)[2].endswith("| 1.00 (1.00 to 1.00) |")
    assert muon.OURS in muon.race(muon.in_parts(muon.SETS["quick"], "cpu"), 1, "cpu")


@pytest.mark.slow
def test_owners_do_their_share_and_gathering_does_all():
    rows = [line.split(" | ") for line in muon.ranks_report(2, muon.SETS["quick"])[2:]]
    assert [row[4] for row in rows] == ["4 |", "4 |"]
    assert 0.5 <= float(rows[0][2]) < 0.7
    assert float(rows[1][2]) == 1.0


# ---------------------------------------------------------------------- what is added to a step


def test_steps_that_alternate_have_the_ratio_of_their_times():
    now = [0.0]

    def takes(seconds):
        return lambda: now.__setitem__(0, now[0] + seconds)

    assert state_dtype.ratio(takes(3.0), takes(1.5), 4, lambda: now[0]) == "2.00 (2.00 to 2.00)"


def test_what_an_average_adds_is_over_the_chain_and_a_copy_of_as_many_numbers(monkeypatch, capsys):
    now = [0.0]

    def small(chain, after=(), compile=False):
        p = Parameter(torch.zeros(10))
        takes = 6.0 if after else 3.0
        p.grad = torch.ones(10)
        opt = types.SimpleNamespace(param_groups=[{"params": [p]}])
        opt.step = lambda: now.__setitem__(0, now[0] + takes)
        return opt

    copy = lambda *_: now.__setitem__(0, now[0] + 1.0)  # noqa: E731
    monkeypatch.setattr(averages, "optimizer", small)
    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    ratios, speeds = averages.added("Lion", "ScheduleFree", 4, lambda: now[0])
    assert (ratios, speeds) == ([6 / 4] * 4, pytest.approx([8e-8] * 4))
    monkeypatch.setattr(averages, "clock_of", lambda cpu: lambda: now[0])
    monkeypatch.setattr(circumstances, "work_of_cores", lambda: None)  # whatever else runs here
    averages.main(["--rounds", "4", "--chain", "Lion", "--link", "ScheduleFree"])
    assert re.search(r"^NOT MET +1.50 \(1.50–1.50\) +≤ 1.05 +Lion, ", capsys.readouterr().out, re.M)


# ---------------------------------------------------------------------- the page of results


def test_the_page_of_results_is_printed_from_its_tables():
    assert (printed.HERE / "RESULTS.md").read_text() == printed.page()
    names = printed.PLACE.findall((printed.HERE / "results" / "page.md").read_text())
    assert sorted(names) == sorted(file.stem for file in printed.PRINTED.iterdir())
    assert sorted(names) == sorted(printed.TABLES)


def test_every_table_of_the_page_names_its_command():
    page = printed.page()
    for name, one in printed.TABLES.items():
        assert f"`python -m {one.command}" in page, name


def test_every_command_of_a_table_is_a_module():
    for one in printed.TABLES.values():
        assert importlib.util.find_spec(one.command.split()[0]) is not None


def test_every_commit_of_the_page_is_in_the_repository():
    commits = set(re.findall(r"commit ([0-9a-f]{7,40})", printed.page()))
    assert commits
    if circumstances.git("git", "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("this is no checkout with its whole history")
    kinds = {commit: circumstances.git("git", "cat-file", "-t", commit) for commit in commits}
    assert set(kinds.values()) == {"commit"}, kinds


def test_no_table_of_the_page_was_measured_on_a_busy_machine():
    assert "busy, so nothing is decided" not in printed.page()


def test_a_table_without_its_load_is_marked(tmp_path, monkeypatch):
    monkeypatch.setattr(printed, "PRINTED", tmp_path)
    command = printed.TABLES["norms"].command
    file = tmp_path / "norms.txt"
    file.write_text(f"# `python -m {command}`, 2026-11-21\na line\n")
    marked = printed.table("norms")
    assert marked.startswith("```text\na line\n```\n\n*`python -m benchmarks.norms`, 2026-11-21*")
    assert "To be measured again" in marked
    assert "`python -m benchmarks.printed norms`" in marked
    file.write_text(f"a line\n# `python -m {command}`\n# 2026-11-21\n# load average 0.1 before\n")
    whole = printed.table("norms")
    assert whole.startswith("```text\na line\n```\n\n*`python -m benchmarks.norms`, 2026-11-21, ")
    assert whole.endswith(", load average 0.1 before*")


def test_what_an_instrument_prints_is_kept_with_its_circumstances(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(printed, "PRINTED", tmp_path)
    printed.keep("tree", printed.Table("json.tool --help"))
    shown = capfd.readouterr().out
    lines = (tmp_path / "tree.txt").read_text().splitlines()
    assert lines[: -len(NOTES)] == shown.splitlines()
    assert lines[-3] == "# `python -m json.tool --help`"
    assert f"torch {torch.__version__}" in lines[-2]
    assert lines[-1].startswith("# load average ")
    printed.keep("counts", printed.Table("json.tool --help", counts=True))
    assert "load" not in (tmp_path / "counts.txt").read_text().splitlines()[-1]
    with pytest.raises(SystemExit):
        printed.keep("broken", printed.Table("json.tool /no/such/file"))
    assert not (tmp_path / "broken.txt").exists()


def test_the_command_lists_tables_and_refuses_unknown_ones(capsys):
    printed.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*printed.TABLES]
    with pytest.raises(SystemExit):
        printed.main(["no_such_table"])
    assert "unknown table 'no_such_table'" in capsys.readouterr().err


@pytest.mark.parametrize(("foreign", "busy"), [(0.04, False), (0.06, True), (0.9, True)])
def test_a_machine_is_busy_when_others_take_more_than_a_twentieth(monkeypatch, foreign, busy):
    """Ten seconds on two cores, of which this process took four."""
    now = types.SimpleNamespace(clock=100.0, work=50.0, own=7.0)
    monkeypatch.setattr(circumstances.time, "monotonic", lambda: now.clock)
    monkeypatch.setattr(circumstances, "cores", lambda: 2)
    monkeypatch.setattr(circumstances, "work_of_cores", lambda: now.work)
    monkeypatch.setattr(circumstances, "work_of_this_process", lambda: now.own)
    watch = circumstances.Watch(["python", "-m", "x", "--chains", "clip + Adam"])
    now.clock += 10.0
    now.own += 4.0
    now.work += 4.0 + 20.0 * foreign
    assert watch.foreign == pytest.approx(foreign)
    assert watch.busy == busy
    command, _, load = watch.lines()
    assert command == "# `python -m x --chains 'clip + Adam'`"
    assert f"other processes took {100 * foreign:.1f} % of the CPU time" in load
    assert load.endswith("nothing is decided from this table") == busy
    monkeypatch.setattr(circumstances, "work_of_cores", lambda: None)
    assert watch.foreign is None
    assert "is not known" in watch.lines()[-1]


@pytest.mark.skipif(not circumstances.STAT.exists(), reason="only Linux tells it")
def test_the_work_of_this_process_is_part_of_the_work_of_the_cores():
    before = circumstances.work_of_cores()
    own = circumstances.work_of_this_process()
    while circumstances.work_of_this_process() < own + 0.06:
        sum(range(10_000))
    assert circumstances.work_of_cores() - before > 0.03  # counted in hundredths of a second


def test_a_ratio_of_the_table_of_small_models_is_read_for_pages():
    both = ("MLP, clip + Adam, compiled", "MLP, clip + Adam, default")
    low, high = [float(number) for number in evidence.raced("small", "2", *both).split(" to ")]
    assert low < high
    assert evidence.raced("small", "1", both[1]) == f"{high:.1f}"
    with pytest.raises(ValueError, match="the table small has 0 lines of no"):
        evidence.raced("small", "1", "no such race")


def test_ratios_and_verdicts_are_read_as_bars_print_them(tmp_path, monkeypatch):
    monkeypatch.setattr(printed, "PRINTED", tmp_path)
    found = [
        bars.of_ratios("of torch fused, 142 µs: MLP, clip + Adam, default", [2.0, 2.5, 3.0], 1.8),
        bars.of_ratios("of torch foreach, one pass: vit, Normalize + LR", [0.9] * 3, 1.0),
        bars.of_ratios("of the fused kernel that scales: vit, clip + Adam", [7.0] * 3, None),
        bars.of_ratios("of torch: vit, clip_grad_norm_", [1.2] * 3, None),
        Bar("allocations, a step: vit, clip + SGD", 9, 0),
    ]
    (tmp_path / "small.txt").write_text(bars.judged(found, busy=False))
    assert printed.ratios("small", ["MLP, clip + Adam, default"]) == [2.5]
    assert printed.ratios("small") == [2.5, 0.9, 1.2]
    assert printed.verdicts("small") == (1, 2)
