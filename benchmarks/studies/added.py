"""What guards and release add to the time of a step: python -m benchmarks.studies.added

Steps of 34 million parameters alternate, with a guard and without; and whole training steps of a
small GPT, forward and backward included, of `release` and of `Modular`. Printed is the ratio of
their times, median and quartiles. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.circumstances import watched
from benchmarks.memory import GPT
from benchmarks.studies.state_dtype import BUSY, CHAINS, Clock, Step, clock_of, optimizer, ratio
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Guard,
    Lion,
    Modular,
    SkipLarge,
    SkipSpike,
    Transform,
    WeightDecay,
    release,
)

Links = Callable[[], list[Transform]]

GUARDS: dict[str, Links] = {
    "Guard": lambda: [Guard()],
    "SkipLarge": lambda: [SkipLarge(1e6)],
    "SkipSpike": lambda: [SkipSpike()],
    "Guard, SkipSpike": lambda: [Guard(), SkipSpike()],
}
RELEASED: dict[str, Links] = {
    "AdamW": lambda: [Adam(), WeightDecay(0.1), LR(1e-4)],
    "ClipNorm, AdamW": lambda: [ClipNorm(1.0), Adam(), WeightDecay(0.1), LR(1e-4)],
    "Lion": lambda: [Lion(), LR(1e-4)],
}


def guarded(guard: str, chain: str, rounds: int, clock: Clock, **options: Any) -> str:
    """The ratio to the chain without the guard."""
    with_guard = optimizer(chain, *GUARDS[guard](), **options)
    return ratio(with_guard.step, optimizer(chain, **options).step, rounds, clock)


def training(make: Callable[..., Modular], chain: str, **options: Any) -> Step:
    """Forward, backward and step of four layers as wide as GPT-2's, on sixteen words."""
    torch.manual_seed(0)
    model = GPT(768, 4, 8000, 64)
    tokens = torch.randint(8000, (1, 17))
    opt = make(model, *RELEASED[chain](), **options)

    def step() -> None:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        opt.step()
        opt.zero_grad()

    return step


def kept(model: torch.nn.Module, *links: Transform, **options: Any) -> Modular:
    """The optimizer that has all gradients at once."""
    return Modular(model.parameters(), *links, **options)


def released(chain: str, rounds: int, clock: Clock, **options: Any) -> str:
    """The ratio to the same training without release."""
    steps = [training(make, chain, **options) for make in (release, kept)]
    return ratio(*steps, rounds, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["guards", "release"])
    parser.add_argument("--chain", choices=CHAINS, nargs="+", default=["ClipNorm, Adam", "Lion"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help=BUSY)
    args = parser.parse_args()
    clock = clock_of(args.cpu)
    print("| | `compile=True` | eager |\n|---|---|---|")
    if args.what == "guards":
        for chain in args.chain:
            for guard in GUARDS:
                both = [guarded(guard, chain, args.rounds, clock, compile=c) for c in (True, False)]
                print(f"| {guard}, then {chain} | {' | '.join(both)} |", flush=True)
        return
    for chain in RELEASED:
        both = [released(chain, args.rounds, clock, compile=c) for c in (True, False)]
        print(f"| {chain} | {' | '.join(both)} |", flush=True)


if __name__ == "__main__":
    with watched("benchmarks.studies.added"):
        main()
