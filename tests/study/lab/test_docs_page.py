"""The picture of the lab in the documentation: its numbers are those of simulation."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import pytest

from tests.helpers import ROOT
from torchzero_clip import Trace, simulate
from torchzero_clip.study.lab.session import recorded
from torchzero_clip.study.simulate_command import rule as read_rule

source = importlib.util.spec_from_file_location("lab", ROOT / "docs" / "_hooks" / "lab.py")
assert source is not None
assert source.loader is not None
hook: Any = importlib.util.module_from_spec(source)
source.loader.exec_module(hook)
NAME = "language_trouble"


@pytest.mark.slow
def test_each_position_of_a_slider_has_what_simulate_says() -> None:
    trace, told = Trace.read(recorded()[NAME]), hook.results(NAME)
    for rule in told["rules"]:
        assert hook.POSITIONS >= len(rule["made"]) - 1 > 10
        for shown in (rule["made"][0], rule["made"][rule["start"]]):
            done = simulate(trace, read_rule(shown["text"]))
            false, missed = done.alarms()
            assert shown["share"] == pytest.approx(done.clipped.double().mean().item())
            assert shown["false"] == pytest.approx(false.item())
            assert shown["missed"] == pytest.approx(missed.item())
            cut = done.clipped[:, 0].nonzero().flatten()
            assert shown["cut"] == cut.tolist()
            assert shown["left"] == pytest.approx(done.left[cut, 0].tolist(), rel=1e-3)


@pytest.mark.slow
def test_the_page_has_the_picture_its_data_and_what_draws_it() -> None:
    html = hook.on_page_content(f"<p>a</p><!-- lab: {NAME} --><p>b</p>")
    data = re.findall(r'<script type="application/json">(.*?)</script>', html)
    assert json.loads(data[0]) == hook.results(NAME)
    labels = re.findall(r'<label for="([\w-]+)"', html)
    assert labels == re.findall(r'<input type="range" id="([\w-]+)"', html) != []
    assert "function labPicture" in html
    assert len(html) < 300_000


def test_the_page_of_the_lab_asks_for_the_picture() -> None:
    assert f"<!-- lab: {NAME} -->" in (ROOT / "docs" / "lab.md").read_text()
    assert hook.on_page_content("<p>a</p>") == "<p>a</p>"
