"""The gradients: a signal in noise, and what goes wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SHAPES = ((8, 12), (12, 8), (4, 12))
PARTS = [a * b for a, b in SHAPES]
SIZE = sum(PARTS)
BEFORE, AFTER = 200, 400  # healthy steps, and steps from the trouble on
STEPS = BEFORE + AFTER + 1  # the last has a spike for all: what gets through of it?
LATER = 1000.0  # the size of that spike
SIGNAL = 0.5  # the length of the signal where that of the noise is 1
SPREAD = 0.2  # the deviation of the logarithm of the norm
LONG = 10  # how many steps a burst or a silence lasts
DEGREES = 1.5  # of Student's t: the variance is infinite


@dataclass(frozen=True)
class Trouble:
    """A way to change gradients from step BEFORE on, in place."""

    about: str
    change: Callable[[Tensor], None]
    level: float = 1.0  # that of the gradients when it is over
    lasts: int | None = 1  # steps; None where it never ends


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def signal() -> Tensor:
    return unit(draws(0, SIZE))


def noise() -> Tensor:
    return unit(draws(1, STEPS, SIZE))


def norms() -> Tensor:
    return (SPREAD * draws(2, STEPS, 1)).exp()


def healthy() -> Tensor:
    """Steps by entries: norms near 1, whose logarithm is normal."""
    return norms() * unit(SIGNAL * signal() + noise())


def bad() -> Tensor:
    """Directions without signal."""
    return unit(draws(3, STEPS, SIZE))


def spike(size: float, lasts: int = 1) -> Callable[[Tensor], None]:
    def change(grads: Tensor) -> None:
        where = slice(BEFORE, BEFORE + lasts)
        grads[where] = size * bad()[where]

    return change


def jump(factor: float) -> Callable[[Tensor], None]:
    def change(grads: Tensor) -> None:
        grads[BEFORE:] *= factor

    return change


def drift(grads: Tensor) -> None:
    grads[BEFORE:] *= torch.logspace(0, 1, STEPS - BEFORE, dtype=torch.float64).unsqueeze(1)


def tails(grads: Tensor) -> None:
    """The noise is multiplied by the size of Student's t, over its median; the signal is not."""
    source = torch.Generator().manual_seed(4)
    half = torch.full((STEPS,), DEGREES / 2, dtype=torch.float64)
    chi_square = 2 * torch._standard_gamma(half, source)
    size = (draws(5, STEPS).abs() / (chi_square / DEGREES).sqrt()).unsqueeze(1)
    size = size / size.median()
    part = norms() / (SIGNAL * signal() + noise()).norm(dim=-1, keepdim=True)
    grads[:] = part * (SIGNAL * signal() + size * noise())


def silence(grads: Tensor) -> None:
    grads[BEFORE : BEFORE + LONG] = 0.0


def entry(value: float) -> Callable[[Tensor], None]:
    def change(grads: Tensor) -> None:
        grads[BEFORE, 0] = value

    return change


def one_tensor(grads: Tensor) -> None:
    first = slice(0, PARTS[0])
    usual = grads[BEFORE, first].norm()
    grads[BEFORE, first] = 1000.0 * usual * unit(bad()[BEFORE, first])


TROUBLES: dict[str, Trouble] = {
    "none": Trouble("healthy gradients", lambda grads: None, lasts=None),
    "spike ×10": Trouble("one gradient is noise with 10 times the usual norm", spike(10.0)),
    "spike ×1000": Trouble("one gradient is noise with 1000 times the usual norm", spike(1000.0)),
    "spike ×10⁶": Trouble("one gradient is noise with a million times the usual norm", spike(1e6)),
    "burst": Trouble(
        "ten gradients in a row are noise with 100 times the usual norm",
        spike(100.0, LONG),
        lasts=LONG,
    ),
    "jump ×4": Trouble("all later gradients are 4 times as large", jump(4.0), 4.0, lasts=0),
    "jump ÷4": Trouble("all later gradients are a quarter as large", jump(0.25), 0.25, lasts=0),
    "drift": Trouble("the norms grow slowly, by a factor of 10 in 400 steps", drift, lasts=None),
    "heavy tails": Trouble(
        "the norm of the noise has infinite variance in all steps", tails, lasts=None
    ),
    "zeros": Trouble("ten gradients in a row are zero", silence, lasts=LONG),
    "NaN": Trouble("one element of one gradient is NaN", entry(torch.nan)),
    "infinity": Trouble("one element of one gradient is infinite", entry(torch.inf)),
    "one tensor": Trouble(
        "one gradient has a spike of 1000 in one of the three tensors", one_tensor
    ),
}
LEVELS = [1.0, 4.0, 0.25]


def gradients() -> tuple[list[str], Tensor]:
    """The names of all runs, and steps by runs by entries: each trouble, and each level healthy.

    The last step is a spike for all.
    """
    names, rows = [], []
    for level in LEVELS:
        names.append(twin_name(level))
        rows.append(level * healthy())
    for name, trouble in TROUBLES.items():
        grads = healthy()
        trouble.change(grads)
        names.append(name)
        rows.append(grads)
    levels = [*LEVELS, *(trouble.level for trouble in TROUBLES.values())]
    for level, grads in zip(levels, rows, strict=True):
        grads[-1] = level * LATER * bad()[-1]
    return names, torch.stack(rows, 1)


def twin_name(level: float) -> str:
    return f"healthy at {level:g}"
