"""An audit of a step finds each planted defect on its line, and nothing where there is none."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.audit import planted_steps
from tests.audit.planted_steps import PLANTED, RIGHT, Small, line
from tests.helpers import ROOT, at_once
from tests.processes.launch import python
from torchzero_clip import ClipNorm, Clipper, Guard, Modular, ZClip, attach, clip_grad_norm_, named
from torchzero_clip.__main__ import main
from torchzero_clip.audit import assert_no_waits, audit, ledger, step_audit, twin
from torchzero_clip.audit.step_audit import trial

FILE = planted_steps.__file__
SHAPES = [(64, 64), (64,), (32, 64), (64, 32), (32,), (16, 64)]


def params() -> list[Tensor]:
    return [torch.empty(shape) for shape in SHAPES]


def test_there_are_twenty_and_more() -> None:
    assert len(PLANTED) >= 20


@at_once("kind", PLANTED)
def test_a_planted_defect_is_found_on_its_line_and_nothing_else(kind: type[Small]) -> None:
    what, number = line(kind)
    report = trial(kind, params())
    assert {x.where for x in report.of(what)} == {f"{FILE}:{number}"}, str(report)
    others = [x for x in report.findings if x.where != f"{FILE}:{number}"]
    assert [x for x in others if what not in ("read", "copy", "wait", "change")] == []
    assert report.capturable == (what in ("loop", "memory"))


@at_once("make", RIGHT)
def test_nothing_is_found_where_nothing_is_wrong(make: Callable[..., Any]) -> None:
    report = trial(make, params())
    assert report.capturable, str(report)
    assert report.of("loop") == [] or make is planted_steps.foreach, str(report)
    assert report.findings == [] or make is not planted_steps.fused, str(report)


def scaled(made: list[Any], enabled: bool = True) -> Callable[[Any], Any]:
    """A step with a scaler, as most are written, which `made` takes."""

    def make(some: Any) -> Any:
        opt = torch.optim.AdamW(some, foreach=True, capturable=True)
        made.append(torch.amp.GradScaler("cuda", enabled=enabled))
        return lambda: made[-1].step(opt)

    return make


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has CUDA, and a scaler is enabled")
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled, but:UserWarning")
def test_a_scaler_that_torch_disables_here_is_said_to_be_unseen() -> None:
    report = trial(scaled([]), params())
    assert not report.capturable
    assert 'The audit is incomplete: PyTorch disables GradScaler("cuda") on' in str(report)
    with pytest.raises(AssertionError, match="PyTorch disables GradScaler"):
        assert_no_waits(scaled([]), params())
    off = trial(scaled([], enabled=False), params())
    assert off.capturable, str(off)
    assert torch.amp.GradScaler("cpu").is_enabled()


OURS: dict[str, Callable[[Any], Any]] = {
    "headline": lambda some: Modular(some, ClipNorm(1.0, dim="global"), named("adamw")),
    "names": lambda some: Modular(some, named("lion")),
    "guard": lambda some: Modular(some, Guard(), ZClip(), named("adamw")),
    "clipper": lambda some: Clipper(some, ZClip()),
    "helper": lambda some: lambda: clip_grad_norm_(some, 1.0, dim="global"),
}


@at_once("name", OURS)
def test_ours_may_be_captured(name: str) -> None:
    report = trial(OURS[name], params())
    assert report.capturable, str(report)


def test_what_is_attached_is_tried_with_its_optimizer() -> None:
    def make(some: Any) -> Any:
        opt = torch.optim.AdamW(some, fused=True, capturable=True)
        attach(opt, ZClip())
        return opt

    report = trial(make, params())
    assert report.capturable, str(report)
    assert report.calls > trial(RIGHT[2], params()).calls
    with pytest.raises(TypeError, match="must return the optimizer, not the handle"):
        trial(lambda some: attach(torch.optim.SGD(some), ZClip()), params())


def test_torch_says_itself_what_it_refuses_to_capture() -> None:
    report = trial(lambda some: torch.optim.AdamW(some, fused=True), params())
    (refusal,) = report.findings
    assert not report.capturable
    assert "torch/optim/adam.py" in refusal.where
    assert "capturable=True" in refusal.what


def test_a_line_of_torch_comes_with_the_line_that_called_it() -> None:
    def make(some: Any) -> Any:
        return lambda: torch.nn.utils.clip_grad_norm_(some, 1.0, error_if_nonfinite=True)

    (read,) = trial(make, params()).waits
    assert "torch/nn/utils/clip_grad.py:" in read.where
    assert read.called == f"{__file__}:{make.__code__.co_firstlineno + 1}"


def test_a_step_of_torchs_own_optimizer_has_no_caller() -> None:
    """The line that asks for the audit did not call torch."""
    report = trial(lambda some: torch.optim.AdamW(some, foreach=True), params())
    changes = report.of("change")
    assert changes
    assert {x.called for x in changes} == {""}, str(report)
    assert all(["torch/optim/adam.py:" in x.where for x in changes])


def test_beside_a_step_stands_clip_and_fused_adamw() -> None:
    report = audit(Small, params())
    assert report.beside is not None
    assert (report.beside.calls, report.beside.waits) == (10, [])
    assert report.beside.capturable


def test_a_report_is_text_and_plain_data() -> None:
    report = audit(planted_steps.ReadsItem, params())
    _, number = line(planted_steps.ReadsItem)
    text = str(report).splitlines()
    assert text[0].startswith("ReadsItem: 4 kernels for 6 parameters, 1 synchronization, ")
    assert text[1:3] == [
        "Lines that synchronize with the GPU:",
        f"  tests/audit/planted_steps.py:{number}: copies a value to the CPU "
        "(aten._local_scalar_dense.default)",
    ]
    assert text[-1].startswith("For comparison: ")
    told = json.loads(json.dumps(report.as_dict()))
    assert told["capturable"] is False
    assert told["findings"][0]["kind"] == "read"


def test_a_step_that_needs_values_ends_and_says_so() -> None:
    report = audit(planted_steps.PicksByAMask, params())
    assert f"planted_steps.py:{line(planted_steps.PicksByAMask)[1]} calls " in str(report)
    assert not report.capturable


def test_a_loop_that_a_value_ends_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(some: Any) -> Any:
        def until_small() -> None:
            while not some[0].grad.norm() < 1:
                some[0].grad.div_(2)

        return until_small

    monkeypatch.setattr(ledger, "READS_ALLOWED", 20)
    assert "copies more than 20 values to the CPU" in trial(make, params()).ended


def test_an_assertion_lists_the_lines() -> None:
    assert_no_waits(Small, params())
    assert_no_waits(planted_steps.Counts, params())  # which is in a graph's way alone
    _, number = line(planted_steps.ReadsItem)
    with pytest.raises(AssertionError, match=f"planted_steps.py:{number}: copies a value"):
        assert_no_waits(planted_steps.ReadsItem, params())
    with pytest.raises(AssertionError, match="synchronizes with the GPU"):
        assert_no_waits(planted_steps.LooksForEntries, params())


def test_names_come_with_their_twins_and_frozen_parameters_have_no_gradient() -> None:
    model = torch.nn.Linear(8, 4)
    model.bias.requires_grad_(False)
    given = []
    report = trial(
        lambda some: given.extend(some) or Small([some[0][1]]), [*model.named_parameters()]
    )
    assert [name for name, _ in given] == ["weight", "bias"]
    assert given[1][1].grad is None
    assert report.tensors == 1


@pytest.mark.parametrize(
    ("make", "some", "words"),
    [
        (
            torch.optim.SGD([torch.ones(1)]),
            params(),
            "got an existing SGD",
        ),
        (Small, [], "at least one parameter"),
        (lambda some: None, params(), "got None"),
        (lambda some: lambda: None, params(), "used none of the parameters"),
        (
            lambda some: Modular([torch.nn.Parameter(torch.ones(2))], named("lion")),
            params(),
            "construct the optimizer from these parameters",
        ),
    ],
)
def test_what_cannot_be_tried_is_told(make: Any, some: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        audit(make, some)


def test_an_older_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.1")
    with pytest.raises(RuntimeError, match="newer, got 2"):
        audit(Small, params())


# --- a torch that does not show where the guards of devices lie


def test_without_a_guard_the_same_is_found() -> None:
    """In a process of its own, since a guard that is given stays."""
    code = "\n".join(
        [
            "from torchzero_clip.audit import fake_gpu",
            "fake_gpu.GUARDS = 'no such name'",
            "from tests.audit import test_step as t",
            "from tests.audit.planted_steps import PLANTED, RIGHT, line",
            "from torchzero_clip.audit.step_audit import trial",
            "assert not fake_gpu._has_guard()",
            "for kind in PLANTED:",
            "    what, number = line(kind)",
            "    found = {x.where for x in trial(kind, t.params()).of(what)}",
            "    assert found == {f'{t.FILE}:{number}'}, (kind, found)",
            "for make in [*RIGHT, *t.OURS.values()]:",
            "    assert trial(make, t.params()).capturable, make",
        ]
    )
    run = python("-c", code)
    assert run.returncode == 0, run.stderr


# --- a GPU that is here


@pytest.mark.filterwarnings("ignore:called a synchronizing")
def test_beside_it_stands_what_torch_sees_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warnings become lines, and its mode is as it was: more cannot be shown without one."""
    modes: list[Any] = []
    report = trial(Small, params())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(step_audit, "_twins", lambda some, device: twin(some, "cpu"))

    def make(some: Any) -> Any:
        def wait() -> None:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

        return wait

    (place,) = step_audit.on_gpu(make, params())
    assert place.startswith("tests/audit/test_step.py:")
    assert modes == ["warn", 0]
    report = replace(report, on_gpu=[place])
    assert f"Lines that synchronized on the GPU of this machine:\n  {place}" in str(report)


# --- the command


def test_the_command_prints_and_ends_with_one_where_the_step_waits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["audit", "tests.audit.planted_steps:fused"])
    assert "A CUDA graph can capture it" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["audit", f"{FILE}:ReadsFloat", "--shape", "4x4", "--json"])
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["tensors"] == 1


def test_the_command_minds_graphs_where_it_is_asked_to() -> None:
    main(["audit", "tests.audit.planted_steps:Counts"])
    with pytest.raises(SystemExit) as ended:
        main(["audit", "tests.audit.planted_steps:Counts", "--graph"])
    assert ended.value.code == 1


def pair() -> tuple[Any, Any]:
    return Small, torch.nn.Linear(3, 2).parameters()


def test_a_function_without_arguments_brings_its_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["audit", "tests.audit.test_step:pair"])
    assert "for 2 parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["tests.audit.test_step:params", "nowhere:x", "torch:nothing", "nowhere.py:make"]
)
def test_what_the_command_cannot_try_is_a_sentence(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", name])
    assert ended.value.code == 2
    assert "audit: error: " in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["3,4", "x", "-1"])
def test_a_shape_that_is_none_is_a_sentence(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "examples/slow_clip.py:make", f"--shape={shape}"])
    assert f"--shape must be sizes such as 512x128, got '{shape}'" in capsys.readouterr().err


def test_the_page_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main(["audit", "examples/slow_clip.py:make"])
    page = (ROOT / "docs" / "waits.md").read_text()
    assert f"```text\n{capsys.readouterr().out}```" in page
