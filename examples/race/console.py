"""The output in the terminal: the race while it runs, and the table at the end."""

from __future__ import annotations

import math
import shutil
import sys
import time
from typing import TextIO

from race.training import RECOVERED, Racer, Result

COLUMNS = {
    "final loss": "on held-out text, in nats per character",
    "worst spike": "the largest increase of this loss above its earlier minimum",
    "steps clipped": "steps in which the rule clipped something, and skipped steps",
    "steps to recover": f"the longest time with a loss more than {RECOVERED} above its minimum; "
    "> means that this was still so at the end",
    "ms per step": "median, with the forward and backward pass",
    "ms in opt.step()": "median, the optimizer step only",
}


class Progress:
    """A bar and a line for each chain. A terminal redraws them, and a file gets a few of them."""

    def __init__(self, steps: int, out: TextIO | None = None) -> None:
        self.steps, self.out = steps, out or sys.stdout
        self.live = self.out.isatty()
        self.begin, self.drawn, self.lines = time.monotonic(), -math.inf, 0

    def __call__(self, step: int, racers: list[Racer]) -> None:
        now, last = time.monotonic(), step == self.steps
        due = now - self.drawn > 0.2 if self.live else step % max(self.steps // 5, 1) == 0
        if not (due or last):
            return
        self.drawn = now
        minutes, seconds = divmod(int((now - self.begin) * (self.steps - step) / step), 60)
        done = 30 * step // self.steps
        bar = "█" * done + "░" * (30 - done)
        lines = [f"{bar} step {step} of {self.steps}, {minutes}:{seconds:02} left"]
        width = max(len(racer.name) for racer in racers)
        for racer in racers:
            loss, norm, limit = racer.glance()
            line = f"  {racer.name:{width}}   loss {loss:6.3f}"
            if norm is not None and limit is not None:
                shown = f"{limit:.2f}" if math.isfinite(limit) else "–"
                line += f"   norm {norm:8.2f}   limit {shown:>6}"
            lines.append(line)
        if self.live:
            most = shutil.get_terminal_size().columns - 1
            self.out.write(f"\x1b[{self.lines}A" if self.lines else "")
            lines = [f"\x1b[2K{line[:most]}" for line in lines]
        self.lines = len(lines)
        self.out.write("\n".join(lines) + "\n")
        self.out.flush()


def headline(results: list[Result]) -> str:
    words = ["One chain", "Two chains", "Three chains", "Four chains", "Five chains", "Six chains"]
    count = len(results)
    who = words[count - 1] if count <= len(words) else f"{count} chains"
    return f"{who} on the same corrupted data"


def cells(result: Result) -> dict[str, str]:
    """Return a row of the table."""
    steps, back = result.recovery
    final, spike = result.final_loss, result.worst_spike
    numbers = [
        f"{final:.3f}" if math.isfinite(final) else "diverged",
        f"{spike:.3f}" if math.isfinite(spike) else "∞",
        str(result.steps_clipped),
        str(steps) if back else f"> {steps}",
        f"{result.ms:.1f}",
        f"{result.ms_in_step:.2f}",
    ]
    return dict(zip(COLUMNS, numbers, strict=True))


def table(results: list[Result]) -> str:
    rows = [{"chain": result.name, **cells(result)} for result in results]
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in rows[0]}

    def line(row: dict[str, str]) -> str:
        first, *others = row
        numbers = [row[title].rjust(widths[title]) for title in others]
        return "   ".join([row[first].ljust(widths[first]), *numbers])

    head = line({title: title for title in widths})
    notes = [f"  {title}: {meaning}" for title, meaning in COLUMNS.items()]
    return "\n".join([head, "─" * len(head), *map(line, rows), "", *notes])
