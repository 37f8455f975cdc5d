"""No term of a rule can change without an identity that notices: what scripts/mutate.py counts."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

from scripts import mutate
from tests.identities.identity import Identity, load

IDENTITIES = load()
PIECES = 32  # of all changes: those of a day's share, by two processes


def test_a_change_of_a_term_is_noticed() -> None:
    """A few of the changes; all of them, of all rules, are a longer check."""
    names = "adamw", "lambc", "adamc"
    some = list(mutate.plan([IDENTITIES[name] for name in names]))
    files = {mutation.function.__code__.co_filename.split("/")[-1] for mutation, _ in some}
    assert {"adam.py", "weight_decay.py", "trust_ratio.py", "lr.py", "large_batch.py"} <= files
    some = [(m, judges) for m, judges in some if m.no_term is None]
    chosen = some[:: len(some) // 6]
    assert len(chosen) >= 6
    assert [str(m) for m, judges in chosen if mutate.survives(m, judges)] == []
    assert not mutate.notices(IDENTITIES["lamb"]), "a change was left behind"


def test_what_no_identity_notices_survives() -> None:
    """An identity that allows everything is no judge."""
    blind = dataclasses.replace(IDENTITIES["sgd"], rtol={torch.float64: math.inf})
    some = list(mutate.plan([blind]))
    assert some
    assert any(mutate.survives(m, judges) for m, judges in some)


def test_lines_that_do_not_run_are_not_changed() -> None:
    """Adam's branch of AMSGrad is held by the identity that runs it."""
    changed = {
        name: {str(m) for m, _ in mutate.plan([IDENTITIES[name]])} for name in ("adam", "amsgrad")
    }
    of_amsgrad = {words for words in changed["amsgrad"] if ".maximum_" in words}
    assert of_amsgrad
    assert not of_amsgrad & changed["adam"]


def test_the_changes_of_a_file_are_tried_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate.main(["signum", "sign.py"]) == 0
    *survivors, said = capsys.readouterr().out.splitlines()
    assert [line.split()[2].partition(":")[0] for line in survivors] == ["modules/clipping/sign.py"]
    assert 0 < int(said.split()[0]) < 9
    assert said.endswith("changes, 0 survive")


@functools.cache
def planned() -> list[tuple[mutate.Mutation, list[Identity]]]:
    """All changes, and who must notice."""
    return list(mutate.plan(list(IDENTITIES.values())))


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_no_change_survives(piece: int) -> None:
    chosen = [(m, judges) for m, judges in planned() if not m.no_term][piece::PIECES]
    assert len(chosen) > 32
    assert [str(m) for m, judges in chosen if mutate.survives(m, judges)] == []


@pytest.mark.slow
def test_what_is_no_term_stands_in_the_code_still() -> None:
    assert mutate.NOT_TERMS.keys() == {m.no_term for m, _ in planned()} - {None}
