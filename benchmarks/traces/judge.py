"""What rules at many sensitivities would have done to the traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.rows import digits
from torchzero_clip import (
    AdaGC,
    AutoClip,
    ClipNorm,
    ClipNormGrowth,
    NormRule,
    Trace,
    ZClip,
    ZScoreClip,
    simulate,
)

PLANTED, EVERY, FIRST = 5.0, 50, 150  # spikes in traces that have none: their size, and where
FACTORS = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
DEVIATIONS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
PERCENTILES = (50.0, 90.0, 95.0, 99.0)

Family = tuple[Sequence[float], Callable[[float, float], NormRule]]
FAMILIES: dict[str, Family] = {  # sensitivities, and the rule of one and the median norm
    "ClipNorm, in medians": (FACTORS, lambda x, median: ClipNorm(digits(x * median), dim="global")),
    "ZClip, z_thresh": (DEVIATIONS, lambda x, median: ZClip(z_thresh=x, max_norm=None)),
    "ZScoreClip, zmax": (DEVIATIONS, lambda x, median: ZScoreClip(zmax=x)),
    "AutoClip, percentile": (PERCENTILES, lambda x, median: AutoClip("percentile", x)),
    "ClipNormGrowth, mul": (FACTORS, lambda x, median: ClipNormGrowth(mul=x, dim="global")),
    "AdaGC, rel": (FACTORS, lambda x, median: AdaGC(rel=x)),
}


@dataclass
class Line:
    """A line of simulation.csv: a rule on a trace."""

    trace: str
    spikes: str
    family: str
    sensitivity: float
    rule: str
    false: float
    missed: float


def judge(name: str, trace: Trace, families: Sequence[str] = (*FAMILIES,)) -> Iterator[Line]:
    """Every rule at every sensitivity on one trace."""
    spikes = trace.spikes
    known = spikes is not None and bool(spikes.any())
    trace = trace if known else planted(trace)
    median = trace.total.median().item()
    for family in families:
        values, make = FAMILIES[family]
        rules = [make(x, median) for x in values]
        rows = zip(*[part.tolist() for part in simulate(trace, *rules).alarms()], strict=True)
        for x, rule, (false, missed) in zip(values, rules, rows, strict=True):
            spikes_are = "recorded" if known else f"planted ×{PLANTED:g}"
            yield Line(name, spikes_are, family, x, repr(rule), digits(false), digits(missed))


def planted(trace: Trace) -> Trace:
    """The trace with spikes: all norms of every fiftieth step are five times as long."""
    steps = torch.arange(len(trace))
    where = (steps >= FIRST) & (steps % EVERY == 0)
    norms = torch.where(where.unsqueeze(1), PLANTED * trace.norms, trace.norms)
    return Trace(norms, trace.names, trace.known, {**trace.logged, "spike": where.double()})
