"""The picture of a recorded run.

matplotlib is optional, so each function imports it when the function runs.
"""

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
from torchzero_clip.study.table import Column, Table, increases

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

# The colors of Okabe and Ito. Color-blind readers can distinguish them, and so can grey prints.
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
COLORS = (BLUE, ORANGE, GREEN, PURPLE)
STYLES = ("-", "--", "-.", ":")
GREY = "#777777"
WIDTH = 8.0
"""The width of the picture in inches. A panel uses at least 80 % of this width."""
TITLE_LENGTH = 76
"""The largest number of characters in a line of a title."""
SHORT_TITLE_LENGTH = 48
"""The largest number of characters in a line of a title, if a color scale is next to it."""
UNITS_NAMED = 12
"""The largest number of rows of a map that are labeled with a name."""
NAME_LENGTH = 24
"""The largest number of characters in the name of a row."""
LABEL_LENGTH = 16
"""The largest number of characters in the label of a logged value."""
KINDS = ("norm", "limit", "factor", "clipped")
"""The four metrics that each norm rule has."""
BINS = 60
"""The largest number of bins in the plot of the share of clipped steps."""
ROWS_PER_BIN = 8
"""The smallest number of rows in a bin."""
LARGEST_RATIO = 100.0
"""The end of the color scale of a map. Larger ratios of norm and limit have the same color."""

Key: TypeAlias = "dict[str, Artist]"
"""The lines and marks of a panel, by label. The legend below all panels shows them."""


def draw(
    table: Table, path: str | PathLike[str], title: str | None, caller: str = "Recorder"
) -> None:
    """Draw panels for each logged value, for each rule, and for the share of clipped steps.

    Args:
        table: The metrics of the run.
        path: The file for the picture.
        title: A title above the picture, or None.
        caller: The name of the class for error messages.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f'{caller}: plot requires matplotlib: pip install "torchzero-clip[plot]"',
            name="matplotlib",
        ) from None
    if not len(table):
        raise ValueError("Recorder: plot must be called after the first step")
    columns = table.columns
    rules: dict[str, list[Column]] = {}
    for name in columns:
        rule, _, metric = name.rpartition("/")
        of_rule = [f"{rule}/{kind}" for kind in KINDS]
        if metric == "norm" and all(column in columns for column in of_rule):
            rules[rule] = [columns[column] for column in of_rule]
    measured = {f"{rule}/{kind}" for rule in rules for kind in KINDS}
    logged = [n for n in columns if n not in measured and n.split("/")[-1] not in GUARD]

    panels: list[tuple[float, Callable[[Axes], Key]]] = []
    panels += [(1.1, partial(logged_panel, table, name)) for name in logged]
    for rule, parts in rules.items():
        panel = units_panel if parts[0].values.shape[1] > 1 else norm_panel
        panels.append((1.7, partial(panel, table, rule, parts)))
    if rules:
        clipped = {rule: parts[KINDS.index("clipped")] for rule, parts in rules.items()}
        panels.append((1.0, partial(shares_panel, table, clipped)))
    if not panels:
        raise ValueError(
            "Recorder: plot has no data, because no norm was recorded: add a transform that "
            "measures norms, such as ClipNorm(math.inf), or call Recorder.log"
        )

    heights = [height for height, _ in panels]
    figure = Figure(layout="constrained")
    grid = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    key: Key = {}
    for axes, (_, draw_panel) in zip(grid, panels, strict=True):
        axes.tick_params(which="both", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        key |= draw_panel(axes)
    edges = row_edges(table)
    grid[-1].set_xlim(edges[0], edges[-1])
    grid[-1].xaxis.set_major_locator(integer_ticks(9))
    per_point = f", {table.stride} a point" if table.stride > 1 else ""
    grid[-1].set_xlabel(f"step{per_point}", fontsize=9)
    if title:
        figure.suptitle(title, fontsize=10)
    lines = sum(axes.get_title(loc="left").count("\n") for axes in grid)
    lines += add_legend(figure, key)
    figure.set_size_inches(WIDTH, 0.9 + 1.25 * sum(heights) + 0.17 * lines)
    figure.savefig(path, dpi=200)


def add_legend(figure: Figure, key: Key) -> int:
    """Add one legend below all panels, and return the number of lines in the legend."""
    if not key:
        return 0
    names = [textwrap.fill(name, TITLE_LENGTH) for name in key]
    longest = max(len(line) for name in names for line in name.splitlines())
    columns = max(1, min(len(names), TITLE_LENGTH // (longest + 6)))
    figure.legend(
        [*key.values()], names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
    return math.ceil(sum(name.count("\n") + 1 for name in names) / columns)


def row_edges(table: Table) -> list[float]:
    """Return the left edge of each row on the step axis, then the right edge of the last row."""
    first = (int(table.steps[0]) - 1) // table.stride * table.stride
    return [first + 0.5, *(table.steps + 0.5).tolist()]


def integer_ticks(count: int) -> MaxNLocator:
    """Return a locator that places at most `count` ticks, all at round integers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)


def line(axes: Axes, table: Table, values: Tensor, known: Tensor, **style: Any) -> None:
    """Draw a line through the known values. The line has gaps where values are NaN or infinite.

    Args:
        axes: The panel.
        table: The metrics of the run.
        values: A value for each row.
        known: Whether the value of each row is known.
        **style: The style of the line, for matplotlib.
    """
    x = table.steps[known].tolist()
    y = values[known]
    good = torch.isfinite(y) & (y > 0) if axes.get_yscale() == "log" else torch.isfinite(y)
    y = y.masked_fill(~good, torch.nan)
    is_alone = good.clone()  # a point between two gaps, which a line alone would not show
    is_alone[1:] &= ~good[:-1]
    is_alone[:-1] &= ~good[1:]
    places = is_alone.nonzero().flatten().tolist()
    axes.plot(x, y.tolist(), marker="_", ms=3.5, mew=1.2, markevery=places, **style)


def add_title(axes: Axes, name: str, label: str, length: int = TITLE_LENGTH) -> None:
    """Set the label of the y axis and the title of a panel, wrapped after `length` characters."""
    axes.set_title(textwrap.fill(name, length), fontsize=9, loc="left", y=1.0, parse_math=False)
    axes.set_ylabel(label, fontsize=8, parse_math=False)


def shortened(name: str, length: int) -> str:
    """Return a name, without its middle if the name has more than about `length` characters."""
    half = length // 2
    return name if len(name) <= length else f"{name[: half - 1]}…{name[-half:]}"


def short_names(names: list[str]) -> list[str]:
    """Return shorter names of units, if any name is too long.

    The shorter names omit the modules with which all names begin, and the middle of a long name.
    """
    if max(map(len, names)) <= NAME_LENGTH:
        return names
    paths = [name.split(".") for name in names]
    folders = zip(*(path[:-1] for path in paths), strict=False)
    shared = len([*takewhile(lambda same: len({*same}) == 1, folders)])
    return [shortened(".".join(path[shared:]), NAME_LENGTH) for path in paths]


def logged_panel(table: Table, name: str, axes: Axes) -> Key:
    """Draw a logged value. A vector is drawn as its median, with a band from minimum to maximum."""
    column = table.columns[name]
    rows = column.read()
    known = (column.counts > 0).any(1)
    values = rows.nanmedian(1).values
    if column.vector:
        least = rows.nan_to_num(nan=math.inf).amin(1)[known].tolist()
        largest = rows.nan_to_num(nan=-math.inf).amax(1)[known].tolist()
        axes.fill_between(table.steps[known].tolist(), least, largest, color=BLUE, alpha=0.2, lw=0)
    good = values[torch.isfinite(values)]
    if len(good) and good.min() > 0 and good.max() > 100 * good.min():
        axes.set_yscale("log")
    line(axes, table, values, known, color=BLUE, lw=0.9)
    add_title(axes, name, shortened(name, LABEL_LENGTH))
    return add_marks(table, column, axes)


def norm_panel(table: Table, rule: str, parts: list[Column], axes: Axes) -> Key:
    """Draw a rule with one norm: the norm, the limit, and a dot in each clipped step.

    Args:
        table: The metrics of the run.
        rule: The name of the rule.
        parts: The columns of the rule, in the order of `KINDS`.
        axes: The panel.
    """
    norms, limits, _, clipped = parts
    norm = norms.read()[:, 0]
    known = norms.counts[:, 0] > 0
    axes.set_yscale("log")
    line(axes, table, norm, known, color=BLUE, lw=0.9, label="norm")
    for i, limit in enumerate(limits.read().unbind(1)):
        label = "_limit" if i else "limit"  # the legend leaves out labels that begin with _
        line(axes, table, limit, known, color="black", lw=1.2, label=label)
    is_clipped = torch.isfinite(norm) & (clipped.read() > 0).any(1)
    x = table.steps[is_clipped].tolist()
    y = norm[is_clipped].tolist()
    axes.plot(x, y, ls="", marker="o", ms=2.6, color=ORANGE, mew=0, label="clipped")
    add_title(axes, rule, "norm")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.16)  # so that the legend is above the lines
    axes.legend(loc="upper right", ncols=3, fontsize=7.5, frameon=False, borderaxespad=0.3)
    return add_marks(table, norms, axes)


def units_panel(table: Table, rule: str, parts: list[Column], axes: Axes) -> Key:
    """Draw a rule with many units as a map: the ratio of norm and limit for each unit and step.

    Args:
        table: The metrics of the run.
        rule: The name of the rule.
        parts: The columns of the rule, in the order of `KINDS`.
        axes: The panel.
    """
    from matplotlib import ticker
    from matplotlib.colors import LogNorm

    norm = parts[0].read()
    limit = parts[1].read()
    ratio = (norm / limit).masked_fill(~torch.isfinite(limit), torch.nan)
    distances = ratio[torch.isfinite(ratio) & (ratio > 0)].log().abs()
    largest = 2.0  # the ratio at the end of the color scale
    if len(distances):
        largest = distances.quantile(0.98).exp().clamp(2, LARGEST_RATIO).item()
    ratio = ratio.clamp(1 / largest, largest)
    rows = [0.5 + i for i in range(norm.shape[1] + 1)]
    axes.set_facecolor("#dddddd")
    picture = axes.pcolormesh(
        row_edges(table),
        rows,
        ratio.T.tolist(),
        norm=LogNorm(1 / largest, largest),
        cmap="PuOr_r",
        rasterized=True,
    )
    axes.invert_yaxis()
    names = short_names([*parts[0].units.values()])
    named = range(0, len(names), math.ceil(len(names) / UNITS_NAMED))
    axes.set_yticks([i + 1 for i in named], [names[i] for i in named])
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
    ticks = (1.0,) if largest >= 10 else (1.0, 2.0, 5.0)
    scale.xaxis.set_major_locator(ticker.LogLocator(subs=ticks))
    scale.xaxis.set_major_formatter("{x:g}")
    scale.xaxis.set_minor_formatter(ticker.NullFormatter())
    add_title(axes, rule, "unit", SHORT_TITLE_LENGTH)
    axes.yaxis.label.set(rotation=0, ha="right", va="bottom")
    axes.yaxis.set_label_coords(-0.01, 1.01)  # above the names, so that they have more width
    return add_marks(table, parts[0], axes)


def shares_panel(table: Table, clipped: Mapping[str, Column], axes: Axes) -> Key:
    """Draw the share of steps and the share of units that each rule clipped.

    Args:
        table: The metrics of the run.
        clipped: For each rule, the column "clipped".
        axes: The panel.
    """
    from matplotlib import ticker

    edges = row_edges(table)
    count = len(table)
    bins = max(1, min(BINS, count // ROWS_PER_BIN))
    bin_of_row = torch.arange(count) * bins // count
    starts = [edges[int((bin_of_row == i).nonzero()[0])] for i in range(bins)]
    key: Key = {}
    for i, (rule, column) in enumerate(clipped.items()):
        total = torch.zeros(2, bins, dtype=torch.float64)
        total[0].index_add_(0, bin_of_row, column.values.sum(1))
        total[1].index_add_(0, bin_of_row, column.counts.sum(1).double())
        color = COLORS[i % 4]
        style = STYLES[(i + i // 4) % 4]  # the first sixteen rules differ in color or in style
        share: Tensor = 100 * total[0] / total[1]
        look: dict[str, Any] = {"color": color, "ls": style, "lw": 1.2, "baseline": None}
        key[rule] = axes.stairs(share.tolist(), [*starts, edges[-1]], **look)
        if len(clipped) == 1:
            axes.stairs(share.tolist(), [*starts, edges[-1]], color=color, fill=True, alpha=0.25)
    axes.set_ylim(-3, 103)
    axes.yaxis.set_major_locator(ticker.FixedLocator([0, 50, 100]))
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(decimals=0))
    add_title(axes, "clipped", "share")
    return key if len(clipped) > 1 else {}


def add_marks(table: Table, column: Column, axes: Axes) -> Key:
    """Mark steps at the top of a panel: NaN or infinite values, skipped steps, and rollbacks.

    Args:
        table: The metrics of the run.
        column: The values of the panel.
        axes: The panel.
    """
    broken = (column.counts > 0) & ~torch.isfinite(column.values)
    marks: list[tuple[str, str, str, Tensor]] = [("NaN or infinite", "x", ORANGE, broken.any(1))]
    for name, guard in table.columns.items():
        if name == "recover/back":
            marks.append(("after a rollback", "^", PURPLE, guard.counts[:, 0] > 0))
        if name.endswith("/skipped"):
            marks.append(("skipped", "v", GREY, increases(guard.read()[:, 0]) > 0))
    key: Key = {}
    for label, marker, color, is_marked in marks:
        x = table.steps[is_marked].tolist()
        if x:
            (key[label],) = axes.plot(
                x,
                [1.0] * len(x),
                transform=axes.get_xaxis_transform(),
                ls="",
                marker=marker,
                ms=4,
                color=color,
                label=label,
                clip_on=False,
            )
    return key
