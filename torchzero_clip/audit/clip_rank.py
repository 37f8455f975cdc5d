"""The program that `audit_clip` starts for each rank. It runs cases one after the other."""

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

from torchzero_clip.audit.clip_cases import DISTRIBUTED, IN_ONE_PROCESS, ClipCase
from torchzero_clip.audit.clip_trial import CaseResult, try_case
from torchzero_clip.audit.function_names import function_named

COLLECTIVE_TIMEOUT = 20
"""The time in seconds that a rank waits for the other ranks in a collective."""
RANK_TIMEOUT = 30 * COLLECTIVE_TIMEOUT
"""The time in seconds that a rank waits until the other ranks have finished a case."""


def _result(function: Callable[..., Any], make: Callable[[], ClipCase]) -> CaseResult:
    """Return the result of a case on this rank. An error of the function is part of the result."""
    case = make()
    try:
        return try_case(function, case)
    except Exception as error:
        why = f"{type(error).__name__}: {_first_line(str(error))}"
        return {"expected": case.norm, "found": None, "fresh": None, "why": why, "raised": True}


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 100 else line[:97] + "..."


def work(jobs: Sequence[tuple[str, str]], folder: str, ranks: int, rank: int) -> None:
    """Run cases on one rank, and write the results to a file in the folder.

    A function may raise an error on some ranks only, or may end differently on different ranks.
    Then ranks may wait for each other. In this case, this process stops, and new processes run the
    remaining jobs. This process cannot start a second process group, because DTensor and the
    function may still hold the first one.

    Args:
        jobs: Pairs of a function name and a case name. A case in one process runs on rank 0 alone.
        folder: A folder for files that the ranks share.
        ranks: The number of ranks.
        rank: The number of this rank.
    """
    torch.set_num_threads(1)
    functions = {name: function_named(name) for name, _ in jobs}
    results: list[CaseResult | None] = []
    for i, (name, case) in enumerate(jobs):
        if case in IN_ONE_PROCESS:
            results.append(_result(functions[name], IN_ONE_PROCESS[case]) if rank == 0 else None)
            continue
        if not dist.is_initialized():
            _exchanged(Path(folder, "alone"), "", ranks, rank)
            dist.init_process_group(
                "gloo",
                init_method=Path(folder, "store").as_uri(),
                rank=rank,
                world_size=ranks,
                timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT),
            )
        result = _result(functions[name], DISTRIBUTED[case])
        results.append(result)
        ending = f"{result['raised']} {result['why'] == ''}"
        endings = _exchanged(Path(folder, f"done{i}"), ending, ranks, rank)
        if result["raised"] or len(set(endings)) > 1:
            break
    if dist.is_initialized():
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))


def _exchanged(file: Path, text: str, ranks: int, rank: int) -> list[str]:
    """Send a text to all ranks, and return the texts of all ranks.

    The texts are sent through files. After an error, ranks may be in different collectives, so they
    cannot communicate by collectives.
    """
    part = file.with_suffix(f".part{rank}")
    end = time.monotonic() + RANK_TIMEOUT
    part.write_text(text)
    part.rename(file.with_suffix(f".{rank}"))  # a file with this name is always complete
    files = [file.with_suffix(f".{r}") for r in range(ranks)]
    while not all([other.exists() for other in files]):
        if time.monotonic() > end:
            raise RuntimeError(f"rank {rank} timed out while it waited for the other ranks")
        time.sleep(0.002)
    return [other.read_text() for other in files]


if __name__ == "__main__":
    jobs, folder, ranks = json.loads(sys.argv[1])
    work(jobs, folder, ranks, int(sys.argv[2]))
