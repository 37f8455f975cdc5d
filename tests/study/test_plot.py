"""The layout of pictures of runs: panels are wide, nothing lies on anything else."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch

from tests.helpers import some
from torchzero_clip import (
    LR,
    AdaGC,
    AdaptiveClip,
    AutoClip,
    ClipNorm,
    ClipNormGrowth,
    Guard,
    Modular,
    NormRule,
    P2Quantile,
    Quantile,
    Recorder,
    Scale,
    SoftClip,
    Trace,
    Watch,
    ZClip,
    simulate,
)

RULES: list[NormRule] = [
    AdaptiveClip(P2Quantile(0.9), dim=None, name="the criterion of every tensor by itself"),
    ClipNormGrowth(mul=1.2, dim="global"),
    ZClip(max_norm=None, mode="percentile", dim="layer"),
    AdaptiveClip(Quantile(0.9, window=32)),
    AutoClip("percentile", 90.0),
    SoftClip(3.0, dim="global"),
    AdaGC(warmup_steps=10),
    ClipNorm(3.0, dim="layer"),
]
NAMES = [f"transformer.h.{i}.attn.query_key_value.weight" for i in range(24)]


def trace(units: int) -> Trace:
    """Norms of 150 steps with spikes a hundred times as long, the first and last among them."""
    norms = torch.rand(150, units) + 0.5
    norms[[0, 40, 80, 149]] *= 100
    return Trace(norms, NAMES[:units])


def measure(figure: Any) -> tuple[Any, list[Any], list[tuple[str, Any]]]:
    """The whole picture, its panels, and all that is written in it, as boxes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(200)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer: Any = canvas.get_renderer()
    written: list[Any] = [] if figure._suptitle is None else [figure._suptitle]
    written += figure.legends
    for axes in figure.axes:
        for each in (axes, *axes.child_axes):
            written += [each.xaxis.label, each.yaxis.label, each._left_title]
            written += numbers(each.xaxis) + numbers(each.yaxis)
        written += [axes.get_legend()] if axes.get_legend() else []
    boxes = [(repr(artist), artist.get_window_extent(renderer)) for artist in written]
    shown = [(name, box) for name, box in boxes if box.width > 0 and box.height > 0]
    return figure.bbox, [axes.get_window_extent(renderer) for axes in figure.axes], shown


def numbers(axis: Any) -> list[Any]:
    """What is written beside the ticks that can be seen."""
    low, high = sorted(axis.get_view_interval())
    seen = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for tick in seen for text in (tick.label1, tick.label2) if text.get_visible()]


def meet(one: Any, other: Any) -> bool:
    """Whether two boxes share more than an edge, to half a dot."""
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    return wide > 0.5 and min(one.y1, other.y1) - max(one.y0, other.y0) > 0.5


def check(figure: Any) -> None:
    page, panels, written = measure(figure)
    for panel in panels:
        assert panel.width >= 0.8 * page.width
    for name, box in written:
        assert page.x0 <= box.x0 <= box.x1 <= page.x1, f"{name} leaves the picture"
        assert page.y0 <= box.y0 <= box.y1 <= page.y1, f"{name} leaves the picture"
        if not name.startswith("<matplotlib.legend.Legend"):
            assert not any(meet(box, panel) for panel in panels), f"{name} lies on a panel"
    for (name, box), (second, other) in combinations(written, 2):
        assert not meet(box, other), f"{name} lies on {second}"
    for axes in figure.axes:
        assert axes.get_ylabel()
        legend = axes.get_legend()
        for line in axes.lines if legend else []:
            hidden = legend.get_window_extent().padded(-2)
            points = axes.transData.transform(line.get_xydata())
            assert not any(hidden.contains(*point) for point in points), f"a legend hides {line}"
    assert figure.axes[-1].get_xlabel().startswith("step")


@pytest.mark.parametrize(
    ("count", "units"),
    [(1, 24), *some([(3, 24), (5, 1), *[(n, 24) for n in (2, *range(4, 9))]], one_in=9)],
)
def test_panels_of_a_simulation_are_wide_and_nothing_lies_on_anything_else(
    count: int, units: int, figure: list[Any], tmp_path: Path
) -> None:
    simulate(trace(units), *RULES[:count]).plot(
        tmp_path / "simulate.png", "What rules would have done"
    )
    check(figure[0])


def test_panels_of_a_recorded_run_are_wide_and_nothing_lies_on_anything_else(
    figure: list[Any], tmp_path: Path
) -> None:
    params = [(name, torch.nn.Parameter(torch.zeros(3))) for name in NAMES]
    rules = [ClipNorm(1.0), ClipNorm(3.0, dim="global", name="the norm of all of the model")]
    opt = Modular(params, Guard(), *rules, Scale(0.0))
    recorder = Recorder(opt)
    for step in range(60):
        for _, p in params:
            p.grad = torch.full((3,), float("nan") if step == 30 else 1e5 ** (step / 60))
        recorder.log(loss=1e6 + step, **{"the mean reward of an episode": -step})
        opt.step()
    recorder.plot(tmp_path / "run.png", title="A run")
    check(figure[0])


@pytest.mark.slow
def test_eight_rules_have_lines_that_differ(figure: list[Any], tmp_path: Path) -> None:
    simulate(trace(1), *RULES).plot(tmp_path / "simulate.png")
    looks = {(p.get_edgecolor(), p.get_linestyle()) for p in figure[0].axes[-1].patches}
    assert len(looks) == len(RULES)


def ticks(axes: Any) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize(
    ("names", "shown"),
    some(
        [
            (NAMES[:2], ["0.attn.quer…value.weight", "1.attn.quer…value.weight"]),
            (["0.weight", "0.bias"], ["0.weight", "0.bias"]),
            (["encoder.layers.10.mlp.weight", "encoder.bias"], ["layers.10.mlp.weight", "bias"]),
            (["net.layers.0.weight", "net.head.bias"], ["net.layers.0.weight", "net.head.bias"]),
        ],
        one_in=2,
    ),
)
def test_the_rows_of_a_map_have_the_names_of_the_parameters(
    names: list[str], shown: list[str], figure: list[Any], tmp_path: Path
) -> None:
    params = [(name, torch.nn.Parameter(torch.zeros(3))) for name in names]
    opt = Modular(params, ClipNorm(1.0), Scale(0.0))
    recorder = Recorder(opt)
    for _, p in params:
        p.grad = torch.ones(3)
    opt.step()
    recorder.plot(tmp_path / "run.png")
    simulate(Trace.of(recorder), ClipNorm(1.0)).plot(tmp_path / "simulate.png")
    for drawn in figure:
        assert ticks(drawn.axes[0]) == shown


def test_a_simulation_of_layers_has_their_names(figure: list[Any], tmp_path: Path) -> None:
    names = ["0.weight", "0.bias", "2.weight"]
    simulate(Trace(torch.rand(9, 3), names), ClipNorm(1.0, dim="layer")).plot(
        tmp_path / "simulate.png"
    )
    assert ticks(figure[0].axes[0]) == ["0", "2"]


def test_of_many_rows_some_have_names(figure: list[Any], tmp_path: Path) -> None:
    names = [str(i) for i in range(100)]
    simulate(Trace(torch.rand(9, 100), names), ClipNorm(1.0)).plot(tmp_path / "simulate.png")
    assert ticks(figure[0].axes[0]) == names[::9]


def test_units_that_were_watched_have_a_band_and_ways_back_a_mark(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    opt = Modular(model.named_parameters(), ClipNorm(1.0, dim="global"), LR(0.1), Watch("layer"))
    recorder = Recorder(opt)
    for step in range(12):
        model(torch.randn(4, 3)).sum().backward()
        if step == 6:
            recorder.log(**{"recover/back": 5.0, "recover/left_out": 3.0})
        opt.step()
    with mpl.rc_context({"svg.fonttype": "none"}):
        recorder.plot(tmp_path / "run.svg")
    text = (tmp_path / "run.svg").read_text()
    assert {name in text for name in ("Watch/ratio", "recover/back", "after a rollback")} == {True}
    assert text.count("FillBetweenPolyCollection") + text.count("PolyCollection") >= 3
