"""A script on several ranks, none of which may wait for ever."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def on_ranks(n, *command, limit=60):
    """Run `python *command` on n ranks of one group; returns what each printed."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n)}
    shared = {**os.environ, **group, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n)
    ]
    try:
        ends = [rank.communicate(timeout=limit) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for rank, (_, err) in zip(ranks, ends, strict=True):
        assert rank.returncode == 0, err[-3000:]
    return [out for out, _ in ends]
