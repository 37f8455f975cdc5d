"""What a user writes, for type checkers: `make types` runs mypy on it, and a test pyright."""
# mypy: warn-return-any
# pyright: strict

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    Clipper,
    Group,
    Live,
    Masked,
    Modular,
    NormRule,
    Partition,
    Scope,
    State,
    TensorList,
    Transform,
    UnitState,
    ZClip,
    attach,
    clip_grad_norm_,
    named,
    optimizer_class,
    schedule,
    take_over,
    zeros_like_state,
)


class SlowBoost(Transform):
    """m ← β m + (1 - β) u, at first u;   u ← u + gain · m   (arXiv 2405.20233)"""

    beta: Live[float] = 0.98
    gain: Live[float] = 2.0

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"slow": zeros_like_state(param).fill_(torch.inf)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        slow = state["slow"]
        slow.copy_(u.where(slow.isinf(), slow)).lerp_(u, 1 - group["beta"])
        return u.add_(slow, alpha=group["gain"])


class LastSteps(Transform):
    """e ← e + (w - u - e) / window, the weights for evaluation; u stays as it is"""

    window: Live[float] = 100.0

    place = "end"
    leaves = "gradient"
    drops = "first"
    reads = ("lr", "step")
    state_kinds = {"mean": "weights"}

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"mean": param.detach().clone()}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        state["mean"].lerp_(group["params"].sub(u), 1 / group["window"])
        return u

    def averaged(self, param: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return state["mean"]


class ClipToWeight(NormRule):
    """u ← u · min(1, share · ‖w‖ / ‖u‖)"""

    share: Live[float] = 0.1
    dim: Scope = None

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        return self.measure(group["params"]).mul(group["share"])


class ClipToAverage(NormRule):
    """u ← u · min(1, factor · a / ‖u‖);   a ← (a + c) / 2, c the clipped norm; at first a ← c"""

    factor: Live[float] = 2.0
    dim: Scope = None

    def init_unit(self) -> dict[str, float]:
        return {"average": torch.inf}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        return state["average"].mul(group["factor"])

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        average = state["average"]
        return {"average": torch.where(average.isinf(), clipped, (average + clipped) / 2)}


def is_matrix(name: str, p: Tensor) -> bool:
    return p.dim() == 2


def kind(name: str, p: Tensor) -> str:
    return "matrix" if p.dim() == 2 else "rest"


def falling(step: int) -> float:
    return 1e-3 / (1 + step)


def main() -> float:
    model = nn.Linear(2, 2)

    Clipped = optimizer_class(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))
    made = Clipped(model.parameters(), lr=3e-4, max_norm=0.5)
    Clipped(model.parameters(), 3e-4, betas=(0.9, 0.95), compile=False)
    Clipped(model.named_parameters(), torch.tensor(3e-4))
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
    Clipped(groups)
    lr: float = made.param_groups[0]["lr"]

    chain = Chain(SlowBoost(gain=1.0), ClipToWeight(dim="global")) + Chain(ClipToAverage())
    branches = Partition({"matrix": Masked(chain, is_matrix), "rest": ClipNorm(1.0)}, kind)
    opt = Modular(model.named_parameters(), branches, Adam(), LR(1e-3))
    limit = schedule(opt, "lr", falling)
    steps = torch.optim.lr_scheduler.StepLR(opt, 3)
    opt.step()
    steps.step()
    limit.step()
    norms: dict[str, Tensor] = opt.metrics()
    opt.load_state_dict(opt.state_dict(), keep=("lr",))
    taken: list[str] = take_over(opt, opt.state_dict())

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(sgd, ZClip()) as handle:
        handle.param_groups[0]["z_thresh"] = 3.0
    model(torch.ones(2)).sum().backward()
    Clipper(model.parameters(), ZClip()).step()
    total: Tensor = clip_grad_norm_(model.parameters(), 1.0, dim="global")
    Modular(model.parameters(), named("lamb", lr=1e-3))
    return lr + len(norms) + len(taken) + total.item()
