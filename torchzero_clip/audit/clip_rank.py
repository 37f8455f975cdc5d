"""What `audit_clip` starts on every rank: cases one after the other, while ranks are in step."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchzero_clip.audit.clip_cases import ALONE, TOGETHER, ClipCase
from torchzero_clip.audit.clip_trial import tried
from torchzero_clip.audit.function_names import found_by

PATIENCE = 20  # seconds that a rank waits for the others


def _one(function: Callable[..., Any], make: Callable[[], ClipCase]) -> dict[str, Any]:
    """A case on this rank; an error is a finding."""
    case = make()
    try:
        return {**tried(function, case), "raised": False}
    except Exception as error:
        why = f"{type(error).__name__}: {_first(str(error))}"
        return {"expected": case.norm, "found": None, "fresh": None, "why": why, "raised": True}


def _first(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 100 else line[:97] + "..."


def work(jobs: Sequence[tuple[str, str]], folder: str, ranks: int, rank: int) -> None:
    """Cases on one rank, those in one process on rank 0.

    After an error, or where ranks part, they may wait for each other. The rest is for new
    processes: in these a second group would meet what DTensor, or a function, keeps of the first.
    """
    torch.set_num_threads(1)
    functions = {name: found_by(name) for name, _ in jobs}
    found: list[dict[str, Any] | None] = []
    for i, (name, case) in enumerate(jobs):
        if case in ALONE:
            found.append(_one(functions[name], ALONE[case]) if rank == 0 else None)
            continue
        if not dist.is_initialized():
            _told(Path(folder, "alone"), "", ranks, rank)
            dist.init_process_group(
                "gloo",
                init_method=Path(folder, "store").as_uri(),
                rank=rank,
                world_size=ranks,
                timeout=datetime.timedelta(seconds=PATIENCE),
            )
        row = _one(functions[name], TOGETHER[case])
        found.append(row)
        ends = _told(Path(folder, f"done{i}"), f"{row['raised']} {row['why'] == ''}", ranks, rank)
        if row["raised"] or len(set(ends)) > 1:
            break
    if dist.is_initialized():
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def _told(file: Path, text: str, ranks: int, rank: int) -> list[str]:
    """The texts of all ranks, by way of files, since their sockets may be out of step."""
    part, end = file.with_suffix(f".part{rank}"), time.monotonic() + 30 * PATIENCE
    part.write_text(text)
    part.rename(file.with_suffix(f".{rank}"))
    every = [file.with_suffix(f".{r}") for r in range(ranks)]
    while not all([other.exists() for other in every]):
        if time.monotonic() > end:
            raise RuntimeError(f"rank {rank} waited in vain for the others")
        time.sleep(0.002)
    return [other.read_text() for other in every]


if __name__ == "__main__":
    jobs, folder, ranks = json.loads(sys.argv[1])
    work(jobs, folder, ranks, int(sys.argv[2]))
