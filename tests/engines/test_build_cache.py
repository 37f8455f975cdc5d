"""compile=True: libraries are kept in a folder of their owner, and damaged ones are rebuilt."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import ROOT
from tests.processes.launch import python
from torchzero_clip import LR, Adam, ClipNorm, Modular
from torchzero_clip.engines.compiled.printers import build

SCRIPT = """
import os, sys, warnings
import torch
from torch.nn import Parameter
from torchzero_clip import LR, Adam, ClipNorm, Modular

params = [Parameter(torch.ones(n, 3)) for n in (5, 40)]
opt = Modular(params, ClipNorm(0.5, dim="global"), Adam(), LR(0.1), compile=True)
for i in range(2):
    for p in params:
        p.grad = torch.full_like(p, 0.5 + i)
    opt.step()
    {between}
print(params[0][0, 0].item())
"""
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def step(
    cache: str | Path, between: str = "pass", cwd: Path = ROOT, **environment: str
) -> CompletedProcess[str]:
    """Run two steps in a process of their own, which a damaged library may crash."""
    known = {"TORCHZERO_CLIP_CACHE": str(cache)}
    return python("-c", SCRIPT.format(between=between), cwd=cwd, **known, **environment)


def good(run: CompletedProcess[str], warning: str = "") -> None:
    """Check that the steps have run, with this warning or none."""
    assert run.returncode == 0, run.stderr[-3000:]
    assert 0.5 < float(run.stdout.split()[0]) < 0.9
    assert re.search(warning, run.stderr), run.stderr
    assert bool(run.stderr) == bool(warning), run.stderr


@pytest.fixture(scope="module", autouse=True)
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Have a compiler that notes each of its calls; return the file of these notes."""
    folder = tmp_path_factory.mktemp("compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", counting(folder))
        yield folder / "calls"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all libraries of the script."""
    folder = tmp_path_factory.mktemp("built") / "kept"
    good(step(folder))
    assert len(list(folder.glob("*.so"))) == 4
    return folder


@pytest.fixture
def kept(full: Path, tmp_path: Path) -> Path:
    return shutil.copytree(full, tmp_path / "kept")


def counting(folder: Path) -> str:
    """Return a compiler command that notes every call in a file."""
    script = folder / "counting"
    script.write_text(f'#!/bin/sh\necho built >> {folder / "calls"}\nexec g++ "$@"\n')
    script.chmod(0o700)
    return str(script)


def cut(library: Path) -> None:
    os.truncate(library, 4096)


def exchange(library: Path) -> None:
    library.write_text("something else")


def flip(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 0xFF
    library.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [cut, *[pytest.param(x, marks=pytest.mark.slow) for x in (exchange, flip)]]
)
def test_a_damaged_library_is_built_again_and_then_kept(
    kept: Path, calls: Path, damage: object
) -> None:
    """The next process finds all libraries, and calls no compiler."""
    for library in sorted(kept.glob("*.so"))[::2]:
        damage(library)  # type: ignore[operator]
    before = {library.name: library.stat().st_size for library in kept.iterdir()}
    good(step(kept))
    after = {library.name: library.stat().st_size for library in kept.iterdir()}
    assert after.keys() == before.keys()
    noted = calls.read_text()
    good(step(kept))
    assert calls.read_text() == noted
    assert after == {library.name: library.stat().st_size for library in kept.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [0o702, *[pytest.param(x, marks=pytest.mark.slow) for x in (0o777, 0o775)]]
)
def test_a_folder_that_others_can_write_to_is_not_used(kept: Path, mode: int) -> None:
    kept.chmod(mode)
    before = sorted(kept.iterdir())
    stamps = [library.stat().st_atime_ns for library in before]
    good(step(kept), f"other users can write to the folder {re.escape(str(kept))}.*_CLIP_CACHE")
    assert sorted(kept.iterdir()) == before
    assert [library.stat().st_atime_ns for library in before] == stamps


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_not_used(kept: Path) -> None:
    os.chown(kept, 12345, 12345)
    good(step(kept), f"{re.escape(str(kept))} belongs to another user")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param(0o700, marks=pytest.mark.slow), 0o755])
def test_a_folder_that_others_can_only_read_is_used(kept: Path, mode: int) -> None:
    kept.chmod(mode)
    good(step(kept))


def test_a_temporary_folder_is_gone_with_its_process(kept: Path, tmp_path: Path) -> None:
    kept.chmod(0o777)
    (tmp_path / "tmp").mkdir()
    good(step(kept, TMPDIR=str(tmp_path / "tmp")), "not cached on disk")
    assert not list((tmp_path / "tmp").glob("torchzero_clip_*"))


@pytest.mark.parametrize("given", [".", "kept", "a/../kept"])
def test_a_relative_folder_stays_the_same_when_the_process_changes_its_folder(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHZERO_CLIP_CACHE", given)
    monkeypatch.setattr(build, "_folder", functools.cache(build._folder.__wrapped__))
    before = build._folder()
    monkeypatch.chdir(tmp_path / "a")
    assert before == build._folder() == (tmp_path if given == "." else tmp_path / "kept")


@pytest.mark.slow
@pytest.mark.parametrize("given", ["a/../kept", ".", "kept"])
def test_a_relative_folder_is_that_of_the_beginning(given: str, tmp_path: Path) -> None:
    start = tmp_path / "start"
    (start / "a").mkdir(parents=True, mode=0o700)
    start.chmod(0o700)
    between = "os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere'); opt.step(); opt = "
    between += "Modular(params, ClipNorm(0.5), LR(0.0), compile=True)"  # other kernels
    good(step(given, between, cwd=start))
    folder = start if given == "." else start / "kept"
    assert len(list(folder.glob("*.so"))) > 2
    assert not list((start / "elsewhere").rglob("*.so"))


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ('"g++', "the environment variable CXX must be the command of a .*, got '\"g"),
        ("/", "compile=True needs a C\\+\\+ compiler: install .* CXX is '/' now"),
    ],
)
def test_a_command_that_is_no_compiler_is_a_sentence_when_the_optimizer_is_made(
    command: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(RuntimeError, match=sentence):
        Modular([Parameter(torch.ones(3))], LR(0.1), compile=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ('"g++', "the environment variable CXX must be the command of a .*, got '\"g"),
        ("there-is-no-such-compiler", "needs a C\\+\\+ compiler: install"),
        ("/", "compile=True needs a C\\+\\+ compiler: install"),
        ("/bin/true", "compiler failed, .* Command: /bin/true"),
        ("/bin/false", "compiler failed, .* Command: /bin/false"),
        ("g++ --no", "compiler failed, .* Command: g\\+\\+ --no"),
    ],
)
def test_a_compiler_that_does_not_work_is_a_sentence_also_where_libraries_are_kept(
    kept: Path, command: str, sentence: str
) -> None:
    run = step(kept, CXX=command)
    last = run.stderr.strip().splitlines()[-1]
    assert re.search(sentence, last if run.returncode else run.stderr), run.stderr[-3000:]
    assert sorted([path.suffix for path in kept.iterdir()]) == [".proven"] * 3 + [".so"] * 4


@pytest.mark.slow
def test_a_compiler_that_writes_no_library_leaves_none_behind(tmp_path: Path) -> None:
    script = tmp_path / "odd"
    lines = ["#!/bin/sh", 'for x in "$@"; do last=$x; done']
    lines += ['case $last in *.so) echo nothing > "$last" ;; esac']  # and no file named --version
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o700)
    run = step(tmp_path / "kept", CXX=str(script))
    assert re.search(r"the C\+\+ compiler failed", run.stderr), run.stderr[-3000:]
    assert not list((tmp_path / "kept").iterdir())


def test_a_parameter_that_becomes_double_half_way_is_a_sentence() -> None:
    p = Parameter(torch.ones(5, 3))
    opt = Modular([p], ClipNorm(0.5, dim="global"), Adam(), LR(0.1), compile=True)
    p.grad = torch.ones(5, 3)
    opt.step()
    p.data = p.data.double()
    p.grad = torch.ones(5, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"has dtype torch.float64, but its state.*torch.float32"):
        opt.step()


@pytest.mark.slow
def test_a_model_that_becomes_double_half_way_is_a_sentence(full: Path) -> None:
    run = step(
        full, "[setattr(p, 'data', p.data.double()) or setattr(p, 'grad', None) for p in params]"
    )
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert "has dtype torch.float64, but its state" in last, run.stderr[-3000:]
    assert "torch.float32" in last


def test_every_header_of_a_kernel_exists() -> None:
    """Without one of them no kernel can be built, and steps run operator by operator."""
    assert len(build.HEADERS) == 5
    assert all([header.is_file() for header in build.HEADERS])
