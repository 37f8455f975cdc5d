"""Users can rely on what a release had: its names, its signatures, its form of checkpoints."""

import copy
import json
from pathlib import Path

import pytest

from scripts import public_api
from tests.helpers import at_once

FILES = sorted(Path(__file__).parent.glob("public_*.json"))
RECORDS = {file.stem.removeprefix("public_"): json.loads(file.read_text()) for file in FILES}


@pytest.fixture(scope="module")
def now():
    return public_api.record()


def lost(before, after):
    """What the record `before` has and the record `after` lacks, as texts."""
    problems = []
    for table, entries in before.items():
        for name, entry in entries.items():
            there = after.get(table, {})
            if name not in there:
                problems.append(f"{table}: {name} is gone")
            elif isinstance(entry, list):
                problems += [f"{table}: {name}: {p}" for p in changed_arguments(entry, there[name])]
            else:
                problems += [f"{table}: {name}: {p}" for p in changed_state(entry, there[name])]
    return problems


def changed_arguments(before, after):
    """A call that was right must stay right, so old arguments keep order, kind and default."""
    problems = [
        f"{old!r} is now {new!r}" for old, new in zip(before, after, strict=False) if old != new
    ]
    problems += [f"{old!r} is gone" for old in before[len(after) :]]
    for new in after[len(before) :]:
        if " = " not in new and "variadic" not in new:
            problems.append(f"{new!r} is new and has no default")
    return problems


def changed_state(before, after):
    """A checkpoint of the release must load, so it has all keys that are read."""
    return [f"{part} is now {after[part]}" for part in before if before[part] != after[part]]


def test_there_is_a_record():
    assert RECORDS, "python scripts/public_api.py --write VERSION"


@at_once("version", list(RECORDS))
def test_a_release_is_kept(version, now):
    assert lost(RECORDS[version], now) == []


def test_what_is_lost_is_found(now):
    before = copy.deepcopy(now)
    assert lost(before, now) == []

    later = copy.deepcopy(now)
    del later["torchzero_clip"]["Adam"]
    assert lost(before, later) == ["torchzero_clip: Adam is gone"]

    later = copy.deepcopy(now)
    later["torchzero_clip"]["ClipNorm"].reverse()
    assert lost(before, later)

    later = copy.deepcopy(now)
    later["torchzero_clip"]["named"].append("size keyword-only")
    assert lost(before, later) == [
        "torchzero_clip: named: 'size keyword-only' is new and has no default"
    ]

    later = copy.deepcopy(now)
    later["torchzero_clip"]["named"].append("size keyword-only = 3")
    later["torchzero_clip"]["Newcomer"] = []
    assert lost(before, later) == []

    later = copy.deepcopy(now)
    adam = next(name for name in later["checkpoints"] if name.startswith("Adam("))
    later["checkpoints"][adam]["state"]["Adam/exp_avg"] = "bfloat16 tensor with 2 dims"
    assert len(lost(before, later)) == 1
