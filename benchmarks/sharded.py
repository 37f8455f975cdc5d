"""Sharded: steps of sharded parameters on gloo ranks, beside torch's clip and optimizer by hand.

    python -m benchmarks.sharded                            # 1, 2 and 4 ranks, a few minutes
    python -m benchmarks.sharded --ranks 2 --only blocks --rounds 20

A row is the median time of a step, in milliseconds, of the faster of torch's foreach and fused
optimizers behind its own clip, and the median ratios to it in turns, with their quartiles: of ours
by default and compiled, with the share of the compiled steps that was replayed. Gradients are in
other memory in every step, as with FSDP2. The last rows are Muon beside torch's own, whose
iteration is put into float32 for both, and SOAP, where `--soap FOLDER` is a checkout of
nikhilvyas/SOAP a1e5535. That one takes no sharded matrices: every rank does all of them.

One rank and its mesh are the same as many, but for the wait; more ranks than cores take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.circumstances import watched
from benchmarks.step.bars import quartiles
from benchmarks.step.shapes import SHAPES
from benchmarks.studies.bases import EVERY, official_soap
from torchzero_clip import EMA, LR, Adam, ClipNorm, Modular, Orthogonalize, WeightDecay, named

RATE, DECAY, LIMIT = 1e-3, 0.01, 1.0
WARM_UP, STEPS = 5, 20  # steps of each contestant that do not count, and in a turn
WIDTH, BLOCKS = 64, 24
Params = list[Any]
Step = Callable[[], Any]


def blocks(mesh: Any) -> Params:
    """24 blocks of a layer and a norm, each a unit of FSDP2."""
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(BLOCKS)]
    )
    for block in model:
        fully_shard(block, mesh=mesh)
    return list(fully_shard(model, mesh=mesh).parameters())


def cut(shapes: Sequence[tuple[int, ...]]) -> Callable[[Any], Params]:
    """Parameters of these shapes, cut along their first dim."""

    def made(mesh: Any) -> Params:
        whole = [0.02 * torch.randn(shape) for shape in shapes]
        return [nn.Parameter(distribute_tensor(t, mesh, [Shard(0)])) for t in whole]

    return made


MODELS: dict[str, Callable[[Any], Params]] = {
    "blocks": blocks,
    "thousand": cut([(16, 16)] * 1000),
    "vit": cut(SHAPES["vit"]()),
    "muon": cut([(256, 256)] * 8),
    "soap": cut([(256, 256)] * 8),
    "quick": cut([(5, 3), (3,)]),
}


# ---------------------------------------------------------------------- who steps


def by_hand(**options: Any) -> Callable[[Params], Step]:
    """torch's clip and AdamW."""

    def made(params: Params) -> Step:
        opt = torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY, **options)

        def step() -> None:
            nn.utils.clip_grad_norm_(params, LIMIT)
            opt.step()

        return step

    return made


def ours(compile: bool) -> Callable[[Params], Step]:
    chain = ClipNorm(LIMIT, dim="global"), Adam(), WeightDecay(DECAY), LR(RATE)
    return lambda params: Modular(params, *chain, compile=compile).step


def torch_muon(params: Params) -> Step:
    """torch's own, with its iteration in single precision: see `benchmarks.studies.muon`."""
    step = torch.optim.Muon(params, lr=RATE, weight_decay=DECAY).step

    def run() -> None:
        with mock.patch.object(Tensor, "bfloat16", Tensor.float):
            step()

    return run


def our_muon(compile: bool) -> Callable[[Params], Step]:
    muon = EMA(0.95, nesterov=True), Orthogonalize(scale="original")
    chain = *muon, WeightDecay(DECAY), LR(RATE)
    return lambda params: Modular(params, *chain, compile=compile).step


def authors_soap(folder: Path) -> Callable[[Params], Step]:
    """The authors' optimizer of whole matrices on every rank, since it knows no other."""

    def made(params: Params) -> Step:
        whole = [nn.Parameter(p.full_tensor()) for p in params]
        for p in whole:
            p.grad = torch.randn_like(p)
        step: Step = official_soap(folder, whole).step
        return step

    return made


def our_soap(compile: bool) -> Callable[[Params], Step]:
    soap = {"precondition_frequency": EVERY}
    return lambda params: Modular(params, named("soap", **soap), compile=compile).step


BOTH = {"default": ours(False), "compiled": ours(True)}
ADAMW = {"foreach": by_hand(foreach=True), "fused": by_hand(fused=True)}
RACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks": (ADAMW, BOTH),
    "thousand": (ADAMW, BOTH),
    "vit": (ADAMW, BOTH),
    "quick": (ADAMW, BOTH),
    "muon": ({"Muon": torch_muon}, {"default": our_muon(False), "compiled": our_muon(True)}),
    "soap": ({}, {"default": our_soap(False), "compiled": our_soap(True)}),
}


# ---------------------------------------------------------------------- on a rank


def give(params: Params, sets: Sequence[list[Tensor]], turn: int) -> None:
    """Gradients in other memory than before."""
    for p, t in zip(params, sets[turn % len(sets)], strict=True):
        whole = {"shape": p.shape, "stride": p.stride()}
        p.grad = DTensor.from_local(t, p.device_mesh, p.placements, run_check=False, **whole)


def race(name: str, rounds: int, soap: str) -> dict[str, Any]:
    """The times of all contestants, in turns, and how often compiled steps were replayed."""
    theirs, mine = RACES[name]
    theirs = {**theirs, "authors": authors_soap(Path(soap))} if name == "soap" and soap else theirs
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sides: dict[str, tuple[Params, list[list[Tensor]], Step]] = {}
    failed: dict[str, str] = {}
    for label, make in {**theirs, **mine}.items():
        torch.manual_seed(0)
        params = MODELS[name](mesh)
        sets = [[torch.randn_like(p.to_local()) for p in params] for _ in range(3)]
        give(params, sets, 0)
        step = make(params)
        try:
            for turn in range(WARM_UP):
                give(params, sets, turn)
                step()
            sides[label] = params, sets, step
        except Exception as error:  # it takes no sharded parameters
            failed[label] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    times: dict[str, list[float]] = {label: [] for label in sides}
    before = {label: _replays(step) for label, (_, _, step) in sides.items()}
    for _ in range(rounds):
        for label, (params, sets, step) in sides.items():
            taken = []
            for turn in range(STEPS):
                give(params, sets, turn)
                dist.barrier()
                begun = time.perf_counter()
                step()
                taken.append(time.perf_counter() - begun)
            times[label].append(statistics.median(taken))
    shares = {
        label: (_replays(step) - before[label]) / (rounds * STEPS)
        for label, (_, _, step) in sides.items()
    }
    return {"times": times, "shares": shares, "failed": failed}


def _replays(step: Any) -> int:
    """How many steps were replayed."""
    engine = getattr(getattr(step, "__self__", None), "engine", None)
    replays = getattr(engine, "replays", None)
    return 0 if replays is None else int(replays.count)


def on_this_rank(names: Sequence[str], rounds: int, soap: str) -> None:
    """Race, and print what came of it on the first rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        found = race(name, rounds, soap)
        if dist.get_rank() == 0:
            print(json.dumps({"name": name, "ranks": dist.get_world_size(), **found}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


# ---------------------------------------------------------------------- what starts ranks


def on_ranks(ranks: int, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What the first of so many ranks prints."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "benchmarks.sharded", "--here", *arguments]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **group, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    assert started[0].stdout is not None
    with started[0].stdout as lines:
        for line in lines:
            if line.startswith("{"):
                yield json.loads(line)
    if any([run.wait() for run in started]):
        raise SystemExit(f"a rank of {ranks} failed")


def row(found: dict[str, Any]) -> str:
    """A line of the table."""
    times, mine = found["times"], RACES[found["name"]][1]
    theirs = {label: statistics.median(t) for label, t in times.items() if label not in mine}
    best = min(theirs, key=theirs.__getitem__) if theirs else "none"
    cells = [f"{found['name']:10}", f"{found['ranks']:5} ", f"{best:8}"]
    cells.append(f"{1e3 * theirs[best]:8.2f}" if theirs else f"{'':8}")
    for label in mine:
        pairs = zip(times[label], times[best] if theirs else itertools.repeat(1e-3), strict=False)
        ratios = [a / b for a, b in pairs]
        cells.append(f"{quartiles(ratios):>21}")
    cells.append(f"{100 * found['shares']['compiled']:9.0f} %")
    refusals = [f"{label} took none ({why})" for label, why in found["failed"].items()]
    return "".join(cells) + "".join([f"  {x}" for x in refusals])


HEAD = (
    f"{'model':10}{'ranks':>5} {'by hand':8}{'ms':>8}"
    f"{'default':>21}{'compiled':>21}{'repeated':>11}"
)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--only", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "quick"]
    )
    parser.add_argument("--rounds", type=int, default=9, help=f"turns of {STEPS} steps")
    parser.add_argument("--soap", default="", help="a checkout of nikhilvyas/SOAP")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        on_this_rank(given.only, given.rounds, given.soap)
    arguments = ["--only", *given.only, "--rounds", str(given.rounds), "--soap", given.soap]
    with watched("benchmarks.sharded"):
        print(HEAD)
        for ranks in given.ranks:
            for found in on_ranks(ranks, arguments):
                print(row(found), flush=True)


if __name__ == "__main__":
    main()
