"""Audit a clip function on gradients with a known norm, in one process and on four ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchzero_clip.audit.clip_cases import DISTRIBUTED, IN_ONE_PROCESS, RANKS
from torchzero_clip.audit.clip_report import ClipReport, ClipRow
from torchzero_clip.audit.clip_trial import CaseResult
from torchzero_clip.audit.function_names import name_of

SECONDS_PER_FUNCTION = 600
"""The time limit for all cases of one function, in seconds."""
MODULE = "torchzero_clip.audit.clip_rank"
"""The name of the module that each rank runs. The module itself is not imported here, because
`python -m` warns if it is imported already."""
INSIDE = "TORCHZERO_CLIP_AUDIT"
"""The environment variable that is set in the processes of an audit."""


def audit_clip(
    function: Callable[..., Any] | str, cases: Sequence[str] | None = None
) -> ClipReport:
    """Check the norm of a clip function on gradients whose norm is known.

    The audit calls `function(parameters, max_norm)` with whole gradients in one process, and with
    sharded gradients in four processes on this machine. No GPU is needed. The function must scale
    `p.grad` in place, and may return the norm. If the function has an argument `case`, it also
    receives the case. `case.model` is the module of the parameters. `case.group` is the process
    group of the other pipeline stages, or None.

    The processes import the function by its name. So the function must be defined at the top level
    of a module. A script must call `audit_clip` below `if __name__ == "__main__":`.

    Args:
        function: The function, or its name: "package.module:name" or "file.py:name".
        cases: The names of the cases to run. None runs all cases.

    Returns:
        A `ClipReport`. `print(report)` shows a table with one line for each case. If a norm is
        wrong, the line names the likely cause.

    Example:
        >>> import torch
        >>> from torchzero_clip.audit import audit_clip
        >>> report = audit_clip(torch.nn.utils.clip_grad_norm_, ["whole", "entries of 1e30"])
        >>> [row.right for row in report.rows]
        [True, False]
    """
    return audits([function], cases)[0]


def audits(
    functions: Sequence[Callable[..., Any] | str], cases: Sequence[str] | None = None
) -> list[ClipReport]:
    """Return the reports of several functions.

    The same processes run the cases of all functions, one after the other. New processes are
    started only after an error, and run the remaining cases.
    """
    all_cases = [*IN_ONE_PROCESS, *DISTRIBUTED]
    wanted = all_cases if cases is None else list(cases)
    if unknown := [name for name in wanted if name not in all_cases]:
        raise ValueError(
            f"audit_clip: cases= must contain only names from {all_cases}, got {unknown[0]!r}"
        )
    if INSIDE in os.environ:
        raise RuntimeError(
            "audit_clip starts processes that import your file, so put the call of "
            "audit_clip below `if __name__ == '__main__':`"
        )
    names = [x if isinstance(x, str) else name_of(x) for x in functions]
    jobs = [
        (name, case)
        for kind in (IN_ONE_PROCESS, DISTRIBUTED)
        for name in names
        for case in wanted
        if case in kind
    ]
    results: list[tuple[CaseResult | None, ...]] = []
    end = time.monotonic() + SECONDS_PER_FUNCTION * len(names)
    while len(results) < len(jobs):
        results += _results(jobs[len(results) :], names, end)
    rows = {job: _row(job[1], of_ranks) for job, of_ranks in zip(jobs, results, strict=True)}
    return [ClipReport(name, [rows[name, case] for case in wanted]) for name in names]


def _results(
    jobs: Sequence[tuple[str, str]], names: Sequence[str], end: float
) -> list[tuple[CaseResult | None, ...]]:
    """Start processes, and return the results of all ranks for the jobs that were completed.

    The processes complete at least the first job. See `clip_rank.work`.
    """
    ranks = RANKS if any([case in DISTRIBUTED for _, case in jobs]) else 1
    with tempfile.TemporaryDirectory() as folder:
        started = [
            start_rank([json.dumps([jobs, folder, ranks]), str(rank)]) for rank in range(ranks)
        ]
        try:
            errors = [
                process.communicate(timeout=max(end - time.monotonic(), 0))[1]
                for process in started
            ]
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"audit_clip: {', '.join(names)} did not finish within "
                f"{SECONDS_PER_FUNCTION * len(names)} s: audit the cases one by one"
            ) from None
        finally:
            for process in started:
                process.kill()
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        if missing := [rank for rank, file in enumerate(files) if not file.exists()]:
            raise RuntimeError(
                f"audit_clip: a process failed in {', '.join(names)}: "
                f"{_last_line(errors[missing[0]])}"
            )
        return list(zip(*[json.loads(file.read_text()) for file in files], strict=True))


def start_rank(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start the process of a rank."""
    search_path = os.pathsep.join([os.getcwd(), *[path for path in sys.path if path]])
    variables = {INSIDE: "1", "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _last_line(text: str) -> str:
    lines = reversed(text.splitlines())
    return next((line for line in lines if line.strip()), "no error message")


def _row(case: str, of_ranks: Sequence[CaseResult | None]) -> ClipRow:
    """Return the row of a case from the results of all ranks.

    If a case runs in one process, only rank 0 has a result.
    """
    results = [result for result in of_ranks if result is not None]
    wrong = [result for result in results if result["why"]]
    first = (wrong or results)[0]
    why = first["why"]
    returned = [result["found"] for result in results]
    norms = {norm for norm in returned if norm is not None and norm == norm}
    if not why and norms and max(norms) > min(norms) * (1 + 1e-6):
        why = f"ranks return different norms: {sorted(norms)}"
    elif why and len(wrong) < len(results):
        why += f"; on {len(wrong)} of {len(results)} ranks"
    memory = [result["fresh"] for result in results]
    fresh = max([share for share in memory if share is not None], default=None)
    return ClipRow(case, not why, first["expected"], first["found"], fresh, why)
