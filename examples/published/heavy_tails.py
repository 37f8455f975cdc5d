"""Study rare classes: does Adam learn them faster than gradient descent?

After Kunstner et al., arXiv 2402.19449. Group g contains 2ᵍ classes with 2ᵐ⁻ᵍ examples each, so all
groups have the same size. Inputs are uniform, tell nothing about the class, and have more
dimensions than there are examples. A linear model uses all examples in each step.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.published.charts import Panel, figure
from examples.published.study import Results, Study
from torchzero_clip import LR, Adam, ClipNorm, Modular, Momentum, Normalize, Sign

GROUPS, STEPS, EVERY = 7, 200, 10
PLAIN, MOMENTUM = "without momentum", "momentum 0.9"
METHODS = {
    "Adam": (),
    "gradient descent": (),
    "sign": (Sign(),),
    "clipped": (ClipNorm(1.0, dim="global"),),  # a third of the first gradient
    "normalised": (Normalize(dim="global"),),
}
RATES = {"sign": (1e-4, 3e-4, 1e-3), "Adam": (1e-3, 3e-3, 1e-2)}
OTHERS = (0.03, 0.1, 0.3)


def examples() -> tuple[Tensor, Tensor]:
    """Return the inputs and the classes, one group after the other."""
    counts = [2 ** (GROUPS - g) for g in range(GROUPS) for _ in range(2**g)]
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return torch.rand(len(y), (GROUPS + 1) * 2**GROUPS), y


def run(case: str, method: str, rate: float, seed: int, steps: int = STEPS) -> list[float]:
    """Return the loss every ten steps, and then the loss of each group at the end."""
    x, y = examples()
    model, beta, seen = nn.Linear(x.shape[1], int(y.max()) + 1), 0.9 * (case == MOMENTUM), []
    last = Adam((beta, 0.999)) if method == "Adam" else Momentum(beta)
    opt = Modular(model.parameters(), *METHODS[method], last, LR(rate))
    for step in range(steps + 1):
        losses = F.cross_entropy(model(x), y, reduction="none")
        seen += [losses.mean().item()] if step % EVERY == 0 else []
        opt.zero_grad()
        losses.mean().backward()
        opt.step()
    return seen + losses.detach().view(GROUPS, -1).mean(1).tolist()


def picture(found: Results) -> str:
    """Return the loss of each group at the end."""
    first, groups = STEPS // EVERY + 1, range(GROUPS)
    lines = {
        case: {m: found.points(case, m, groups, first) for m in METHODS}
        for case in (PLAIN, MOMENTUM)
    }
    view = {"ticks": {g: f"{2 ** (GROUPS - g)}" for g in groups}, "low": 0.0, "high": 5.0}
    names = "examples of a class", f"loss after {STEPS} steps"
    panels = [Panel(case, *names, lines[case], **view) for case in lines]
    return figure(panels, "Guessing gives a loss of 4.84.")


STUDY = Study(
    name="heavy_tails",
    cases={PLAIN: (*METHODS,), MOMENTUM: (*METHODS,)},
    rates=lambda case, method: RATES.get(method, OTHERS),
    run=run,
    score=lambda values: values[-GROUPS - 1],
    columns={
        "loss": lambda v: v[-GROUPS - 1],
        "frequent": lambda v: v[-GROUPS],
        "rare": lambda v: v[-1],
    },
    against="gradient descent",
    picture=picture,
)
