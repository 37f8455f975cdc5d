"""What came of judging, as tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks import axes
from benchmarks.traces.__main__ import POLICY, load
from benchmarks.traces.judge import FAMILIES, Line
from benchmarks.traces.policy import table
from benchmarks.traces.runs import TRAININGS

DEFAULTS = dict(zip(FAMILIES, (2.0, 2.5, 3.0, 95.0, 1.5, 1.05), strict=True))
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#777777")


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def traces(lines: Sequence[Line]) -> str:
    """What was recorded."""
    rows = ["| trace | of | steps | tensors | median | 99 % | largest |", "|---|---|" + "---:|" * 5]
    for name, training in TRAININGS.items():
        trace = load(name)
        total = trace.total
        numbers = [f"{x:.3g}" for x in (total.median(), total.quantile(0.99), total.max())]
        size = [f"{len(trace)}", f"{len(trace.names)}"]
        rows.append("| " + " | ".join([f"`{name}`", training.about, *size, *numbers]) + " |")
    return "\n".join(rows)


def defaults(lines: Sequence[Line]) -> str:
    """False alarms and missed spikes of every rule at one sensitivity."""
    names = list(dict.fromkeys(line.trace for line in lines))
    traces = "".join(f'<th colspan="2" scope="colgroup"><code>{name}</code></th>' for name in names)
    both = '<th scope="col">false alarms</th><th scope="col">missed</th>' * len(names)
    head = f'<tr><th rowspan="2" scope="col">rule</th>{traces}</tr>\n<tr>{both}</tr>'
    rows = []
    for family, sensitivity in DEFAULTS.items():
        own = [x for x in lines if (x.family, x.sensitivity) == (family, sensitivity)]
        found = {x.trace: (x.false, x.missed) for x in own}
        shares = "".join(
            f'<td style="text-align: right">{100 * share:.3g}</td>'
            for name in names
            for share in found[name]
        )
        rows.append(f'<tr><th scope="row">{family} = {sensitivity:g}</th>{shares}</tr>')
    body = "\n".join(rows)
    table = f'<table class="dense">\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>'
    return f'<div class="frame">\n{table}\n</div>'


def policy(lines: Sequence[Line]) -> str:
    """What guards and Recover would have done."""
    return table(POLICY)


LEFT, TOP, WIDTH, HEIGHT, LEGEND = 72, 16, 380, 260, 250


def picture(lines: Sequence[Line], trace: str) -> str:
    """False alarms against missed spikes, a line for each rule over its sensitivities."""
    own = [line for line in lines if line.trace == trace]
    parts = []
    for tick in (0, 1, 5, 20, 50, 100):
        x, y = across(tick / 100), down(tick / 100)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{TOP + HEIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{tick}</text>')
        parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{tick}</text>')
    parts.append(axes.names(LEFT, TOP, WIDTH, HEIGHT, "false alarms, %", "missed, %"))
    for i, (family, colour) in enumerate(zip(FAMILIES, COLOURS, strict=True)):
        points = [(across(x.false), down(x.missed)) for x in own if x.family == family]
        line = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline style="stroke:{colour}" points="{line}"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" style="fill:{colour}"/>' for x, y in points]
        y = TOP + 12 + 22 * i
        parts.append(f'<circle cx="{LEFT + WIDTH + 22}" cy="{y}" r="5" style="fill:{colour}"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 34}" y="{y}" dy="4">{family}</text>')
    box = f"0 0 {LEFT + WIDTH + LEGEND} {TOP + HEIGHT + axes.ROOM}"
    return (
        f'<figure class="picture">\n<svg viewBox="{box}" role="img" '
        f'aria-label="False alarms and missed spikes: {trace}">{"".join(parts)}</svg>\n'
        f"<figcaption><code>{trace}</code>, spikes {own[0].spikes}: the share of good steps that a "
        "rule clips, and the share of spikes that it misses. Each dot is one sensitivity of a "
        "rule. The lower left corner is best. The axes stretch small shares.</figcaption>\n"
        "</figure>"
    )


def across(share: float) -> float:
    return round(LEFT + math.sqrt(share) * WIDTH, 1)


def down(share: float) -> float:
    return round(TOP + HEIGHT - math.sqrt(share) * HEIGHT, 1)
