"""The pictures of the pages: they name their axes, and show the matrices of a layout."""

import re
from typing import Any

import pytest
import torch

from benchmarks.atlas.report import picture as of_the_atlas
from benchmarks.atlas.runs import Curve
from benchmarks.guide.picture import picture as of_the_guide
from benchmarks.guide.report import CASES, results
from benchmarks.rows import read
from benchmarks.traces.judge import Line
from benchmarks.traces.report import picture as of_traces
from scripts.pages import layouts
from scripts.pages.kinds import RUNS
from tests.helpers import ROOT
from torchzero_clip import logical_matrices

FOUND = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("kind", "rule", "lower", "upright"),
    [
        ("picture", "ClipNorm(1.0)", "step", "norm"),
        ("curve", "Sign()", "element before", "element after"),
        ("norm curve", "ClipNorm(1.0)", "norm before", "norm after"),
        ("weights", "WeightEMA(0.9)", "step", "weight"),
        ("rows", "EqualRows()", "row", "norm"),
        ("singular values", "ClipSpectral(1.0)", "from the largest", "singular value"),
    ],
)
def test_a_picture_of_a_rule_names_its_axes(kind: str, rule: str, lower: str, upright: str) -> None:
    assert axes_of(RUNS[kind](rule)) == [lower, upright]


def test_the_pictures_of_results_name_their_axes() -> None:
    curves = read(FOUND / "atlas_curves.csv", Curve)
    lines = read(FOUND / "simulate.csv", Line)
    assert axes_of(of_the_atlas(curves, "ClipNorm") or "") == ["step", "size of the step", "step"]
    assert axes_of(of_traces(lines, "ppo")) == ["false alarms, %", "missed, %"]
    for trouble in CASES:
        drawn = of_the_guide(results(), trouble)
        assert axes_of(drawn) == ["difference in loss"]
        assert ">method</text>" in drawn


def axes_of(drawn: str) -> list[str]:
    """What stands at the foot of a picture, and upright at its left edge, in their order."""
    height = float(re.findall(r'viewBox="0 0 \S+ (\S+)"', drawn)[0])
    texts = re.findall(
        r'<text x="(\S+)" y="(\S+)"[^>]*?( transform="rotate.*?)?>(.*?)</text>', drawn
    )
    return [text for _, y, turned, text in texts if turned or float(y) == height - 6]


@pytest.mark.parametrize(("title", "shape", "entry"), layouts.EXAMPLES)
def test_each_element_of_a_drawn_weight_belongs_to_one_of_its_matrices(
    title: str, shape: tuple[int, int], entry: Any
) -> None:
    numbers = [number for row in layouts.owners(entry, shape) for number in row]
    sizes = {number: numbers.count(number) for number in numbers}
    elements = [matrix.numel() for matrix in logical_matrices(entry, torch.zeros(shape))]
    assert sizes == dict(enumerate(elements))
    assert layouts.panel(0, 0, title, shape, entry).count("<circle") == len(numbers)
