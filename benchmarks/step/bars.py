"""What the figures should be, and whether they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.step.chains import COMPILED, HEADLINE, OURS, RACES
from benchmarks.step.timing import GRAPH, Result

EAGER = {"gpt2": 1.1, "resnet50": 1.1, "vit": 1.2, "tiny": 1.5}
WITHIN_THE_LIMIT = 0.9
MANY_SMALL = 1.5
GRAD = 0.9
AFTER_COMPILING = {"resnet50": 0.75, "gpt2": 0.87, "tiny": 0.85}
FLOOR = 1.3
COLD = 40.0
MODELS = ("gpt2", "resnet50")


@dataclass(frozen=True)
class Bar:
    """One demand."""

    what: str
    value: float | None
    """None where it was not measured."""
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[self.met]
        value = "" if self.value is None else f"{self.value:.2f}"
        sign = "≥" if self.at_least else "≤"
        return f"{verdict:<13}{value:>7} {sign} {self.limit:<5g} {self.what}"


def of_results(results: Sequence[Result]) -> Iterator[Bar]:
    """The bars about time that these races can tell."""
    for result in results:
        race = RACES[result.chain]
        where = f"{result.shapes}, {result.chain}, {result.gradients}, {result.device}"
        best = result.best()
        limit = _eager_limit(result)
        by = race.measured_by or best
        if by in result.times and limit is not None:
            yield Bar(f"of {by}: {where}", result.ratio(OURS, by)[1], limit)
        if "torchzero" in result.times and race.kind != "helper":
            faster = result.ratio("torchzero", OURS)[1]
            bound = 5.0 if race.has_adam else 3.0
            yield Bar(f"times as fast as torchzero: {where}", faster, bound, at_least=True)
        if COMPILED in result.times:
            yield from _compiled(result, where)
        graphed = result.best(graph=True)
        if graphed is not None and OURS + GRAPH in result.times:
            value = result.ratio(OURS + GRAPH, graphed)[1]
            yield Bar(f"of {graphed}, ours as a graph: {where}", value, limit or 1.0)


def _eager_limit(result: Result) -> float | None:
    race = RACES[result.chain]
    if race.kind == "helper":
        return race.bound if race.in_torch else None  # torch has no such function
    if result.shapes == "tiny":
        return MANY_SMALL
    if race.kind == "headline" and result.gradients == "within the limit":
        return WITHIN_THE_LIMIT
    if race.kind == "headline":
        return EAGER.get(result.shapes, 1.1)
    return GRAD if race.kind == "grad" else race.bound


def _compiled(result: Result, where: str) -> Iterator[Bar]:
    best = result.best()
    if result.chain == HEADLINE and result.shapes in AFTER_COMPILING and best is not None:
        value, limit = result.ratio(COMPILED, best)[1], AFTER_COMPILING[result.shapes]
        yield Bar(f"of {best}, ours compiled: {where}", value, limit)
    if result.shapes in MODELS and result.floor:
        value = result.over_floor(COMPILED)
        yield Bar(f"of the floor, ours compiled: {where}", value, FLOOR)


def of_memory(counts: Mapping[str, int]) -> Iterator[Bar]:
    for chain, count in counts.items():
        yield Bar(f"allocations as large as a parameter, a step: {chain}, cpu", count, 0)


def of_kept(kept: Mapping[tuple[str, bool], float]) -> Iterator[Bar]:
    """One float32 buffer like the parameters at most; none where no update is clipped."""
    for (chain, loose), size in kept.items():
        clips = RACES[chain].kind != "grad" and not loose
        gradients = "within the limit" if loose else "clipped"
        yield Bar(
            f"bytes kept for each number: {chain}, {gradients}, cpu", size, 4.0 if clips else 0.0
        )


def of_compiling(times: Mapping[int, tuple[float, float]]) -> Iterator[Bar]:
    for count, (cold, _) in times.items():
        yield Bar(f"seconds to compile {HEADLINE}, cold: {count} tensors", cold, COLD)


def unmeasured(bars: Sequence[Bar], compiles: bool) -> Iterator[Bar]:
    """What this run was not asked for, or cannot do, so that nothing is passed over in silence."""
    said = "\n".join(bar.what for bar in bars)
    for shapes, limit in EAGER.items():
        if f"{shapes}, {HEADLINE}," not in said:
            yield Bar(f"of torch: {shapes}, {HEADLINE}", None, limit)
    why = "" if compiles else ": Modular has no compile= here"
    for shapes, limit in AFTER_COMPILING.items():
        if f"ours compiled: {shapes}, {HEADLINE}," not in said:
            yield Bar(f"of torch, ours compiled: {shapes}, {HEADLINE}{why}", None, limit)
    if "seconds to compile" not in said:
        yield Bar(f"seconds to compile {HEADLINE}, cold{why or ': ask with --compile'}", None, COLD)
    if "torchzero:" not in said:
        yield Bar("times as fast as torchzero: not installed", None, 5.0, at_least=True)
