"""The picture of a recorded run. matplotlib is imported where it is used: it may be missing."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.floats import GUARD

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from torchzero_clip.study.table import Column, Table

# Okabe and Ito's colours: told apart by colour-blind readers, and by their grey in print
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
COLOURS, STYLES = (BLUE, ORANGE, GREEN, PURPLE), ("-", "--", "-.", ":")
GREY = "#777777"
WIDTH = 8.0  # of the picture, in inches; a panel has at least 0.8 of it
LETTERS, BESIDE = 76, 48  # in a line of a title: in all of its width, and beside a scale of colours
NAMED, LONGEST = 12, 24  # rows of a map that have names, and the letters of a name
UPRIGHT = 16  # letters beside a panel of something that was logged
KINDS = ("norm", "limit", "factor", "clipped")
BINS = 60  # at most, that the share of clipped steps is counted in, of 8 rows each at least
FURTHEST = 100.0  # at most, the ratio of norm and limit where the colours of a map end

Key: TypeAlias = "dict[str, Artist]"
"""What the lines and marks of a panel mean, for the legend below all panels."""


def draw(
    table: Table, path: str | PathLike[str], title: str | None, caller: str = "Recorder"
) -> None:
    """Panels one above the other: what was logged, each rule, and how often it clipped."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f'{caller}: plot needs matplotlib: pip install "torchzero-clip[plot]"',
            name="matplotlib",
        ) from None
    if not len(table):
        raise ValueError("Recorder: there is nothing to plot before the first step")
    columns = table.columns
    rules = {
        name[: -len("/norm")]: [columns[name[: -len("norm")] + kind] for kind in KINDS]
        for name in columns
        if all(name[: -len("norm")] + kind in columns for kind in KINDS)
    }
    measured = {f"{rule}/{kind}" for rule in rules for kind in KINDS}
    logged = [n for n in columns if n not in measured and n.split("/")[-1] not in GUARD]

    panels: list[tuple[float, Callable[[Axes], Key]]] = []
    panels += [(1.1, partial(curve, table, name)) for name in logged]
    for rule, parts in rules.items():
        many = parts[0].values.shape[1] > 1
        panels.append((1.7, partial(units if many else one, table, rule, parts)))
    if rules:
        panels.append((1.0, partial(shares, table, {r: parts[3] for r, parts in rules.items()})))
    if not panels:
        raise ValueError("Recorder: nothing was measured or logged, so there is nothing to plot")

    heights = [height for height, _ in panels]
    figure = Figure(layout="constrained")
    grid = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    key: Key = {}
    for axes, (_, panel) in zip(grid, panels, strict=True):
        axes.tick_params(which="both", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        key |= panel(axes)
    edges = ends(table)
    grid[-1].set_xlim(edges[0], edges[-1])
    grid[-1].xaxis.set_major_locator(whole(9))
    each = f", {table.stride} a point" if table.stride > 1 else ""
    grid[-1].set_xlabel(f"step{each}", fontsize=9)
    if title:
        figure.suptitle(title, fontsize=10)
    lines = sum(axes.get_title(loc="left").count("\n") for axes in grid) + below(figure, key)
    figure.set_size_inches(WIDTH, 0.9 + 1.25 * sum(heights) + 0.17 * lines)
    figure.savefig(path, dpi=200)


def below(figure: Figure, key: Key) -> int:
    """The legend of all panels, in as many columns as there is room for; how many lines it has."""
    if not key:
        return 0
    names = [textwrap.fill(name, LETTERS) for name in key]
    longest = max(len(line) for name in names for line in name.splitlines())
    columns = max(1, min(len(names), LETTERS // (longest + 6)))
    figure.legend(
        [*key.values()], names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
    return math.ceil(sum(name.count("\n") + 1 for name in names) / columns)


def ends(table: Table) -> list[float]:
    """Where each row begins and the last ends, half a step aside."""
    first = (int(table.steps[0]) - 1) // table.stride * table.stride
    return [first + 0.5, *(table.steps + 0.5).tolist()]


def whole(count: int) -> MaxNLocator:
    """Ticks at round whole numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)


def line(axes: Axes, table: Table, values: Tensor, known: Tensor, **style: Any) -> None:
    """A line through the rows where something is known; it breaks where that is no number."""
    x, y = table.steps[known].tolist(), values[known]
    good = torch.isfinite(y) & (y > 0) if axes.get_yscale() == "log" else torch.isfinite(y)
    y = y.masked_fill(~good, torch.nan)
    alone = good.clone()
    alone[1:] &= ~good[:-1]
    alone[:-1] &= ~good[1:]
    where = alone.nonzero().flatten().tolist()
    axes.plot(x, y.tolist(), marker="_", ms=3.5, mew=1.2, markevery=where, **style)


def entitle(axes: Axes, name: str, label: str, letters: int = LETTERS) -> None:
    """The title of a panel, in lines of so many letters, and the name of its upright axis."""
    axes.set_title(textwrap.fill(name, letters), fontsize=9, loc="left", y=1.0, parse_math=False)
    axes.set_ylabel(label, fontsize=8, parse_math=False)


def shortened(name: str, letters: int) -> str:
    """A name, less its middle where it is too long."""
    half = letters // 2
    return name if len(name) <= letters else f"{name[: half - 1]}…{name[-half:]}"


def apart(names: list[str]) -> list[str]:
    """Names of units, less what all of them begin with and their middles where one is too long."""
    if max(map(len, names)) <= LONGEST:
        return names
    paths = [name.split(".") for name in names]
    folders = zip(*(path[:-1] for path in paths), strict=False)
    shared = len([*takewhile(lambda same: len({*same}) == 1, folders)])
    return [shortened(".".join(path[shared:]), LONGEST) for path in paths]


def curve(table: Table, name: str, axes: Axes) -> Key:
    """Something that was logged."""
    column = table.columns[name]
    rows, known = column.read(), (column.counts > 0).any(1)
    values = rows.nanmedian(1).values
    if column.vector:  # of units: the median, and as a band all of them
        ends = [rows.nan_to_num(nan=x).aminmax(dim=1) for x in (math.inf, -math.inf)]
        least, most = ends[0].min[known].tolist(), ends[1].max[known].tolist()
        axes.fill_between(table.steps[known].tolist(), least, most, color=BLUE, alpha=0.2, lw=0)
    good = values[torch.isfinite(values)]
    if len(good) and good.min() > 0 and good.max() > 100 * good.min():
        axes.set_yscale("log")
    line(axes, table, values, known, color=BLUE, lw=0.9)
    entitle(axes, name, shortened(name, UPRIGHT))
    return mark_trouble(table, column, axes)


def one(table: Table, rule: str, parts: list[Column], axes: Axes) -> Key:
    """A rule with one norm: the norm, its limit, and where it clipped."""
    norm, limits, clipped = parts[0].read()[:, 0], parts[1].read(), parts[3].read()
    known = parts[0].counts[:, 0] > 0
    axes.set_yscale("log")
    line(axes, table, norm, known, color=BLUE, lw=0.9, label="norm")
    for i, limit in enumerate(limits.unbind(1)):
        label = "_limit" if i else "limit"
        line(axes, table, limit, known, color="black", lw=1.2, label=label)
    cut = torch.isfinite(norm) & (clipped > 0).any(1)
    x, y = table.steps[cut].tolist(), norm[cut].tolist()
    axes.plot(x, y, ls="", marker="o", ms=2.6, color=ORANGE, mew=0, label="clipped")
    entitle(axes, rule, "norm")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.16)  # room for the legend, which hides nothing
    axes.legend(loc="upper right", ncols=3, fontsize=7.5, frameon=False, borderaxespad=0.3)
    return mark_trouble(table, parts[0], axes)


def units(table: Table, rule: str, parts: list[Column], axes: Axes) -> Key:
    """A rule with many: a map of how far each unit's norm is above or below its limit."""
    from matplotlib import ticker
    from matplotlib.colors import LogNorm

    norm, limit = parts[0].read(), parts[1].read()
    ratio = (norm / limit).masked_fill(~torch.isfinite(limit), torch.nan)
    far = ratio[torch.isfinite(ratio) & (ratio > 0)].log().abs()
    furthest = far.quantile(0.98).exp().clamp(2, FURTHEST).item() if len(far) else 2.0
    ratio = ratio.clamp(1 / furthest, furthest)
    rows = [0.5 + i for i in range(norm.shape[1] + 1)]
    axes.set_facecolor("#dddddd")
    picture = axes.pcolormesh(
        ends(table),
        rows,
        ratio.T.tolist(),
        norm=LogNorm(1 / furthest, furthest),
        cmap="PuOr_r",
        rasterized=True,
    )
    axes.invert_yaxis()
    names = apart([*parts[0].units.values()])
    every = range(0, len(names), math.ceil(len(names) / NAMED))
    axes.set_yticks([i + 1 for i in every], [names[i] for i in every])
    axes.tick_params("y", labelsize=6.5)
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    scale = axes.inset_axes((0.76, 1.04, 0.24, 0.05))
    axes.figure.colorbar(
        picture, cax=scale, orientation="horizontal", ticklocation="top", extend="both"
    )
    scale.set_ylabel("norm / limit", fontsize=8, rotation=0, ha="right", va="center")
    scale.yaxis.set_label_coords(-0.08, 0.5)
    scale.tick_params(labelsize=7)
    scale.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0,) if furthest >= 10 else (1, 2, 5)))
    scale.xaxis.set_major_formatter("{x:g}")
    scale.xaxis.set_minor_formatter(ticker.NullFormatter())
    entitle(axes, rule, "unit", BESIDE)
    axes.yaxis.label.set(rotation=0, ha="right", va="bottom")
    axes.yaxis.set_label_coords(-0.01, 1.01)  # above the names, to which it leaves the width
    return mark_trouble(table, parts[0], axes)


def shares(table: Table, clipped: Mapping[str, Column], axes: Axes) -> Key:
    """In how many of the steps, and for how many of the units, each rule clipped."""
    from matplotlib import ticker

    edges, count = ends(table), len(table)
    bins = max(1, min(BINS, count // 8))
    place = torch.arange(count) * bins // count
    starts = [edges[int((place == i).nonzero()[0])] for i in range(bins)]
    key: Key = {}
    for i, (rule, column) in enumerate(clipped.items()):
        total = torch.zeros(2, bins, dtype=torch.float64)
        total[0].index_add_(0, place, column.values.sum(1))
        total[1].index_add_(0, place, column.counts.sum(1).double())
        colour, style = COLOURS[i % 4], STYLES[(i + i // 4) % 4]  # sixteen that differ
        share: Tensor = 100 * total[0] / total[1]
        look: dict[str, Any] = {"color": colour, "ls": style, "lw": 1.2, "baseline": None}
        key[rule] = axes.stairs(share.tolist(), [*starts, edges[-1]], **look)
        if len(clipped) == 1:
            axes.stairs(share.tolist(), [*starts, edges[-1]], color=colour, fill=True, alpha=0.25)
    axes.set_ylim(-3, 103)
    axes.yaxis.set_major_locator(ticker.FixedLocator([0, 50, 100]))
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(decimals=0))
    entitle(axes, "clipped", "share")
    return key if len(clipped) > 1 else {}


def mark_trouble(table: Table, column: Column, axes: Axes) -> Key:
    """Crosses at the top where a value was no finite number, and ticks where a guard skipped."""
    broken = (column.counts > 0) & ~torch.isfinite(column.values)
    marks: list[tuple[str, str, str, Tensor]] = [("NaN or infinite", "x", ORANGE, broken.any(1))]
    for name, guard in table.columns.items():
        if name == "recover/back":
            marks.append(("behind a way back", "^", PURPLE, guard.counts[:, 0] > 0))
        if name.endswith("/skipped"):
            total = guard.read()[:, 0].nan_to_num(0).cummax(0).values
            before = torch.cat([total.new_zeros(1), total[:-1]])
            marks.append(("skipped", "v", GREY, total > before))
    key: Key = {}
    for label, marker, colour, where in marks:
        x = table.steps[where].tolist()
        if x:
            (key[label],) = axes.plot(
                x,
                [1.0] * len(x),
                transform=axes.get_xaxis_transform(),
                ls="",
                marker=marker,
                ms=4,
                color=colour,
                label=label,
                clip_on=False,
            )
    return key
