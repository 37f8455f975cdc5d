"""Study Prodigy, which needs no learning rate, next to Adam at the best learning rate of a grid.

After Mishchenko, Defazio, arXiv 2306.06101: logistic regression on small tables in batches of 16,
with a learning rate that falls along half a cosine, and a network with one hidden layer on the
largest table.
"""

import math

from torch import Tensor, nn
from torch.nn import functional as F

from examples.published.charts import Panel, figure
from examples.published.study import Questions, Results, Study
from examples.published.tables import TABLES, Parts, Regression, least
from torchzero_clip import Modular, named

BATCH, EPOCHS, TESTS, NETWORK = 16, 30, 15, "digits, a network"
METHODS = {"Prodigy": "prodigy", "Adam": "adam", "D-Adaptation": "dadapt_adam"}
RATES = {"Adam": (0.001, 0.003, 0.01, 0.03, 0.1), "Prodigy": (1.0,), "D-Adaptation": (1.0,)}


class Network(Regression):
    """A network with one hidden layer of 64 rectified units."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.inner = nn.Linear(parts.x.shape[1], 64)
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x).relu(), self.weight, self.bias)


def run(case: str, method: str, rate: float, seed: int, epochs: int = EPOCHS) -> list[float]:
    """Return the loss above its minimum at fifteen times, and then the held-out accuracy."""
    parts = Parts(case.partition(",")[0], seed)
    network = case == NETWORK
    model, best = (Network(parts), 0.0) if network else (Regression(parts), least(parts))
    opt = Modular(model.parameters(), named(METHODS[method], lr=rate))
    batches, seen = [*parts.batches(BATCH, epochs)], []
    for step, (x, y) in enumerate(batches):
        opt.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / len(batches))) / 2
        opt.zero_grad()
        model.loss(x, y).backward()
        opt.step()
        if (step + 1) * TESTS // len(batches) > step * TESTS // len(batches):
            seen.append(model.above(best))
    return [*seen, model.accuracy()]


def picture(found: Results) -> str:
    """Draw the loss above its minimum for each table."""
    times = [EPOCHS * (i + 1) / TESTS for i in range(TESTS)]
    panels = [
        Panel(
            title=case.replace("_", " "),
            lower="epoch",
            upright="loss" if case == NETWORK else "loss above the least",
            lines={m: found.points(case, m, times) for m in METHODS},
            log="y",
        )
        for case in (*TABLES, NETWORK)
    ]
    return figure(panels, "Adam has the best learning rate of its grid.")


def further(found: Results) -> Questions:
    """Compare Prodigy with D-Adaptation by the loss, and with Adam by the error rate."""
    losses, errors = {}, {}
    for case in found.study.cases:
        loss = [found.scores(case, m) for m in ("Prodigy", "D-Adaptation")]
        wrong = [found.by(lambda v: 1 - v[-1], case, m) for m in ("Prodigy", "Adam")]
        losses[case], errors[case] = (loss[0], loss[1]), (wrong[0], wrong[1])
    return {"Prodigy against D-Adaptation": losses, "Prodigy against Adam by error rate": errors}


STUDY = Study(
    name="prodigy",
    cases=dict.fromkeys((*TABLES, NETWORK), (*METHODS,)),
    rates=lambda case, method: RATES[method],
    run=run,
    score=lambda values: math.log10(values[-2]),
    columns={"above the least": lambda v: v[-2], "accuracy": lambda v: v[-1]},
    against="Adam",
    picture=picture,
    further=further,
    tuning=(100, 101, 102),
)
