"""Kinds: how the step of a parameter relates to its gradient and to its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.audit.update.step_sums import DirectionSums, Observed, StepSums
from torchzero_clip.core.sharding.layout import whole_of

KINDS = {
    "gradient": "along the negative gradient",
    "sign": "all elements have one size",
    "orthogonal": "all singular values have one size",
    "decay": "along the negative weight",
    "other": "none of the known kinds",
    "still": "the weight did not move",
}
"""The kinds of steps that `expect=` accepts, each with its meaning."""
UNJUDGED = "unjudged"
COSINE = 0.999
"""Two tensors have the same direction if their cosine is at least this."""
DECAY_IGNORED = 1e-4
"""Weight decay that makes up a smaller share of the squared step does not change the kind."""
SIGN_VARIATION = 0.15
"""The elements of a sign step may differ by this coefficient of variation."""
SINGULAR_SPREAD = 1.8
"""The singular values of an orthogonal step may differ by this factor. We measured up to 1.72 for
the iteration of Muon, if the singular values of the gradient are log-spaced over up to 4 decades. A
random matrix with sides of 4 to 1 has 1.92."""
SMALL_ENERGY = 0.1
"""The share of the squared norm that comes from smaller singular values and is ignored. A gradient
of low rank leaves some singular values small."""
LARGE_ENERGY = 0.05
"""The share of the squared norm that comes from larger singular values and is ignored."""
FLAT_VARIATION = 0.145
"""Squared singular values are of one size if their squared coefficient of variation, weighted by
themselves, is at most this. We measured up to 0.142 for Muon on the same gradients, and 0.22 for a
random matrix with sides of 2 to 1."""
UNEQUAL_VARIATION = 0.22
"""Squared singular values with a larger variation are not of one size."""
UNCLEAR_VARIATION = 0.4
"""A step of Muon may have this variation if the singular values of the gradient decay fast, because
five iterations do not make them equal. A random square matrix has 0.25."""
SMALLEST_RANK = 1 / 6
"""The share of the singular values that must be of one size. Fewer are easily so by coincidence."""
SMALLEST_SIDE = 4
"""The singular values of smaller matrices are easily of one size by coincidence."""
NARROW = 4
"""If one side of a matrix is this many times longer than the other side, the singular values of a
random matrix are of one size, too."""
TOO_NARROW = f"one side of the matrix is more than {NARROW} times longer than the other"
LOW_RANK = "a step of low rank"
FEWEST_ELEMENTS = 8
"""With fewer elements, a direction or a common size is easily a coincidence."""
ROUNDING_ALLOWED = 0.05
"""The squared rounding error of the weights, divided by the squared step, up to which a step is
judged."""


@dataclass(frozen=True)
class StepKind:
    """The kind of a step.

    Attributes:
        name: One of `KINDS`, or "unjudged".
        reason: Why the step is not judged, or "".
        may_be_orthogonal: Whether an "other" step may be a step of Muon whose iteration has not
            made the singular values equal.
    """

    name: str
    reason: str = ""
    may_be_orthogonal: bool = False

    def __str__(self) -> str:
        return f"not judged: {self.reason}" if self.reason else self.name


def kind_of(
    one: Observed, sums: StepSums, steps: int, singular: Callable[[Tensor], StepKind]
) -> StepKind:
    """Return the kind of a step. All ranks that hold a shard must call this.

    Args:
        one: The parameter before and after the step.
        sums: The sums of the parameter.
        steps: The number of steps of the optimizer.
        singular: A function of the step as a whole tensor. It returns the kind that follows from
            the singular values: "orthogonal", "unjudged" or "other".
    """
    if not sums.moved:
        return StepKind("still")
    if sums.bad_weights or sums.bad_gradients:
        return StepKind(UNJUDGED, "not finite")
    if sums.elements < FEWEST_ELEMENTS:
        return StepKind(UNJUDGED, f"fewer than {FEWEST_ELEMENTS} elements")
    directions = {False: sums.step}
    if one.rates.decay**2 * sums.weight_square > DECAY_IGNORED * sums.step_square:
        directions[True] = sums.undecayed
    judged = {
        without_decay: direction
        for without_decay, direction in directions.items()
        if _noise(sums, direction) <= ROUNDING_ALLOWED
    }
    if not judged:
        return StepKind(UNJUDGED, "rounding")
    for direction in judged.values():
        product = direction.along_gradient
        if _is_opposite(product, direction, sums.gradient_square, _noise(sums, direction)):
            return StepKind("gradient")
    if _is_opposite(sums.along_weight, sums.step, sums.weight_square, _noise(sums, sums.step)):
        return StepKind("decay")
    if not sums.gradient_square:
        return StepKind(UNJUDGED, "no gradient")
    if steps > 1:
        return StepKind(UNJUDGED, "several steps")
    for direction in judged.values():
        if direction.variation <= SIGN_VARIATION**2 + _noise(sums, direction):
            return StepKind("sign")
    # all ranks gather all directions, whatever they find in the first one
    kinds = [singular(whole_of(one.step(without_decay), one.layout)) for without_decay in judged]
    return next((kind for kind in kinds if kind.name == "orthogonal"), kinds[-1])


def _noise(sums: StepSums, direction: DirectionSums) -> float:
    """Return the squared rounding error of the weights, divided by the squared step."""
    return sums.rounding / direction.square if direction.square else math.inf


def _is_opposite(
    product: float, direction: DirectionSums, other_square: float, noise: float
) -> bool:
    """Return whether a step points against another tensor, up to rounding."""
    if not other_square:
        return False
    cosine = product / math.sqrt(direction.square) / math.sqrt(other_square)
    return -cosine >= COSINE / math.sqrt(1 + noise)


# ---------------------------------------------------------------------- singular values


def stacks_of(step: Tensor) -> list[Tensor]:
    """Return the ways in which a tensor may be a stack of matrices.

    A tensor with more than two dims may be a stack, or the weight of a convolution.
    """
    if step.dim() < 2:
        return []
    if step.dim() == 2:
        return [step.unsqueeze(0)]
    return [step.reshape(-1, *step.shape[-2:]), step.flatten(1).unsqueeze(0)]


def singular_kind(stacks: list[Tensor], largest: int) -> StepKind:
    """Return the kind of a step from its singular values: orthogonal, unjudged or other.

    Args:
        stacks: The ways in which the step may be a stack of matrices.
        largest: The longest shorter side of a matrix whose singular values are computed.
    """
    may_be_orthogonal = False
    reasons = []
    for stack in stacks:
        reason = _reason_not_to_judge(stack, largest)
        reasons.append(reason)
        if reason and (reason != TOO_NARROW or len(stacks) > 1):
            continue
        spectra = _spectra(stack)
        if all([spectrum.is_flat for spectrum in spectra]):
            if any([spectrum.share < SMALLEST_RANK for spectrum in spectra]):
                reason = LOW_RANK
            # a narrow matrix that is flat may be of any kind, but an orthogonal matrix is flat
            return StepKind(UNJUDGED, reason) if reason else StepKind("orthogonal")
        if all([spectrum.variation <= UNCLEAR_VARIATION for spectrum in spectra]):
            may_be_orthogonal = True
    unjudged = [reason for reason in reasons if reason not in ("", TOO_NARROW)]
    if unjudged and "" not in reasons:
        return StepKind(UNJUDGED, unjudged[0])
    return StepKind("other", may_be_orthogonal=may_be_orthogonal)


def _reason_not_to_judge(stack: Tensor, largest: int) -> str:
    short = min(stack.shape[-2:])
    if short < SMALLEST_SIDE:
        return f"a matrix with a side below {SMALLEST_SIDE}"
    if short > largest:
        return f"a matrix with sides above largest_matrix={largest}"
    if max(stack.shape[-2:]) > NARROW * short:
        return TOO_NARROW
    return ""


class Spectrum(NamedTuple):
    """The singular values of a matrix.

    Attributes:
        is_flat: Whether most of the squared norm comes from singular values of one size.
        share: The share of the singular values that most of the squared norm comes from.
        variation: The squared coefficient of variation of the squared singular values, weighted by
            themselves.
    """

    is_flat: bool
    share: float
    variation: float


def _spectra(stack: Tensor) -> list[Spectrum]:
    """Return the spectrum of each matrix of a stack that is not zero."""
    moved = stack.abs().amax(dim=(-2, -1)) > 0
    with torch.autocast(stack.device.type, enabled=False):  # the block may be in autocast
        return list(map(_spectrum, stack[moved].to(torch.float32)))


def _spectrum(matrix: Tensor) -> Spectrum:
    """Return the spectrum of a matrix. Singular values are computed only in unclear cases.

    The sums of powers of the squared singular values are traces of powers of the Gram matrix. They
    cost two products of matrices.
    """
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.mT
    short, long = matrix.shape
    matrix = matrix / matrix.abs().amax()
    matrix = matrix / torch.linalg.vector_norm(matrix)  # the squared singular values add up to 1
    gram = matrix @ matrix.mT
    second = float(gram.square().sum())
    third = float((gram @ gram * gram).sum())
    variation = third / second**2 - 1
    if variation > UNEQUAL_VARIATION:
        return Spectrum(False, 1 / second / short, variation)
    if variation <= FLAT_VARIATION and long <= 2 * short:
        return Spectrum(True, 1 / second / short, variation)
    energies = torch.linalg.eigvalsh(gram).clamp_min(0).cpu()  # CUDA's cumsum is not deterministic
    shares = energies.cumsum(0) / energies.sum()
    first = int((shares < SMALL_ENERGY).sum())
    last = min(int((shares < 1 - LARGE_ENERGY).sum()), short - 1)
    is_flat = bool(energies[last] <= SINGULAR_SPREAD**2 * energies[first])
    return Spectrum(is_flat, (last - first + 1) / short, variation)
