"""Newton-Schulz iterations: they move the singular values of matrices toward one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Triple: TypeAlias = tuple[float, float, float]
Triples: TypeAlias = Sequence[Triple]

JORDAN: Triple = (3.4445, -4.7750, 2.0315)
POLAR: Triples = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


# the safety factor of the paper, 1.01, divides the matrix once, and x in all polynomials but the
# last one
SAFE = [1.01**2, *[1.01] * (len(POLAR) - 2), 1.0]
SCHEDULES: dict[str, Triples] = {
    "quintic": (JORDAN,) * 5,
    "polar_express": [
        (a / f, b / f**3, c / f**5) for f, (a, b, c) in zip(SAFE, POLAR, strict=True)
    ],
    "deepseek": (JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}

DEFAULT_STEPS = 5  # the number of steps if there is one triple for all steps

GRAM_RATIO = 2  # from this ratio of columns to rows on, the Gram matrix is cheaper on CPU
GRAM_GROWTH = 2e5  # the growth of rounding errors after which the Gram matrix is recomputed


def schedule_of(coefficients: Any, steps: int | None) -> Triples:
    """Return the triple of coefficients of every step. The last triple repeats."""
    named = isinstance(coefficients, str)
    triples = SCHEDULES.get(coefficients) if named else coefficients
    if _is_triple(triples):
        triples = (triples,)
        steps = DEFAULT_STEPS if steps is None else steps
    if not isinstance(triples, (tuple, list)) or not triples or not all(map(_is_triple, triples)):
        raise ValueError(
            f"coefficients must be one of {list(SCHEDULES)}, 3 numbers, or 3 numbers for each "
            f"step, got {coefficients!r}"
        )
    steps = len(triples) if steps is None else steps
    return [triples[min(i, len(triples) - 1)] for i in range(steps)]


def _is_triple(x: Any) -> bool:
    """Return whether x is a tuple or list of three finite numbers."""
    if not isinstance(x, (tuple, list)) or len(x) != 3:
        return False
    if not all([isinstance(v, (int, float)) and not isinstance(v, bool) for v in x]):
        return False
    return all(map(math.isfinite, x))


def normalized(x: Tensor, eps: float = 0.0) -> Tensor:
    """Return new matrices with norm one, without overflow in the squares of large elements."""
    if not x.numel():
        return x.clone()
    size = x.abs().amax(dim=(1, 2), keepdim=True)  # vector_norm of order inf is slow
    size = torch.where(size > 0, size, torch.ones_like(size))
    x = x / size
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    norm = torch.maximum(norm, eps / size) if eps else norm
    return x.div_(torch.where(norm > 0, norm, torch.ones_like(norm)))


def newton_schulz(x: Tensor, schedule: Triples) -> Tensor:
    """Return X after X ← a X + (b A + c A²) X, where A = X Xᵀ, for each triple (a, b, c).

    The matrices must have at least as many columns as rows. For wide matrices in single precision
    on CPU, the function iterates on the Gram matrix A. The result is the same up to rounding, but X
    is multiplied only twice instead of in every step.
    """
    if x.dtype not in (torch.float32, torch.float64) or x.device.type != "cpu":
        return by_products(x, schedule)
    wide = x.shape[2] >= GRAM_RATIO * x.shape[1]
    # for a single step, by_gram needs one copy of X less than by_products
    for triples in _parts(schedule) if wide else [[triple] for triple in schedule]:
        x = by_gram(x, triples)
    return x


def by_products(x: Tensor, schedule: Triples) -> Tensor:
    """Return the result of the iteration. This function iterates on the matrices X themselves."""
    for a, b, c in schedule:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def by_gram(x: Tensor, schedule: Triples) -> Tensor:
    """Return the result of the iteration. This function iterates on A = X Xᵀ.

    The product Q = … P₂ P₁ of all steps multiplies X only once, at the end.
    """
    gram = x @ x.mT
    product = None
    for i, (a, b, c) in enumerate(schedule):
        step = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        step.diagonal(dim1=1, dim2=2).add_(a)
        product = step if product is None else step @ product
        if i + 1 < len(schedule):
            gram = gram @ step @ step
    return x if product is None else product @ x


def _parts(schedule: Triples) -> Iterator[Triples]:
    """Split the schedule into parts, so that rounding errors in a Gram matrix stay small.

    In each step, the rounding errors grow by the factor a². Each part starts with a new Gram
    matrix.
    """
    begin = 0
    growth = 1.0
    for i, (a, _, _) in enumerate(schedule):
        if growth > GRAM_GROWTH:
            yield schedule[begin:i]
            begin = i
            growth = 1.0
        growth *= a * a
    yield schedule[begin:]
