"""Is a norm right? A clip function against gradients that are known, in processes on gloo."""

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

from torchzero_clip.audit.clip_cases import ALONE, RANKS, TOGETHER
from torchzero_clip.audit.clip_report import ClipReport, ClipRow
from torchzero_clip.audit.function_names import name_of

LIMIT = 600  # seconds that all cases of a function may take
MODULE = "torchzero_clip.audit.clip_rank"
INSIDE = "TORCHZERO_CLIP_AUDIT"  # set in the processes of an audit


def audit_clip(
    function: Callable[..., Any] | str, cases: Sequence[str] | None = None
) -> ClipReport:
    """Try a clip function on gradients whose norm is known, whole and cut over four processes.

    It is called as `function(parameters, max_norm)`, must scale `p.grad` in place and may return
    the norm. One that has an argument `case` gets more: `case.model`, and `case.group`, the
    processes that hold the other stages of a pipeline. Processes import it by its name.

    Args:
        function: The function, or "package.module:name", or "file.py:name".
        cases: The names of some cases; all unless they are given.

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
    """The reports of several functions, which the same processes try in turn while they can."""
    known = [*ALONE, *TOGETHER]
    wanted = known if cases is None else list(cases)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"audit_clip: there is no case {unknown[0]!r}; there are {known}")
    if INSIDE in os.environ:
        raise RuntimeError(
            "audit_clip was called again by a process of its own, which imports the file of the "
            "function: put the call below `if __name__ == '__main__':`"
        )
    names = [x if isinstance(x, str) else name_of(x) for x in functions]
    jobs = [
        (name, case)
        for kind in (ALONE, TOGETHER)
        for name in names
        for case in wanted
        if case in kind
    ]
    found: list[tuple[dict[str, Any] | None, ...]] = []
    end = time.monotonic() + LIMIT * len(names)
    while len(found) < len(jobs):
        found += _begun(jobs[len(found) :], names, end)
    rows = {job: _row(job[1], ranks) for job, ranks in zip(jobs, found, strict=True)}
    return [ClipReport(name, [rows[name, case] for case in wanted]) for name in names]


def _begun(
    jobs: Sequence[tuple[str, str]], names: Sequence[str], end: float
) -> list[tuple[dict[str, Any] | None, ...]]:
    """What every rank found in the first of the jobs, and in as many more as processes can do."""
    ranks = RANKS if any([case in TOGETHER for _, case in jobs]) else 1
    with tempfile.TemporaryDirectory() as folder:
        started = [begin([json.dumps([jobs, folder, ranks]), str(rank)]) for rank in range(ranks)]
        try:
            said = [
                process.communicate(timeout=max(end - time.monotonic(), 0))[1]
                for process in started
            ]
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"audit_clip: {', '.join(names)} took more than {LIMIT * len(names)} s: try its "
                "cases one by one"
            ) from None
        finally:
            for process in started:
                process.kill()
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        if lost := [i for i, file in enumerate(files) if not file.exists()]:
            raise RuntimeError(
                f"audit_clip: {', '.join(names)} ended early: {_last(said[lost[0]])}"
            )
        return list(zip(*[json.loads(file.read_text()) for file in files], strict=True))


def begin(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start the process of a rank."""
    search = os.pathsep.join([os.getcwd(), *[path for path in sys.path if path]])
    home = {**os.environ, INSIDE: "1", "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, *arguments],
        env=home,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def _row(case: str, ranks: Sequence[dict[str, Any] | None]) -> ClipRow:
    """One row from what the ranks found; a case in one process has rank 0 alone."""
    told = [one for one in ranks if one is not None]
    wrong = [one for one in told if one["why"]]
    first = (wrong or told)[0]
    why = first["why"]
    norms = {x for one in told if (x := one["found"]) is not None and x == x}
    if not why and norms and max(norms) > min(norms) * (1 + 1e-6):
        why = f"ranks disagree: {sorted(norms)}"
    elif why and len(wrong) < len(told):
        why += f"; on {len(wrong)} of {len(told)} ranks"
    fresh = max([one["fresh"] for one in told if one["fresh"] is not None], default=None)
    return ClipRow(case, not why, first["expected"], first["found"], fresh, why)
