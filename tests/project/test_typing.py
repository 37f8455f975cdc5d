"""A type checker accepts a rule of one's own as it stands and rejects wrong arguments."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from mypy import api

from tests.project import typed

pytestmark = pytest.mark.xdist_group("typing")  # one worker runs mypy
ROOT = Path(__file__).parents[2]

HEAD = """\
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from torchzero_clip import (
    LR, Adam, Chain, ClipNorm, ClipValueByEMA, Live, Modular, NormRule, Scale, TensorList,
    TensorwiseTransform, Transform, optimizer_class, zeros_like_state
)
from torchzero_clip.core import Group, Scope, State, UnitState


class Average(Transform):
    beta: Live[float] = 0.9

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"ema": zeros_like_state(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return state["ema"].lerp_(u, 1 - group["beta"])


class Growth(NormRule):
    mul: Live[float]
    add: Live[float | None] = None
    dim: Scope = None

    def init_unit(self) -> dict[str, float]:
        return {"previous": math.inf}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        return state["previous"].mul(group["mul"])

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        return {"previous": clipped}


class Flip(TensorwiseTransform):
    times: int

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return u.flip(0)


model = nn.Linear(2, 2)
"""

# A line ends in what the checker must say about it; without a comment it must say nothing.
BODY = """\
Average()
Average(0.5)
Average(beta=0.5, target="grad", name="slow")
Growth(1.5)
Growth(1.5, None, "global")
Growth(mul=1.5, add=2.0, dim=(0, 1))
Flip(2)
opt = Modular(model.parameters(), Average(), Growth(2.0), Adam(), LR(1e-3))
Modular(model.named_parameters(), Chain(ClipNorm(1.0, "l1", dim=0), Flip(1)), LR(0.1))
Modular([{"params": model.parameters(), "mul": 2.0}], Growth(1.5), LR(0.1))
torch.optim.lr_scheduler.StepLR(opt, 3)
beta: float = Average().beta
add: float | None = Growth(1.0).add
ClipValueByEMA(0.9, "update", ema_tfm=Scale(2.0))
Clipped = optimizer_class(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))
Clipped(model.parameters(), lr=3e-4, max_norm=0.5)

Average(bta=0.5)  # Unexpected keyword argument "bta" for "Average"
Average("0.5")  # Argument 1 to "Average" has incompatible type "str"; expected "float"
Average(beta=None)  # Argument "beta" to "Average" has incompatible type "None"; expected "float"
Average(0.5, "grad")  # Too many positional arguments for "Average"
Average(target="grads")  # Argument "target" to "Average" has incompatible type "Literal['grads']"
Average(name=3)  # Argument "name" to "Average" has incompatible type "int"; expected "str | None"
Growth()  # Missing positional argument "mul" in call to "Growth"
Growth(add=1.0)  # Missing positional argument "mul" in call to "Growth"
Growth(1.5, "1")  # Argument 2 to "Growth" has incompatible type "str"; expected "float | None"
Growth(1.5, dim="row")  # Argument "dim" to "Growth" has incompatible type
Growth(1.5, min_size=2)  # Unexpected keyword argument "min_size" for "Growth"
Flip(2.5)  # Argument 1 to "Flip" has incompatible type "float"; expected "int"
ClipNorm()  # Missing positional argument "max_norm" in call to "ClipNorm"
ClipNorm("1")  # Argument 1 to "ClipNorm" has incompatible type "str"; expected "float"
ClipNorm(1.0, maximum=2)  # Unexpected keyword argument "maximum" for "ClipNorm"
Adam(0.9)  # Argument 1 to "Adam" has incompatible type "float"; expected "tuple[float, float]"
Modular(model.parameters(), Adam)  # incompatible type "type[Adam]"; expected "Transform"
Modular(model.parameters(), 0.1)  # Argument 2 to "Modular" has incompatible type "float"
wrong: str = Average().beta  # expression has type "float", variable has type "str"


class Wrong(Transform):
    def update(self, u: TensorList, state: State, group: Group) -> Tensor:  # "update" incompatible
        return u.tensors[0]


class Later(Average):
    gain: Live[float] = 1.0


Later(0.9, 2.0)
Later(0.9, "2")  # Argument 2 to "Later" has incompatible type "str"; expected "float"
"""
SAYS = {'"update" incompatible': 'Return type "Tensor" of "update" incompatible with return type'}


def check(folder, *files):
    """What `mypy --strict` says: {file: {line: message}}, of these files alone."""
    out, err, _ = api.run(
        [
            "--strict",
            "--config-file=",
            "--follow-imports=silent",
            "--untyped-calls-exclude=torch",  # Tensor.backward has no annotations
            "--no-error-summary",
            "--hide-error-codes",
            f"--cache-dir={folder / 'cache'}",
            *map(str, files),
        ]
    )
    assert err == ""
    said = defaultdict(dict)
    for path, line, kind, message in re.findall(r"^(.+?):(\d+): (\w+): (.+)$", out, re.MULTILINE):
        if kind == "error":
            said[Path(path).name][int(line)] = message
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("typing")
    user = folder / "user.py"
    user.write_text(HEAD + BODY)
    broken = folder / "broken.py"
    broken.write_text('word: int = "not an int"\n')
    files = user, broken, ROOT / "examples" / "write_your_own.py"
    return check(folder, *files)


def numbered():
    """Every line: its code, its number, and what the checker must say."""
    for number, line in enumerate((HEAD + BODY).splitlines(), 1):
        code, _, expected = line.partition("  # ")
        yield code.strip(), number, expected.strip()


REJECTED = {code: (number, expected) for code, number, expected in numbered() if expected}


@pytest.mark.slow  # a minute of mypy
def test_the_checker_runs(said):
    assert "incompatible type" in said["broken.py"][1].lower()


@pytest.mark.slow
def test_a_rule_of_ones_own_and_its_use_are_accepted(said):
    rejected = {i for i, _ in REJECTED.values()}
    assert {i: text for i, text in said["user.py"].items() if i not in rejected} == {}


@pytest.mark.slow
def test_a_wrong_argument_is_rejected_with_its_name(said):
    for line, expected in REJECTED.values():
        found = said["user.py"].get(line, "nothing was said")
        assert SAYS.get(expected, expected) in found, line


@pytest.mark.slow
def test_the_example_is_accepted(said):
    assert said["write_your_own.py"] == {}


# ---------------------------------------------------------------------- what a user writes


def test_what_is_typed_runs():
    assert typed.main() > 0


@pytest.mark.parametrize("name", ["SlowBoost", "ClipToWeight", "ClipToAverage"])
def test_the_rules_that_are_typed_are_those_of_the_guide(name):
    page = (ROOT / "docs" / "write_your_own.md").read_text()
    (text,) = re.findall(rf"^class {name}\(.*?(?=^\S|^```)", page, re.M | re.S)
    assert text.rstrip() in Path(typed.__file__).read_text()


def test_the_checker_of_make_types_reads_it():
    (files,) = re.findall(r"^files = (.*)$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert '"tests/project/typed.py"' in files


@pytest.mark.peers
def test_pyright_accepts_it_in_strict_mode():
    checked = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, typed.__file__],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert "0 errors" in checked.stdout, checked.stdout + checked.stderr
