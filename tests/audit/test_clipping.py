"""An audit of a clip function finds each planted mistake with its cause, and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.audit import planted_clips
from tests.helpers import ROOT
from tests.processes.launch import Started
from torchzero_clip.__main__ import main
from torchzero_clip.audit import audit_clip, clip_audit, clip_cases
from torchzero_clip.audit.clip_audit import audits
from torchzero_clip.audit.clip_trial import try_case

FILE = planted_clips.__file__


class Fork(Started):
    """A process as the audit knows it."""

    def communicate(self, timeout: float) -> tuple[str, str]:
        ended = self.ended(timeout)
        return ended.stdout, ended.stderr


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that begin at once."""

    def start_rank(arguments: list[str]) -> Fork:
        search = {clip_audit.INSIDE: "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return Fork("-m", clip_audit.MODULE, *arguments, **search)

    monkeypatch.setattr(clip_audit, "start_rank", start_rank)


def why(function: Callable[..., Any], case: str) -> str:
    """What is wrong in one process."""
    found = try_case(function, clip_cases.IN_ONE_PROCESS[case]())
    return str(found["why"])


@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
@pytest.mark.parametrize("case", clip_cases.IN_ONE_PROCESS)
def test_a_right_function_is_right_in_one_process(case: str) -> None:
    assert why(planted_clips.right, case) == ""


@pytest.mark.parametrize(
    ("function", "case", "words"),
    [
        (planted_clips.added, "whole", "1.677 times the right norm: the norms of tensors"),
        (planted_clips.no_root, "whole", "the square root is missing"),
        (planted_clips.measures_only, "whole", "gradients are 3.333 times the right gradients"),
        (planted_clips.scales_up, "within the limit", "gradients are 4 times the right gradients"),
        (planted_clips.nearly_one, "within the limit", "changed although their norm is below"),
        (planted_clips.goes_through_twice, "a generator", "gradients are 3.333 times"),
        (planted_clips.rounds_its_factor, "whole", "gradients are 1.00"),
        (planted_clips.in_halves, "float16", "squares or norms overflow in float16"),
        (planted_clips.in_halves, "entries of 1e30", "squares overflow in float32"),
        (planted_clips.in_halves, "entries of 1e-30", "squares underflow in float32"),
        (planted_clips.hides_nan, "NaN", "although a gradient is NaN"),
        (torch.nn.utils.clip_grad_norm_, "tied, listed twice", "listed twice is counted twice"),
        (torch.nn.utils.clip_grad_norm_, "16 million entries", "a sum in float32 loses"),
    ],
)
def test_a_mistake_is_found_with_its_cause(
    function: Callable[..., Any], case: str, words: str
) -> None:
    assert words in why(function, case)


def test_mistakes_over_ranks_are_found_with_their_cause(forks: None) -> None:
    names = [f"{FILE}:{f.__name__}" for f in [planted_clips.right, *planted_clips.PLANTED]]
    chosen = ["DDP", "FSDP2, even", "FSDP2 of copies", "TP"]
    right, *found = audits(names, chosen)
    assert right.right, right
    own, copies, gathers, silent = [{row.case: row.why for row in x.rows} for x in found]
    assert own["DDP"] == ""
    assert "each rank counts only its own part" in own["FSDP2, even"]
    assert "2 times the right norm: gradients that several ranks have" in copies["DDP"]
    assert copies["FSDP2, even"] == ""
    assert "1.414 times the right norm: gradients that several ranks" in copies["FSDP2 of copies"]
    assert "gradients that several ranks have are counted several times" in copies["TP"]
    assert gathers["DDP"] == ""
    assert "times the memory of the gradients on this rank" in gathers["FSDP2, even"]
    assert "gradients are 0.5 times the right gradients: gradients that" in silent["DDP"]


def test_after_an_error_nothing_is_kept_of_the_first_group(forks: None) -> None:
    (report,) = audits([f"{FILE}:keeps_its_group"], ["DDP", "FSDP2, uneven"])
    assert [row.why for row in report.rows] == ["TypeError: no shard", ""]


@pytest.mark.slow
def test_an_error_on_one_rank_is_told_and_the_next_case_begins_anew(forks: None) -> None:
    """The others wait for it until their time is up."""
    chosen = ["DDP", "FSDP2, even"]
    (report,) = audits([f"{FILE}:raises_on_one_rank"], chosen)
    for row in report.rows:
        assert "Error" in row.why
        assert "on 4 of 4 ranks" not in row.why


@pytest.mark.slow
def test_a_right_function_is_right_everywhere_and_torchs_is_where_it_is_known_to_be() -> None:
    ours, torchs = audits([f"{FILE}:right", torch.nn.utils.clip_grad_norm_])
    assert ours.right, ours
    wrong = {row.case: row.why for row in torchs.rows if not row.right}
    assert list(wrong) == [
        "tied, listed twice",
        "16 million entries",
        "entries of 1e-30",
        "entries of 1e30",
        "TP",
        "experts on a second mesh",
        "pipeline of two stages",
    ], wrong


def test_a_report_is_a_table_and_plain_data(forks: None) -> None:
    report = audit_clip(torch.nn.utils.clip_grad_norm_, ["whole", "entries of 1e30"])
    assert not report.right
    assert json.loads(json.dumps(report.as_dict()))["cases"][1]["right"] is False
    first, head, good, bad = str(report).splitlines()
    assert first == "torch.nn.utils.clip_grad:clip_grad_norm_: right in 1 of 2 cases"
    assert head.split() == ["expected", "found", "memory"]
    assert good.split() == ["✓", "whole", "15.792", "15.792"]
    assert bad.endswith("inf times the right norm: squares overflow in float32")


def test_the_command_prints_the_table_and_ends_with_what_was_found(
    forks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "torch.nn.utils:clip_grad_norm_"
    main(["audit-clip", name, "--case", "whole"])
    assert "right in 1 of 1 case" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["audit-clip", name, "--case", "entries of 1e30", "--json"])
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["function"] == name
    with pytest.raises(SystemExit) as ended:
        main(["audit-clip", name, "--case", "nowhere"])
    assert ended.value.code == 2
    assert "got 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no.such.module:clip", "No module named 'no'"),
        ("torch.nn.utils:no_such", "has no attribute 'no_such'"),
        ("torch", "package.module:name or file.py:name, got 'torch'"),
        ("torch:__version__", "torch:__version__ must be a function"),
    ],
)
def test_a_name_that_cannot_be_imported_is_a_sentence(forks: None, name: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=r"a process failed in") as found:
        audit_clip(name, ["whole"])
    assert words in str(found.value)


def test_a_function_that_does_not_end_is_told_and_leaves_no_process(
    forks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import time\n\n\ndef clip(params, max_norm):\n    time.sleep(100)\n")
    monkeypatch.setattr(clip_audit, "SECONDS_PER_FUNCTION", 1)
    with pytest.raises(RuntimeError, match="did not finish within 1 s: audit the cases one by one"):
        audit_clip(f"{file}:clip", ["whole"])


def test_a_function_without_a_name_is_a_sentence() -> None:
    with pytest.raises(TypeError, match="function must be defined with `def`"):
        audit_clip(lambda params, max_norm: None, ["whole"])


def test_a_script_that_calls_it_without_a_guard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(clip_audit.INSIDE, "1")
    with pytest.raises(RuntimeError, match="below `if __name__ == '__main__':`"):
        audit_clip(torch.nn.utils.clip_grad_norm_, ["whole"])


def test_processes_of_its_own_start(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def clip(params, max_norm):\n    raise OSError('as planted')\n")
    (row,) = audit_clip(f"{file}:clip", ["whole"]).rows
    assert row.why == "OSError: as planted"
    assert sys.executable
