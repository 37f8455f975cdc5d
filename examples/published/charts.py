"""Figures of several panels, as SVG in the colors of the page.

A panel is at most as wide as the screen of a phone, so that letters keep their size. Panels that do
not fit next to each other go below each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks import axes

LEFT, TOP, WIDTH, HEIGHT = 64, 26, 280, 190
Points = Sequence[tuple[float, Sequence[float]]]  # x, and what each seed had there


@dataclass(frozen=True)
class Panel:
    """Lines through the medians over seeds, with a band from the least to the largest value.

    Attributes:
        title: The title above the panel.
        lower, upright: The names of the axes.
        lines: The lines by name. All panels of a figure have the same names.
        log: The logarithmic axes, such as "xy".
        dots: Whether to draw points instead of lines.
        ticks: Texts below the axis instead of numbers.
        low, high: The ends of the upright axis, unless the lines determine them.
    """

    title: str
    lower: str
    upright: str
    lines: Mapping[str, Points]
    log: str = ""
    dots: bool = False
    ticks: Mapping[float, str] | None = None
    low: float | None = None
    high: float | None = None

    def draw(self, names: Sequence[str]) -> str:
        shown = [(x, y) for points in self.lines.values() for x, ys in points for y in ys]
        finite = [y for _, y in shown if math.isfinite(y) and (y > 0 or "y" not in self.log)]
        low = min(finite) if self.low is None else self.low
        high = max(finite) if self.high is None else self.high
        high = low + 1 if high == low else high
        across = Scale(*ends([x for x, _ in shown]), "x" in self.log, LEFT, WIDTH)
        up = Scale(low, high, "y" in self.log, TOP + HEIGHT, -HEIGHT)
        parts = [f'<text class="title" x="{LEFT}" y="14">{escape(self.title)}</text>']
        for tick, label in up.ticks():
            y = f"{up(tick):.1f}"
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{label}</text>')
        for tick, label in self.ticks.items() if self.ticks else across.ticks():
            x, y = f"{across(tick):.1f}", TOP + HEIGHT + 20
            parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{escape(label)}</text>')
        for name, points in self.lines.items():
            kind = f"s{names.index(name)}"
            parts += self.dotted(kind, points, across, up) if self.dots else []
            parts += [] if self.dots else self.lined(kind, points, across, up)
        parts.append(axes.names(LEFT, TOP, WIDTH, HEIGHT, escape(self.lower), escape(self.upright)))
        box = f"0 0 {LEFT + WIDTH + 16} {TOP + HEIGHT + axes.ROOM}"
        label = escape(f"{self.title}: {self.upright} over {self.lower}")
        return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(parts)}</svg>'

    def lined(self, kind: str, points: Points, across: Scale, up: Scale) -> list[str]:
        at = [(across(x), [up(y) for y in ys]) for x, ys in points]
        edge = [(x, min(ys)) for x, ys in at] + [(x, max(ys)) for x, ys in reversed(at)]
        line = [(x, statistics.median(ys)) for x, ys in at]
        return [
            f'<polygon class="{kind}" points="{spelled(edge)}"/>',
            f'<polyline class="{kind}" points="{spelled(line)}"/>',
        ]

    def dotted(self, kind: str, points: Points, across: Scale, up: Scale) -> list[str]:
        return [
            f'<circle class="{kind}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="2"/>'
            for x, ys in points
            for y in ys
        ]


@dataclass(frozen=True)
class Scale:
    """Return the position of a number between two ends. Numbers outside are drawn at the edge."""

    low: float
    high: float
    log: bool
    start: float
    length: float

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high) if value == value else self.high
        share = (self.of(value) - self.of(self.low)) / (self.of(self.high) - self.of(self.low))
        return self.start + share * self.length

    def of(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def ticks(self) -> list[tuple[float, str]]:
        """Return round numbers: powers of ten, or three to six steps of 1, 2 or 5."""
        if self.log:
            first, last = math.ceil(self.of(self.low) - 1e-9), math.floor(self.of(self.high) + 1e-9)
            every = max(1, math.ceil((last - first) / 5))
            powers = [10.0**i for i in range(first, last + 1, every)]
            return [(x, f"{x:g}") for x in powers] if len(powers) > 1 else self.two()
        span = self.high - self.low
        size = 10 ** math.floor(math.log10(span / 3))
        step = max(s * size for s in (1, 2, 5) if span / (s * size) >= 2.5)
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor(self.high / step + 1e-9) - first + 1
        return [((first + i) * step, f"{(first + i) * step:g}") for i in range(count)]

    def two(self) -> list[tuple[float, str]]:
        return [(x, f"{x:.2g}") for x in (self.low, self.high)]


def ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def spelled(points: Sequence[tuple[float, float]]) -> str:
    return " ".join([f"{x:.1f},{y:.1f}" for x, y in points])


def figure(panels: Sequence[Panel], caption: str) -> str:
    """Return the panels of a figure, and the legend of their colors."""
    names = list(dict.fromkeys([name for panel in panels for name in panel.lines]))
    legend = ", ".join([f'<span class="s{i}">{escape(x)}</span>' for i, x in enumerate(names)])
    drawn = "\n".join([panel.draw(names) for panel in panels])
    return (
        f'<figure class="picture panels">\n{drawn}\n'
        f"<figcaption>{legend}. {caption}</figcaption>\n</figure>"
    )
