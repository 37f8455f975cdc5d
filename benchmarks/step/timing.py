"""Races: every contestant in turns, in one process."""

from __future__ import annotations

import gc
import random
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.step.chains import (
    COMPILED,
    LOOP,
    OURS,
    PEERS,
    Build,
    Params,
    Race,
    Step,
    installed,
)
from benchmarks.step.shapes import Shapes

WARM_UP = 4  # the first steps make state, and some compile
WARM_UP_IN_TORCH = 2  # the first step makes state
FIRST = 3  # rounds after which the slow contestants leave
CLOSE = 1.5  # a spelling in torch that takes longer than the fastest one by this factor leaves
FAR = 3.0  # another contestant that takes longer than ours by this factor leaves
FEWEST = 7  # rounds of the others, however long they take
GRAPH = ", graph"
BARE = "Adam(fused=True) alone"
"""What torch's fused Adam takes for 7 numbers an entry tells how fast memory is at that moment."""


@dataclass
class Result:
    """What one race took: the seconds of every contestant, round by round."""

    device: str
    shapes: str
    chain: str
    gradients: str
    times: dict[str, list[float]]
    share: float = 0.0
    """Of the bytes that the chain must move over those that BARE moves."""
    copy: float = 0.0
    """The seconds that copying as many bytes takes: on CUDA."""
    missing: list[str] = field(default_factory=list)

    def seconds(self, name: str) -> float:
        return statistics.median(self.times[name])

    def ratio(self, name: str, other: str) -> tuple[float, float, float]:
        """The time of one over that of another within a round: lower quartile, median, upper."""
        low, middle, high = statistics.quantiles(self.ratios(name, other), n=4)
        return low, middle, high

    def ratios(self, name: str, other: str) -> list[float]:
        """Return the time of one over that of another for each round in which both took part."""
        rows = zip(self.times[name], self.times[other], strict=False)  # one may have left
        return [a / b for a, b in rows]

    @property
    def floor(self) -> float:
        """The seconds that the bytes alone would take."""
        return self.share * self.seconds(BARE) if self.share else 0.0

    def over_floor(self, name: str) -> list[float]:
        """Return the time of one over what its bytes would take, for each round."""
        return [ratio / self.share for ratio in self.ratios(name, BARE)]

    def best(self, graph: bool = False) -> str | None:
        """Return the fastest spelling in torch, as it is or as a CUDA graph."""
        return fastest_in_torch(self.times, graph)


def in_torch(name: str) -> bool:
    """Return whether a contestant is a spelling in torch."""
    return name.replace(",", " ").split()[0] == "torch"


def fastest_in_torch(times: Mapping[str, Sequence[float]], graph: bool = False) -> str | None:
    """Return the spelling in torch whose median time is the least; None if there is none.

    A spelling that left early was slower than another one, which stayed.
    """
    names = [name for name in times if in_torch(name) and name.endswith(GRAPH) == graph]
    most = max([len(times[name]) for name in names], default=0)
    stayed = [name for name in names if len(times[name]) == most]
    return min(stayed, key=lambda name: statistics.median(times[name]), default=None)


def run(
    race: Race,
    shapes: Shapes,
    loose: bool,
    seconds: float,
    device: str,
    skip: Sequence[str] = (),
) -> tuple[dict[str, list[float]], list[str]]:
    """Time the contestants for so many seconds after the first rounds, and at least seven rounds.

    Returns:
        The seconds of each round, and who could not take part.
    """
    gc.collect()  # what the last race left
    params, fresh = model(shapes, loose, device, race.dtype)
    steps, missing = {}, []
    for name, build in race.contestants.items():
        if name in PEERS and not installed(name):
            missing.append(f"{name}: not installed")
        elif name not in skip:
            step = prepared(name, build, params, fresh, missing)
            if step is not None:
                steps[name] = step
    if device == "cuda":
        steps |= {
            name + GRAPH: prepared(name, captured(build), params, fresh, missing)
            for name, build in race.contestants.items()
            if name in steps and name not in (*PEERS, BARE, LOOP)  # a loop is thousands of launches
        }
        steps = {name: step for name, step in steps.items() if step is not None}
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0)
    gc.disable()
    try:
        end = 0.0
        while len(times[OURS]) < FEWEST or time.perf_counter() < end:
            if len(times[OURS]) == FIRST:
                end = time.perf_counter() + seconds
                order = [name for name in order if stays(times, name)]
            shuffle.shuffle(order)
            for name in order:
                refill(params, fresh)
                times[name].append(timed(steps[name], device))
    finally:
        gc.enable()
        if COMPILED in steps:
            torch.compiler.reset()  # compiled code holds what it has seen
    return times, missing


def stays(times: Mapping[str, Sequence[float]], name: str) -> bool:
    """Return whether a contestant goes on after the first rounds.

    The others leave, so that those that are close to each other have many rounds. Ours and the
    fastest spelling in torch always go on.
    """
    if name == OURS:
        return True
    if name == BARE:
        return COMPILED in times  # a bar compares nothing else with it
    taken = statistics.median(times[name])
    fastest = fastest_in_torch(times, name.endswith(GRAPH))
    if in_torch(name) and fastest is not None:
        return taken <= CLOSE * statistics.median(times[fastest])
    return taken <= FAR * statistics.median(times[OURS])


def model(
    shapes: Shapes, loose: bool, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Params, list[tuple[Tensor, Tensor]]]:
    """Parameters, and for each the gradient that it has and the one to refill it from.

    All contestants move the same parameters: what the values are does not matter for the time.
    """
    torch.manual_seed(0)
    params = [Parameter(0.02 * torch.randn(s, device=device, dtype=dtype)) for s in shapes]
    entries = sum(p.numel() for p in params)
    size = 0.5 / entries**0.5 if loose else 1.0  # a norm of 0.5, or far above every limit
    fresh = [size * torch.randn_like(p) for p in params]
    for p, grad in zip(params, fresh, strict=True):
        p.grad = grad.clone()
    return params, [
        (p.grad, grad) for p, grad in zip(params, fresh, strict=True) if p.grad is not None
    ]


def refill(params: Params, fresh: list[tuple[Tensor, Tensor]]) -> None:
    """The same gradients for every step, whoever has clipped or dropped them."""
    with torch.no_grad():
        torch._foreach_copy_([grad for grad, _ in fresh], [source for _, source in fresh])
    for p, (grad, _) in zip(params, fresh, strict=True):
        p.grad = grad


def prepared(
    name: str, build: Build, params: Params, fresh: list[tuple[Tensor, Tensor]], missing: list[str]
) -> Step | None:
    """A contestant after its first steps; None, and why, where it cannot run here."""
    try:
        with warnings.catch_warnings():
            if name in PEERS:
                warnings.simplefilter("ignore")
            refill(params, fresh)
            step = build(params)
            for _ in range(WARM_UP_IN_TORCH if in_torch(name) else WARM_UP):
                refill(params, fresh)
                step()
    except Exception as error:
        if name == OURS:
            raise
        missing.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
        return None
    return step


def timed(step: Step, device: str) -> float:
    """The seconds of one step."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    step()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1000


def captured(build: Build) -> Build:
    """The step as a CUDA graph."""

    def graphed(params: Params) -> Step:
        step = build(params)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay: Step = graph.replay
        return replay

    return graphed


# ---------------------------------------------------------------------- bandwidth


def bare(params: Params) -> Step:
    """A step of torch's fused Adam, which reads four numbers an entry and writes three."""
    step: Step = torch.optim.Adam(params, lr=1e-3, fused=True).step
    return step


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a copy of a gigabyte."""
    source = torch.empty(2**28, device=device)
    target = torch.empty_like(source)
    times = [timed(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * 4 * source.numel() / statistics.median(times)
