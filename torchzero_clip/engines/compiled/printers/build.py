"""Libraries: a source in C++ becomes a function, built once and kept for the next process.

Libraries lie in `~/.cache/torchzero_clip` or where TORCHZERO_CLIP_CACHE says. What lies there runs
in this process, so the folder must be the user's own; the name of a library ends in the digest of
its content, so that one that was cut short or exchanged is built again and never loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from torchzero_clip.core.user_warnings import warn

FLAGS = "-std=c++17 -O3 -march=native -fopenmp -fPIC -shared "
FLAGS += "-fno-math-errno -fno-trapping-math -ffp-contract=off"
NAMES = ("kernel.h", "vector.h", "operators.h", "native_forms.h", "triton_include.py")
HEADERS = [Path(__file__).with_name(name) for name in NAMES]
OTHERS = stat.S_IWGRP | stat.S_IWOTH  # the bits with which others may write


def compiler() -> list[str] | None:
    """The command of the C++ compiler: the environment variable CXX, or the first that is found."""
    given = os.environ.get("CXX", "")
    try:
        named = shlex.split(given)
    except ValueError as error:
        raise RuntimeError(
            f"the environment variable CXX must be a command, as in CXX=g++, got {given!r}: {error}"
        ) from None
    found = [name for name in (named[:1] or ["g++", "c++", "clang++"]) if shutil.which(name)]
    return [*(named or found[:1])] if found else None


@cache
def function(text: str, flags: str | None = None) -> Any:
    """The function of a source; None where it cannot be built or loaded, with a warning why."""
    command = compiler()
    if command is None:
        return None
    try:
        return _function(text, [*command, *(flags or FLAGS).split()])
    except (OSError, AttributeError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        warn(
            f"{shlex.join(command)} could not build a kernel, whose operators now run one by one, "
            f"which is slower: {why.strip()[-500:]}",
        )
        return None


def _function(text: str, command: list[str]) -> Any:
    """The function of a library, one that is kept or one that is built now."""
    path = place(text, *command)
    for library in path.parent.glob(f"{path.name}-*.so"):
        try:
            if library == _named(path, library):
                return _load(library)
        except (OSError, AttributeError):  # perhaps a system library that it needs has changed
            pass
        library.unlink(missing_ok=True)
    library = _build(text, command, path)
    try:
        return _load(library)
    except (OSError, AttributeError):
        library.unlink(missing_ok=True)
        raise


def place(*words: str) -> Path:
    """Where something is kept that hangs on these words, on our headers and on this machine."""
    source = "\n".join([*words, *[header.read_text() for header in HEADERS], machine()])
    return _folder() / hashlib.sha256(source.encode()).hexdigest()[:24]


def _load(library: Path) -> Any:
    loaded = ctypes.CDLL(str(library)).kernel
    loaded.restype = None
    return loaded


def _build(text: str, command: list[str], path: Path) -> Path:
    """Build a library in a temporary folder and move it to its place in one operation."""
    with tempfile.TemporaryDirectory(dir=path.parent) as made_in:
        page, made = Path(made_in) / "kernel.cpp", Path(made_in) / "kernel.so"
        page.write_text(text)
        order = [*command, f"-I{HEADERS[0].parent}", str(page), "-o", str(made)]
        subprocess.run(order, capture_output=True, text=True, errors="replace", check=True)
        if not made.is_file():
            raise OSError("it ended without an error, and without a library")
        made.chmod(0o700)
        with made.open("rb") as file:  # a rename may reach the disk before what is renamed
            os.fsync(file.fileno())
        return made.replace(_named(path, made))


def _named(path: Path, library: Path) -> Path:
    """The place of a library with this content."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:24]
    return path.with_name(f"{path.name}-{digest}.so")


@cache
def _folder() -> Path:
    """The folder of libraries; a temporary one, with a warning, where the usual one is refused."""
    given = os.environ.get("TORCHZERO_CLIP_CACHE")
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = (Path(given) if given else home / "torchzero_clip").resolve()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (why := _refused(folder)) is None:
            return folder
    except (OSError, RuntimeError) as error:  # no home, or none to write to
        why = str(error)
    folder = Path(tempfile.mkdtemp(prefix="torchzero_clip_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    warn(
        f"compiled kernels are not kept for the next process: {why}; name a folder of your own in "
        "the environment variable TORCHZERO_CLIP_CACHE",
    )
    return folder


def _refused(folder: Path) -> str | None:
    """The reason why libraries must not be kept in a folder, or None."""
    status = folder.stat()
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"{folder} belongs to another user, whose libraries would run here"
    if status.st_mode & OTHERS:
        return f"others can write to {folder}, whose libraries would run here (chmod go-w it)"
    return None if os.access(folder, os.W_OK) else f"{folder} cannot be written to"


@cache
def machine() -> str:
    """The processor and C library, on which -march=native and loading depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *platform.libc_ver(), *sorted(set(known))])
