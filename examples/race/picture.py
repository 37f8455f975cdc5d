"""The picture: the loss, the norm and its threshold, and the share of clipped steps per chain."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from html import escape
from math import isfinite
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from race.chains import spell
from race.console import headline
from race.data import CORRUPTED
from race.training import Result
from torchzero_clip import Chain, NormRule

# name: (in light, in dark). Blue, orange and purple are Okabe and Ito's, who chose them for eyes
# that do not tell red from green.
COLOURS = {
    "paper": ("#fffffe", "#1b2026"),
    "ink": ("#1f2328", "#e8eaed"),
    "muted": ("#5c6670", "#a3adb8"),
    "others": ("#c3c8ce", "#4b545e"),
    "norm": ("#0072b2", "#56b4e9"),
    "limit": ("#d55e00", "#f0a030"),
    "corrupted": ("#cc79a7", "#d98cb8"),
}
PAPER, INK, MUTED, OTHERS, NORM, LIMIT, BAD = (light for light, _ in COLOURS.values())
STYLE = {
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": PAPER,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "race",  # the same race gives the same file
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}
TITLES = (
    "Loss on held-out text (grey: the others)",
    "Norm of the gradient, and the limit",
    "Share clipped, mean of 50 steps",
)
LIMITS = "Norm of the gradient, and all tensors' limits as one"
RUNNING = 50  # steps that the share is averaged over


def save_png(results: list[Result], path: Path) -> None:
    """Draw all chains in one picture, one row for each chain."""
    with mpl.rc_context(STYLE):
        rows = len(results)
        figure = Figure(figsize=(12, 1.5 + 2 * rows), dpi=120)
        top, *bands = figure.subfigures(rows + 1, 1, height_ratios=[0.45] + [1] * rows)
        top.text(0.012, 0.66, headline(results), size=17, weight="bold")
        line = (
            f"Purple lines are corrupted batches, one in {1 / CORRUPTED:.0f}: their letters are "
            "noise and their loss is 10 to 1000 times too large."
        )
        top.text(0.012, 0.3, line, size=10, color=MUTED)
        for band, result in zip(bands, results, strict=True):
            width = {"width_ratios": [1, 1, 0.7]}
            panels = band.subplots(1, 3, gridspec_kw=width)
            draw(panels, result, results)
            first, last = result is results[0], result is results[-1]
            for axes, title in zip(panels, titles(result), strict=True):
                axes.set_title(title if first or title == LIMITS else "", color=MUTED)
                axes.set_xlabel("step" if last else "")
            title = f"{shortened(result.name, 24)}:  {verdict(result)}"
            chain = shortened(spell(result.chain), 92)
            right = {"ha": "right", "va": "top", "size": 8, "color": MUTED, "family": "monospace"}
            band.suptitle(title, x=0.012, ha="left", size=11, weight="bold", parse_math=False)
            band.text(0.988, 0.985, chain, parse_math=False, **right)
            if first:
                panels[1].legend(loc="upper left", ncols=3)
        figure.savefig(path, metadata={"Software": None})


def svg(result: Result, results: list[Result]) -> str:
    """Draw one chain for a page, in the colors of the reader's light or dark theme."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.9, 5.2))
        panels = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [1, 1, 0.55]})
        draw(panels, result, results)
        for axes, title in zip(panels, titles(result), strict=True):
            axes.set_title(title)
        panels[-1].set_xlabel("step")
        panels[1].legend(loc="upper left", ncols=3, columnspacing=1, handlelength=1.2)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    return themed(file.getvalue(), f"Loss, norm and share clipped of {result.name}")


def themed(text: str, label: str) -> str:
    """Return a matplotlib figure for a page, in the colors of its theme, to a tenth of a point."""
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[A-Za-z.]\w*_\d+"', "", text)  # the same in every picture of the page
    for name, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{name})")
    text = re.sub(r"(?<=[ \"ML])-?\d+\.\d+(?=[ \"\n])", lambda m: f"{float(m[0]):.1f}", text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    begin = f'<svg role="img" class="race" aria-label="{escape(label)}"'
    return text[text.index("<svg") :].replace("<svg", begin, 1).replace("*{", ".race *{")


def variables(theme: int) -> str:
    """Return the colors of the pictures in the light theme, 0, or the dark theme, 1."""
    return " ".join(f"--{name}: {pair[theme]};" for name, pair in COLOURS.items())


def draw(panels: list[Axes], result: Result, results: list[Result]) -> None:
    """Draw the loss, the norm and the share of one chain, on the scales of all chains."""
    there = [x for step in result.corrupted for x in (step, step, math.nan)]
    heights = [0.0, 1.0, math.nan] * len(result.corrupted)
    bad = {"color": BAD, "lw": 0.8, "alpha": 0.55, "zorder": 0, "label": "corrupted batch"}
    for axes in panels:
        axes.plot(there, heights, transform=axes.get_xaxis_transform(), **bad)
        axes.set_xlim(0, len(result.norm))
    losses, norms, shares = panels
    for axes, name in zip(panels, ("loss", "norm", "share"), strict=True):
        axes.set_ylabel(name)
    steps = range(1, len(result.norm) + 1)

    for other in results:
        mine = other is result
        losses.plot(
            *zip(*other.test_losses.items(), strict=True),
            color=INK if mine else OTHERS,
            lw=1.8 if mine else 0.8,
            zorder=3 if mine else 1,
        )
    start = result.test_losses[0]
    seen = [loss for r in results for loss in r.test_losses.values() if isfinite(loss)]
    losses.set_ylim(0, min(max(seen), 2 * start) * 1.05)

    norms.plot(steps, result.norm, color=NORM, lw=0.8, label="norm")
    alone = [i for i, near in enumerate(neighbours(result.limit)) if not any(map(isfinite, near))]
    norms.plot(
        steps, result.limit, color=LIMIT, lw=1.6, marker=".", ms=4, markevery=alone, label="limit"
    )
    seen = [norm for r in results for norm in r.norm if 0 < norm < math.inf]
    norms.set_yscale("log")
    norms.set_ylim(min(seen) / 2, max(seen) * 10)

    shares.set_ylim(0, 1.02)
    shares.yaxis.set_major_formatter("{x:.0%}")
    if result.clips:
        shares.fill_between(steps, running_mean(result.share), color=LIMIT, alpha=0.6, lw=0)
    else:
        place = {"ha": "center", "va": "center", "color": MUTED}
        shares.text(0.5, 0.5, "nothing is clipped", transform=shares.transAxes, **place)


def titles(result: Result) -> tuple[str, ...]:
    """Return the titles of the panels of one chain."""
    loss, norm, share = TITLES
    return loss, LIMITS if has_limit_per_tensor(result.chain) else norm, share


def has_limit_per_tensor(chain: Chain) -> bool:
    """Return whether the first rule with a threshold has one for each tensor."""
    rules = [link for link in chain.walk() if isinstance(link, NormRule)]
    return bool(rules) and rules[0].scope is None


def verdict(result: Result) -> str:
    if not isfinite(result.final_loss):
        return "✕ diverged"
    mark = "✓ survived" if result.survived else "✕ lost"
    return f"{mark}, final loss {result.final_loss:.3f}"


def neighbours(values: list[float]) -> Iterator[tuple[float, float]]:
    """Return the parts of a text before and after each value."""
    padded = [math.nan, *values, math.nan]
    return zip(padded, padded[2:], strict=False)


def running_mean(values: list[float]) -> list[float]:
    windows = (values[max(end - RUNNING, 0) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
