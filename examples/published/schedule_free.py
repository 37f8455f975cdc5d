"""Study Schedule-Free descent next to averages and a falling learning rate, on convex problems.

After Defazio et al., arXiv 2405.15682: logistic regression on small tables in batches of 16. Each
method has its own best learning rate. The result is the difference between the loss and its
minimum.
"""

import math

from examples.published.charts import Panel, figure
from examples.published.study import Results, Study
from examples.published.tables import TABLES, Parts, Regression, least
from torchzero_clip import LR, Modular, ScheduleFree, WeightAverage

BATCH, EPOCHS, TESTS = 16, 30, 15
METHODS = {
    "Schedule-Free": (ScheduleFree(0.9),),
    "linear decay": (),
    "mean of all": (WeightAverage(),),
    "primal averaging": (ScheduleFree(0.999),),
    "constant": (),
}
RATES = (0.03, 0.1, 0.3)


def run(case: str, method: str, rate: float, seed: int, epochs: int = EPOCHS) -> list[float]:
    """Return the loss above its minimum, at fifteen times of the training."""
    parts = Parts(case, seed)
    model, best = Regression(parts), least(parts)
    opt = Modular(model.parameters(), LR(rate), *METHODS[method])
    batches, seen = [*parts.batches(BATCH, epochs)], []
    for step, (x, y) in enumerate(batches):
        if method == "linear decay":
            opt.param_groups[0]["lr"] = rate * (1 - step / len(batches))
        opt.zero_grad()
        model.loss(x, y).backward()
        opt.step()
        if (step + 1) * TESTS // len(batches) > step * TESTS // len(batches):
            opt.eval()
            seen.append(model.above(best))
            opt.train()
    return seen


def picture(found: Results) -> str:
    """Draw the loss above its minimum for each table."""
    times = [EPOCHS * (i + 1) / TESTS for i in range(TESTS)]
    panels = [
        Panel(
            title=case.replace("_", " "),
            lower="epoch",
            upright="loss above the least",
            lines={m: found.points(case, m, times) for m in METHODS},
            log="y",
        )
        for case in TABLES
    ]
    return figure(panels, "Each method has its own best learning rate.")


STUDY = Study(
    name="schedule_free",
    cases=dict.fromkeys(TABLES, (*METHODS,)),
    rates=lambda case, method: RATES,
    run=run,
    score=lambda values: math.log10(values[-1]),
    columns={"above the least": lambda values: values[-1]},
    against="linear decay",
    picture=picture,
    tuning=(100, 101, 102),
)
