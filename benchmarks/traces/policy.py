"""What `SkipSpike` and `Recover` would have done to recorded runs: which steps, and where back.

A simulation does not change the run: after a rollback the batches are those that came next, with
the norms and losses of the recorded weights.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchzero_clip import Trace
from torchzero_clip.recovering.judging import TIE, Look, judged, limit_of

EVERY, CHECK, SIGMAS, WINDOW, MOST = 200, 10, 6.0, 128, 8  # the defaults of Recover
LEAST, PATIENCE = 64, 20  # and those of SkipSpike


def stands_out(x: float, values: Sequence[float]) -> bool:
    if not math.isfinite(x):
        return True
    if len(values) < LEAST:
        return False
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return std > TIE * abs(mean) and x - mean > SIGMAS * std


def skipped(norms: Sequence[float], losses: Sequence[float]) -> list[bool]:
    """The steps that SkipSpike would have skipped."""
    rows: list[deque[float]] = [deque(maxlen=WINDOW), deque(maxlen=WINDOW)]
    out, row = [], 0
    for pair in zip(norms, losses, strict=True):
        bad = any([stands_out(x, values) for x, values in zip(pair, rows, strict=True)])
        row = row + 1 if bad else 0
        for x, values in zip(pair, rows, strict=True):
            if math.isfinite(x) and (not bad or row > PATIENCE):
                values.append(x)
        out.append(bad)
    return out


def ways_back(losses: Sequence[float], flags: Sequence[bool]) -> list[dict[str, Any]]:
    """Where Recover would have gone back, and in the end refused."""
    found: list[dict[str, Any]] = []
    good, snapshot, stays, again = list[float](), None, 0, 0  # steps that would have stayed
    kept: list[float] = []
    for end in range(CHECK, len(losses) + 1, CHECK):
        looks = [
            Look(x if math.isfinite(x) else 0.0, not math.isfinite(x), flag)
            for x, flag in zip(losses[end - CHECK : end], flags[end - CHECK : end], strict=True)
        ]
        bad, why = judged(looks, limit_of(good, SIGMAS, WINDOW))
        good = [*good, *[x.loss for x, b in zip(looks, bad, strict=True) if not b]][-WINDOW:]
        stays += CHECK
        if why and snapshot is not None:
            found.append({"batch": end, "undone": stays - snapshot, "why": why})
            if again == MOST:
                return found
            stays, good, again = snapshot, list(kept), again + 1
        elif not any(bad) and (snapshot is None or stays // EVERY > snapshot // EVERY):
            snapshot, kept, again = stays, list(good), 0
    return found


def decisions(trace: Trace) -> dict[str, Any]:
    """What would have happened to a run."""
    losses = trace.logged["loss"].tolist()
    flags = skipped(trace.total.tolist(), losses)
    spikes = [] if trace.spikes is None else trace.spikes.tolist()
    numbers = trace.steps.tolist()
    known = [step for step, spike in zip(numbers, spikes, strict=False) if spike]
    skips = [step for step, flag in zip(numbers, flags, strict=True) if flag]
    backs = ways_back(losses, flags)
    return {"steps": len(losses), "known": known, "skipped": skips, "back": backs}


def write(traces: dict[str, Trace], path: Path) -> None:
    """A line for each run."""
    lines = [json.dumps({"trace": name, **decisions(trace)}) for name, trace in traces.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(path: Path) -> str:
    """What is in that file, for a page."""
    rows = ["| trace | steps | known to be bad | skipped | known and skipped | rollbacks |"]
    rows.append("|---|" + "--:|" * 4 + "---|")
    for line in path.read_text(encoding="utf-8").splitlines():
        made = json.loads(line)
        known, skips = set(made["known"]), made["skipped"]
        found = len(known & {*skips})
        backs = made["back"]
        said = "none"
        if backs:
            said = "At batch {batch}, a rollback of {undone} steps ({why}).".format(**backs[0])
        if len(backs) > MOST:
            last = backs[-1]["batch"]
            said += f" After {MOST - 1} more rollbacks, `RuntimeError` at batch {last}."
        cells = [f"`{made['trace']}`", made["steps"], len(known) or "", len(skips)]
        cells += [found if known else "", said]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)
