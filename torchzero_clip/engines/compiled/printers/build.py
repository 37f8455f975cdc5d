"""Libraries: compile C++ source text to shared libraries, and store them for later processes.

`function(text)` compiles a source text and returns the function named `kernel`. Each library is
built once. Libraries are stored in `~/.cache/torchzero_clip`. The environment variable
TORCHZERO_CLIP_CACHE selects another folder.

A stored library runs in this process, so the folder must belong to the user. The file name of a
library ends in the digest of its content. If a file was truncated or replaced, the digest does not
match. Such a file is never loaded, and the library is built again.
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
INCLUDES = Path(__file__).parent
HEADERS = [*sorted(INCLUDES.glob("*.h")), INCLUDES / "triton_include.py"]
"""The files that kernels include. If one of these files changes, all kernels are built again."""
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH  # bits of a file's mode


def compiler() -> list[str] | None:
    """Return the command of the C++ compiler, or None if no compiler was found.

    If the environment variable CXX is set, the command is the value of CXX. Otherwise the command
    is the first of g++, c++ and clang++ that is installed.
    """
    variable = os.environ.get("CXX", "")
    try:
        words = shlex.split(variable)
    except ValueError as error:
        raise RuntimeError(
            "the environment variable CXX must be the command of a C++ compiler, for example g++, "
            f"got {variable!r}: {error}"
        ) from None
    for name in words[:1] or ["g++", "c++", "clang++"]:
        if shutil.which(name):
            return words or [name]
    return None


@cache
def function(text: str, flags: str | None = None) -> Any:
    """Compile a source text and return its function `kernel`, or None if there is no compiler.

    If the library cannot be built or loaded, warn and return None.
    """
    command = compiler()
    if command is None:
        return None
    try:
        return _function(text, [*command, *(flags or FLAGS).split()])
    except (OSError, AttributeError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        warn(
            "compile=True: the C++ compiler failed, so steps are slower. Command: "
            f"{shlex.join(command)} Error: {why.strip()[-500:]}",
        )
        return None


def _function(text: str, command: list[str]) -> Any:
    """Return the function of a source text, from a stored library if a valid one exists."""
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
    """Return a path without a suffix, for files that depend on these texts.

    The path also depends on the headers and on this machine.
    """
    source = "\n".join([*words, *[header.read_text() for header in HEADERS], machine()])
    return _folder() / hashlib.sha256(source.encode()).hexdigest()[:24]


def _load(library: Path) -> Any:
    """Load a library and return its function `kernel`."""
    loaded = ctypes.CDLL(str(library)).kernel
    loaded.restype = None
    return loaded


def _build(text: str, command: list[str], path: Path) -> Path:
    """Build a library in a temporary folder, then move it to its final path in one operation."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        page = Path(folder) / "kernel.cpp"
        library = Path(folder) / "kernel.so"
        page.write_text(text)
        order = [*command, f"-I{INCLUDES}", str(page), "-o", str(library)]
        subprocess.run(order, capture_output=True, text=True, errors="replace", check=True)
        if not library.is_file():
            raise OSError("the compiler reported no error, but wrote no file")
        library.chmod(0o700)
        with library.open("rb") as file:
            os.fsync(file.fileno())  # the rename could reach the disk before the content does
        return library.replace(_named(path, library))


def _named(path: Path, library: Path) -> Path:
    """Return the final path of a library. The file name ends in the digest of the content."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:24]
    return path.with_name(f"{path.name}-{digest}.so")


@cache
def _folder() -> Path:
    """Return the folder for libraries.

    If the usual folder cannot be used, warn and return a temporary folder.
    """
    variable = os.environ.get("TORCHZERO_CLIP_CACHE")
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = (Path(variable) if variable else home / "torchzero_clip").resolve()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (why := _refused(folder)) is None:
            return folder
    except (OSError, RuntimeError) as error:  # there is no home folder, or it is read-only
        why = str(error)
    folder = Path(tempfile.mkdtemp(prefix="torchzero_clip_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    warn(
        f"compiled kernels are not cached on disk: {why}. Set the environment variable "
        "TORCHZERO_CLIP_CACHE to a folder that only you can write to",
    )
    return folder


def _refused(folder: Path) -> str | None:
    """Return the reason why libraries must not be stored in a folder, or None."""
    status = folder.stat()
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"the folder {folder} belongs to another user"
    if status.st_mode & WRITABLE_BY_OTHERS:
        return f"other users can write to the folder {folder} (chmod go-w changes that)"
    return None if os.access(folder, os.W_OK) else f"{folder} cannot be written to"


@cache
def machine() -> str:
    """Return a text that identifies the processor and the C library of this machine.

    A compiled library depends on the processor, because it was built with -march=native. It can
    also depend on the C library.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *platform.libc_ver(), *sorted(set(known))])
