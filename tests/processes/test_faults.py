"""Faults: killed processes, lost ranks, and checkpoints that are not what they should be."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import ROOT, at_once, seed
from tests.processes.launch import Started, python
from torchzero_clip import (
    LR,
    Adam,
    AdaptiveClip,
    ClipNorm,
    ClipNormGrowth,
    Clipper,
    ClipValueGrowth,
    Modular,
    Quantile,
    SpikeClip,
    Transform,
    ZClip,
    attach,
)

FAULTS = ROOT / "tests" / "processes"

# ---------------------------------------------------------------------- killed processes


def killed(folder: Path, kills: int, seconds: float) -> dict[str, Any]:
    """What tests/processes/kills.py found."""
    done = python(FAULTS / "kills.py", folder, kills, 0, limit=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, 100])
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(kills, tmp_path):
    """With the recipe of docs/checkpoints.md no file is ever half written, no bit differs."""
    found = killed(tmp_path, kills, seconds=30 * kills)
    assert sum(found["during"].values()) == kills
    assert found["equal"]
    assert found["files"] == [f"{3 * kills - 1:08}.pt", f"{3 * kills:08}.pt"]
    assert found["lines"] >= 10  # and a save may be killed at every line that it runs
    assert found["lines with a half file"] > 0
    if kills >= 100:  # where few kills strike is chance
        assert found["during"]["train"] > 0
        assert found["during"]["evaluation"] > 0
        assert found["during"]["save"] > 0
        assert found["half files"] > 0  # they would have cost the checkpoint without the recipe


# ---------------------------------------------------------------------- ranks


def two_ranks(folder: Path, what: str, wait_for: int) -> list[list[str]]:
    """What the first processes of a sharded run say, of two to the second of which this happens."""
    ranks = [Started(FAULTS / "faults.py", folder / "store", rank, what) for rank in range(2)]
    try:
        ends = [rank.ended(limit=60) for rank in ranks[:wait_for]]
    finally:
        for rank in ranks:
            rank.kill()
    for end in ends:
        assert end.returncode == 3, end.stderr[-3000:]
    return [end.stdout.splitlines() for end in ends]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_is_an_error_on_the_others(end, tmp_path):
    """One process of FSDP2 is killed, or stands still, in a step: the other raises in time."""
    ((*before, last),) = two_ranks(tmp_path, end, wait_for=1)
    assert before == ["step 0: done", "step 1: done"]
    seconds = re.match(r"step 2: RuntimeError after ([\d.]+) s: ", last)
    assert seconds, last
    assert float(seconds[1]) < 20  # the timeout of the process group is 10


def test_a_nan_in_the_shard_of_one_rank_stops_all(tmp_path):
    """The rank that holds it says so, and the others raise in their next step at the latest."""
    first, second = two_ranks(tmp_path, "NaN", wait_for=2)
    before = [*[f"step {step}: done" for step in range(3)], "load: done"]
    told = "safe to save: [True, False]"  # on the other rank as well
    assert first[:5] == second[:5] == [*before, told]
    assert re.match(
        r"load: ValueError .* has NaN in 'Adam/exp_avg' of parameter 0: load", second[5]
    )
    assert re.match(r"load: ValueError |step 3: \w+Error ", first[-1])


# ---------------------------------------------------------------------- damaged checkpoints

SHAPES = ((3, 4), (4,), ())
CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "Modular": lambda: [ClipNormGrowth(), ZClip(warmup_steps=2), Adam(), LR(0.1)],
    "Clipper": lambda: [ClipNormGrowth(), ZClip(warmup_steps=2), SpikeClip()],
    "attach": lambda: [ClipNormGrowth(), ZClip(warmup_steps=2), SpikeClip()],
}
WHOLE = {"Modular": "Adam/exp_avg", "Clipper": "SpikeClip/rms", "attach": "SpikeClip/rms"}
NUMBER, SHARED = "ClipNormGrowth/previous", "ZClip/mean"


class Run:
    """Parameters, and a chain in one of the three ways to use it."""

    def __init__(
        self, kind: str, links: list[Transform] | None = None, groups: int = 1, shapes: Any = SHAPES
    ) -> None:
        seed()
        self.params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        parts = [{"params": self.params[i::groups]} for i in range(groups)]
        links = CHAINS[kind]() if links is None else links
        self.host: torch.optim.Optimizer | None = None
        if kind == "Modular":
            self.chain = Modular(parts, *links)
        else:
            self.host = torch.optim.SGD([dict(part) for part in parts], lr=0.1, momentum=0.9)
            self.chain = Clipper(parts, *links) if kind == "Clipper" else attach(self.host, *links)
        self.calls = [self.chain.step] if kind != "attach" else []
        self.calls += [self.host.step] if self.host is not None else []

    def train(self, steps: range) -> None:
        for step in steps:
            seed(step)
            for p in self.params:
                p.grad = torch.randn(p.shape) * (1 + step % 3)
            for call in self.calls:
                call()

    def checkpoint(self) -> dict[str, Any]:
        return copy.deepcopy(self.chain.state_dict())

    def everything(self) -> Any:
        """All that loading could change: bits, and which tensors hold them."""
        held = [self.chain.state, self.chain.param_groups, self.params]
        if self.host is not None:
            held += [self.host.state, self.host.param_groups]
        return bits(held)


def bits(value: Any) -> Any:
    """Nested values as plain data in which every bit and every tensor's identity counts."""
    if isinstance(value, Tensor):
        raw = value.detach().reshape(-1).clone().view(torch.uint8).tolist()
        return (id(value), str(value.dtype), tuple(value.shape), raw)
    if isinstance(value, dict):
        return [(bits(k), bits(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    return repr(value)


def started(kind: str, **more: Any) -> Run:
    run = Run(kind, **more)
    run.train(range(3))
    return run


def put(where: Callable[[Any], dict[str, Any]], **given: Any) -> Callable[[Any, str], None]:
    """A mutation that sets keys; "whole" is the name of a state of the parameter's shape."""

    def mutate(checkpoint: Any, whole: str) -> None:
        names = {"whole": whole, "number": NUMBER, "shared": SHARED}
        held = where(checkpoint)
        for key, value in given.items():
            name = names.get(key, key)
            held[name] = value(held[name]) if callable(value) else value

    return mutate


def drop(where: Callable[[Any], dict[str, Any]], *keys: str) -> Callable[[Any, str], None]:
    """A mutation that removes keys; a key with a "*" removes all that begin like it."""

    def mutate(checkpoint: Any, whole: str) -> None:
        held = where(checkpoint)
        for key in [whole if key == "whole" else key for key in keys]:
            found = [k for k in held if k == key or (key[-1] == "*" and k.startswith(key[:-1]))]
            assert found
            for k in found:
                del held[k]

    return mutate


def top(checkpoint: Any) -> Any:
    return checkpoint


def state(checkpoint: Any) -> Any:
    return checkpoint["state"][1]


def group(checkpoint: Any) -> Any:
    return checkpoint["param_groups"][0]


def shared(checkpoint: Any) -> Any:
    return checkpoint["param_groups"][0]["chain"]


def spoil(t: Tensor) -> Tensor:
    """The same with a NaN as its last entry."""
    t = t.clone()
    t.view(-1)[-1] = math.nan
    return t


NAN = "has NaN in {} of parameter 1: load an earlier checkpoint, or"
STRANGE = "has the state ['{}'] for {}, but no transform"
MUTATIONS: dict[str, tuple[Callable[[Any, str], None], str]] = {
    "missing: a tensor": (drop(state, "whole"), "has no state {} for parameter 1"),
    "missing: a number": (drop(state, NUMBER), f"has no state '{NUMBER}' for parameter 1"),
    "missing: a number of the model": (
        drop(shared, SHARED),
        f"has no state '{SHARED}' for group 0",
    ),
    "missing: all numbers of the model": (
        drop(shared, "ZClip/*"),
        "has no state 'ZClip/count', 'ZClip/mean', ",
    ),
    "missing: the chain": (drop(group, "chain"), "was not saved by torchzero_clip"),
    "missing: the parameters": (drop(group, "params"), "parameter groups of sizes [0]"),
    "missing: the state": (
        drop(top, "state"),
        "with the keys 'state' and 'param_groups', got ['par",
    ),
    "missing: the groups": (drop(top, "param_groups"), "and 'param_groups', got ['state']"),
    "extra: a tensor": (
        put(state, **{"Z/more": torch.ones(4)}),
        STRANGE.format("Z/more", "parameter 1"),
    ),
    "extra: a parameter": (
        lambda c, _: c["state"].update({9: {}}),
        "has state for the parameters ['9']",
    ),
    "extra: of a link": (put(shared, **{"ZClip/x": 1.0}), STRANGE.format("ZClip/x", "group 0")),
    "extra: of no link": (put(shared, **{"Z/x": 1.0}), STRANGE.format("Z/x", "group 0")),
    "extra: a misspelt value": (put(group, mull=2.0), "group 0 of the checkpoint: unknown key"),
    "shape: a tensor": (put(state, whole=torch.zeros(1)), "has shape (1,) for"),
    "shape: a number": (put(state, number=torch.ones(1)), f"has shape (1,) for '{NUMBER}'"),
    "shape: of the model": (put(shared, shared=torch.ones(2)), f"has shape (2,) for '{SHARED}'"),
    "dtype: a tensor": (put(state, whole=torch.Tensor.double), "has dtype torch.float64 for"),
    "dtype: a number": (put(state, number=torch.Tensor.long), "has dtype torch.int64 for"),
    "dtype: of the model": (put(shared, shared=torch.Tensor.half), "has dtype torch.float16 for"),
    "NaN: in a tensor": (put(state, whole=spoil), NAN),
    "NaN: a number": (put(state, number=spoil), NAN.replace("{}", f"'{NUMBER}'")),
    "NaN: a plain number": (put(state, number=math.nan), NAN.replace("{}", f"'{NUMBER}'")),
    "NaN: of the model": (put(shared, shared=spoil), f"has NaN in '{SHARED}' of group 0"),
    "NaN: several": (put(state, number=spoil, whole=spoil), " of parameter 1 and 1 more: load"),
    "NaN: a live value": (
        put(group, mul=math.nan),
        "mul must be a number of at least 1 or N",
    ),
    "a live value out of bounds": (
        put(group, mul=0.5),
        "mul must be a number of at least 1 or N",
    ),
    "a live value of words": (put(group, mul="x"), "ClipNormGrowth: mul must be a number"),
    "a float for a tensor": (put(state, whole=1.0), "has 1.0 for"),
    "words for a tensor": (put(state, whole="x"), "has 'x' for"),
    "words for a number": (put(state, number="x"), "has 'x' for"),
}


def refused(run: Run, checkpoint: Any, sentence: str, error: type[Exception] = ValueError) -> str:
    """Loading raises the sentence and changes nothing; returns what was said."""
    before = run.everything()
    with pytest.raises(error) as caught:
        run.chain.load_state_dict(checkpoint)
    assert sentence in str(caught.value)
    assert run.everything() == before
    return str(caught.value)


@at_once("kind", CHAINS)
@pytest.mark.parametrize("how", MUTATIONS)
def test_a_damaged_checkpoint_raises_a_sentence_and_changes_nothing(how, kind):
    mutate, sentence = MUTATIONS[how]
    run, twin = started(kind), started(kind)
    checkpoint = run.checkpoint()
    mutate(checkpoint, WHOLE[kind])
    refused(run, checkpoint, sentence.replace("{}", f"'{WHOLE[kind]}'"))
    run.train(range(3, 5)), twin.train(range(3, 5))
    assert all(p.equal(q) for p, q in zip(run.params, twin.params, strict=True))


@pytest.mark.parametrize("kind", CHAINS)
def test_the_checkpoint_of_another_run_raises_a_sentence_and_changes_nothing(kind):
    run = started(kind)
    links = CHAINS[kind]()
    other = started(kind, links=[ClipNorm(1.0), *links[1:]])
    refused(
        run,
        other.checkpoint(),
        "saved with different transforms. The checkpoint has the hyperparameters [",
    )
    swapped = started(kind, links=[links[1], links[0], *links[2:]])
    refused(run, swapped.checkpoint(), "saved with different transforms")
    more = started(kind, groups=2)
    refused(
        run, more.checkpoint(), "groups of sizes [2, 1], but this optimizer has groups of sizes [3]"
    )
    refused(
        more, run.checkpoint(), "groups of sizes [3], but this optimizer has groups of sizes [2, 1]"
    )
    fewer = started(kind, shapes=SHAPES[:2])
    refused(
        run, fewer.checkpoint(), "groups of sizes [2], but this optimizer has groups of sizes [3]"
    )
    refused(run, [run.checkpoint()], "with the keys 'state' and 'param_groups', got list")
    both = {"opt": run.checkpoint()}
    refused(run, both, "with the keys 'state' and 'param_groups', got ['opt']")


@pytest.mark.parametrize("kind", CHAINS)
def test_a_number_where_a_0_dim_tensor_was_gives_the_same_run(kind):
    first, second = started(kind), started(kind)
    checkpoint = first.checkpoint()
    state(checkpoint)[NUMBER] = state(checkpoint)[NUMBER].item()
    shared(checkpoint)[SHARED] = shared(checkpoint)[SHARED].item()
    second.chain.load_state_dict(checkpoint)
    first.train(range(3, 6)), second.train(range(3, 6))
    for p, q in zip(first.params, second.params, strict=True):
        assert p.equal(q)


CUT_OFF = (EOFError, pickle.UnpicklingError, RuntimeError, OSError)


@pytest.mark.parametrize("kind", CHAINS)
def test_a_file_that_was_cut_off_is_an_error_of_torch(kind, tmp_path):
    """At any length, and of the classes on the page: the optimizer never hears of it."""
    run = started(kind)
    before = run.everything()
    path = tmp_path / "opt.pt"
    torch.save(run.chain.state_dict(), path)
    whole = path.read_bytes()
    kinds = set()
    for size in [*range(8), *range(8, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CUT_OFF) as caught:
            run.chain.load_state_dict(torch.load(path, weights_only=True))
        kinds.add(caught.type)
    assert kinds >= {EOFError, pickle.UnpicklingError, RuntimeError}
    assert run.everything() == before


# ---------------------------------------------------------------------- what is no damage


def test_what_begins_as_nan_or_infinite_loads():
    """An empty window holds NaN, a limit that is not known yet is infinite: both are resumed."""
    links = [AdaptiveClip(Quantile(0.5, window=8), dim=None), ClipValueGrowth(), LR(0.1)]
    first, second = Run("Modular", links), Run("Modular", links)
    for run in (first, second):
        run.chain.init_state()
    first.train(range(3))
    checkpoint = first.checkpoint()
    norms = checkpoint["state"][0]["AdaptiveClip/norms"]
    assert norms.isnan().any()
    assert second.chain.state[second.params[0]]["ClipValueGrowth/previous"].isinf().all()
    second.chain.load_state_dict(second.checkpoint())
    second.chain.load_state_dict(checkpoint)
    for p, q in zip(second.params, first.params, strict=True):
        p.data.copy_(q.data)
    first.train(range(3, 6)), second.train(range(3, 6))
    for p, q in zip(first.params, second.params, strict=True):
        assert p.equal(q)
    checkpoint["state"][0]["ClipValueGrowth/previous"] = torch.full((3, 4), math.nan)
    refused(second, checkpoint, "has NaN in 'ClipValueGrowth/previous' of parameter 0: load")


def test_state_that_one_of_several_links_lacks_is_missed():
    """Whether a link has a criterion inside, or no memory, does not matter for the next."""
    links = [AdaptiveClip(Quantile(0.5, window=8), dim=None), ClipNorm(1.0), Adam(), LR(0.1)]
    run = started("Modular", links=links)
    for path in ("AdaptiveClip", "Adam"):
        checkpoint = run.checkpoint()
        drop(state, f"{path}/*")(checkpoint, "")
        refused(run, checkpoint, f"has no state '{path}/")


def test_what_a_broken_run_saved_loads_as_the_sentence_says():
    """Adam takes a NaN gradient in, as torch's does; with numbers in their place it loads."""
    run = started("Modular", links=[Adam(), LR(0.1)])
    for value in (math.inf, math.nan):
        run.params[0].grad = torch.full((3, 4), value)
        run.chain.step()
    fresh = started("Modular", links=[Adam(), LR(0.1)])
    checkpoint = run.checkpoint()
    sentence = refused(fresh, checkpoint, "has NaN in 'Adam/exp_avg' of parameter 0 and 1 more")
    assert "torch.nan_to_num_" in sentence
    for held in checkpoint["state"].values():
        for t in held.values():
            torch.nan_to_num_(t)
    fresh.chain.load_state_dict(checkpoint)
    fresh.train(range(3, 4))
    assert all(p.isfinite().all() for p in fresh.params)


def test_an_infinite_average_loads():
    """A gradient of 1e30 makes Adam's v infinite in float32: those entries stand still, and may."""
    run = started("Modular", links=[Adam(), LR(0.1)])
    run.params[0].grad = torch.full((3, 4), 1e30)
    run.chain.step()
    assert run.chain.state[run.params[0]]["Adam/exp_avg_sq"].isinf().all()
    fresh = started("Modular", links=[Adam(), LR(0.1)])
    fresh.chain.load_state_dict(run.checkpoint())
    assert fresh.chain.state[fresh.params[0]]["Adam/exp_avg_sq"].isinf().all()


def test_state_that_is_rightly_missing_loads():
    """Parameters without a gradient, groups that were added later, and links that wait."""
    run = Run("Modular")
    run.params[1].grad = torch.ones(4)
    run.chain.step()
    added = torch.nn.Parameter(torch.ones(2))
    run.chain.add_param_group({"params": [added]})
    other = Run("Modular")
    other.chain.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    checkpoint = run.checkpoint()
    assert set(checkpoint["state"]) == {1}
    assert SHARED not in checkpoint["param_groups"][1]["chain"]
    other.chain.load_state_dict(checkpoint)
    assert set(other.chain.state_dict()["state"]) == {1}
