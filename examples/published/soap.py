"""Study old bases: how much worse do SOAP and Shampoo become if bases are renewed less often?

After Vyas et al., arXiv 2409.11321: both methods on a small transformer, with bases that are
renewed every 1 to 100 steps, next to Adam. Each method has its own best learning rate.
"""

from benchmarks.guide.runs import SIZE, TEXT, train
from benchmarks.guide.troubles import TROUBLES
from examples.published.charts import Panel, figure
from examples.published.study import Questions, Results, Study
from torchzero_clip import (
    LR,
    Adam,
    Graft,
    InBasis,
    Modular,
    Partition,
    Shampoo,
    SOAPBasis,
    Transform,
    matrices_and_rest,
)

EVERY, STEPS = (1, 5, 20, 100), 300
RATES = (0.003, 0.01, 0.03)
ADAM = Adam((0.95, 0.95))


def direction(method: str, every: int) -> Transform:
    """Return the rule for the hidden matrices. Adam updates the rest."""
    if method == "SOAP":
        return InBasis(SOAPBasis(every=every), ADAM)
    return Graft(ADAM, Shampoo((0.95, 0.95), every=every)) if method == "Shampoo" else ADAM


def run(case: str, method: str, rate: float, seed: int, steps: int = STEPS) -> list[float]:
    """Return the final loss on held-out text: the median of five tests, ten steps apart."""
    task = TROUBLES["nothing wrong"](SIZE, TEXT, seed)
    name, _, every = method.partition(", every ")
    parts = {"matrices": direction(name, int(every or 1)), "rest": ADAM}
    split = Partition(parts, matrices_and_rest(task.model))
    opt = Modular(task.model.named_parameters(), split, LR(rate))
    return [train(task, opt, steps)]


def picture(found: Results) -> str:
    """Draw the loss over the number of steps between renewals."""
    lines = {
        name: [p for n in EVERY for p in found.points("", f"{name}, every {n}", [n])]
        for name in ("SOAP", "Shampoo")
    }
    lines["Adam"] = [(n, ys) for n in EVERY for _, ys in found.points("", "Adam", [n])]
    names = "letters", "steps from one renewal to the next", "loss"
    panel = Panel(*names, lines, log="x", ticks={n: str(n) for n in EVERY})
    return figure([panel], "Each method has its own best learning rate.")


def ageing(found: Results) -> Questions:
    """Compare the rarest renewals with the most frequent ones, for each method and between them."""
    ends = {
        name: [found.scores("", f"{name}, every {n}") for n in (EVERY[-1], EVERY[0])]
        for name in ("SOAP", "Shampoo")
    }
    lost = {n: {s: old[s] - new[s] for s in old.keys() & new} for n, (old, new) in ends.items()}
    pairs = {f"{n}, every {EVERY[-1]} against every 1": (x[0], x[1]) for n, x in ends.items()}
    pairs["what SOAP loses by that against Shampoo"] = lost["SOAP"], lost["Shampoo"]
    return {"Old bases": pairs}


METHODS = ("Adam", *[f"{name}, every {n}" for name in ("SOAP", "Shampoo") for n in EVERY])
STUDY = Study(
    name="soap",
    cases={"": METHODS},
    rates=lambda case, method: RATES,
    run=run,
    score=lambda values: values[0],
    columns={"loss": lambda values: values[0]},
    against="Adam",
    picture=picture,
    further=ageing,
)
