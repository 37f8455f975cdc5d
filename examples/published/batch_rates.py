"""Study a batch of 256 at several learning rates: does clipping allow a larger learning rate?

After Brock et al., arXiv 2102.06171, figure 2, with the networks of large_batches.py. In the paper,
the learning rate grows with the batch. Here every method runs at every learning rate, and once more
at the learning rate that three other seeds choose for it.
"""

from examples.published import large_batches
from examples.published.charts import Panel, figure
from examples.published.study import Questions, Results, Study

BATCH, BEST = 256, "own best"
RATES = (0.05, 0.16, 0.5, 1.6, 5.0)
METHODS = ("no clip", "AGC 0.01", "AGC 0.04", "AGC 0.16")


def run(case: str, method: str, rate: float, seed: int, epochs: int = 12) -> list[float]:
    """Return the accuracy on held-out data, and the loss of the last batch."""
    of_smallest = rate * large_batches.BATCHES[0] / BATCH  # what that script multiplies
    return large_batches.run(str(BATCH), method, of_smallest, seed, epochs)


def rates(case: str, method: str) -> tuple[float, ...]:
    return RATES if case == BEST else (float(case),)


def tightness(found: Results) -> Questions:
    """Compare the tightest threshold with the others, at every learning rate."""
    pairs = {}
    for other in ("AGC 0.04", "AGC 0.16"):
        for case in found.study.cases:
            both = [found.scores(case, method) for method in ("AGC 0.01", other)]
            pairs[f"{other}, {case}"] = both[0], both[1]
    return {"AGC 0.01 against": pairs}


def picture(found: Results) -> str:
    """Draw the accuracy over the learning rate."""
    lines = {m: [p for r in RATES for p in found.points(f"{r:g}", m, [r])] for m in METHODS}
    names = "digits, a batch of 256", "learning rate", "accuracy"
    ticks = {r: f"{r:g}" for r in RATES}
    panel = Panel(*names, lines, log="x", ticks=ticks, low=0.0, high=1.0)
    return figure([panel], "Accuracy on held-out digits.")


STUDY = Study(
    name="batch_rates",
    cases=dict.fromkeys((*[f"{r:g}" for r in RATES], BEST), METHODS),
    rates=rates,
    run=run,
    score=lambda values: 1 - values[0],
    columns={"accuracy": lambda values: values[0], "loss": lambda values: values[1]},
    against="no clip",
    picture=picture,
    further=tightness,
    tuning=(100, 101, 102),
)
