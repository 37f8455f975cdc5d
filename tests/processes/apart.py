"""What `test_replayed.py` starts on three ranks: in some steps one replays and others do not.

    torchrun --nproc-per-node 3 -m tests.processes.apart 2000 fsdp stages
    torchrun --nproc-per-node 3 -m tests.processes.apart 10 raises

Beside each optimizer goes one that replays nothing. Both must leave the same bits, by the same
collectives in the same order, whatever happens to one rank alone.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.engines.test_replays import never_replayed, replays
from tests.helpers import equal
from tests.processes.sharded import Net, twins
from torchzero_clip import LR, Adam, ClipNorm, Modular, SkipLarge, WeightDecay, ZClip
from torchzero_clip.core.sharding.layout import layout_of, local

COLLECTIVES = ("all_gather_single", "all_gather_into_tensor", "all_to_all_single", "all_reduce")
Models = list[list[nn.Parameter]]
ROUND = 40  # steps, of which the second half is quiet
Happens = Callable[["Run", bool], None]


class Run:
    """The same parameters twice, with optimizers of which one replays.

    `chosen` draws alike on all ranks, and says to which of them something happens.
    """

    def __init__(self, setting: str) -> None:
        self.rank, self.chosen = dist.get_rank(), random.Random(0)
        self.models = [list(net.parameters()) for net in twins(Net)]
        self.like = [p.detach().clone() for p in self.models[0]]
        group = None
        if setting == "stages":  # each rank has some of the layers
            self.models = [params[self.rank :: dist.get_world_size()] for params in self.models]
            group = dist.group.WORLD
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            nets = [fully_shard(net, mesh=mesh) for net in twins(Net)]
            self.models = [list(net.parameters()) for net in nets]
        self.sharded, self.opts = group is None, [self.made(ps, group) for ps in self.models]
        never_replayed(self.opts[1])
        self.lr, self.step = 1e-2, 0
        self.asleep = self.without = -1

    def made(self, params: list[nn.Parameter], group: Any) -> Modular:
        far = ClipNorm(1.0, dim="global"), ZClip(warmup_steps=3, dim="global")
        chain = SkipLarge(900.0), *far, Adam(), ClipNorm(0.3), WeightDecay(0.01), LR(1e-2)
        opt = Modular(params, *chain, compile=True, process_group=group)
        opt.engine = opt.engine.twin()
        return opt

    def give(self) -> None:
        """Gradients, which are the same on both sides."""
        for params in self.models:
            gen = torch.Generator().manual_seed(self.step)
            grads = [torch.randn(t.shape, generator=gen) for t in self.like]
            mine = grads if self.sharded else grads[self.rank :: dist.get_world_size()]
            for p, g in zip(params, mine, strict=True):
                layout = layout_of(p)
                p.grad = g if layout is None else layout.wrap(layout.part(g).clone())

    def holds(self, i: int) -> Any:
        """All that a step of one side may have changed."""
        opt, rows = self.opts[i], []
        for p in self.models[i]:
            grad = None if p.grad is None else local(p.grad)
            state = {k: local(torch.as_tensor(x)) for k, x in opt.state.get(p, {}).items()}
            rows.append([local(p.detach()), grad, state])
        return [rows, [group["chain"] for group in opt.param_groups], opt.metrics()]


# ---------------------------------------------------------------------- what happens


def nothing(run: Run, mine: bool) -> None:
    """A step like the one before."""


def anew(run: Run, mine: bool) -> None:
    """What one rank has written down is gone."""
    if mine:
        run.opts[0].engine.forget("a test")
        vars(run.opts[0].engine).pop("_recording", None)


def seldom(run: Run, mine: bool) -> None:
    """What one rank has written down is gone, and it does not try again for a while."""
    if mine:
        run.opts[0].engine.forget("a test")
        replays(run.opts[0])._required = 20


def fails(run: Run, mine: bool) -> None:
    """One rank cannot write steps down, until all begin anew."""
    engine: Any = run.opts[0].engine
    if mine:
        engine.forget("a test")
        engine._recording = lambda grads: 1 / 0


def live(run: Run, mine: bool) -> None:
    """Another rate on one rank."""
    if mine:
        run.lr = run.lr * 0.5 if run.lr > 1e-3 else 1e-2


def kinds(run: Run, mine: bool) -> None:
    """A rate of another kind on one rank, in this step."""
    for opt in run.opts if mine else ():
        opt.param_groups[0]["lr"] = torch.tensor(run.lr)


def state(run: Run, mine: bool) -> None:
    """A tensor of state of one rank is another one with the same values."""
    for params, opt in zip(run.models, run.opts, strict=True) if mine else ():
        held = opt.state[params[0]]
        if "Adam/step" in held:
            held["Adam/step"] = held["Adam/step"].clone()


def gaps(run: Run, mine: bool) -> None:
    """The gradients of one rank lie in memory with gaps."""
    for p in [p for params in run.models for p in params] if mine else ():
        part = local(p.grad)
        if part.dim() > 1:
            wide = torch.stack([part, part], -1)[..., 0]
            layout = layout_of(p)
            p.grad = wide if layout is None else layout.wrap(wide)


def without(run: Run, mine: bool) -> None:
    """A parameter has no gradient: of stages on one rank, of a sharded model on all."""
    if run.sharded or mine:
        for params in run.models:
            params[0].grad = None


def large(run: Run, mine: bool) -> None:
    """The gradients of one rank are so large that all skip."""
    for p in [p for params in run.models for p in params] if mine else ():
        local(p.grad).mul_(1e4)


EVENTS: list[Happens] = [
    *[nothing] * 6,
    *(anew, seldom, fails, live, kinds, state, gaps, without, large),
]


def refused(opt: Modular) -> None:
    """A live value that no step takes raises on all ranks before any has sent a word."""
    opt.param_groups[0]["weight_decay"] = math.nan
    with pytest.raises(ValueError, match="weight_decay must be a finite number"):
        opt.step()
    opt.param_groups[0]["weight_decay"] = 0.01


# ---------------------------------------------------------------------- the checks


@contextmanager
def listened(log: list[Any]) -> Iterator[None]:
    """A block in which the collectives that are issued are noted."""
    names = [name for name in COLLECTIVES if hasattr(dist, name)]
    before = {name: getattr(dist, name) for name in names}

    def noted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sizes = [t.numel() for t in args if isinstance(t, Tensor)]
            log.append((name, sizes, kwargs["group"].group_name if kwargs.get("group") else ""))
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, noted(name))
    try:
        yield
    finally:
        for name in names:
            setattr(dist, name, before[name])


def together(setting: str, steps: int) -> list[str]:
    """Whatever happens to one rank, all go on together, as those that repeat nothing."""
    run, told = Run(setting), []
    for run.step in range(steps):
        run.give()
        event, to = run.chosen.choice(EVENTS), run.chosen.randrange(dist.get_world_size())
        begins = run.step % (ROUND // 2) == 0
        if begins:
            event = anew  # on all: what does not stay alike is tried ever more seldom
        elif run.step % ROUND > ROUND // 2:
            event = nothing
        event(run, begins or to == run.rank)
        for opt in run.opts:
            if event is not kinds or to != run.rank:
                opt.param_groups[0]["lr"] = run.lr
        if run.chosen.random() < 0.05:
            for opt in run.opts:
                refused(opt)
        logs: list[list[Any]] = [[], []]
        before = replays(run.opts[0]).count
        for opt, log in zip(run.opts, logs, strict=True):
            with listened(log):
                opt.step()
        again = replays(run.opts[0]).count > before
        told.append((again, logs[0]))
        if logs[0] != logs[1]:
            return [f"{setting}: step {run.step}, {event.__name__}: {logs}"]
        if not equal(run.holds(0), run.holds(1)):
            return [f"{setting}: step {run.step}, {event.__name__}: other bits"]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, told)
    rows = list(zip(*every, strict=True))
    wrong = [i for i, row in enumerate(rows) if len({str(log) for _, log in row}) > 1]
    differ = sum([len({again for again, _ in row}) > 1 for row in rows])
    alike = sum([all([again for again, _ in row]) for row in rows])
    if min(differ, alike) < steps // 10:
        wrong.append(f"{setting}: ranks differed in {differ} steps, and replayed in {alike}")
    return [f"{setting}: {x}" for x in wrong]


def raises(steps: int) -> str:
    """What the others say where one rank raises in a step by itself, and ends."""
    run = Run("fsdp")
    for run.step in range(steps):
        run.give()
        if run.step == steps - 1:
            assert replays(run.opts[0]).count > 0
            if run.rank == 1:
                run.opts[0].param_groups[0]["weight_decay"] = math.nan
        try:
            run.opts[0].step()
        except Exception as error:
            return f"step {run.step}: {type(error).__name__}"
    return "no error"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    steps = int(sys.argv[1])
    for setting in sys.argv[2:]:
        if setting == "raises":
            print(raises(steps), flush=True)
            continue
        wrong = together(setting, steps)
        print(f"{setting}: {len(wrong)} wrong", *wrong, sep="\n", flush=True)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


if __name__ == "__main__":
    main()
