"""Processes of their own, which begin at once: forks of one that has imported what takes long."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torchzero_clip",
        "torch._dynamo",  # which the first step of an optimizer imports, in a second
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "tests.table",
    ]
)


class Started:
    """`python *command`, on its way."""

    def __init__(self, *command: Any, cwd: Path = ROOT, **environment: str) -> None:
        self.command = [str(word) for word in command]
        self.written = tempfile.TemporaryDirectory()
        self.files = [Path(self.written.name, name) for name in ("out", "err")]
        for file in self.files:
            file.touch()
        self.process = FORKS.Process(
            target=become,
            args=(self.command, cwd, {**os.environ, **environment}, self.files),
        )
        self.process.start()

    def ended(self, limit: float) -> subprocess.CompletedProcess[str]:
        """What it printed, within so many seconds."""
        self.process.join(limit)
        code = self.process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.command, limit)
        return subprocess.CompletedProcess(
            self.command, code, *[file.read_text() for file in self.files]
        )

    def kill(self) -> None:
        """End it, where it has not ended."""
        self.process.kill()
        self.process.join()
        self.written.cleanup()


def become(command: list[str], cwd: Path, environment: dict[str, str], files: list[Path]) -> None:
    """Do in this process what `python *command` does in a new one."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for stream, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY), stream)
    tempfile.tempdir = None  # as it is before the environment was asked
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is no garbage, and need not be walked
    how, what = command[0], command[1] if len(command) > 1 else ""
    sys.argv = command[1:] if how in ("-m", "-c") else command
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif how == "-c":
            exec(what, {"__name__": "__main__"})
        else:
            runpy.run_path(how, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def python(*command: Any, cwd: Path = ROOT, limit: float = 300, **environment: str) -> Any:
    """Run `python *command`; returns how it ended and what it printed."""
    process = Started(*command, cwd=cwd, **environment)
    try:
        return process.ended(limit)
    finally:
        process.kill()


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def compiled(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """`-m module *arguments`, with `compile=True` in every optimizer."""
    assert command[0] == "-m"
    return "-m", "tests.processes.compiled", *command[1:]


def on_ranks(n: int, *command: Any, limit: float = 60, compile: bool = False) -> list[str]:
    """Run `python *command` on n ranks of one group, none of which may wait for ever; returns what
    each printed. `compile`: with `compile=True` in every optimizer of a module."""
    command = compiled(command) if compile else command
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n)}
    ranks = [Started(*command, **group, RANK=str(i), LOCAL_RANK=str(i)) for i in range(n)]
    try:
        ends = [rank.ended(limit) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for end in ends:
        assert end.returncode == 0, end.stderr[-3000:]
    return [end.stdout for end in ends]
