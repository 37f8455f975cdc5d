"""Recorder(live=True): a file that grows with the run, which the lab follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchzero_clip import ClipNorm, Modular, Recorder, Scale, Trace
from torchzero_clip.study import live_file
from torchzero_clip.study.lab.session import LabSession


class Process:
    """Stands for the lab's own."""

    def __init__(self, command: list[str]) -> None:
        self.command, self.code = command, None

    def poll(self) -> Any:
        return self.code


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_file.subprocess, "Popen", Process)


def begun(**options: Any) -> tuple[list[torch.nn.Parameter], Modular, Recorder, Path]:
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    named = [("a.weight", params[0]), ("a.bias", params[1])]
    opt = Modular(named, ClipNorm(1.0), ClipNorm(2.0, dim="global", name="all"), Scale(0.0))
    recorder = Recorder(opt, live=True, every=10, **options)
    assert recorder._lab is not None
    return params, opt, recorder, recorder._lab.path


def train(params: list[torch.nn.Parameter], opt: Modular, steps: range) -> None:
    for step in steps:
        for p in params:
            p.grad = torch.full((3,), float(step))
        opt.step()


def test_the_file_has_the_steps_so_far_after_each_every_of_them() -> None:
    params, opt, recorder, path = begun()
    train(params, opt, range(1, 10))
    assert not path.exists()
    for end in (10, 20, 30):
        train(params, opt, range(end, end + 10))
        trace = Trace.read(path)
        assert trace.steps.tolist() == [*range(1, end + 1)]
        assert trace.names == ["a.weight", "a.bias"]
        assert trace.norms[-1, 0].item() == pytest.approx(end * 3**0.5)
    recorder.remove()
    assert len(Trace.read(path)) == 39


def test_the_lab_follows_that_file_from_a_process_of_its_own() -> None:
    *_, recorder, path = begun()
    assert recorder._lab is not None
    assert recorder._lab.process.command[1:] == [
        "-m", "torchzero_clip", "lab", "--follow", str(path)
    ]  # fmt: skip


def test_what_the_lab_sees_grows_until_rows_are_merged() -> None:
    params, opt, _recorder, path = begun(capacity=32)
    session, seen = LabSession(path, follow=True), []
    for first in range(1, 91, 10):
        train(params, opt, range(first, first + 10))
        seen.append(session.refresh())
    assert seen == [(1, 10), (1, 20), (1, 30), (2, 20), (2, 25), (2, 30), (3, 17), (3, 20), (3, 22)]
    trace = session.trace
    assert trace is not None
    assert (trace.stride, trace.steps[-1].item()) == (4, 88)


def test_a_name_that_comes_later_gets_its_column() -> None:
    params, opt, recorder, path = begun()
    train(params, opt, range(1, 11))
    recorder.log(spike=1.0)
    train(params, opt, range(11, 21))
    spikes = Trace.read(path).spikes
    assert spikes is not None
    assert spikes.nonzero().flatten().tolist() == [10]


def test_where_the_page_was_closed_training_goes_on_and_nothing_is_written() -> None:
    params, opt, recorder, path = begun()
    train(params, opt, range(1, 11))
    assert recorder._lab is not None
    recorder._lab.process.code = 0
    train(params, opt, range(11, 31))
    assert len(Trace.read(path)) == 10
    assert len(recorder.history()["step"]) == 30


def test_the_file_goes_with_its_recorder() -> None:
    params, opt, recorder, path = begun()
    train(params, opt, range(1, 11))
    folder = path.parent
    recorder.remove()
    del recorder, opt
    assert not folder.exists()


def test_live_is_true_or_false() -> None:
    opt = Modular([torch.nn.Parameter(torch.zeros(3))], ClipNorm(1.0), Scale(0.0))
    with pytest.raises(TypeError, match="live= must be True or False, got 'yes'"):
        Recorder(opt, live="yes")  # type: ignore[arg-type]
