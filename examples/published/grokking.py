"""Study grokking: a network memorizes sums modulo 97, and learns to add only later.

After Prieto et al., arXiv 2501.04697 (OrthoGrad, weight decay), and Lee et al., arXiv 2405.20233
(Grokfast). The network has two hidden layers of 200 units without biases. The training set contains
40 % of all sums, and each step uses all of them. A run ends when the other sums are right.
"""

import math

import torch
from torch.nn import functional as F

from examples.published.charts import Panel, figure
from examples.published.models import Adder
from examples.published.study import Results, Study
from torchzero_clip import LR, Adam, Grokfast, Modular, OrthoGrad, WeightDecay

P, WIDTH, SHARE, STEPS, EVERY, RIGHT = 97, 200, 0.4, 400, 10, 0.95
ADAM, DECAY = Adam((0.9, 0.99), eps=1e-25), WeightDecay(3.0)
GROKFAST = Grokfast(0.98, 2.0)
METHODS = {
    "OrthoGrad": (OrthoGrad(), ADAM),
    "Adam with decay": (ADAM, DECAY),
    "Grokfast with decay": (GROKFAST, ADAM, DECAY),
    "Grokfast": (GROKFAST, ADAM, WeightDecay(0.005)),
    "Adam": (ADAM,),
}


def run(case: str, method: str, rate: float, seed: int, steps: int = STEPS) -> list[float]:
    """Return the accuracy on the training set and on the other sums, every ten steps."""
    every = torch.cartesian_prod(torch.arange(P), torch.arange(P))
    sums, pairs = every.sum(1) % P, every + torch.tensor([0, P])
    learned, rest = torch.randperm(P * P).tensor_split([round(SHARE * P * P)])
    model, seen = Adder(P, WIDTH), []
    opt = Modular(model.parameters(), *METHODS[method], LR(rate))
    for step in range(steps + 1):
        scores = model(pairs[learned])
        if step % EVERY == 0:
            with torch.no_grad():
                both = (scores, learned), (model(pairs[rest]), rest)
                seen += [(x.argmax(1) == sums[i]).float().mean().item() for x, i in both]
            if seen[-1] >= RIGHT:
                break
        opt.zero_grad()
        F.cross_entropy(scores, sums[learned]).backward()
        opt.step()
    return seen


def length(values: list[float]) -> float:
    return EVERY * (len(values) // 2 - 1)


def picture(found: Results) -> str:
    """Return the accuracy on the other sums, which stays constant after a run has ended."""
    lines = {}
    for method in METHODS:
        seeds = [v[1::2] for v in found.values("", method).values()]
        times = range(max(map(len, seeds)))
        lines[method] = [(EVERY * i, [v[min(i, len(v) - 1)] for v in seeds]) for i in times]
    panel = Panel("a + b modulo 97", "step", "accuracy on other sums", lines, low=0.0, high=1.0)
    return figure([panel], f"A run ends at an accuracy of {100 * RIGHT:g} %.")


def steps(values: list[float]) -> float:
    """Return the steps until the other sums are right, or infinity if they never are."""
    return length(values) if values[-1] >= RIGHT else math.inf


STUDY = Study(
    name="grokking",
    cases={"": (*METHODS,)},
    rates=lambda case, method: (0.003, 0.006, 0.012),
    run=run,
    score=lambda values: length(values) + STEPS * max(RIGHT - values[-1], 0.0),
    columns={
        "steps": steps,
        "accuracy at the end": lambda values: values[-1],
    },
    against="Adam with decay",
    picture=picture,
    result=steps,
    failing=f"not within {STEPS} steps",
)
