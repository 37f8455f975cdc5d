"""RESULTS and README quote the studies about torch: the studies still give these numbers."""

import torch

from benchmarks import printed
from benchmarks.studies import norm_accuracy, same_as_torch


def test_the_difference_from_torch_is_the_printed_one() -> None:
    distances = same_as_torch.distances()
    assert distances.keys() == same_as_torch.ENGINES.keys()
    _, moved_column, away_column = same_as_torch.COLUMNS
    for name, (moved, away) in distances.items():
        assert abs(moved - float(printed.cell("same_as_torch", name, moved_column))) < 0.01
        # another processor rounds otherwise, but not by a factor of two
        assert away < 2 * float(printed.cell("same_as_torch", name, away_column))


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
