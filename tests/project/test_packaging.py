"""What an installation brings along; `make smoke` builds the archives and uses them."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import torchzero_clip

ROOT = Path(__file__).parents[2]


FRESH = """
import sys, torch
before = {*sys.modules}
import torchzero_clip as tz
print(*({*sys.modules} - before))

# each is loaded by the first access
print(tz.source.SourceError.__mro__[1].__name__)

from torchzero_clip import Recorder, Simulation, Trace, simulate
from torchzero_clip.study import trace
print(tz.Trace is Trace is trace.Trace)
print({"Recorder", "Simulation", "Trace", "simulate", "source"} <= {*dir(tz)})

from torchzero_clip.study.lab.session import LabSession
session = LabSession()
session.run(0, 0)
print(len([*session.simulate("ZClip()", (), 0, session.version, ())]) > 1)
print("torch._dynamo" in sys.modules)
"""
"""What a fresh process does."""


@cache
def printed() -> list[str]:
    """What a fresh process prints: the modules that are added to those of torch, then answers."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout.splitlines()


def added() -> set[str]:
    """Every module that the library imports and torch has not, in a fresh process."""
    return set(printed()[0].split())


def test_the_import_brings_nothing_slow_that_torch_did_not_bring() -> None:
    assert "torchzero_clip.modules.clipping.clip_norm" in added()
    slow = ("torch.distributed", "torch._dynamo", "torch._inductor", "matplotlib", "numpy")
    assert [name for name in sorted(added()) if name.startswith(slow)] == []


def test_importing_the_library_imports_torch_and_nothing_else() -> None:
    """The files of which `test_layout.py` reads the imports could reach others through torch."""
    allowed = {"torch", "typing_extensions", "torchzero_clip"} | sys.stdlib_module_names
    assert {name.split(".")[0] for name in added()} <= allowed


def test_what_few_need_is_imported_by_those_who_ask_for_it() -> None:
    """What writes files, looks at recorded runs, or looks for faults."""
    wings = tuple([f"torchzero_clip.{name}" for name in ("source", "study", "audit", "checking")])
    assert [name for name in sorted(added()) if name.startswith(wings)] == []
    asked = [
        getattr(torchzero_clip, name) for name in ("Recorder", "Simulation", "Trace", "simulate")
    ]
    assert added().isdisjoint({thing.__module__ for thing in asked})


def test_what_looks_at_recorded_runs_is_there_under_its_public_names_all_the_same() -> None:
    assert printed()[2:4] == ["True", "True"]


def test_what_writes_files_is_there_as_an_attribute_all_the_same() -> None:
    assert printed()[1] == "ValueError"


def test_the_lab_simulates_without_the_compiler_of_torch() -> None:
    """To import it takes seconds."""
    assert printed()[4:] == ["True", "False"]


def names(text: str) -> set[str]:
    """The packages that a list of requirements names."""
    found = re.findall(r'"([A-Za-z][\w.-]*)(?:\[[\w,]+\])?(?:[><=~!].*?)?"', text)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found} - {"torchzero-clip"}


@pytest.mark.parametrize("key", ["dependencies", "test", "docs", "dev", "release"])
def test_every_requirement_is_pinned(key: str) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(rf"^{key} = \[(.*?)\]$", project, re.M | re.S)
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    assert names(listed)
    assert names(listed) <= set(pinned)


def test_what_builds_the_archives_is_pinned_too() -> None:
    """`make dist` builds without isolation, so `dev` must hold what [build-system] asks for."""
    project = (ROOT / "pyproject.toml").read_text()
    (backend,) = re.findall(r"^requires = \[(.*?)\]$", project, re.M)
    (dev,) = re.findall(r"^dev = \[(.*?)\]$", project, re.M | re.S)
    assert names(backend) <= names(dev)


def test_the_source_archive_names_only_what_there_is() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^only-include = \[(.*?)\]$", project, re.M | re.S)
    assert [f for f in re.findall(r'"(.+?)"', listed) if not (ROOT / f).exists()] == []


def test_the_source_archive_has_every_file_that_the_makefile_and_the_readme_name() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^only-include = \[(.*?)\]$", project, re.M | re.S)
    taken = {*re.findall(r'"(.+?)"', listed), "README.md", "LICENSE", "pyproject.toml"}
    for page in ("Makefile", "README.md", ".ci/run", "CONTRIBUTING.md"):
        for path in re.findall(
            r"[\w.-]+(?:/[\w.-]+)+|\w+\.(?:md|txt|yml|toml)", (ROOT / page).read_text()
        ):
            if (ROOT / path).exists() and not path.startswith((".venv", "dist", "site")):
                assert path.split("/")[0] in taken, f"{page} names {path}"
