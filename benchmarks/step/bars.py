"""What the figures should be, and whether they are."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.step.chains import COMPILED, HEADLINE, OURS, RACES, UNDOCUMENTED
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
    """One demand, and what was measured.

    Args:
        what: What is compared with what.
        value: The measured value, a median if it is a time; None if it was not measured.
        limit: What the value should be at most; None if nothing is demanded.
        at_least: Whether the value should be at least the limit instead.
        spread: The quartiles over rounds; None if there is one value only.
        rounds: How many rounds there were.
        busy: Whether the machine did something else meanwhile, so that nothing is decided.
    """

    what: str
    value: float | None
    limit: float | None
    at_least: bool = False
    spread: tuple[float, float] | None = None
    rounds: int | None = None
    busy: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the demand is met; None if there is none, or it is not decided."""
        if self.value is None or self.limit is None or self.busy:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.limit is None:
            return "no bar"
        if self.busy:
            return "busy"
        return "met" if self.met else "NOT MET"

    def __str__(self) -> str:
        value = "" if self.value is None else f"{self.value:.2f}"
        spread = "" if self.spread is None else f" ({self.spread[0]:.2f}–{self.spread[1]:.2f})"
        sign = "≥" if self.at_least else "≤"
        limit = "" if self.limit is None else f"{sign} {self.limit:g}"
        rounds = "" if self.rounds is None else f"; {self.rounds} rounds"
        return f"{self.verdict:<13}{value:>7}{spread:<16}{limit:<6} {self.what}{rounds}"


def of_ratios(what: str, ratios: Sequence[float], limit: float | None, **more: bool) -> Bar:
    """Return the bar of a ratio of times, which is one number for each round."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Bar(what, middle, limit, spread=(low, high), rounds=len(ratios), **more)


def quartiles(ratios: Sequence[float]) -> str:
    """Return the median of ratios, and their quartiles in brackets; one ratio has no quartiles."""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} (one round)"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def judged(found: Iterable[Bar], busy: bool) -> str:
    """Return the lines of bars; on a busy machine none of them is decided."""
    return "\n".join(str(replace(bar, busy=busy)) for bar in found)


def of_results(results: Sequence[Result]) -> Iterator[Bar]:
    """Yield our time over that of the fastest spelling in torch, and the other bars of races."""
    for result in results:
        race = RACES[result.chain]
        where = f"{result.shapes}, {result.chain}, {result.gradients}, {result.device}"
        best = result.best()
        limit = _eager_limit(result)
        if best is not None:
            yield of_ratios(f"of {best}: {where}", result.ratios(OURS, best), limit)
        for undocumented in UNDOCUMENTED:
            if undocumented in result.times:
                ratios = result.ratios(OURS, undocumented)
                yield of_ratios(f"of the {undocumented}: {where}", ratios, None)
        if "torchzero" in result.times and race.kind != "helper":
            ratios = result.ratios("torchzero", OURS)
            bound = 5.0 if race.has_adam else 3.0
            yield of_ratios(f"times as fast as torchzero: {where}", ratios, bound, at_least=True)
        if COMPILED in result.times:
            yield from _compiled(result, where)
        graphed = result.best(graph=True)
        if graphed is not None and OURS + GRAPH in result.times:
            ratios = result.ratios(OURS + GRAPH, graphed)
            yield of_ratios(f"of {graphed}, ours as a graph: {where}", ratios, limit or 1.0)


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
        limit = AFTER_COMPILING[result.shapes]
        yield of_ratios(f"of {best}, ours compiled: {where}", result.ratios(COMPILED, best), limit)
    if result.shapes in MODELS and result.floor:
        floor = f"of the floor, ours compiled: {where}"
        yield of_ratios(floor, result.over_floor(COMPILED), FLOOR)


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
        yield Bar(
            f"seconds to compile {HEADLINE}, cold{why or ': ask with --measure compile'}",
            None,
            COLD,
        )
    if "torchzero:" not in said:
        yield Bar("times as fast as torchzero: not installed", None, 5.0, at_least=True)
