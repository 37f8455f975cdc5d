"""A recorder's vectors: an entry is of one unit, whichever had a gradient in a step."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from torchzero_clip import LR, AdaGC, ClipNorm, Clipper, Modular, Recorder, Transform, attach

NAN = math.nan
NAMES = ["a.weight", "a.bias", "b.weight"]
Grads = list[float | None]


def problem(*links: Transform, groups: bool = False, named: bool = True) -> tuple[Any, Modular]:
    params = [Parameter(torch.zeros(4)) for _ in NAMES]
    given: Any = list(zip(NAMES, params, strict=True)) if named else params
    given = [{"params": given[:1]}, {"params": given[1:]}] if groups else given
    return params, Modular(given, *links, LR(0.1))


def walk(params: list[Parameter], step: Any, rows: list[Grads]) -> None:
    """Steps in which each parameter has a gradient of this norm, or none."""
    for row in rows:
        for p, size in zip(params, row, strict=True):
            p.grad = None if size is None else torch.full_like(p, size / 2)
        step()


def equal(got: list[Any], wanted: list[Any]) -> bool:
    """Equal lists of lists, NaN equal to NaN."""
    return torch.tensor(got).equal(torch.tensor(wanted)) or bool(
        torch.allclose(torch.tensor(got), torch.tensor(wanted), equal_nan=True)
    )


ROWS: list[Grads] = [[None, 2.0, 3.0], [1.0, None, None], [4.0, 5.0, None], [None, None, 6.0]]
BY_NAME = [[NAN, 2.0, 3.0], [1.0, NAN, NAN], [4.0, 5.0, NAN], [NAN, NAN, 6.0]]


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
def test_an_entry_is_that_of_one_tensor(groups: bool, named: bool) -> None:
    params, opt = problem(ClipNorm(1e3), groups=groups, named=named)
    rec = Recorder(opt)
    walk(params, opt.step, ROWS)
    assert equal(rec.history()["ClipNorm/norm"], BY_NAME)
    unnamed = ["parameter 0 of group 0", "parameter 1 of group 0", "parameter 2 of group 0"]
    if groups:
        unnamed = ["parameter 0 of group 0", "parameter 0 of group 1", "parameter 1 of group 1"]
    assert rec.units("ClipNorm/norm") == (NAMES if named else unnamed)


def test_parameters_that_take_turns_are_not_one_number() -> None:
    params, opt = problem(ClipNorm(1e3))
    rec = Recorder(opt)
    walk(params, opt.step, [[None, 7.0, None], [1.0, None, None]])
    assert equal(rec.history()["ClipNorm/norm"], [[NAN, 7.0], [1.0, NAN]])
    assert rec.units("ClipNorm/norm") == ["a.weight", "a.bias"]


def test_an_entry_is_that_of_one_layer_whichever_member_has_a_gradient() -> None:
    params, opt = problem(ClipNorm(1e3, dim="layer"), groups=True)
    rec = Recorder(opt)
    walk(params, opt.step, ROWS)
    norms = [[2.0, 3.0], [1.0, NAN], [math.hypot(4, 5), NAN], [NAN, 6.0]]
    assert equal(rec.history()["ClipNorm/norm"], norms)
    assert rec.units("ClipNorm/norm") == rec.units("ClipNorm/limit") == ["a", "b"]


@pytest.mark.parametrize("dim", ["group", "global"])
def test_an_entry_is_that_of_one_group(dim: Any) -> None:
    params, opt = problem(ClipNorm(1e3, dim=dim), groups=True)
    opt.param_groups[1]["max_norm"] = 500.0
    rec = Recorder(opt)
    walk(params, opt.step, [[None, 3.0, 4.0], [1.0, None, None], [1.0, 1.0, None]])
    history = rec.history()
    limits = [[NAN, 500.0], [1e3, NAN], [1e3, 500.0]]
    assert equal(history["ClipNorm/limit"], limits)
    assert rec.units("ClipNorm/limit") == ["group 0", "group 1"]
    norms = {"group": [[NAN, 5.0], [1.0, NAN], [1.0, 1.0]], "global": [5.0, 1.0, math.sqrt(2)]}
    assert equal(history["ClipNorm/norm"], norms[dim])


@pytest.mark.parametrize("dim", ["group", "global"])
def test_units_have_the_names_of_groups(dim: Any) -> None:
    params, opt = problem(ClipNorm(1e3, dim=dim), groups=True)
    opt.param_groups[0]["name"] = "embedding"
    opt.param_groups[1]["name"] = "body"
    rec = Recorder(opt)
    walk(params, opt.step, ROWS)
    assert rec.units("ClipNorm/limit") == ["embedding", "body"]
    norms = {"group": ["embedding", "body"], "global": ["0"]}  # one norm for both groups
    assert rec.units("ClipNorm/norm") == norms[dim]


def test_an_entry_is_that_of_one_slice() -> None:
    weights = [("a", Parameter(torch.zeros(2, 3))), ("b", Parameter(torch.zeros(3, 2)))]
    opt = Modular(weights, ClipNorm(1e3, dim=1), LR(0.1))
    rec = Recorder(opt)
    walk([p for _, p in weights], opt.step, [[None, 2.0], [2.0, None]])
    assert rec.units("ClipNorm/norm") == ["a[0]", "a[1]", "b[0]", "b[1]", "b[2]"]
    known = [[not math.isnan(x) for x in row] for row in rec.history()["ClipNorm/norm"]]
    assert known == [[False, False, True, True, True], [True, True, False, False, False]]


def test_merged_rows_keep_units_apart() -> None:
    params, opt = problem(ClipNorm(1e3))
    rec = Recorder(opt, capacity=2)
    walk(params, opt.step, ROWS)
    assert equal(rec.history()["ClipNorm/norm"], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def test_a_resumed_history_goes_on_with_its_units() -> None:
    params, opt = problem(ClipNorm(1e3), AdaGC())
    rec = Recorder(opt)
    walk(params, opt.step, ROWS[:2])
    saved = rec.state_dict()
    rec.remove()
    rec = Recorder(opt)
    rec.load_state_dict(saved)
    walk(params, opt.step, ROWS[2:])
    for rule in ("ClipNorm", "AdaGC"):
        assert rec.units(f"{rule}/norm") == NAMES
    assert equal(rec.history()["ClipNorm/norm"], BY_NAME)


def test_a_column_of_the_file_is_of_one_unit(tmp_path: Path) -> None:
    params, opt = problem(ClipNorm(1e3))
    rec = Recorder(opt)
    walk(params, opt.step, ROWS)
    rec.to_csv(tmp_path / "run.csv")
    with open(tmp_path / "run.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    got = [[float(row[f"ClipNorm/norm/{i}"] or NAN) for i in range(3)] for row in rows]
    assert equal(got, BY_NAME)


def test_a_map_has_a_row_for_each_unit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    params, opt = problem(ClipNorm(1e3, dim="layer"), ClipNorm(10.0), groups=True)
    rec = Recorder(opt)
    walk(params, opt.step, ROWS)
    rec.plot(tmp_path / "run.svg")
    assert (tmp_path / "run.svg").stat().st_size > 0


@pytest.mark.parametrize("handle", [True, False], ids=["handle", "clipper"])
def test_the_units_of_a_handle_and_a_clipper_have_names(handle: bool) -> None:
    params = [(name, Parameter(torch.zeros(4))) for name in NAMES]
    sgd = torch.optim.SGD(params, lr=0.1)
    rules = attach(sgd, ClipNorm(1e3)) if handle else Clipper(params, ClipNorm(1e3))
    rec = Recorder(rules)
    walk([p for _, p in params], sgd.step if handle else rules.step, ROWS)
    assert rec.units("ClipNorm/norm") == NAMES
    assert equal(rec.history()["ClipNorm/norm"], BY_NAME)


def test_units_of_a_name_that_is_not_there_is_a_sentence() -> None:
    _, opt = problem(ClipNorm(1.0))
    with pytest.raises(
        ValueError, match=r"^Recorder: name must be one of \[\], got 'ClipNorm/norm'"
    ):
        Recorder(opt).units("ClipNorm/norm")
