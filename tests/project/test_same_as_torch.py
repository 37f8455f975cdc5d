"""RESULTS and README quote the studies about torch: the studies still give these numbers."""

import pytest
import torch

from benchmarks import printed
from benchmarks.studies import norm_accuracy, same_as_torch


def difference_is_as_printed(distances: dict[str, tuple[float, float]]) -> None:
    assert distances.keys() == same_as_torch.ENGINES.keys()
    for name, (_, away) in distances.items():
        # another processor rounds otherwise, but not by a factor of two
        assert away < 2 * float(printed.cell("same_as_torch", name, same_as_torch.COLUMNS[2]))


@pytest.mark.slow
def test_the_difference_from_torch_is_the_printed_one() -> None:
    distances = same_as_torch.distances()
    difference_is_as_printed(distances)
    for name, (moved, _) in distances.items():
        cell = printed.cell("same_as_torch", name, same_as_torch.COLUMNS[1])
        assert abs(moved - float(cell)) < 0.01


def test_a_short_run_differs_from_torch_by_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_as_torch, "SEEDS", range(1))
    monkeypatch.setattr(same_as_torch, "STEPS", 20)
    distances = same_as_torch.distances()
    difference_is_as_printed(distances)
    assert all(moved > 0.01 for moved, _ in distances.values())


def test_the_error_of_a_norm_is_the_printed_one() -> None:
    """The smallest row: a larger tensor would take too long."""
    elements = norm_accuracy.ELEMENTS[0]
    name, *errors = norm_accuracy.row(elements)
    for column, error in zip(norm_accuracy.NORMS, errors, strict=True):
        found = percent(printed.cell("norm_accuracy", name, column))
        # other instructions add up in another order
        assert percent(error) < 10 * found + 1e-5


def test_our_norm_is_exact_where_torch_s_is_not() -> None:
    columns = {
        name: percent(printed.cell("norm_accuracy", f"{norm_accuracy.ELEMENTS[-1]:,}", name))
        for name in norm_accuracy.NORMS
    }
    assert columns["torchzero_clip"] < 1e-4 < 0.01 < columns["torch"]


def test_the_error_of_a_wrong_norm_is_found() -> None:
    grad = torch.ones(100)
    assert norm_accuracy.error(lambda p: torch.tensor(11.0), grad) == 0.1


def percent(text: str) -> float:
    """Return the number in front of a percent sign."""
    return float(text.removesuffix(" %"))
