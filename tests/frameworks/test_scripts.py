"""The scripts in examples/frameworks run by themselves, offline, and name us in few lines."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.frameworks
SCRIPTS = sorted((ROOT / "examples" / "frameworks").glob("with_*.py"))


def script_id(path: Path) -> str:
    return path.stem.removeprefix("with_")


def lines_that_name_us(source: str) -> set[int]:
    """The lines with an import of ours, or with a name that came with one or was made by one."""
    tree, ours, lines = ast.parse(source), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torchzero_clip":
            ours |= {alias.asname or alias.name for alias in node.names}
            lines.add(node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in ours:
            lines.add(node.lineno)
    return lines


@pytest.mark.parametrize("path", SCRIPTS, ids=script_id)
def test_a_script_runs_and_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec(script_id(path)) is None:
        pytest.skip(f"{script_id(path)} is not installed: see tests/frameworks/README.md")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)],
        env={**os.environ, **offline, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.findall(r"^# → (.*)$", path.read_text(), re.M)
    assert said
    assert done.stdout.splitlines() == said


@pytest.mark.parametrize("path", SCRIPTS, ids=script_id)
def test_a_script_names_us_in_five_lines_at_most(path: Path) -> None:
    assert 2 <= len(lines_that_name_us(path.read_text())) <= 5


@pytest.mark.parametrize("path", SCRIPTS, ids=script_id)
def test_a_script_is_short(path: Path) -> None:
    code = [line for line in path.read_text().splitlines() if line.strip()]
    assert len(code) <= 42
