"""Launches through Triton's own launcher, over a driver that does nothing: benchmarks/launches.py.

`make test-triton` runs these tests. A process has one driver, so each test starts a process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

COMPILES = bool(importlib.util.find_spec("triton")) and not os.environ.get("TRITON_INTERPRET")
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not COMPILES, reason="needs Triton, without TRITON_INTERPRET"),
]
SCRIPT = """
import functools, json, sys
from benchmarks.launches import driver, stepping
from torchzero_clip.core import torch_private
from torchzero_clip.engines.compiled.printers import launches

folder, how = sys.argv[1:]
driver(folder)
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.jit import JITFunction

if how == "gone":
    torch_private.RUN = ["something", "else"]
looked, launched, seen = [], [], []
run, start = JITFunction.run, CudaLauncher.__call__

@functools.wraps(run)
def looking(self, *given, **options):
    looked.append(self)
    return run(self, *given, **options)

@functools.wraps(start)
def starting(self, *given):
    row = [x.data_ptr() if hasattr(x, "data_ptr") else x for x in given[9:]]
    launched.append([*given[:4], given[4], *row])
    return start(self, *given)

JITFunction.run, CudaLauncher.__call__ = looking, starting
step = stepping(3, moves=False)
found = []
for i in range(2):
    looked.clear(), launched.clear()
    step()
    found.append([len(looked), list(launched)])
if how == "hooked":
    knobs.runtime.launch_enter_hook.add(lambda told: seen.append(told.get()["name"]))
    step()
print(json.dumps([found, seen, sum(launches.LAUNCHES.values())]))
"""


def told(folder: Path, how: str) -> list[Any]:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), how]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    result: list[Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def test_a_step_is_launched_by_the_compiled_kernels(tmp_path: Path) -> None:
    """The arguments are those of Triton's own launch function, which inspects all of them."""
    (first, again), seen, _ = told(tmp_path, "there")
    assert first == again
    assert (first[0], len(first[1]), seen) == (0, 3, [])
    (slow, _), *_ = told(tmp_path, "gone")
    assert (slow[0], len(slow[1])) == (3, 3)
    for ours, theirs in zip(first[1], slow[1], strict=True):
        assert ours[:3] == theirs[:3]
        assert len(ours) == len(theirs)
        kinds = [[type(x) for x in row] for row in (ours, theirs)]
        assert kinds[0] == kinds[1]
        assert [x for x in ours[5:] if x < 2**20] == [x for x in theirs[5:] if x < 2**20]


def test_a_profiler_of_tritons_sees_our_launches(tmp_path: Path) -> None:
    _, seen, _ = told(tmp_path, "hooked")
    assert len(seen) == 3
    assert all([name.startswith("torchzero_clip_") for name in seen])


def test_the_benchmark_prints_what_the_host_takes(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.launches", "--steps", "3"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    heads, *rows = run.stdout.splitlines()
    assert "gradients stay" in heads
    assert [int(row.split()[0]) for row in rows] == [3, 200, 2000]
    assert all([float(x) > 0 for row in rows for x in row.split()[1:]])
