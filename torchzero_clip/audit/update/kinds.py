"""Kinds: how the step of a parameter relates to its gradient and to its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
SIGN_VARIATION = 0.15
"""The elements of a sign step may differ by this coefficient of variation."""
SINGULAR_SPREAD = 1.8
"""The singular values of an orthogonal step may differ by this factor. The Newton-Schulz iteration
of Muon leaves a factor of up to 1.72, and a random matrix with sides of 4 to 1 has 1.92."""
SMALL_ENERGY = 0.1
"""The share of the squared norm that comes from smaller singular values and is ignored. A gradient
of low rank leaves some singular values small."""
LARGE_ENERGY = 0.05
"""The share of the squared norm that comes from larger singular values and is ignored."""
DOMINANT_SHARE = 0.95
"""If one singular value has this share of the squared norm, a matrix has rank one in effect."""
SMALLEST_SIDE = 4
"""The singular values of smaller matrices are easily of one size by coincidence."""
NARROW = 4
"""If one side of a matrix is this many times longer than the other side, the singular values of a
random matrix are of one size, too."""
TOO_NARROW = f"one side of the matrix is more than {NARROW} times longer than the other"
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
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"not judged: {self.reason}" if self.reason else self.name


def kind_of(
    one: Observed, sums: StepSums, steps: int, singular: Callable[[Tensor], StepKind | None]
) -> StepKind:
    """Return the kind of a step. All ranks that hold a shard must call this.

    Args:
        one: The parameter before and after the step.
        sums: The sums of the parameter.
        steps: The number of steps of the optimizer.
        singular: A function of the step as a whole tensor. It returns the kind that follows from
            the singular values, or None if the singular values are not all of one size.
    """
    if not sums.moved:
        return StepKind("still")
    if sums.bad_weights or sums.bad_gradients:
        return StepKind(UNJUDGED, "not finite")
    if sums.elements < FEWEST_ELEMENTS:
        return StepKind(UNJUDGED, f"fewer than {FEWEST_ELEMENTS} elements")
    directions = {False: sums.step, True: sums.undecayed} if one.rates.decay else {False: sums.step}
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
    for without_decay in judged:
        whole = whole_of(one.step(without_decay), one.layout)
        if kind := singular(whole):
            return kind
    return StepKind("other")


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


def singular_kind(stacks: list[Tensor], largest: int) -> StepKind | None:
    """Return the kind of a step from its singular values, or None if they differ in size.

    Args:
        stacks: The ways in which the step may be a stack of matrices.
        largest: The longest shorter side of a matrix whose singular values are computed.
    """
    reasons = [_reason_not_to_judge(stack, largest) for stack in stacks]
    for stack, reason in zip(stacks, reasons, strict=True):
        if reason == "":
            energies = _energies(stack)
            if not len(energies):
                return StepKind(UNJUDGED, "a step of rank one")
            if all([_is_flat(row) for row in energies]):
                return StepKind("orthogonal")
    if len(stacks) == 1 and reasons[0] == TOO_NARROW:
        # a step of another kind may be flat here, but a step that is not flat is not orthogonal
        (stack,) = stacks
        if all([_is_flat(row) for row in _energies(stack)]):
            return StepKind(UNJUDGED, TOO_NARROW)
        return None
    unjudged = [reason for reason in reasons if reason not in ("", TOO_NARROW)]
    return StepKind(UNJUDGED, unjudged[0]) if unjudged and "" not in reasons else None


def _reason_not_to_judge(stack: Tensor, largest: int) -> str:
    short = min(stack.shape[-2:])
    if short < SMALLEST_SIDE:
        return f"a matrix with a side below {SMALLEST_SIDE}"
    if short > largest:
        return f"a matrix with sides above largest_matrix={largest}"
    if max(stack.shape[-2:]) > NARROW * short:
        return TOO_NARROW
    return ""


def _energies(stack: Tensor) -> Tensor:
    """Return the squared singular values of each matrix, in ascending order.

    Matrices of zeros, and matrices with one dominant singular value, are left out.
    """
    size = stack.abs().amax(dim=(-2, -1), keepdim=True)
    moved = size.flatten() > 0
    matrices = (stack[moved] / size[moved]).to(torch.float32)
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mT
    with torch.autocast(matrices.device.type, enabled=False):  # the block may be in autocast
        energies = torch.linalg.eigvalsh(matrices @ matrices.mT).clamp_min(0)
    energies = energies.cpu()  # cumsum has no deterministic form on CUDA
    dominant = energies[:, -1] >= DOMINANT_SHARE * energies.sum(dim=-1)
    return energies[~dominant]


def _is_flat(energies: Tensor) -> bool:
    """Return whether most of the squared norm comes from singular values of one size."""
    shares = energies.cumsum(0) / energies.sum()
    low = energies[int((shares < SMALL_ENERGY).sum())]
    high = energies[min(int((shares < 1 - LARGE_ENERGY).sum()), len(energies) - 1)]
    return bool(high <= SINGULAR_SPREAD**2 * low)
