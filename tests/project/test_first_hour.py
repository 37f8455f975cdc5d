"""The script for the first minutes on a GPU runs through without one, and nothing is wrong."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("sections", "least"),
    [
        ("races,second,capture,times,kernels", 4),
        pytest.param("", 200, marks=pytest.mark.slow),
    ],
)
def test_the_first_hour_runs_through_on_a_cpu(sections: str, least: int) -> None:
    command = [sys.executable, "scripts/first_hour.py", "--only", sections]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    found = re.search(r"(\d+) held, (\d+) wrong or failed, .* ON THE CPU", run.stdout)
    assert found is not None, run.stdout + run.stderr
    assert (int(found[2]), run.returncode) == (0, 0), run.stdout
    assert int(found[1]) >= least
    for section in filter(None, sections.split(",")):
        assert f"--- {section}" in run.stdout
