"""Calls on one rank alone: `one_rank.py` runs on two, and rank 0 calls all that programs call."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.processes.launch import on_ranks
from torchzero_clip import Modular, Recover, compat, take_over
from torchzero_clip.attach import Attached

TALKING: dict[str, tuple[Any, ...]] = {  # the calls of all ranks, and what has to say so
    "safe_to_save": (Modular.safe_to_save, Attached.safe_to_save, Modular),
    "state_dict": (Modular,),
    "init_state": (Modular.init_state, Modular),
    "take_over": (take_over,),
    "Recover.step at a look": (Recover.step,),
    "compat.get_total_norm": (compat.get_total_norm,),
    "compat.clip_grad_norm_": (compat.clip_grad_norm_,),
}
OF_SHARDS = {  # talk about tensors that are sharded alone
    "sharded soap": {"state_dict", "init_state", "take_over"},
    "sharded others": {"compat.get_total_norm", "compat.clip_grad_norm_"},
}
OF_ANY = {"safe_to_save", "Recover.step at a look"}


def test_what_one_rank_may_call_alone_sends_nothing() -> None:
    first, second = on_ranks(2, "-m", "tests.processes.one_rank", limit=300)
    assert second == "together\n"
    *lines, last = first.splitlines()
    assert last == "together"
    seen = [tuple(line.split("|")) for line in lines]
    assert {"explain", "metrics", "repr", "to_source", "check_pure"} <= {row[1] for row in seen}
    for setting, call, how in seen:
        talks = call in OF_ANY or call in OF_SHARDS.get(setting, ())
        assert how == ("talks" if talks else "silent"), (setting, call)


@pytest.mark.parametrize("call", TALKING)
def test_what_talks_says_that_all_ranks_call_it(call: str) -> None:
    for said in TALKING[call]:
        assert "all ranks" in " ".join((inspect.getdoc(said) or "").split())
    assert call in OF_ANY or any(call in calls for calls in OF_SHARDS.values())
