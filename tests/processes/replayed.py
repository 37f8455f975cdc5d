"""What `test_replayed.py` starts on every rank: sharded steps that are replayed, and those anew.

    torchrun --nproc-per-node 2 -m tests.processes.replayed brief fsdp tp
    torchrun --nproc-per-node 4 -m tests.processes.replayed every float64 hsdp both

Every construction of the contract table steps three times over: replayed, anew, and on a model
that is not sharded. What is replayed there is replayed here, to the bit as the step done anew, by
the same collectives.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.engines.test_replays import never_replayed, replays
from tests.helpers import equal
from tests.processes.apart import listened
from tests.processes.sharded import SETTINGS, anew, constructions, named, same_gradients
from torchzero_clip import LR, Adam, ClipNorm, Group, Modular, State, TensorList, Transform
from torchzero_clip.core.sharding.layout import local

BRIEF = "brief" in sys.argv
STEPS = 5 if BRIEF else 6
SAMPLE = {  # if brief: what is recorded or refused in different ways
    "ClipNorm[columns]",
    "ClipNormGrowth[layer]",
    "ClipPercentile[60]",
    "DAdaptAdam[default]",
    "Lambda[tanh]",
    "Guard[skip]",
    "SkipLarge[huge]",
    "InBasis[soap]",
    "ScheduleFree[default]",
    "Accumulate[2]",
    "head/grad",
    "zclip",
    "agc",
    "dot",
}


def holds(opt: Modular, params: list[nn.Parameter]) -> Any:
    """All that a step may have changed on this rank."""
    rows = []
    for p in params:
        state = {k: local(torch.as_tensor(x)) for k, x in opt.state.get(p, {}).items()}
        rows.append([local(p.detach()), local(p.grad), state])
    return [rows, [group["chain"] for group in opt.param_groups], opt.metrics()]


def contract(setting: str) -> list[str]:
    """Every construction, replayed and anew; if brief, those of the sample."""
    wrong: list[str] = []
    rows = [row for row in constructions() if not BRIEF or row[0] in SAMPLE]
    assert len(rows) >= len(SAMPLE)
    for name, chain, matrices, _ in rows:
        sides = []
        for side in range(3):
            model = anew(setting, side)[side < 2]
            pairs = [x for x in named(model) if not matrices or x[1].dim() == 2]
            opt = Modular(pairs, *chain, compile=True)
            opt.engine = opt.engine.twin()
            sides.append((opt, [p for _, p in pairs]))
        (fast, params), (slow, twin), (plain, whole) = sides
        never_replayed(slow)
        text = ""
        for step in range(STEPS):
            same_gradients(whole, params, step)
            same_gradients(whole, twin, step)
            logs: list[list[Any]] = [[], []]
            for opt, log in zip((fast, slow), logs, strict=True):
                with listened(log):
                    opt.step()
            plain.step()
            if logs[0] != logs[1]:
                text = f"step {step}: {logs}"
            elif not equal(holds(fast, params), holds(slow, twin)):
                text = f"step {step}: other bits"
        here, there = replays(fast), replays(plain)
        if here.count != there.count or (here.why or "") != (there.why or ""):
            text = f"replayed {here.count} and {there.count} times: {here.why}, {there.why}"
        if text:
            wrong.append(f"{setting} {name}: {text}")
    return wrong


class Talks(Transform):
    """A rule that talks to other ranks by itself."""

    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        total = torch.ones(())
        dist.all_reduce(total)
        return u.mul_(total / dist.get_world_size())


def said() -> list[str]:
    """`explain` says that steps are replayed, with which collectives; and why others are not."""
    wrong = []
    for chain, words in {
        (ClipNorm(1.0, dim="global"), Adam(), LR(1e-2)): "PyTorch runs the rest: gather",
        (Adam(), LR(1e-2)): "A replayed step is 1 call of compiled code.",
        (
            Talks(),
            LR(1e-2),
        ): "c10d.allreduce_.default communicates with other ranks, but a recorded",
    }.items():
        plain, wrapped = SETTINGS["fsdp"]()
        params = [p for _, p in named(wrapped)]
        opt = Modular(params, *chain, compile=True)
        if "can be recorded and replayed" not in opt.explain():
            wrong.append(f"{chain}: {opt.explain()}")
        for step in range(4):
            same_gradients([p for _, p in named(plain)], params, step)
            opt.step()
        if words not in opt.explain():
            wrong.append(f"{chain}: {opt.explain()}")
    return wrong


def trained() -> list[str]:
    """Steps on gradients that torch made are replayed too, wherever these lie."""
    wrong = []
    for setting in ("fsdp", "tp", "partly") if dist.get_world_size() < 4 else ("hsdp", "both"):
        models = [SETTINGS[setting]()[1] for _ in range(2)]
        params = [[p for _, p in named(model)] for model in models]
        chain = ClipNorm(0.1, dim="global"), Adam(), LR(1e-2)
        fast, slow = [Modular(some, *chain, compile=True) for some in params]
        for opt in (fast, slow):
            opt.engine = opt.engine.twin()
        never_replayed(slow)
        for step in range(8):
            x = torch.randn(8, 4 if setting in ("tp", "both") else 5, generator=seeded(step))
            for model, opt in zip(models, (fast, slow), strict=True):
                opt.zero_grad()
                model(x).square().mean().backward()
                opt.step()
        if not equal(*map(holds, (fast, slow), params)):
            wrong.append(f"{setting}: other bits")
        if replays(fast).count != 6:
            wrong.append(f"{setting}: {replays(fast).count} replays: {replays(fast).why}")
    return wrong


def seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


ALONE = {"said": said, "trained": trained}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if "float64" in sys.argv else torch.float32)
    dist.init_process_group("gloo")
    for setting in sys.argv[1:]:
        if setting in ("every", "brief", "float32", "float64"):
            continue
        wrong = ALONE[setting]() if setting in ALONE else contract(setting)
        print(f"{setting}: {len(wrong)} wrong", *wrong, sep="\n", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


if __name__ == "__main__":
    main()
