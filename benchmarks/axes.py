"""The names of the axes of pictures that are written as SVG."""

from __future__ import annotations

ROOM = 50  # below a panel: for the numbers of its lower axis, and its name


def names(left: float, top: float, width: float, height: float, lower: str, upright: str) -> str:
    """Both names: below the numbers under a panel, and at the left edge of the picture."""
    across, down = f"{left + width / 2:g}", f"{top + height / 2:g}"
    below = f'<text x="{across}" y="{top + height + 44:g}" text-anchor="middle">{lower}</text>'
    turned = f'transform="rotate(-90 16 {down})"'
    beside = f'<text x="16" y="{down}" text-anchor="middle" {turned}>{upright}</text>'
    return below + beside * bool(upright)
