"""examples/recover.py: what it wrote is what the page says of it, and a short run of it runs."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT


def test_clipping_and_skipping_lose_the_run_and_recover_has_that_without_the_shard() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "recover.json").read_text())
    runs = {name: run["losses"][-1] for name, run in found["runs"].items()}
    assert runs["Recover"] == runs["without the shard"]
    assert sum([back[3] for back in found["runs"]["Recover"]["backs"]]) == 30
    assert runs["clip"][1] > 1.7 * runs["Recover"][1]
    assert runs["clip and skip"][1] > 1.25 * runs["Recover"][1]


def test_no_curve_of_the_picture_leaves_its_axes() -> None:
    drawn = (ROOT / "docs" / "assets" / "recover.svg").read_text()
    paths = [path.split("L") for path in re.findall(r'<path d="M ([^"]*)"', drawn)]
    paths = [[float(point.split()[1]) for point in path] for path in paths]
    _, axes, *_ = [path for path in paths if len(path) == 4]  # the first is the whole picture
    heights = [y for path in paths if len(path) > 40 for y in path]
    assert len(heights) > 150
    assert min(axes) < min(heights)
    assert max(heights) < max(axes)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of examples/recover.py."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    return runpy.run_path(str(ROOT / "examples" / "recover.py"))


def test_the_picture_of_the_page_is_drawn_from_the_results(example: dict[str, Any]) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "recover.json").read_text())
    assert example["picture"](found) == (ROOT / "docs" / "assets" / "recover.svg").read_text()


@pytest.mark.slow
def test_a_short_run_says_where_each_ends_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], example: dict[str, Any]
) -> None:
    found = example["main"](["--steps", "20", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "recover.json").read_text()) == json.loads(json.dumps(found))
    assert (tmp_path / "recover.svg").read_text().startswith("<svg")
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" ends")[0].strip() for line in said[1:]] == [*found["runs"]]
