"""What `test_recovered.py` starts on every rank: sharded runs of which one rank has bad batches.

torchrun --nproc-per-node 2 -m tests.processes.recovered eager replayed
"""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.recovering.runs import Loader, batches, differences
from torchzero_clip import LR, Adam, ClipNorm, Modular, Recover, SkipSpike, WeightEMA
from torchzero_clip.core.sharding.layout import local


class Sharded:
    """A sharded model with dropout, and a loop over the batches of this rank."""

    def __init__(self, compile: bool) -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Tanh(), nn.Linear(9, 6))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        links = SkipSpike(), ClipNorm(1.0, dim="global"), Adam(), LR(1e-2), WeightEMA(0.9)
        self.opt = Modular(model.named_parameters(), *links, compile=compile)
        if compile:  # programs run node by node
            self.opt.engine = self.opt.engine.twin()
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 100)
        torch.manual_seed(dist.get_rank())

    def train(self, given: Any, recover: Recover | None = None) -> None:
        for x, y in given:
            self.opt.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.opt.step()
            self.schedule.step()
            if recover is not None:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Recover: step")
                    recover.step(loss)

    def all(self) -> list[Any]:
        states = [
            {name: local(torch.as_tensor(x)) for name, x in state.items()}
            for state in self.opt.state.values()
        ]
        params = [local(p.detach()) for p in self.model.parameters()]
        chains = [group["chain"] for group in self.opt.param_groups]
        return [params, states, chains, self.schedule.state_dict(), torch.get_rng_state()]


EVERY = 10
BAD = range(25, 30)  # steps with bad batches; the snapshot before them is behind step 20
MORE = {"every": EVERY, "check": 5, "window": EVERY}


def given() -> list[Any]:
    """Batches of which the last rank alone has bad ones."""
    bad = dist.get_rank() == dist.get_world_size() - 1
    return batches(34, bad=BAD if bad else ())


def compared(compile: bool) -> list[str]:
    wrong = []
    for again in (False, True):
        run = Sharded(compile)
        data: Any = Loader(given()) if again else iter(given())
        parts = [run.schedule, *([data] if again else [])]
        recover = Recover(run.opt, run.model, parts=parts, **MORE)
        run.train(recover.batches(data), recover)
        gone = set(recover.now.left_out)
        gone = gone or set(range(21, 21 + sum([back.left_out for back in recover.events])))
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (recover.events, sorted(gone)))
        if not recover.events or any([each != everywhere[0] for each in everywhere]):
            wrong.append(f"ranks went back otherwise: {everywhere}")
        plain = Sharded(compile)
        plain.train([batch for i, batch in enumerate(given(), 1) if i not in gone])
        wrong += differences(plain.all(), run.all())
    return wrong


def untold(compile: bool) -> list[str]:
    """A loss on the last rank alone: all look at weights as well, and judge that loss."""
    run = Sharded(compile)
    recover = Recover(run.opt, run.model, every=4, check=4, window=4)
    last, backs = dist.get_rank() == dist.get_world_size() - 1, []
    for i in range(16):
        run.train(batches(1, bad=()))
        loss = float("nan") if i == 9 else 1.0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Recover: step")
            backs.append(recover.step(loss if last else None))
    wrong = [] if [back.to for back in backs if back] == [8] else [f"went back {backs}"]
    return wrong if recover.now.losses == [1.0] * 4 else [*wrong, f"{recover.now.losses}"]


def resumed(compile: bool) -> list[str]:
    """A run that was saved between two snapshots, on each rank or on the first one alone."""
    straight, data = Sharded(compile), Loader(given())
    recover = Recover(straight.opt, straight.model, parts=[straight.schedule, data], **MORE)
    straight.train(itertools.islice(recover.batches(data), BAD[0]), recover)
    parts = straight.model, straight.opt, straight.schedule, data, recover
    saved = copy.deepcopy([x.state_dict() for x in parts])
    random_state = torch.get_rng_state()
    straight.train(recover.batches(data), recover)
    wrong = [] if recover.events else ["it did not go back"]

    other, again = Sharded(compile), Loader(given())
    found = Recover(other.opt, other.model, parts=[other.schedule, again], **MORE)
    theirs = other.model, other.opt, other.schedule, again, found
    for x, state in zip(theirs, copy.deepcopy(saved), strict=True):
        x.load_state_dict(state)
    torch.set_rng_state(random_state)
    other.train(found.batches(again), found)
    wrong += differences(straight.all(), other.all())
    wrong += [] if found.events == recover.events else [f"went back {found.events}"]

    first = [copy.deepcopy(saved[-1])]
    dist.broadcast_object_list(first, src=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found.load_state_dict(first[0])
    told = any(
        ["because a different rank saved the snapshots" in str(each.message) for each in caught]
    )
    if found._ring or not told:
        wrong.append(f"rank {dist.get_rank()} took snapshots of another rank")
    return wrong


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for how in sys.argv[1:]:
        what, _, engine = how.rpartition("-")
        check = {"": compared, "untold": untold, "resumed": resumed}[what]
        wrong = check(engine == "replayed")
        print(f"{how}: {len(wrong)} wrong", *wrong, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
