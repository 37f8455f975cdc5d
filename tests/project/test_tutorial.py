"""The tutorial quotes the losses that examples/tutorial.py prints, and shows the same program."""

import importlib.util
import re

import pytest

from tests.helpers import ROOT, some
from torchzero_clip import LR, Adam, ClipNorm, Guard

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
source = importlib.util.spec_from_file_location("tutorial", ROOT / "examples" / "tutorial.py")
assert source is not None
assert source.loader is not None
tutorial = importlib.util.module_from_spec(source)
source.loader.exec_module(tutorial)

RUNS = {
    "Adam without clipping": (ClipNorm(float("inf"), dim="global"), Adam(), LR(1e-2)),
    "after `Guard` and `ClipNorm(10.0)`": (
        Guard(),
        ClipNorm(10.0, dim="global"),
        Adam(),
        LR(1e-2),
    ),
}


@pytest.mark.parametrize("run", some([*RUNS][::-1], one_in=2))
def test_the_page_quotes_the_losses_of_the_run(run):
    row = re.search(rf"^\| {re.escape(run)} \| (.+) \|$", PAGE, re.MULTILINE)
    assert row is not None
    quoted = [float(cell) for cell in row[1].split(" | ")]
    loss = tutorial.train(*RUNS[run]).history()["loss"]
    found = [loss[step - 1] for step in (249, 251, 300, 400)]
    assert found == pytest.approx(quoted, rel=0.25)  # rounding grows over 400 steps
