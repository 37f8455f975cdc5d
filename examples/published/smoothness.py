"""Study the curvature along a training: does it grow with the norm of the gradient?

After Zhang et al., arXiv 1905.11881. The study measures the gradient norm and the curvature while
an LSTM is trained. It also counts the steps of descent on x⁴, with and without clipping, from
starting points that are farther and farther away.
"""

import math

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from examples.published.charts import Panel, figure
from examples.published.models import Writer
from examples.published.study import ENOUGH, Questions, Results, Study
from torchzero_clip import LR, ClipNorm, Modular, Transform

CONTEXT, WIDTH, BATCH, STEPS, SLOPE = 32, 64, 32, 200, 0.1
LSTM, STARTS = "LSTM", ("2", "4", "8", "16")
RATES = {"fixed": (1.0, 3.0, 9.0), "clipped": (3.0, 9.0, 27.0)}
OF_POWER = {"fixed": range(-11, -3), "clipped": range(-2, 3)}


def descent(starts: Tensor, chain: list[Transform]) -> float:
    """Return the steps on x⁴ until the slope is small, for the slowest starting point."""
    xs = [start.clone().requires_grad_() for start in starts]
    opt = Modular(xs, *chain)
    for count in range(20 * STEPS):
        for x in xs:
            x.grad = 4 * x.detach() ** 3
        if not SLOPE < (largest := max(abs(x.grad.item()) for x in xs)) < 1e9:
            return float(count) if largest <= SLOPE else math.inf
        opt.step()
    return math.inf


def run(case: str, method: str, rate: float, seed: int, steps: int = STEPS) -> list[float]:
    """Return the last loss, or the steps on x⁴; then the norm and the curvature at every step."""
    clip = [ClipNorm(0.25, dim="global" if case == LSTM else None)] * (method == "clipped")
    if case != LSTM:
        return [descent(float(case) * (0.9 + 0.2 * torch.rand(9)), [*clip, LR(rate)])]
    model, seen = Writer(WIDTH, CONTEXT), []
    params, sample = [*model.parameters()], model.windows[:: len(model.windows) // 128]
    opt = Modular(params, *clip, LR(rate))
    for _ in range(steps):
        before = parameters_to_vector(params).detach()
        opt.zero_grad()
        model.loss(model.windows[torch.randint(len(model.windows), (BATCH,))]).backward()
        opt.step()
        seen += model.curvature(sample, before, parameters_to_vector(params).detach())
    return [model.loss(sample).item(), *seen]


def power(values: list[float]) -> float:
    """Return the exponent of the curvature as a power of the norm, by least squares of logs."""
    both = torch.tensor(values[1:]).view(-1, 2).log().T.cov()
    return (both[0, 1] / both[0, 0]).item()


def picture(found: Results) -> str:
    runs = {m: next(iter(found.values(LSTM, m).values())) for m in RATES}
    points = {m: [(x, [y]) for x, y in zip(v[1::2], v[2::2], strict=True)] for m, v in runs.items()}
    steps = {m: [p for s in STARTS for p in found.points(s, m, [float(s)])] for m in RATES}
    panels = (
        Panel("an LSTM, one seed", "gradient's norm", "curvature", points, log="xy", dots=True),
        Panel("x⁴", "start", "steps", steps, "xy", ticks={float(s): s for s in STARTS}),
    )
    return figure(panels, "Each method has its own best learning rate.")


def halves(found: Results) -> Questions:
    """Compare the methods on the first ten seeds, and on the ten seeds that ran later."""
    both = [found.scores(LSTM, m) for m in ("clipped", "fixed")]
    parts = {"seeds 0 to 9": range(ENOUGH), "seeds 10 to 19": range(ENOUGH, 2 * ENOUGH)}
    kept = {n: [{s: x[s] for s in part if s in x} for x in both] for n, part in parts.items()}
    return {"LSTM, clipped against fixed": {n: (own, other) for n, (own, other) in kept.items()}}


STUDY = Study(
    name="smoothness",
    cases=dict.fromkeys((LSTM, *STARTS), (*RATES,)),
    rates=lambda case, m: RATES[m] if case == LSTM else [2.0**i for i in OF_POWER[m]],
    run=run,
    score=lambda v: v[0] if v[1:] else math.log10(max(v[0], 1)),
    columns={"loss, steps": lambda v: v[0], "power": lambda v: power(v) if v[1:] else math.nan},
    against="fixed",
    picture=picture,
    further=halves,
    untested=STARTS,
    ranged=("power",),
)
