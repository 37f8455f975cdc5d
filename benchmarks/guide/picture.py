"""A trouble's comparisons as intervals."""

from __future__ import annotations

from html import escape

from benchmarks import axes
from benchmarks.guide.comparison import HUGE, SAME, signed
from benchmarks.guide.report import CASES, compare, losses, optimizer_of
from benchmarks.guide.runs import Row

LEFT, WIDTH, TOP, LINE = 290, 400, 28, 24
INK, FAINT = "var(--accent)", "var(--line)"


def picture(rows: tuple[Row, ...], trouble: str) -> str:
    """The difference from no clipping, a line with its interval for each method."""
    made = compare(rows)
    keys = [(trouble, m, f"{optimizer_of(m)}, no clipping") for m in CASES[trouble]]
    found = [made[key] for key in keys if key in made]
    ends = [x for one in found for x in (one.low, one.high, 0.0) if abs(x) < HUGE]
    low, high = min(ends), max(ends)
    edge, bottom = 0.06 * (high - low), TOP + LINE * len(found)

    def across(x: float) -> str:
        share = (min(max(x, low - edge), high + edge) - low + edge) / (high - low + 2 * edge)
        return f"{LEFT + WIDTH * share:.1f}"

    parts = [axes.names(LEFT, TOP, WIDTH, bottom - TOP, "difference in loss", "")]
    parts.append(f'<text x="{LEFT - 10}" y="{TOP - 8}" text-anchor="end">method</text>')
    for tick in sorted({low, 0.0, high}):
        x = across(tick)
        if tick and abs(float(x) - float(across(0.0))) < 50:
            continue  # no room for its label
        parts.append(f'<path d="M{x} {TOP}V{bottom}" style="stroke:{FAINT}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{signed(tick)}</text>')
    for i, one in enumerate(found):
        y = TOP + LINE * i + LINE // 2
        seeds = f"{len(losses(rows, trouble, one.method))} seeds"
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(one.method)}'
            f"<title>{escape(str(one))}, {seeds}</title></text>"
        )
        fill = "none" if one.verdict == SAME else INK
        parts.append(f'<path d="M{across(one.low)} {y}H{across(one.high)}" style="stroke:{INK}"/>')
        style = f"fill:{fill};stroke:{INK}"
        parts.append(f'<circle cx="{across(one.shift)}" cy="{y}" r="4" style="{style}"/>')
    return (
        f'<figure class="picture">\n<svg viewBox="0 0 {LEFT + WIDTH + 25} {bottom + axes.ROOM}" '
        f'role="img" aria-label="Differences from no clipping: {trouble}">{"".join(parts)}</svg>\n'
        "<figcaption>The picture shows the difference in loss from training without clipping: "
        "the Hodges–Lehmann shift of pairs and its 95 % interval. A dot left of 0 is better. A "
        "hollow dot is not significantly different. A dot at the left edge means that training "
        "without clipping diverges.</figcaption>\n</figure>"
    )
