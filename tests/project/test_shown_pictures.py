"""Pictures in Chromium: nothing is cut without a hint, and no line is hidden by another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.published.charts import Panel, figure
from scripts.browser import Browser
from scripts.pages import drawings
from tests.helpers import ROOT

pytestmark = pytest.mark.browser
ASSETS, LAB = ROOT / "docs" / "assets", ROOT / "torchzero_clip" / "study" / "lab"
COLORS = (
    "--md-default-fg-color: #222; --md-default-fg-color--light: #666; "
    "--md-default-fg-color--lighter: #bbb; --md-default-bg-color: #fff; --md-code-bg-color: #eee;"
)
WIDTHS = [390, 1280]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


def show(browser: Browser, folder: Path, width: int, body: str) -> None:
    """Open a page with the style of the documentation, as wide as a screen."""
    style = (ASSETS / "extra.css").read_text()
    base = f"html {{font-size: 125%}} :root {{{COLORS}}} pre > code {{display: block; {AUTO}}}"
    head = f'<meta name="viewport" content="width=device-width"><style>{base}{style}</style>'
    page = f'<!doctype html>{head}<body class="md-typeset">{body}'
    (folder / "page.html").write_text(page, encoding="utf-8")
    browser.resize(width, 900)
    browser.open((folder / "page.html").as_uri())
    browser.wait("document.readyState === 'complete' && document.body.children.length")


AUTO = "overflow: auto; font: 13px monospace"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_long_line_of_output_stays_in_its_frame_or_has_a_shadow(browser, tmp_path, width):
    line = "# → the end      20      16   " + "writes state and parameters: " * 5
    code = f'<pre><code>print()\n<span class="c1">{line}</span></code></pre>'
    show(browser, tmp_path, width, f'<div class="highlight">{code}</div>')
    one = "document.querySelector('code')"
    cut = browser.value(f"{one}.scrollWidth > {one}.clientWidth")
    attached = browser.value(f"getComputedStyle({one}).backgroundAttachment")
    assert cut == (width < 600)
    assert attached.count("local") == attached.count("scroll") - 1 == 2


def test_of_two_lines_with_the_same_values_both_show(browser, tmp_path):
    points = [(x, [1.0]) for x in range(4)]
    names = ["Adam", "gradient descent", "sign", "clipped", "normalised"]
    drawn = figure([Panel("losses", "x", "y", dict.fromkeys(names, points))], "")
    _, files = drawings.stored(drawn, "two lines", ROOT / "docs" / "papers.md")
    (text,) = files.values()
    show(browser, tmp_path, 1280, text)
    style = "getComputedStyle(document.querySelector('polyline.s{}')).strokeDasharray"
    assert browser.value(style.format(3)) == "none"
    assert browser.value(style.format(4)) != "none"


def test_a_rule_with_limits_in_few_steps_has_a_line_in_the_lab(browser, tmp_path):
    script = (LAB / "picture.js").read_text()
    show(browser, tmp_path, 1280, f'<svg class="run"></svg><script>{script}</script>')
    drawn = browser.value(
        """(() => {
          const [svg, none] = [document.querySelector("svg"), Infinity], norms = [1, 9, 1, 1, 9, 1];
          const limit = [none, 2, none, NaN, 3, none], clipped = [0, 1, 0, 0, 1, 0];
          const rule = { look: 0, label: "1", limit, clipped, left: norms, chosen: true };
          const run = { steps: 6, bad: new Set(), norms, numbers: [1, 2, 3, 4, 5, 6] };
          labPicture(svg, run, [rule], { from: 0, to: 6 });
          return svg.querySelector("path.limit").getAttribute("d");
        })()"""
    )
    assert drawn.count("M") == 1
    assert drawn.count("L") == 1
