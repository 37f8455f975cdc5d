"""What the files say, as tables for a page and as pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.which_rule.runs import (
    CALM,
    GRIDS,
    NONE,
    OPTIMIZERS,
    RULES,
    Norms,
    Rate,
    Row,
    read,
)
from benchmarks.which_rule.troubles import SAME, TROUBLES
from torchzero_clip import Chain


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def number(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}" if value < 10_000 else f"{value:.0e}"


def spread(values: list[float]) -> str:
    """The median, and the smallest and largest."""
    return f"{number(statistics.median(values))} ({number(min(values))}–{number(max(values))})"


def final(rows: list[Row]) -> str:
    """The losses at the end, and how many runs have none."""
    lost = sum(row.diverged for row in rows)
    if lost == len(rows):
        return f"diverged {lost}/{lost}"
    text = spread([row.final_loss for row in rows])
    return f"{text}, diverged {lost}/{len(rows)}" if lost else text


def select(rows: list[Row], trouble: str, optimizer: str) -> dict[str, list[Row]]:
    """The runs of a table, by rule. What was not troubled is taken from where nothing is wrong."""
    found: dict[str, list[Row]] = {CALM: []}
    for row in rows:
        if row.optimizer == optimizer and row.trouble == trouble:
            found.setdefault(row.rule, []).append(row)
    if trouble in SAME - {"nothing wrong"}:
        found[CALM] = select(rows, "nothing wrong", optimizer).get(NONE, [])
    return {rule: chosen for rule, chosen in found.items() if chosen}


def results(rows: list[Row], trouble: str, optimizer: str) -> str:
    head = (optimizer, "final loss", "worst loss", "spike score", "clipped")
    lines = []
    for rule, chosen in select(rows, trouble, optimizer).items():
        cells = [spread([getattr(r, key) for r in chosen]) for key in ("worst_loss", "spike_score")]
        clipped = (
            "" if rule in (CALM, NONE) else f"{statistics.median(r.clipped for r in chosen):.0%}"
        )
        lines.append((rule, final(chosen), *cells, clipped.replace("%", " %")))
    return markdown(head, lines)


def rules() -> str:
    lines = []
    for name, rule in RULES.items():
        shown = {**rule, "max_norm": 0.0} if rule.get("max_norm") == "q50" else rule
        link = repr(Chain.from_config([shown])[0]).replace("max_norm=0.0", "max_norm=q50")
        lines.append((name, f"`{link}`"))
    return markdown(("rule", "link"), lines).replace("---:", "---")


def rates(lines: list[Rate]) -> str:
    grid = sorted({rate for rates in GRIDS.values() for rate in rates})
    table: dict[tuple[str, str], dict[float, str]] = {}
    for line in lines:
        cell = "diverged" if math.isinf(line.final_loss) else number(line.final_loss)
        chosen = TROUBLES[line.trouble].rates[line.optimizer] == line.lr
        table.setdefault((line.trouble, line.optimizer), {})[line.lr] = (
            f"**{cell}**" if chosen else cell
        )
    return markdown(
        ("without the trouble", *map(str, grid)),
        [(", ".join(key), *(row.get(rate, "") for rate in grid)) for key, row in table.items()],
    )


def recorded(lines: list[Norms]) -> str:
    keys = ("q10", "q50", "q90", "q99", "largest")
    return markdown(
        ("norms of 200 steps", "10 %", "50 %", "90 %", "99 %", "largest"),
        [
            (f"{n.trouble}, {n.optimizer}", *(number(getattr(n, key)) for key in keys))
            for n in lines
        ],
    )


def tables(folder: Path) -> dict[str, str]:
    """All tables by name, from the files in a folder."""
    rows: list[Row] = read(folder / "which_rule.csv", Row)
    out = {"rules": rules()}
    for trouble in TROUBLES:
        for optimizer in OPTIMIZERS:
            if select(rows, trouble, optimizer):
                out[f"{trouble}, {optimizer}"] = results(rows, trouble, optimizer)
    out["norms"] = recorded(read(folder / "which_rule_norms.csv", Norms))
    if (folder / "which_rule_rates.csv").exists():
        out["rates"] = rates(read(folder / "which_rule_rates.csv", Rate))
    return out


# ---------------------------------------------------------------------- pictures

LEFT, PANEL, GAP, TOP, LINE = 225, 225, 25, 36, 24
INK, FAINT = "var(--md-accent-fg-color)", "var(--md-default-fg-color--lightest)"


def picture(rows: list[Row], trouble: str) -> str:
    """A dot for each run at its final loss, a line for each rule, a panel for each optimizer."""
    panels = {optimizer: select(rows, trouble, optimizer) for optimizer in OPTIMIZERS}
    names = list(panels["Adam"])
    bottom = TOP + LINE * len(names)
    parts = [
        f'<text x="{LEFT - 10}" y="{TOP + LINE * i + 16}" text-anchor="end">{name}</text>'
        for i, name in enumerate(names)
    ]
    for p, (optimizer, found) in enumerate(panels.items()):
        left = LEFT + p * (PANEL + GAP)
        parts += panel(found, left, bottom)
        parts.append(
            f'<text x="{left + PANEL / 2:g}" y="18" text-anchor="middle">{optimizer}</text>'
        )
    width = LEFT + 2 * PANEL + GAP + 20
    caption = (
        "The final loss of every run, a dot each, on a logarithmic axis: further left is better. "
        "3 × says that three runs diverged."
    )
    return (
        f'<figure class="picture">\n<svg viewBox="0 0 {width} {bottom + 24}" role="img" '
        f'aria-label="Final losses of all rules: {trouble}.">\n' + "\n".join(parts) + "\n</svg>\n"
        f"<figcaption>{caption}</figcaption>\n</figure>\n"
    )


def panel(found: dict[str, list[Row]], left: int, bottom: int) -> list[str]:
    finite = [r.final_loss for chosen in found.values() for r in chosen if not r.diverged]
    low, high = min(finite) / 1.1, max(finite) * 1.1

    def place(loss: float) -> float:
        return left + (PANEL - 20) * math.log(loss / low) / math.log(high / low)

    grid, labels, dots = [], [], []
    for tick in ticks(low, high):
        at = f"{place(tick):.0f}"
        grid.append(f'<path d="M{at} {TOP}V{bottom}"/>')
        labels.append(f'<text x="{at}" y="{bottom + 17}">{tick:g}</text>')
    for i, chosen in enumerate(found.values()):
        y = TOP + LINE * i + 12
        ends = [row.final_loss for row in chosen if not row.diverged]
        dots += [f'<circle cx="{place(end):.0f}" cy="{y}" r="4"/>' for end in ends]
        if lost := len(chosen) - len(ends):
            labels.append(f'<text x="{left + PANEL - 6}" y="{y + 4}">{lost} ×</text>')
    return [
        f'<g style="stroke:{FAINT}">{"".join(grid)}</g>',
        f'<g text-anchor="middle">{"".join(labels)}</g>',
        f'<g style="fill:{INK};fill-opacity:.6">{"".join(dots)}</g>',
    ]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, three or so."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [k * 10.0**n for n in powers for k in steps if low <= k * 10.0**n <= high]
        if len(found) >= 3:
            return found[:: math.ceil(len(found) / 5)]
    return found
