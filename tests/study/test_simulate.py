"""A simulation gives the numbers of the run itself, and refuses rules that need more than norms."""

from __future__ import annotations

import csv
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import recursion_limit, some
from torchzero_clip import (
    AGC,
    AdaGC,
    AdaGN,
    Adam,
    AdaptiveClip,
    AutoClip,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    EMARatio,
    Guard,
    Modular,
    Normalize,
    NormRule,
    P2Quantile,
    Partition,
    Quantile,
    Recorder,
    Scale,
    SoftClip,
    Trace,
    TrustRatio,
    ZClip,
    ZScoreClip,
    ZStat,
    simulate,
)
from torchzero_clip.__main__ import main
from torchzero_clip.study.simulate_command import rule as read_rule
from torchzero_clip.study.simulating import kinds

NAMES = ["a.weight", "a.bias", "b.weight"]
RULES = [
    ClipNorm(2.0),
    ClipNorm(3.0, dim="global"),
    ClipNorm(3.0, dim="layer"),
    SoftClip(3.0, dim="global"),
    Normalize(dim="group"),
    ClipNormGrowth(),
    ClipNormGrowth(dim="layer"),
    AdaGC(warmup_steps=10),
    AdaGN(),
    ZClip(),
    ZClip(max_norm=None, dim="layer"),
    ZClip(max_norm=None, mode="percentile"),
    ZScoreClip(),
    AutoClip(),
    AutoClip("percentile", 90.0),
    AdaptiveClip(ZStat()),
    AdaptiveClip(EMARatio(), dim=None),
    AdaptiveClip(Quantile(0.9, window=32)),
    AdaptiveClip(P2Quantile(0.9)),
]


def run(*links: NormRule, steps: int = 80) -> Recorder:
    """A run with spikes, a jump, a zero and a NaN; the second tensor sometimes has no gradient."""
    source = torch.Generator().manual_seed(0)
    params = [(name, Parameter(torch.zeros(4, 5))) for name in NAMES]
    opt = Modular(params, ClipNorm(math.inf, name="raw"), *links, Scale(0.0))
    recorder = Recorder(opt, capacity=steps + 1)
    for step in range(steps):
        size = (50 if step % 23 == 22 else 1) * (4 if step > 50 else 1) * (step != 40)
        for name, p in params:
            p.grad = size * torch.randn(4, 5, generator=source)
            if step == 60:
                p.grad[0, 0] = math.nan
            if name == "a.bias" and step % 7 == 6:
                p.grad = None
        recorder.log(spike=float(step % 23 == 22))
        opt.step()
    return recorder


def test_a_norm_that_is_no_number_is_known_but_a_missing_one_is_not() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    recorder = Recorder(opt := Modular(params, ClipNorm(1.0)))
    params[0].grad = torch.full((2,), math.nan)
    opt.step()
    for p in params:
        p.grad = torch.ones(2)
    opt.step()
    trace = Trace.of(recorder)
    assert trace.known.tolist() == [[True, False], [True, True]]
    assert trace.norms[0].isnan().all()


@pytest.mark.parametrize("rule", some(RULES, one_in=2), ids=repr)
def test_it_agrees_with_the_metrics_of_a_real_run(rule: NormRule) -> None:
    recorder = run(rule)
    history = recorder.history()
    (made,) = simulate(Trace.of(recorder), rule).metrics.values()
    for kind, values in made.items():
        name = f"{type(rule).__name__}/{kind}"
        real = torch.tensor(history[name], dtype=torch.float64).view(len(values), -1)
        values = values.double()
        if kind == "clipped":
            real, values = real.nan_to_num(0.0), values.nan_to_num(0.0)
        broken = made["norm"].isnan()  # no gradient, or no number
        torch.testing.assert_close(
            values.masked_fill(broken, 0.0), real.masked_fill(broken, 0.0), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize(
    "make",
    some(
        [
            lambda x: ZClip(z_thresh=x, max_norm=None),
            lambda x: ZScoreClip(zmax=x),
            lambda x: AdaGC(rel=x, warmup_steps=5),
            lambda x: ClipNormGrowth(mul=x),
            lambda x: ClipNorm(x, dim="global"),
            lambda x: AdaptiveClip(ZStat(z_thresh=x)),
            lambda x: AutoClip("percentile", 20 * x),
        ],
        one_in=2,
    ),
)
def test_rules_that_run_at_once_are_each_as_if_alone(make) -> None:
    trace, rules = Trace.of(run()), [make(x) for x in (1.5, 2.0, 4.0)]
    both = simulate(trace, *rules).metrics
    for rule in rules:
        (alone,) = simulate(trace, rule).metrics.values()
        for kind, values in alone.items():
            assert torch.equal(values.nan_to_num(-1.0), both[repr(rule)][kind].nan_to_num(-1.0))


def test_what_differs_in_live_numbers_alone_runs_at_once() -> None:
    many = [ZClip(z_thresh=2.0), ZClip(z_thresh=3.0), ZClip(mode="mean"), AdaGC()]
    assert [len(alike) for alike in kinds(many)] == [2, 1, 1]


def test_alarms_are_clipped_good_steps_and_spikes_that_are_not_clipped() -> None:
    norms, spike = torch.tensor([[1.0], [3.0], [9.0], [2.0], [9.0]]), torch.tensor([0, 0, 1, 1, 0])
    trace = Trace(norms, logged={"spike": spike})
    false, missed = simulate(trace, ClipNorm(2.5), ClipNorm(1.5), ClipNorm(99.0)).alarms()
    assert false.tolist() == pytest.approx([2 / 3, 2 / 3, 0.0])
    assert missed.tolist() == pytest.approx([0.5, 0.0, 1.0])


def test_a_trace_in_a_file_is_the_same_again(tmp_path: Path) -> None:
    trace = Trace.of(run(steps=30))
    for name in ("run.csv", "run.csv.gz"):
        trace.write(tmp_path / name)
        again = Trace.read(tmp_path / name)
        assert again.names == trace.names == NAMES
        assert torch.equal(again.known, trace.known)
        torch.testing.assert_close(
            again.norms.where(again.known, 0.0), trace.norms.where(trace.known, 0.0)
        )
        assert torch.equal(again.spikes, trace.spikes)


def test_a_file_of_a_recorder_gives_the_norms_that_reached_its_first_rule(tmp_path: Path) -> None:
    recorder = run(ZClip(), steps=30)
    recorder.to_csv(tmp_path / "run.csv")
    first, second = (Trace.read(tmp_path / "run.csv", name) for name in (None, "ZClip/norm"))
    assert (len(first.names), len(second.names)) == (3, 1)
    torch.testing.assert_close(first.total, second.norms[:, 0], rtol=1e-6, atol=0, equal_nan=True)
    assert list(first.logged) == ["spike"]


def test_merged_rows_stand_for_several_steps(tmp_path: Path) -> None:
    recorder = run(steps=30)
    recorder.capacity = 10
    recorder._fit()
    recorder.to_csv(tmp_path / "run.csv")
    assert Trace.read(tmp_path / "run.csv").stride == 4


def test_a_file_says_how_many_steps_a_row_stands_for_and_others_are_read(tmp_path) -> None:
    recorder = run(steps=30)
    recorder.capacity = 10
    recorder._fit()
    recorder.to_csv(tmp_path / "run.csv")
    with open(tmp_path / "run.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["step"] for row in rows] == ["4", "8", "12", "16", "20", "24", "28", "30"]
    assert [row["stands_for"] for row in rows] == [*["4"] * 7, "2"]
    ours = Trace.read(tmp_path / "run.csv")
    with open(tmp_path / "other.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if name != "stands_for"])
        writer.writeheader()
        writer.writerows({name: row[name] for name in writer.fieldnames} for row in rows)
    other = Trace.read(tmp_path / "other.csv")
    assert (ours.stride, [*ours.logged], ours.names) == (other.stride, [*other.logged], other.names)
    assert torch.equal(ours.steps, other.steps)
    torch.testing.assert_close(ours.norms, other.norms, rtol=0, atol=0, equal_nan=True)
    recorder.capacity = 2
    recorder._fit()
    recorder.to_csv(tmp_path / "run.csv")
    assert Trace.read(tmp_path / "run.csv").part(0, 1).stride == 16


def test_a_norm_is_what_it_is_however_large_or_small(tmp_path: Path) -> None:
    """Its square may be too large for a float, and it too large for a float32."""
    rule = AutoClip()  # has no limit yet
    for norm in (math.inf, 1.7e308, 1e300, 1e200, 1e-200, 1e-310):
        (tmp_path / "run.csv").write_text(f"step,grad_norm\n1,{norm}\n2,{norm}\n")
        trace = Trace.read(tmp_path / "run.csv")
        assert trace.total.tolist() == [norm, norm]
        left = simulate(trace.part(0, 1), rule).left.item()
        assert left == pytest.approx(norm, rel=1e-7, abs=1e-45)
        both = Trace(torch.tensor([[norm / 2, norm / 2]], dtype=torch.float64)).total.item()
        assert both == pytest.approx(norm / math.sqrt(2), rel=1e-9)


@pytest.mark.parametrize(
    ("rule", "error", "sentence"),
    [
        (TrustRatio(), ValueError, r"rules that read group\['params'\] are not supported"),
        (AGC(), ValueError, "contains only the 2-norms"),
        (ClipNormByEMA(), ValueError, "contains only the 2-norms"),
        (ClipNorm(1.0, ord=1), ValueError, "contains only the 2-norms"),
        (ClipNorm(1.0, dim=0), ValueError, "contains only the 2-norms"),
        (Adam(), TypeError, "rules must be transforms that clip norms"),
        (Guard(), TypeError, "rules must be transforms that clip norms"),
        (ClipNorm(1.0, dim="layer"), ValueError, "needs a trace with the norm and the name"),
    ],
    ids=repr,
)
def test_what_a_recorded_run_cannot_tell_is_an_error(rule, error, sentence) -> None:
    with pytest.raises(error, match=sentence):
        simulate(Trace(torch.ones(3, 2)), rule)


def test_what_is_no_trace_is_an_error() -> None:
    with pytest.raises(
        TypeError, match=r"trace= must be a Trace, got 'run\.csv': use Trace\.read\(path\)"
    ):
        simulate("run.csv", ZClip())  # type: ignore[arg-type]


def test_a_trace_says_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"norms must be a matrix .* got shape \(3,\)"):
        Trace(torch.ones(3))
    with pytest.raises(ValueError, match="the number of columns of norms, 1, got 2 names"):
        Trace(torch.ones(3, 1), ["a", "b"])
    with pytest.raises(ValueError, match="alarms needs a trace that marks the spikes"):
        simulate(Trace(torch.ones(3, 1)), ClipNorm(1.0)).alarms()
    (tmp_path / "run.csv").write_text("step,loss\n1,2.0\n")
    with pytest.raises(
        ValueError, match=r"such as grad_norm, .* columns are \['step', 'loss'\]\. If"
    ):
        Trace.read(tmp_path / "run.csv")
    assert Trace.read(tmp_path / "run.csv", "loss").norms.tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "step,norm,loss\n1,2.0,3.0\n2,2.0\n3,2.0,3.0\n",
            "must have 3 cells, .* line 3 has 2",
        ),
        ("step,norm\n1,2.0,3.0\n", "must have 2 cells, .* line 2 has 3"),
        (
            'step,norm\n\n1,2.0\n2,"2.0\n3,2.0\n4,2.0\n',
            "line 4 of .* has an opening quote without a closing",
        ),
        ('step,"norm\n1,2.0\n', "line 1 of .* has an opening quote without a closing"),
        ("step,norm\n1,two\n", "must have numbers in all cells: .*'two'"),
        ("step,norm\n", "has no steps"),
        ("", "has no steps"),
    ],
)
def test_what_is_no_table_is_an_error_that_names_the_line(text, sentence, tmp_path) -> None:
    (tmp_path / "run.csv").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        Trace.read(tmp_path / "run.csv")


@pytest.mark.parametrize("name", ["run.csv", "run.csv.gz"])
def test_what_a_killed_writer_leaves_is_read_up_to_its_last_whole_line(name, tmp_path) -> None:
    torch.manual_seed(0)
    whole, cut = Trace(torch.rand(500, 3)), tmp_path / name
    whole.write(cut)
    written = cut.read_bytes()
    seen = []
    for end in (len(written) - 60, len(written) // 2):
        cut.write_bytes(written[:end])
        with pytest.warns(
            UserWarning, match=rf"last line of .*{name} is incomplete, so Trace skips this line"
        ):
            norms = Trace.read(cut).norms
        torch.testing.assert_close(norms, whole.norms[: len(norms)])
        seen.append(len(norms))
    assert 490 < seen[0] < 500
    assert 150 < seen[1] < 300


# ---------------------------------------------------------------------- the command


def test_the_command_prints_a_line_for_each_rule_and_draws(tmp_path, capsys) -> None:
    run(steps=40).to_csv(tmp_path / "run.csv")
    picture = tmp_path / "picture.svg"
    rules = ["ZClip(max_norm=None)", "ClipNorm(5.0, dim='global')"]
    main(["simulate", str(tmp_path / "run.csv"), *rules, "--out", str(picture)])
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("40 steps with 3 norms; the median of their total norm is ")
    assert head.split() == ["rule", "clipped", "largest", "left", "false", "alarms", "missed"]
    assert [line.split("  ")[0] for line in lines[:2]] == [
        "ZClip(max_norm=None)", "ClipNorm(max_norm=5.0, dim='global')"
    ]  # fmt: skip
    assert lines[1].split()[3] == "5"  # what is left of the largest is the limit
    assert picture.read_text().count("<svg") == 1


def test_a_log_of_every_tenth_step_says_so_even_if_it_has_the_first_step_too(
    tmp_path, capsys
) -> None:
    rows = [f"{step},1.0" for step in (1, 10, 20, 30)]
    (tmp_path / "run.csv").write_text("\n".join(["step,grad_norm", *rows, ""]))
    main(["simulate", str(tmp_path / "run.csv"), "ZClip()", "--out", str(tmp_path / "plot.svg")])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("4 rows, one for every 10 steps, with 1 norm; the median")


def test_an_option_may_be_between_the_file_and_the_rules(tmp_path, capsys) -> None:
    run(steps=40).to_csv(tmp_path / "run.csv")
    file, *rules = [str(tmp_path / "run.csv"), "ZClip()", "ClipNorm(5.0, dim='global')"]
    out = ["--out", str(tmp_path / "picture.svg")]
    norms = ["--norms", "raw/norm/0"]
    printed = []
    for words in ([file, *rules, *norms], [file, *norms, *rules], [*norms, file, *rules]):
        main(["simulate", *words, *out])
        printed.append(capsys.readouterr().out)
    assert printed == printed[:1] * 3
    assert "\nZClip()" in printed[0]
    with pytest.raises(SystemExit):
        main(["simulate", *norms])
    assert "arguments are required: run\n" in capsys.readouterr().err


def partitioned() -> Recorder:
    """A run with one rule for each of two parameters, and one norm for each rule."""
    params = {"a": Parameter(torch.ones(2)), "b": Parameter(torch.ones(2))}
    limits = {"actor": ClipNorm(1.0, dim="global"), "critic": ClipNorm(2.0, dim="global")}
    opt = Modular(params.items(), Partition(limits, {"a": "actor", "b": "critic"}), Scale(0.1))
    recorder = Recorder(opt)
    for _ in range(3):
        for size, p in enumerate(params.values(), 1):
            p.grad = size * torch.ones(2)
        opt.step()
    return recorder


def test_the_command_names_the_column_if_there_are_several(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    partitioned().to_csv("run.csv")
    main(["simulate", "run.csv", "ZClip()", "--out", "picture.svg"])
    first, line, *_ = capsys.readouterr().out.splitlines()
    assert first == "3 steps with 1 norm; the median norm is 1.414"
    assert line == (
        "The norms are from the column 'Partition/actor/norm'. To use another column of norms, "
        "pass --norms with one of ['Partition/critic/norm']."
    )
    norms = ["--norms", "Partition/critic/norm"]
    main(["simulate", "run.csv", "ZClip()", "--out", "picture.svg", *norms])
    first, line, *_ = capsys.readouterr().out.splitlines()
    assert first == "3 steps with 1 norm; the median norm is 2.828"
    assert line.startswith("rule")


def test_a_trace_of_one_part_of_the_parameters_warns_unless_a_name_chooses_it(tmp_path) -> None:
    recorder = partitioned()
    recorder.to_csv(tmp_path / "run.csv")
    words = (
        "each of the columns ['Partition/actor/norm', 'Partition/critic/norm'] may contain the "
        "norms of only some parameters. Trace uses 'Partition/actor/norm'"
    )
    with pytest.warns(UserWarning, match=re.escape(words)):
        trace = Trace.read(tmp_path / "run.csv")
    with pytest.warns(UserWarning, match=re.escape(words)):
        assert Trace.of(recorder).median == trace.median
    name = "Partition/actor/norm"
    assert Trace.read(tmp_path / "run.csv", name).median == trace.median
    assert Trace.of(recorder, name).median == trace.median


def test_the_command_prints_its_table_without_matplotlib(tmp_path, capsys, monkeypatch) -> None:
    run(steps=40).to_csv(tmp_path / "run.csv")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    main(["simulate", str(tmp_path / "run.csv"), "ZClip()", "--out", str(tmp_path / "picture.svg")])
    _, _, line, end = capsys.readouterr().out.splitlines()
    assert line.startswith("ZClip()")
    assert end.startswith(
        'There is no plot: Simulation: plot requires matplotlib: pip install "torchzero-clip['
    )
    assert not (tmp_path / "picture.svg").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["nowhere.csv"], "No such file"),
        (
            ["run.csv", "Adam()"],
            "simulate supports only rules that clip norms, such as ZClip(), got Adam()",
        ),
        (["run.csv", "ZCilp()"], "ZCilp"),
        (["run.csv", "ZClip("], "Python code such as ZClip(max_norm=None), got ZClip("),
        (["run.csv", "--norms", "x"], "has no column 'x'"),
        (["run.csv", "ClipNorm(2 * 3)"], "ZClip(max_norm=None), got 2 * 3"),
        (["run.csv", "ClipNorm(x)"], "unknown transform 'x'"),
        (["run.csv", "NormRule()"], "NormRule must define limit"),
        (["run.csv", "--out", "table.csv"], "--out must end in .png or .svg or .pdf, got"),
        (["run.csv", "--out", "nowhere/plot.png"], "the plot cannot be written: "),
    ],
)
def test_a_wrong_argument_gets_a_sentence(given, sentence, tmp_path, capsys, monkeypatch) -> None:
    run(steps=5).to_csv(tmp_path / "run.csv")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *given])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


WRONG = {
    "ClipNorm(2*3)": "ZClip(max_norm=None), got 2 * 3",
    "ClipNorm(-x)": "ZClip(max_norm=None), got -x",
    "ClipNorm(1 if 2 else 3)": "ZClip(max_norm=None), got 1 if 2 else 3",
    "ClipNorm(*[1])": r"ZClip(max_norm=None), got *[1]",
    "ClipNorm(**x)": "ZClip(max_norm=None), got x",
    "ClipNorm(1)(2)": r"ZClip(max_norm=None), got ClipNorm(1)(2)",
    "torch.ZClip()": r"ZClip(max_norm=None), got torch.ZClip()",
    "ClipNorm(math.tau)": "ZClip(max_norm=None), got math.tau",
    "ClipNorm(1, name={'function': 'os:system'})": "ZClip(max_norm=None), got",
    "AdaptiveClip(ZStat(1 + 1))": r"ZClip(max_norm=None), got 1 + 1",
    "lambda: 1": "simulate supports only rules that clip norms, such as ZClip(), got lambda: 1",
    "1": "simulate supports only rules that clip norms, such as ZClip(), got 1",
    "ClipNorm(1, max_norm=2)": "ClipNorm: the argument 'max_norm' was passed twice",
    "ClipNorm(1, type='ZClip')": "ClipNorm has no argument 'type'",
    "ClipNorm(" + "1, " * 20 + ")": "got 20 positional arguments",
    "ClipNorm(" + "9" * 400 + ")": "all numbers of a rule must fit into a float",
    "ClipNorm(" + "9" * 5000 + ")": "a rule must be Python code such as",
    "-" * 9000 + "1": "a rule must be Python code such as",
    "x" + ".x" * 3000: "a rule must be Python code such as",
    "ClipNorm(" * 500: "a rule must be Python code such as",
    "\ud800": "a rule must be Python code such as",
    "ZClip()\0": "a rule must be Python code such as",
    "ClipNorm(nan)": "max_norm must be a number of at least 0, got nan",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_wrong_rule_gets_a_sentence_in_the_words_of_who_wrote_it(text: str) -> None:
    wrong = pytest.raises(ValueError, match=re.escape(WRONG[text]))
    with recursion_limit(1000), wrong as error:
        read_rule(text)
    assert "object at 0x" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_rule_is_read_as_it_is_printed() -> None:
    for rule in [*RULES, ClipNorm(math.inf), SoftClip(1e300), ZClip(alpha=1e-300)]:
        assert repr(read_rule(repr(rule))) == repr(rule)
    assert repr(read_rule("ClipNorm(math.inf)")) == repr(read_rule("ClipNorm(inf)"))


@pytest.mark.parametrize("norm", some(["0", "nan", "inf"], one_in=3))
def test_a_run_without_a_norm_to_go_by_is_simulated_and_says_so(
    norm: str, tmp_path, capsys, monkeypatch
) -> None:
    (tmp_path / "run.csv").write_text(f"step,grad_norm\n1,{norm}\n2,{norm}\n3,{norm}\n")
    monkeypatch.chdir(tmp_path)
    main(["simulate", "run.csv", "--out", "simulate.svg"])
    first, _, *lines, _ = capsys.readouterr().out.splitlines()
    middle = {"0": "the median norm is 0"}.get(norm, "all norms are NaN or infinite, so no")
    assert first.startswith(f"3 steps with 1 norm; {middle}")
    rules = [line.split("(")[0] for line in lines]
    assert rules == [
        "ZClip",
        "AutoClip",
        "ClipNormGrowth",
        "AdaGC",
    ]
    assert [line.split()[-1] for line in lines[:3]] == [norm] * 3


def test_the_median_is_of_norms_that_are_numbers() -> None:
    norms = torch.tensor([[2.0], [math.nan], [math.inf], [math.inf], [math.inf], [4.0], [3.0]])
    assert Trace(norms).median == 3.0
    assert math.isnan(Trace(norms[1:3]).median)
