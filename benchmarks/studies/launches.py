"""What a step asks of a GPU: python -m benchmarks.studies.launches.

The calls of a step on imagined CUDA tensors, of 3 and of 200, by the default engine and with
`compile=True`, in which vectors between two launches are a kernel. Nothing is timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from tests.audit.budgets import COMPILED, REPEATED, Chain, steps
from torchzero_clip import (
    AGC,
    LR,
    AdaGC,
    Adam,
    AutoClip,
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    Guard,
    SkipSpike,
    Transform,
    ZClip,
    named,
)

CLIP = ClipNorm(1.0, dim="global")
CHAINS: dict[str, tuple[Callable[[], Sequence[Transform]], int]] = {
    "ClipNorm": (lambda: [CLIP], 5),
    "Guard, ClipNorm": (lambda: [Guard(), CLIP], 6),
    "SkipSpike, ClipNorm": (lambda: [SkipSpike(), CLIP], 8),
    "ZClip": (lambda: [ZClip()], 6),
    "AdaGC": (lambda: [AdaGC()], 5),
    "AGC": (lambda: [AGC()], 5),
    "ClipNormByEMA": (lambda: [ClipNormByEMA()], 7),
    "Centralize": (lambda: [Centralize()], 5),
    "AutoClip": (lambda: [AutoClip()], 14),
    "lamb": (lambda: [named("lamb")], 7),
    "stable_adamw": (lambda: [named("stable_adamw")], 5),
    "spam": (lambda: [named("spam")], 8),
}
"""Chains, in front of Adam and LR unless they have a name, and how many calls they may make."""


def calls(name: str, count: int, compiled: bool) -> int:
    """The calls of a step of so many tensors, once there is nothing left to make."""
    links = CHAINS[name][0]
    tail: Callable[[], list[Transform]] = lambda: [] if name.islower() else [Adam(), LR(1e-3)]  # noqa: E731
    chain = Chain(name, lambda: [*links(), *tail()])
    more = {"engine": COMPILED, "turns": REPEATED} if compiled else {}
    return steps(chain, count, **more)[-1].calls


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{'calls, of 3 and of 200 tensors':32}{'default':>12}{'compiled':>12}{'at most':>10}")
    missed = []
    for name, (_, most) in CHAINS.items():
        rows = [[calls(name, count, compiled) for count in (3, 200)] for compiled in (False, True)]
        shown = "".join([f"{few:>6}{many:>6}" for few, many in rows])
        print(f"{name:32}{shown}{most:>10}")
        missed += [name] * (max(rows[1]) > most)
    print(f"\nmore than they may: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
