"""torch's own tests, with compat for its clipping functions and chains for its optimizers.

They are read from a checkout of pytorch, which PYTORCH_SOURCE names; CONTRIBUTING.md says how to
make it. Nothing in them is changed but what they import.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.peers


@pytest.fixture
def source() -> Path:
    folder = os.environ.get("PYTORCH_SOURCE")
    if not folder:
        pytest.skip("PYTORCH_SOURCE names no checkout of pytorch: see CONTRIBUTING.md")
    return Path(folder)


def passed(path: Path, folder: Path, choice: str, instead: dict[str, str], first: str = "") -> int:
    """How many tests of a file pass on the CPU, with lines exchanged and one put in front."""
    text = path.read_text()
    for line, other in instead.items():
        assert text.count(f"\n{line}\n") == 1, f"{path.name} no longer has the line {line!r}"
        text = text.replace(f"\n{line}\n", f"\n{other}\n")
    copy = folder / path.name
    copy.write_text(f"{first}\n{text}")
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, copy]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*map(str, command), "-k", choice, "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (count,) = re.findall(r"(\d+) passed", done.stdout)
    return int(count)


def test_the_clipping_functions_pass_torchs_tests(source, tmp_path):
    ours = {
        "from torch.nn.utils import clip_grad_norm_, clip_grad_value_": (
            "from torchzero_clip.compat import clip_grad_norm_, clip_grad_value_"
        )
    }
    assert passed(source / "test" / "test_nn.py", tmp_path, "clip_grad", ours) >= 13


def test_torchs_schedulers_do_to_chains_what_torchs_tests_ask(source, tmp_path):
    ours = {
        "from torch.optim import Adam, Rprop, SGD": (
            "from torch.optim import Rprop; from tests.peers.chains_as_torch import Adam, SGD"
        )
    }
    path = source / "test" / "optim" / "test_lrscheduler.py"
    assert passed(path, tmp_path, "test", ours) >= 100


def test_grad_scaler_does_to_chains_what_torchs_tests_ask(source, tmp_path):
    """The defaults of torch's helpers are bound when these are imported, so ours come first."""
    ours = (
        "import torch; from tests.peers import chains_as_torch as _ours; "
        "torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW = _ours.SGD, _ours.Adam, _ours.AdamW"
    )
    choice = "grad_scaling and not unscale and not update_scale and not state_dict"
    path = source / "test" / "test_torch.py"
    assert passed(path, tmp_path, f"{choice} or clipping_separate_unscale", {}, ours) >= 10
