"""Runs that go wrong: small models, batches of which some are bad, and loops that train on them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import seed
from torchzero_clip import (
    LR,
    Accumulate,
    Adam,
    AutoClip,
    ClipNorm,
    Guard,
    Lion,
    Modular,
    Momentum,
    Noise,
    Recover,
    ScheduleFree,
    SkipSpike,
    Transform,
    WeightDecay,
    WeightEMA,
    ZClip,
    named,
    schedule,
)

Batch = tuple[Tensor, Tensor]
CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "adamw": lambda: [SkipSpike(), ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.1), LR(1e-2)],
    "ema": lambda: [Guard(), ZClip(warmup_steps=5), Momentum(0.9), LR(1e-2), WeightEMA(0.9)],
    "free": lambda: [Guard(), AutoClip("percentile"), Adam((0.0, 0.99)), LR(1e-2), ScheduleFree()],
    "soap": lambda: [Guard(), *named("soap", lr=1e-2)],
    "large batches": lambda: [Accumulate(2), ClipNorm(1.0), Lion(), WeightDecay(0.1), LR(1e-3)],
    "noise": lambda: [Guard(), ClipNorm(1.0, dim="global"), Noise(0.01), Adam(), LR(1e-2)],
}
EVERY, CHECK = 20, 5
FIRST, LAST = 48, 55  # the steps with bad batches; the snapshot before them is behind step 40


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A model with dropout, and with a buffer that moves."""
    seed(1)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 6)
    return nn.Sequential(*layers).to(dtype)


def batches(count: int, bad: Sequence[int] = range(FIRST, LAST + 1)) -> list[Batch]:
    """Batches, of which the bad ones, counted from 1, have noise for targets."""
    g = torch.Generator().manual_seed(7)
    out = []
    for i in range(1, count + 1):
        x, noise = torch.randn(16, 6, generator=g), torch.randn(16, 6, generator=g)
        out.append((x, 100 * noise if i in bad else x.flip(1) + 0.1 * noise))
    return out


class Loader:
    """Batches that can be gone back in."""

    def __init__(self, given: Sequence[Batch]) -> None:
        self.given, self.place = given, 0

    def __iter__(self) -> Iterator[Batch]:
        while self.place < len(self.given):
            self.place += 1
            yield self.given[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.place = state_dict["place"]


class Run:
    """A model, its optimizer and schedules, and a loop.

    Args:
        chain: One of those above.
        dtype: Of the parameters.
        options: Those of Modular.
    """

    def __init__(self, chain: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.dtype, self.model = dtype, net(dtype)
        self.opt = Modular(self.model.named_parameters(), *CHAINS[chain](), **options)
        lr = torch.optim.lr_scheduler
        self.schedules: list[Any] = [lr.CosineAnnealingLR(self.opt, 200)]
        if chain == "ema":
            moves = schedule(self.opt, "momentum", lambda step: 0.9 - 0.001 * step)
            self.schedules.append(moves)
        self.losses: list[Tensor] = []
        seed(2)
        random.seed(2)

    def recover(self, *parts: Any, **given: Any) -> Recover:
        options = {"every": EVERY, "check": CHECK, "window": 20, **given}
        return Recover(self.opt, self.model, parts=[*self.schedules, *parts], **options)

    def train(self, given: Any, recover: Recover | None = None) -> None:
        for x, y in given:
            jitter = 1 + 0.01 * random.random()  # of Python, which must come back too
            out = self.model((jitter * x).to(self.dtype))
            loss = nn.functional.mse_loss(out.float(), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.report(loss=loss)
            self.opt.step()
            for each in self.schedules:
                each.step()
            self.losses.append(loss.detach())
            if recover is not None:
                recover.step(loss)

    def all(self) -> dict[str, Any]:
        """Everything that a run goes on from."""
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "opt": copy.deepcopy(self.opt.state_dict()),
            "schedules": [each.state_dict() for each in self.schedules],
            "torch": torch.get_rng_state(),
            "python": torch.tensor(random.getstate()[1]),
        }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested data are not bit for bit the same."""
    if isinstance(a, Tensor):
        same = isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return [] if same and bits(a).equal(bits(b)) else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [one for key in a for one in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and len(a) == len(b):
        rows = enumerate(zip(a, b, strict=True))
        return [one for i, (x, y) in rows for one in differences(x, y, f"{path}/{i}")]
    return [] if a == b or (a != a and b != b) else [path]


def bits(t: Tensor) -> Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(kinds[t.element_size()]) if t.dim() else t.view(1)
