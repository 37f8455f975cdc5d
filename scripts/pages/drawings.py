"""Turn the figures that reports draw into SVG files, and into the images of a page."""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "assets" / "drawn"
FIGURE = re.compile(r'<figure class="[^"]*">(.*?)</figure>', re.DOTALL)
SVG = re.compile(
    r'<svg viewBox="0 0 (\S+) (\S+)" role="img"\s+aria-label="(.*?)">(.*?)</svg>', re.S
)
CAPTION = re.compile(r"<figcaption>(.*?)</figcaption>", re.DOTALL)
ENTRY = re.compile(r'<span class="(\w+)">(.*?)</span>', re.DOTALL)
ONLY_LEGEND = re.compile(r"^(?:<span[^>]*>[^<]*</span>(?:, )?)+\. ")
LONGEST = 48  # letters of what is drawn, in the name of its file
LINE, SWATCH, LETTER = 20, 24, 6.4  # of the legend: heights and widths in pixels

LIGHT = (
    "--paper: #fffffe; --ink: #1f2328; --muted: #5c6670; --line: #dfe2e5; --fill: #f4f5f6; "
    "--accent: #c23c00; --s0: #0072b2; --s1: #b84400; --s2: #00795a; --s3: #a8487f; --s4: #5c6670;"
)
DARK = (
    "--paper: #1b2026; --ink: #e8eaed; --muted: #a3adb8; --line: #3a424b; --fill: #262c34; "
    "--accent: #ff8a5c; --s0: #56b4e9; --s1: #f09a4a; --s2: #2fc79a; --s3: #e48cc0; --s4: #a3adb8;"
)
STYLE = f"""
.drawing {{{LIGHT} font-family: system-ui, sans-serif;}}
@media (prefers-color-scheme: dark) {{.drawing {{{DARK}}}}}
[data-md-color-scheme=default] .drawing {{{LIGHT} --paper: none;}}
[data-md-color-scheme=slate] .drawing {{{DARK} --paper: none;}}
.drawing .paper {{fill: var(--paper);}}
.drawing text {{fill: var(--muted); font-size: 12px;}}
.drawing .title, .drawing :is(.packages, .links, .ends) text {{fill: var(--ink); font-size: 13px;}}
.drawing .packages text {{font-weight: 600;}}
.drawing .code {{font-family: monospace;}}
.drawing .u {{font-style: italic;}}
.drawing .grid {{stroke: var(--line);}}
.drawing polyline {{fill: none; stroke: var(--colour); stroke-linejoin: round; stroke-width: 1.3;}}
.drawing polygon {{fill: var(--colour); opacity: 0.15;}}
.drawing circle {{fill: var(--colour);}}
.drawing .before {{stroke: var(--muted); opacity: 0.7;}}
.drawing .after, .drawing .place0 {{stroke: var(--accent);}}
.drawing .place1 {{stroke: var(--accent); stroke-dasharray: 5 3;}}
.drawing .place2 {{stroke: var(--muted);}}
.drawing .place3 {{stroke: var(--muted); stroke-dasharray: 2 3;}}
.drawing .place4 {{stroke: var(--ink); stroke-dasharray: 1 5; stroke-linecap: round;}}
.drawing .place4 {{stroke-width: 2.5;}}
.drawing .s0 {{--colour: var(--s0);}}
.drawing .s1 {{--colour: var(--s1);}}
.drawing .s2 {{--colour: var(--s2);}}
.drawing .s3 {{--colour: var(--s3);}}
.drawing .s4 {{--colour: var(--s4);}}
.drawing polyline.s4 {{stroke-dasharray: 5 7;}}
.drawing :is(.flow, .wires) path {{fill: none; stroke: var(--muted); stroke-width: 1.6;}}
.drawing .wires path {{stroke-dasharray: 3 4; stroke-width: 1.2;}}
.drawing .heads path {{fill: var(--muted);}}
.drawing .links rect {{fill: var(--fill); stroke: var(--accent); stroke-width: 1.6;}}
.drawing .stores rect {{fill: var(--fill); stroke: var(--line);}}
"""


def stored(text: str, name: str, page: Path) -> tuple[str, dict[Path, str]]:
    """Return the text with an image in place of each figure, and the files of these images."""
    files: dict[Path, str] = {}

    def image(match: re.Match[str]) -> str:
        caption = "".join(CAPTION.findall(match[1]))
        legend = ENTRY.findall(caption)
        images = []
        for width, height, label, inner in SVG.findall(match[1]):
            number = f"-{len(files) + 1}" if files else ""
            path = FOLDER / f"{slug(name)}{number}.svg"
            files[path] = alone(float(width), float(height), label, inner, legend)
            address = Path(os.path.relpath(path, page.parent)).as_posix()
            images.append(f"![{unescape(label)}]({address})")
        return "\n".join(images) + f"\n\n{plain(caption)}"

    return FIGURE.sub(image, text), files


def slug(name: str) -> str:
    """Return a name as one of a file."""
    return re.sub(r"\W+", "-", name.replace("_", "-")).strip("-").lower()[:LONGEST].rstrip("-")


def plain(caption: str) -> str:
    """Return a caption as Markdown; the legend is in the drawing."""
    text = ENTRY.sub(r"\2", ONLY_LEGEND.sub("", caption))
    text = unescape(re.sub(r"<code>(.*?)</code>", r"`\1`", text))
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def alone(
    width: float, height: float, label: str, inner: str, legend: list[tuple[str, str]]
) -> str:
    """Return a drawing as a file, with its style and its legend."""
    parts, x, y = [], 16.0, height + 10
    for kind, text in legend:
        needs = SWATCH + 8 + LETTER * len(unescape(text)) + 18
        if x + needs > width and x > 16:
            x, y = 16.0, y + LINE
        parts.append(f'<polyline class="{kind}" points="{x:g},{y:g} {x + SWATCH:g},{y:g}"/>')
        parts.append(f'<text x="{x + SWATCH + 6:g}" y="{y + 4:g}">{text}</text>')
        x += needs
    high = y + 12 if legend else height
    inner = inner.replace("/><", "/>\n<")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" width="{width:g}" '
        f'height="{high:g}" viewBox="0 0 {width:g} {high:g}" role="img" aria-label="{label}">\n'
        f'<style>{STYLE}</style>\n<rect class="paper" width="{width:g}" height="{high:g}"/>\n'
        f"{inner}\n{''.join(parts)}\n</svg>\n"
    )
