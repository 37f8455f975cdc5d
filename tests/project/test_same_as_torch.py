"""README quotes the study about torch: the study still gives these numbers."""

import re

from benchmarks.studies import same_as_torch
from tests.helpers import ROOT


def test_the_readme_quotes_the_largest_difference_from_torch() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    (moved, most) = re.findall(r"moved by up to ([\d.]+) and differ by at most ([\de.-]+\d)", text)[
        0
    ]
    differences = same_as_torch.differences()
    assert differences.keys() == same_as_torch.ENGINES.keys()
    # another processor rounds otherwise, but not by a factor of two
    assert max(differences.values()) < 2 * float(most)
    unmoved = same_as_torch.trained(same_as_torch.no_step)
    reference = same_as_torch.trained(same_as_torch.torch_step)
    assert abs(same_as_torch.largest_difference(unmoved, reference) - float(moved)) < 0.01
