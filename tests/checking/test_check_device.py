"""check-device: what it finds on a CPU, which planted mistakes it reports, and how it ends."""

from __future__ import annotations

import json
import math
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import ROOT, at_once
from torchzero_clip import LR, Lambda, Modular
from torchzero_clip.__main__ import main
from torchzero_clip.audit import fake_cuda, twin
from torchzero_clip.checking import (
    CheckResult,
    DeviceReport,
    chain_checks,
    check_device,
    device_checks,
    device_report,
    gpu_checks,
    speed_checks,
    training_runs,
)
from torchzero_clip.checking.chain_checks import Yardstick, allowed, distance
from torchzero_clip.checking.check_cases import CASES, HEADLINE, CheckCase
from torchzero_clip.checking.device_checks import MODES, CheckPlan
from torchzero_clip.checking.speed_checks import SpeedModel
from torchzero_clip.checking.training_runs import STEPS, WATCHED_STEPS, RunResult, RunSetting
from torchzero_clip.engines.compiled.printers import backends
from torchzero_clip.engines.compiled.replay import captures

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
SOME = [*CASES[:2], *CASES[5::4]]  # with a guard, with a loss, and with an average
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without GPU")
COMMAND = ["check-device", "--device", "cpu", "--quiet"]


@contextmanager
def smaller(cases: Sequence[CheckCase], models: Sequence[SpeedModel] = ()) -> Iterator[None]:
    """Only these chains, the same in other dtypes, and these models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_checks, "CASES", cases)
        patch.setattr(device_checks, "DTYPE_CASES", cases[:1])
        patch.setattr(device_checks, "ON_CPU", models)
        patch.setattr(device_checks, "SPEED_SECONDS", 0.1)
        yield


@pytest.fixture(scope="module")
def report() -> DeviceReport:
    """What two chains give on the CPU."""
    with smaller(CASES[:2], [SpeedModel("small", [(64,)] * 4)]):
        return check_device("cpu", minutes=1)


def verdicts(results: Sequence[CheckResult]) -> dict[str, str]:
    return {result.check: result.verdict for result in results}


# ---------------------------------------------------------------------- on a CPU


def test_nothing_is_wrong_on_a_cpu(report: DeviceReport) -> None:
    assert report.failed == [], str(report)
    assert report.passed
    kinds = {(result.check, result.mode) for result in report.results}
    for mode in ("default", "compiled"):
        for check in (
            "numbers",
            "numbers, bfloat16",
            "numbers, float16",
            "numbers, float64",
            "unaligned addresses",
            "new gradients in each step",
            "speed: small",
        ):
            assert (check, mode) in kinds
    assert ("warnings about kernels", "compiled") in kinds
    assert ("numbers", "torch") in kinds
    assert ("speed: small", "torch") in kinds


def test_synchronizations_are_counted_on_a_simulated_gpu(report: DeviceReport) -> None:
    found = [result for result in report.results if result.check == "synchronizations"]
    assert {result.case for result in found} == {case.name for case in CASES[:2]}
    assert {(result.mode, result.verdict, result.value) for result in found} == {
        ("simulated GPU", "ok", 0)
    }


def test_the_report_says_that_there_was_no_gpu(report: DeviceReport) -> None:
    text = str(report)
    assert text.startswith("### torchzero_clip check-device: 0 of ")
    assert "**No GPU was found.** The checks ran on the CPU" in text
    assert "- all checks, captured: needs a CUDA GPU" in text
    assert f"| torch          | {torch.__version__}" in text
    assert report.machine["device"].startswith("CPU, ")


def test_the_report_is_a_table_of_markdown(report: DeviceReport) -> None:
    """Each table has one width, and its second row is a rule."""
    blocks = [block.splitlines() for block in str(report).split("\n\n")]
    tables = [block for block in blocks if block[0].startswith("| ")]
    assert len(tables) == 2
    for rows in tables:
        assert len(set(map(len, rows))) == 1
        assert set(rows[1]) == {"|", "-", " "}
    (row,) = [line for line in tables[1] if line.startswith("| numbers ") and "default" in line]
    assert row.split("|")[3].strip() == "2"
    assert row.split("|")[6].strip() == "ok"


def test_plain_data_has_every_result(report: DeviceReport) -> None:
    data = report.as_dict()
    assert data["passed"] is True
    assert len(data["results"]) == len(report.results)
    assert data == json.loads(json.dumps(data, allow_nan=False))


@pytest.mark.slow
def test_everything_is_right_on_a_cpu() -> None:
    report = check_device("cpu", minutes=30, everything=True)
    assert report.failed == [], str(report)
    assert len(report.of("ok")) >= 250
    assert {result.mode for result in report.of("not run") if result.why != "needs a CUDA GPU"} == {
        ""
    }  # a check of very large tensors, and of no mode


def test_every_chain_is_right_in_the_default_engine() -> None:
    for case in [*CASES, *device_checks.MORE_CASES]:
        result, run = Yardstick(case).compare("numbers", RunSetting("default", CPU))
        assert result.verdict == "ok", f"{case.name}: {result.why}"
        assert run.warnings == []


# ---------------------------------------------------------------------- planted mistakes


class Wrong(Modular):
    """Each step leaves the weights a thousandth too large, in some engines."""

    engines = ("Eager", "Compiled")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if repr(self.engine).startswith(self.engines):
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 1.001)


class WrongCompiled(Wrong):
    engines = ("Compiled",)


def test_a_wrong_step_is_in_the_table_and_in_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_runs, "Modular", WrongCompiled)
    with smaller([HEADLINE]), pytest.raises(SystemExit) as ended:
        main(COMMAND)
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    found = {(row[0], row[1]): row[-1] for row in rows if len(row) == 6}
    assert found["numbers", "compiled"] == "FAILED"
    assert found["numbers", "default"] == "ok"
    assert found["numbers, bfloat16", "default"] == "ok"
    assert found["numbers, float64", "compiled"] == "FAILED"
    assert any(
        [line.startswith("- numbers, compiled, ClipNorm, AdamW: 8.0e-03 rel") for line in lines]
    )


def test_a_mistake_of_every_engine_is_found_because_torch_is_the_yardstick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_runs, "Modular", Wrong)
    for mode in ("default", "compiled", "plain"):
        result, _ = Yardstick(HEADLINE).compare("numbers", RunSetting(mode, CPU))
        assert result.verdict == "FAILED", mode


@at_once("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_wrong_step_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    """A learning rate that is too large: rounding to bfloat16 hides a thousandth of a weight."""
    case = CheckCase(HEADLINE.name, lambda: [*HEADLINE.make()[:-1], LR(3e-2)])
    yardstick = Yardstick(HEADLINE, dtype)
    run = training_runs.train(case, RunSetting("default", CPU, dtype))
    assert distance(run.weights, yardstick.weights) > yardstick.limit


def test_weights_that_are_not_finite_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Yardstick(HEADLINE).weights
    broken = [*weights[:-1], torch.full_like(weights[-1], math.nan)]
    assert distance(weights, weights) == 0
    assert distance(broken, weights) == math.inf
    monkeypatch.setattr(chain_checks, "train", lambda case, setting: RunResult(broken))
    yardstick = Yardstick(HEADLINE)
    vars(yardstick).update(weights=weights, limit=1e-3)
    result, _ = yardstick.compare("numbers", RunSetting("default", CPU))
    assert (result.verdict, result.value) == ("FAILED", None)
    assert result.why == "inf relative error, allowed 0.001"


def reads(u: Tensor) -> Tensor:
    return u * float(u.sum())


def test_a_step_that_reads_a_value_is_found_on_the_simulated_gpu() -> None:
    case = CheckCase("reads", lambda: [Lambda(reads), LR(0.1)])
    (result,) = chain_checks.simulated_checks(case)
    assert result.verdict == "FAILED"
    assert "test_check_device.py:" in result.why
    assert "copies a value to the CPU" in result.why


def test_a_kernel_that_is_not_used_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Warns(Modular):
        def step(self, closure: Any = None) -> Any:
            training_runs.warnings.warn("compile=True: a kernel does not compute", stacklevel=1)
            return super().step(closure)

    monkeypatch.setattr(training_runs, "Modular", Warns)
    results = list(chain_checks.chain_checks(Yardstick(HEADLINE), "compiled", CPU))
    assert verdicts(results) == {"numbers": "ok", "warnings about kernels": "FAILED"}
    assert results[-1].why == "compile=True: a kernel does not compute"


def test_an_error_is_a_failed_check_and_the_others_go_on() -> None:
    def broken() -> list[Any]:
        raise ZeroDivisionError("no such chain")

    with smaller([CheckCase("broken", broken), HEADLINE]):
        report = check_device("cpu", minutes=1)
    assert {result.case for result in report.failed} == {"broken"}
    assert report.failed[0].why == "ZeroDivisionError: no such chain"
    assert "- numbers, default, broken: ZeroDivisionError: no such chain" in str(report)
    assert "ok" in {result.verdict for result in report.results if result.case == HEADLINE.name}


def test_a_published_method_that_cannot_be_captured_is_no_failure() -> None:
    def refused() -> list[Any]:
        raise ValueError("captured: the steps of this chain differ on the host: Reset")

    for is_optional, verdict in ((True, "not run"), (False, "FAILED")):
        case = CheckCase("refused", refused, is_optional=is_optional)
        plan = CheckPlan(CPU, 60)
        (result,) = plan._attempt("numbers", "captured", case, refused)
        assert result.verdict == verdict


def test_a_gpu_that_has_failed_ends_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device_checks, "chain_checks", lost)
    monkeypatch.setattr(device_checks, "synchronize", lost)
    report = check_device("cpu", minutes=1)
    assert [result.check for result in report.failed] == ["numbers", "device"]
    assert not report.passed


# ---------------------------------------------------------------------- what needs a GPU


def on_gpu(
    mode: str, monkeypatch: pytest.MonkeyPatch, **found: Any
) -> tuple[dict[str, str], list[CheckResult]]:
    """The verdicts on a run on a GPU that ended as float64 does, and otherwise as is given."""
    yardstick = Yardstick(HEADLINE)
    run = RunResult(yardstick.weights, **found)
    assert yardstick.limit > 0
    monkeypatch.setattr(chain_checks, "train", lambda case, setting: run)
    results = list(chain_checks.chain_checks(yardstick, mode, CUDA))
    return verdicts(results), results


def test_a_line_that_synchronizes_fails_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = on_gpu("default", monkeypatch)
    assert found == {"numbers": "ok", "synchronizations": "ok"}
    found, results = on_gpu("default", monkeypatch, synchronizing=["x.py:3"])
    assert found == {"numbers": "ok", "synchronizations": "FAILED"}
    assert results[-1].why == "x.py:3"


@pytest.mark.parametrize(
    ("graphs", "verdict"), [(WATCHED_STEPS, "ok"), (WATCHED_STEPS - 1, "FAILED"), (0, "FAILED")]
)
def test_a_step_without_its_graph_fails_a_check(
    graphs: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = on_gpu("captured", monkeypatch, graphs=graphs)
    assert found["CUDA graph"] == verdict


def test_watched_steps_count_lines_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph that is replayed, and a line that synchronizes, in each step."""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)

    def lines(step: Callable[[], Any]) -> list[str]:
        step()
        torch.cuda.CUDAGraph.replay(object())  # type: ignore[arg-type]
        return ["x.py:3"]

    monkeypatch.setattr(training_runs, "synchronizing_lines", lines)
    run = training_runs.train(HEADLINE, RunSetting("default", CPU, is_watched=True))
    assert run.synchronizing == ["x.py:3"] * WATCHED_STEPS
    assert run.graphs == WATCHED_STEPS
    assert training_runs.train(HEADLINE, RunSetting("default", CPU)).graphs == 0


def test_all_checks_of_a_gpu_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on a GPU end as float64 does: this shows which checks there are, and no more."""
    settings: list[RunSetting] = []
    train = training_runs.train

    def imagined(case: CheckCase, setting: RunSetting) -> RunResult:
        if setting.device.type == "cpu":
            return train(case, setting)
        settings.append(setting)
        plain = RunSetting("plain", CPU, torch.float64, setting.dtype, setting.steps)
        return RunResult(train(case, plain).weights, graphs=WATCHED_STEPS)

    def passing(check: str) -> Callable[..., list[CheckResult]]:
        return lambda *_: [device_report.measured(check, "", "", 0.0, 1.0, "")]

    monkeypatch.setattr(chain_checks, "train", imagined)
    monkeypatch.setattr(device_checks, "own_graph_check", passing("your own CUDA graph"))
    monkeypatch.setattr(device_checks, "pinned_memory_check", passing("pins memory"))
    monkeypatch.setattr(device_checks, "speed_checks", passing("speed"))
    monkeypatch.setattr(CheckPlan, "_why_not", lambda plan, mode: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    with smaller([HEADLINE]):
        results = list(CheckPlan(CUDA, 60).results())
    assert {result.verdict for result in results} == {"ok", "to compare"}, results
    assert {
        "CUDA graph",
        "synchronizations",
        "host ahead of the GPU",
        "two CUDA streams in turn",
        "another GPU is current",
        "your own CUDA graph",
        "pins memory",
        "speed",
    } <= {result.check for result in results}
    assert {setting.mode for setting in settings} == {*MODES, "torch"}
    assert {setting.device for setting in settings} == {CUDA}
    for setting in settings:  # a CUDA graph needs gradients that keep their memory
        assert setting.mode != "captured" or not setting.new_gradients


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SOME, id="some"),
        pytest.param(
            [case for case in CASES if case not in SOME], id="others", marks=pytest.mark.slow
        ),
    ],
)
def test_every_chain_is_captured_on_an_imagined_gpu(
    cases: Sequence[CheckCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the check of CUDA graphs would fail on every GPU."""
    monkeypatch.setattr(backends.triton, "here", lambda: True)
    replays: list[str] = []
    monkeypatch.setattr(captures, "capture", lambda step, device: partial(replays.append, "replay"))
    for case in cases:
        replays.clear()
        with fake_cuda():
            params = twin([torch.empty(shape) for shape in case.shapes])
            opt = training_runs.optimizer_for(case, params, "captured")
            for p in params:
                p.grad = torch.zeros_like(p)
            for i in range(STEPS):
                opt.param_groups[0]["lr"] = 1e-3 * (1 + i)
                training_runs.report_loss(case, opt, i)
                opt.step()
        assert len(replays) >= WATCHED_STEPS, case.name


class RecordedGraph:
    """Stands in for a CUDA graph: a capture notes the steps, and a replay does them."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for step in self.steps:
            step()


@pytest.mark.parametrize(("runs_in_capture", "verdict"), [(False, "ok"), (True, "FAILED")])
def test_a_graph_of_the_user_is_compared_with_steps(
    runs_in_capture: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that moves the weights is found."""
    step = Modular.step
    capturing: list[RecordedGraph] = []

    def noted(opt: Modular, closure: Any = None) -> Any:
        if capturing:
            capturing[0].steps.append(partial(step, opt))
        return step(opt, closure) if runs_in_capture or not capturing else None

    @contextmanager
    def capture(graph: RecordedGraph) -> Iterator[None]:
        capturing.append(graph)
        yield
        capturing.clear()

    class Stream:
        def __init__(self, device: Any = None) -> None: ...
        def wait_stream(self, other: Any) -> None: ...

    monkeypatch.setattr(Modular, "step", noted)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    (result,) = gpu_checks.own_graph_check("default", CPU)
    assert result.verdict == verdict, result


@without_gpu
def test_an_error_of_the_thread_that_pins_memory_is_collected() -> None:
    with gpu_checks.pinning_thread() as errors:
        for _ in range(1000):
            if errors:
                break
            time.sleep(0.01)
    assert len(errors) == 1  # torch pins no memory without a GPU


def test_many_elements_are_compared_with_the_exact_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "MANY_ELEMENTS", 4099)
    (result,) = gpu_checks.many_elements_check("default", CPU)
    assert result.verdict == "ok", result
    monkeypatch.setattr(gpu_checks, "LR", lambda rate: LR(0.9 * rate))
    (result,) = gpu_checks.many_elements_check("default", CPU)
    assert result.verdict == "FAILED"


# ---------------------------------------------------------------------- speed


@pytest.mark.parametrize(("seconds", "verdict"), [(1.9e-3, "ok"), (2.1e-3, "slow")])
def test_a_step_of_more_than_twice_torchs_time_is_slow_and_no_failure(
    seconds: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"torch": 1e-3, "default": seconds}
    monkeypatch.setattr(speed_checks, "race", lambda *_: dict(times))
    model = SpeedModel("one", [(4,)])
    by_torch, ours = speed_checks.speed_checks(model, ["default"], CPU, 1.0)
    assert (by_torch.verdict, by_torch.figure) == ("to compare", "1 ms")
    assert ours.verdict == verdict
    assert ours.figure == f"{1e3 * seconds:.3g} ms, {1e3 * seconds:.2f} × torch"
    report = DeviceReport({}, [by_torch, ours], 1.0, has_gpu=False)
    assert report.failed == []


def test_a_model_that_does_not_fit_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**33))
    (result,) = speed_checks.speed_checks(speed_checks.ON_GPU[1], MODES, CUDA, 1.0)
    assert result.verdict == "not run"
    assert result.why == "needs 14.8 GiB of GPU memory, 1.0 GiB are free"


def test_a_transformer_has_as_many_elements_as_its_name_says() -> None:
    assert round(speed_checks.ON_GPU[1].elements / 1e6) == 124
    assert round(speed_checks.ON_CPU[1].elements / 1e6) == 2


def test_a_race_gives_a_time_for_each_contestant() -> None:
    model = SpeedModel("one", [(64,)] * 3)
    times = speed_checks.race(model, ["torch", "default"], CPU, 0.0, torch.float32)
    assert times.keys() == {"torch", "default"}
    assert all([0 < seconds < 1 for seconds in times.values()])


# ---------------------------------------------------------------------- the command


def test_the_command_prints_json_and_names_each_check_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    with smaller([HEADLINE]):
        main(["check-device", "--device", "cpu", "--json"])
    out, err = capsys.readouterr()
    data = json.loads(out, parse_constant=refuse)
    assert data["passed"] is True
    assert data["has_gpu"] is False
    assert data["machine"]["torch"] == torch.__version__
    assert {row["check"] for row in data["results"]} >= {"numbers", "synchronizations"}
    assert "checking numbers, compiled, ClipNorm, AdamW\n" in err


def test_without_time_no_check_runs_and_that_is_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with smaller([HEADLINE]), pytest.raises(SystemExit) as ended:
        main([*COMMAND[:3], "--minutes", "1e-9"])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert "0 of 0 checks failed, " in out
    assert re.search("^- [0-9]+ checks: no time was left: allow more with --minutes$", out, re.M)
    assert "- all checks, captured: needs a CUDA GPU" in out
    assert err == ""


@without_gpu
@at_once(
    "arguments",
    [
        ("--device", "cuda", "torch finds no CUDA GPU for --device cuda: pass --device cpu"),
        ("--device", "mps", "must be a CUDA GPU or the CPU, got mps"),
        ("--device", "nothing", "must be a name such as cuda:0, got 'nothing'"),
        ("--minutes", "0", "--minutes must be above 0, got 0.0"),
        ("--minutes", "nan", "--minutes must be above 0, got nan"),
    ],
)
def test_what_the_command_cannot_check_is_an_error(
    arguments: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    *options, words = arguments
    with pytest.raises(SystemExit) as ended:
        main(["check-device", *options])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_checks.chosen_device(None) == torch.device("cuda:1")
    assert device_checks.chosen_device("cuda") == torch.device("cuda:1")
    assert device_checks.chosen_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(
        ValueError, match="device cuda:2 does not exist, because this machine has 2 GPUs"
    ):
        device_checks.chosen_device("cuda:2")


def test_the_driver_is_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_report.driver() is None
    program = tmp_path / "nvidia-smi"
    for script, found in (("echo 580.65.06; echo 580.65.06", "580.65.06"), ("exit 9", None)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        assert device_report.driver() == found


def test_limits_follow_the_dtype() -> None:
    assert allowed(0.0, torch.float32) == pytest.approx(3.6e-5, rel=0.01)
    assert allowed(1e-5, torch.float32) == pytest.approx(3e-4)
    assert allowed(0.0, torch.bfloat16) == 2**-5
    assert allowed(0.0, torch.float64) < 1e-12


def test_the_page_lists_every_check(report: DeviceReport) -> None:
    """And its example has the columns of today."""
    page = (ROOT / "docs" / "check_device.md").read_text()
    assert f"with {len(CASES)} [chains]" in page
    assert f"also checks {len(device_checks.MORE_CASES)} more chains" in page
    source = Path(device_checks.__file__).read_text()
    for result in report.results:
        if result.check != "all checks":
            assert f"| {re.split('[:,]', result.check)[0]} |" in page, result.check
    for name in ("host ahead of the GPU", "two CUDA streams in turn", "another GPU is current"):
        assert name in source
        assert f"| {name} |" in page
    (header,) = [line for line in str(report).splitlines() if line.startswith("| check ")]
    columns = [cell.strip() for cell in header.split("|")]
    shown = [line for line in page.splitlines() if line.startswith("| check  ")]
    assert [[cell.strip() for cell in line.split("|")] for line in shown] == [columns]
