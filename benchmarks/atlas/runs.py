"""A run of a rule at a place through all troubles, and what is measured of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.atlas.gradients import (
    AFTER,
    BEFORE,
    PARTS,
    SHAPES,
    SIZE,
    STEPS,
    TROUBLES,
    draws,
    gradients,
    signal,
    twin_name,
)
from benchmarks.atlas.rules import AFTER_ADAM, PLACES, RULES, Usual
from benchmarks.rows import digits
from torchzero_clip import Chain, Lambda, Modular, Scale, Transform

WEIGHTS = 200.0  # the length of the weights where that of a gradient is 1
CLOSE = 0.1  # a step is back where its distance from the healthy one is at most this share of it
IN_A_ROW = 10  # and so are the next
AVERAGES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
DRAWN = ("spike ×1000", "jump ×4")  # the troubles of the pictures,
SHOWN = range(-10, 60)  # and their steps, from the trouble on


class Walked(NamedTuple):
    """What a chain made of gradients, steps by runs; the averages as they were before the end."""

    steps: Tensor
    touched: Tensor
    averages: list[Tensor]


def walk(usual: Usual, rule: str, place: str, grads: Tensor) -> Walked:
    """Every run is a layer of one model; after each step its weights are put back."""
    entry, (front, behind) = RULES[rule], PLACES[place]
    seen: dict[str, list[Tensor]] = {"before": [], "after": []}

    def probe(name: str) -> Transform:
        def note(u: Tensor) -> Tensor:
            seen[name].append(u.flatten().clone())
            return u

        return Lambda(note)

    runs = grads.shape[1]
    start = WEIGHTS / SIZE**0.5 * draws(6, SIZE).expand(runs, SIZE)
    flat = start.clone()
    params = [
        (f"{run}.{part}", Parameter(values.view(shape)))
        for run in range(runs)
        for part, (shape, values) in enumerate(zip(SHAPES, flat[run].split(PARTS), strict=True))
    ]
    made = [*front, *([probe("before")] if front else []), *entry.make(usual), probe("after")]
    opt = Modular(params, *made, *behind, Scale(1.0), fused=False)  # at full size, on purpose
    steps, touched, averages = torch.empty_like(grads), torch.ones(grads.shape[:2]), []
    for step, row in enumerate(grads):
        given = [part for run in row for part in run.split(PARTS)]
        for (_, p), grad in zip(params, given, strict=True):
            p.grad = grad.view(p.shape).clone()
        if step == STEPS - 1:
            averages = averages_of(opt, runs)
        seen["before"].clear()
        seen["after"].clear()
        opt.step()
        steps[step] = start - flat
        flat.copy_(start)
        skipped = any(x > 0 for name, x in opt.metrics().items() if name.endswith("/why"))
        if not skipped:
            came = torch.cat(seen["before"]) if front else row
            left = torch.cat(seen["after"]).view(runs, SIZE)
            touched[step] = differs(left, came.view(runs, SIZE)).any(1).float()
    return Walked(steps, touched, averages)


def differs(left: Tensor, came: Tensor) -> Tensor:
    """Where two are not the same; NaN is the same as NaN."""
    return (left != came) & ~(left.isnan() & came.isnan())


def averages_of(opt: Modular, runs: int) -> list[Tensor]:
    """The averages of the links that descend, runs by entries; of squares the root."""
    found: dict[str, list[Tensor]] = {}
    for group in opt.param_groups:
        for p in group["params"]:
            for name, value in opt.state[p].items():
                if name.split("/")[-1] in AVERAGES:
                    value = value.sqrt() if name.endswith("_sq") else value
                    found.setdefault(name, []).append(value.flatten())
    return [torch.cat(values).view(runs, SIZE) for values in found.values()]


@cache
def usual(place: str) -> float:
    """The median norm of what comes to a place where nothing is wrong."""
    if place != AFTER_ADAM:
        return 1.0
    names, grads = gradients()
    calm = walk(Usual(1.0), "no rule", place, grads[:, [names.index("none")]])
    return digits(calm.steps[BEFORE : STEPS - 1, 0].norm(dim=-1).median().item())


def chain_of(rule: str, place: str) -> str:
    """The rule as one writes it, at a place."""
    return ", ".join(map(repr, Chain(*RULES[rule].make(Usual(usual(place))))))


@dataclass
class Row:
    """A line of atlas.csv: a rule at a place in a trouble."""

    place: str
    rule: str
    trouble: str
    largest: float
    back: float
    touched: float
    averages: float
    again: float
    along: float


@dataclass
class Curve:
    """A line of atlas_curves.csv: the sizes of the steps around a trouble, in healthy ones."""

    place: str
    rule: str
    trouble: str
    sizes: str


def measured(case: tuple[str, str]) -> tuple[list[Row], list[Curve]]:
    """All troubles of a rule at a place."""
    torch.set_num_threads(1)  # vectors as short as these gain nothing from more
    rule, place = case
    names, grads = gradients()
    if RULES[rule].together:
        parts = [
            walk(Usual(usual(place)), rule, place, grads[:, [run]]) for run in range(len(names))
        ]
        made = Walked(
            torch.cat([part.steps for part in parts], 1),
            torch.cat([part.touched for part in parts], 1),
            [torch.cat(pieces) for pieces in zip(*(p.averages for p in parts), strict=True)],
        )
    else:
        made = walk(Usual(usual(place), "layer"), rule, place, grads)
    rows = [row_of(rule, place, name, made, names) for name in TROUBLES]
    curves = []
    for name in DRAWN:
        twin, own = twin_of(name, names), names.index(name)
        sizes = made.steps[:, own].norm(dim=-1) / middle(made.steps[:, twin])
        shown = [f"{sizes[BEFORE + step].item():.4g}" for step in SHOWN]
        curves.append(Curve(place, rule, name, " ".join(shown)))
    return rows, curves


def twin_of(trouble: str, names: list[str]) -> int:
    return names.index(twin_name(TROUBLES[trouble].level))


def middle(steps: Tensor) -> float:
    """The median size of healthy steps."""
    return steps[BEFORE : STEPS - 1].norm(dim=-1).median().item()


def row_of(rule: str, place: str, name: str, made: Walked, names: list[str]) -> Row:
    trouble, own, twin = TROUBLES[name], names.index(name), twin_of(name, names)
    steps, healthy = made.steps[:, own], made.steps[:, twin]
    after = slice(BEFORE, STEPS - 1)
    ended = BEFORE + (trouble.lasts or 0)
    sizes = steps[after].norm(dim=-1)
    largest = (sizes / middle(healthy)).nan_to_num(torch.inf).max().item()
    away = (steps - healthy).norm(dim=-1) / healthy.norm(dim=-1)
    last, calm = [s[-1].norm().item() for s in (steps, healthy)]
    return Row(
        place,
        rule,
        name,
        largest=digits(largest),
        back=torch.nan if trouble.lasts is None else back(away[ended : STEPS - 1], largest),
        touched=digits(made.touched[ended : STEPS - 1, own].mean().item()),
        averages=digits(max([apart(x[own], x[twin]) for x in made.averages], default=torch.nan)),
        again=digits(1.0 if last == calm else last / calm if calm else torch.inf),
        along=digits(torch.cosine_similarity(steps[after].sum(0), signal(), dim=-1).item()),
    )


def back(away: Tensor, largest: float) -> float:
    """How many steps pass until ten in a row are close to the healthy ones.

    A step that is no number has no way back: the weights are lost.
    """
    close = (away <= CLOSE) & (largest < torch.inf)
    for step in range(AFTER - IN_A_ROW):
        if close[step : step + IN_A_ROW].all():
            return float(step)
    return torch.inf


def apart(x: Tensor, healthy: Tensor) -> float:
    """How far x is from what it would be, over the size of that; what is no number is infinite."""
    return ((x - healthy).norm() / healthy.norm()).nan_to_num(torch.inf).item()


def run(cases: Sequence[tuple[str, str]], workers: int) -> Iterable[tuple[list[Row], list[Curve]]]:
    """All cases in their order, on several processes."""
    if workers == 1:
        yield from map(measured, cases)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(measured, cases)
