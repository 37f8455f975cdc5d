"""Audits of updates on two ranks: `audited.py` runs on each."""

from __future__ import annotations

import pytest

from tests.processes.launch import on_ranks

ALL = "0.weight, 0.bias, 2.weight, 2.bias"


def differs(names: str, since: str) -> str:
    return f"replicas-differ: {names}: differs between the ranks 0 and 1 of its replicas, {since}"


def test_two_ranks_find_replicas_that_drifted_and_judge_whole_matrices() -> None:
    in_ddp = ", ".join([f"module.{name}" for name in ALL.split(", ")])
    lines = ["fsdp2: right", "half: not-in-optimizer: 2.weight, 2.bias"]
    lines.append("NaN: nonfinite-state changed changed changed changed")
    lines.append(
        "missing: audit_update: 2.bias has a gradient on 1 of the 2 ranks of its mesh. A sharded "
        "parameter must have a gradient on all ranks, or on no rank: use the parameter in the loss "
        "of every rank"
    )
    for make, names in (("in_ddp", in_ddp), ("by_hand", ALL), ("replicated", "w")):
        lines.append(f"{make}: nothing")
        lines.append(f"{make}: {differs(names, 'since this step')}")
        lines.append(f"{make}: {differs(names, 'already before the step')}")
    outputs = on_ranks(2, "-m", "tests.processes.audited", "two", limit=120)
    assert [output.splitlines() for output in outputs] == [lines] * 2


@pytest.mark.slow
def test_four_ranks_of_two_meshes() -> None:
    lines = ["tensor parallel: right", "hsdp: right", "hsdp: nothing"]
    lines.append(f"hsdp: {differs(ALL, 'since this step')}")
    lines.append(f"hsdp: {differs(ALL, 'already before the step')}")
    outputs = on_ranks(4, "-m", "tests.processes.audited", "four", limit=300)
    assert [output.splitlines() for output in outputs] == [lines] * 4
