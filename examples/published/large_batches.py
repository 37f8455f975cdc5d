"""Study large batches without normalization: does adaptive clipping (AGC) help?

After Brock et al., arXiv 2102.06171, figure 2: residual networks with and without batch norm, SGD
with Nesterov momentum, a learning rate that grows with the batch, and several thresholds of AGC.
"""

import math

import torch
from torch.nn import functional as F

from examples.published.charts import Panel, figure
from examples.published.models import Residual
from examples.published.study import Questions, Results, Study
from examples.published.tables import Parts
from torchzero_clip import AGC, LR, Masked, Modular, Momentum, Warmup

BATCHES, EPOCHS, WARM, WIDTH, BLOCKS = (16, 64, 256), 12, 2, 8, 3
LIMITS = {"AGC 0.01": 0.01, "no clip": 0, "AGC 0.04": 0.04, "AGC 0.16": 0.16, "batch norm": 0}


def inner(name: str, _: object) -> bool:
    """Return whether a parameter is clipped: all parameters are, except the last layer's."""
    return not name.startswith("head")


def run(case: str, method: str, rate: float, seed: int, epochs: int = EPOCHS) -> list[float]:
    """Return the accuracy on held-out data, and the loss of the last batch."""
    parts, batch, limit = Parts("digits", seed), int(case), LIMITS[method]
    model = Residual(WIDTH, BLOCKS, normed=method == "batch norm")
    clip = [Masked(AGC(limit), inner)] if limit else []
    momentum, lr = Momentum(0.9, nesterov=True), LR(rate * batch / BATCHES[0])
    warmup = Warmup(WARM * math.ceil(len(parts.x) / batch))
    opt = Modular(model.named_parameters(), *clip, momentum, warmup, lr)
    for x, y in parts.batches(batch, epochs):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        model.eval()
        x, y = parts.held_out
        return [(model(x).argmax(1) == y).float().mean().item(), loss.item()]


def picture(found: Results) -> str:
    """Draw the accuracy over the batch size."""
    lines = {m: [p for b in BATCHES for p in found.points(str(b), m, [b])] for m in LIMITS}
    sizes = {b: str(b) for b in BATCHES}
    panel = Panel("digits", "batch", "accuracy", lines, log="x", ticks=sizes, low=0.0, high=1.0)
    return figure([panel], "Accuracy on held-out digits. The learning rate grows with the batch.")


def tightness(found: Results) -> Questions:
    """Compare the tightest threshold with the others."""
    pairs = {}
    for other in ("AGC 0.04", "AGC 0.16"):
        for batch in map(str, BATCHES):
            both = [found.scores(batch, method) for method in ("AGC 0.01", other)]
            pairs[f"{other}, batch {batch}"] = both[0], both[1]
    return {"AGC 0.01 against": pairs}


STUDY = Study(
    name="large_batches",
    cases={str(batch): (*LIMITS,) for batch in BATCHES},
    rates=lambda case, method: (0.01, 0.03, 0.1),  # of the smallest batch
    run=run,
    score=lambda values: 1 - values[0],
    columns={"accuracy": lambda values: values[0], "loss": lambda values: values[1]},
    against="no clip",
    picture=picture,
    further=tightness,
    first=str(BATCHES[0]),
)
