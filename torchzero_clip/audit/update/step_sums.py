"""Measures: sums over the elements of a parameter, of its step and of its gradient.

Everything that the audit reports about a parameter follows from these sums, except for singular
values. The sums of a sharded parameter are added up over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.sharding.collectives import sum_
from torchzero_clip.core.sharding.layout import Layout, layout_of, local
from torchzero_clip.core.tensor_kinds import wide

PIECE = 2**22
"""The number of elements that are measured at once. This limits the temporary memory."""
CLEAR = 100
"""A gradient of this many times `eps` is clear: `eps` changes the step of Adam by at most 1 %."""
GRADIENTS = 5
"""The place of `StepSums.gradients` in a vector of sums."""
STATE_CHANGES = 12
"""The place of `StepSums.state_changes` in a vector of sums."""
BAD_STATES = 13
"""The place of `StepSums.bad_states` in a vector of sums."""


class Rates(NamedTuple):
    """Hyperparameters of the group of a parameter, as they are in the step.

    Attributes:
        lr: The learning rate. Infinite if the group has none.
        decay: The learning rate times the weight decay.
        eps: The number that Adam adds to the denominator, or 0.
    """

    lr: float
    decay: float
    eps: float


@dataclass(frozen=True)
class Observed:
    """One parameter before and after the step. The tensors are whole, or shards of this rank.

    Attributes:
        param: The parameter after the step.
        before: A copy of the weights before the step.
        gradient: A copy of the gradient, or None. With several steps, the sum of the gradients.
        scale: The factor by which a GradScaler has multiplied the gradient, otherwise 1.
        rates: Hyperparameters of the group of the parameter.
        state_changes: The number of state tensors that changed on this rank.
        bad_states: The number of state tensors that are infinite or NaN on this rank.
    """

    param: Tensor
    before: Tensor
    gradient: Tensor | None
    scale: float
    rates: Rates
    state_changes: int
    bad_states: int

    @property
    def layout(self) -> Layout | None:
        """How the parameter is sharded. None if it is not sharded."""
        return layout_of(self.param)

    def step(self, without_decay: bool) -> Tensor:
        """Return the change of the weights in float32, with or without decoupled weight decay."""
        before = local(self.before).float()
        change = local(self.param).detach().float() - before
        return change.add_(before, alpha=self.rates.decay) if without_decay else change


@dataclass(frozen=True)
class DirectionSums:
    """Sums over the elements of a step, with or without its weight decay.

    Attributes:
        square: The sum of the squares.
        nonzero: The number of elements that are not zero.
        along_gradient: The sum of the products with the gradient.
        clear_square: The sum of the squares over the elements with a clear gradient, which is far
            above `eps`.
        clear_absolute: The sum of the absolute values over these elements.
        clear_nonzero: The number of these elements that are not zero.
    """

    square: float
    nonzero: float
    along_gradient: float
    clear_square: float
    clear_absolute: float
    clear_nonzero: float

    @property
    def rms(self) -> float:
        """The root mean square of the elements that are not zero."""
        return math.sqrt(self.square / self.nonzero) if self.nonzero else 0.0

    @property
    def variation(self) -> float:
        """The squared coefficient of variation of the absolute values with a clear gradient.

        Infinite if less than half of the elements that moved have a clear gradient.
        """
        if not self.clear_absolute or self.clear_nonzero < self.nonzero / 2:
            return math.inf
        return self.clear_square * self.clear_nonzero / self.clear_absolute**2 - 1


@dataclass(frozen=True)
class StepSums:
    """Sums over the elements of one parameter, on all ranks that hold a shard.

    Attributes:
        elements: The number of elements.
        moved: The number of elements that the step changed.
        weight_square: The sum of the squares of the weights before the step.
        along_weight: The sum of the products of the step and the weights before the step.
        rounding: The variance of the rounding errors of the weights, summed over the elements.
        gradients: The number of ranks on which the parameter has a gradient.
        gradient_square: The sum of the squares of the gradient.
        gradient_nonzero: The number of elements of the gradient that are not zero.
        bad_weights: The number of weights after the step that are infinite or NaN.
        bad_gradients: The number of elements of the gradient that are infinite or NaN.
        moved_by_lr: The number of elements that a step of the size of the learning rate changes.
        moved_by_gradient: The number of elements that a step of plain SGD changes.
        state_changes: The number of state tensors that changed, summed over the ranks.
        bad_states: The number of state tensors with infinity or NaN, summed over the ranks.
        step_square: See `step`, like the other fields with this prefix.
        undecayed_square: See `undecayed`, like the other fields with this prefix.
    """

    elements: float
    moved: float
    weight_square: float
    along_weight: float
    rounding: float
    gradients: float
    gradient_square: float
    gradient_nonzero: float
    bad_weights: float
    bad_gradients: float
    moved_by_lr: float
    moved_by_gradient: float
    state_changes: float
    bad_states: float
    step_square: float
    step_nonzero: float
    step_along_gradient: float
    step_clear_square: float
    step_clear_absolute: float
    step_clear_nonzero: float
    undecayed_square: float
    undecayed_nonzero: float
    undecayed_along_gradient: float
    undecayed_clear_square: float
    undecayed_clear_absolute: float
    undecayed_clear_nonzero: float

    @property
    def step(self) -> DirectionSums:
        """The sums over the step."""
        return DirectionSums(
            self.step_square,
            self.step_nonzero,
            self.step_along_gradient,
            self.step_clear_square,
            self.step_clear_absolute,
            self.step_clear_nonzero,
        )

    @property
    def undecayed(self) -> DirectionSums:
        """The sums over the step without its weight decay."""
        return DirectionSums(
            self.undecayed_square,
            self.undecayed_nonzero,
            self.undecayed_along_gradient,
            self.undecayed_clear_square,
            self.undecayed_clear_absolute,
            self.undecayed_clear_nonzero,
        )

    @property
    def weight_rms(self) -> float:
        """The root mean square of the weights before the step."""
        return math.sqrt(self.weight_square / max(self.elements, 1))

    @property
    def gradient_rms(self) -> float:
        """The root mean square of the gradient."""
        return math.sqrt(self.gradient_square / max(self.elements, 1))

    @property
    def ratio(self) -> float | None:
        """The norm of the step divided by the norm of the weights. None if the weights are zero."""
        if not self.weight_square:
            return None
        return math.sqrt(self.step_square / self.weight_square)


def measured(observed: Mapping[str, Observed]) -> dict[str, StepSums]:
    """Return the sums of all parameters. On sharded parameters, all ranks must call this."""
    sums = {name: _local_sums(one) for name, one in observed.items()}
    together: dict[tuple[object, frozenset[int]], list[str]] = {}
    for name, one in observed.items():
        if one.layout is not None and one.layout.split:
            together.setdefault((one.layout.mesh, one.layout.split), []).append(name)
    for (mesh, dims), names in together.items():
        table = torch.stack([sums[name] for name in names])
        for d in sorted(dims):
            table = sum_(table, mesh.get_group(d))  # type: ignore[attr-defined]
        sums.update(zip(names, table, strict=True))
    return {name: StepSums(*row.tolist()) for name, row in sums.items()}


def _local_sums(one: Observed) -> Tensor:
    """Return the sums over the elements on this rank as a vector."""
    after = _flat(one.param.detach())
    before = _flat(one.before)
    gradient = None if one.gradient is None else _flat(one.gradient)
    total = torch.zeros(len(fields(StepSums)), dtype=wide(after.device), device=after.device)
    for start in range(0, len(after), PIECE):
        piece = slice(start, start + PIECE)
        g = None if gradient is None else gradient[piece]
        total += torch.stack([*_sums_of_piece(one, before[piece], after[piece], g)])
    total[GRADIENTS] = float(gradient is not None)
    total[STATE_CHANGES] = float(one.state_changes)
    total[BAD_STATES] = float(one.bad_states)
    return total


def _flat(tensor: Tensor) -> Tensor:
    values = local(tensor)
    if values.is_sparse:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.reshape(-1)


def _sums_of_piece(
    one: Observed, before: Tensor, after: Tensor, gradient: Tensor | None
) -> Iterator[Tensor]:
    """Yield the sums over some elements, in the order of the fields of `StepSums`."""
    dtype = wide(after.device)
    w = before.to(dtype)
    change = after.to(dtype) - w
    g = torch.zeros_like(w) if gradient is None else gradient.to(dtype) / one.scale
    yield torch.ones_like(w).sum()
    yield _count(after != before, dtype)
    yield w.square().sum()
    yield (change * w).sum()
    spacing = after.to(dtype) * torch.finfo(after.dtype).eps
    yield spacing.square().sum() / 6  # twice the variance of one rounding: before and after
    zero = torch.zeros((), dtype=dtype, device=w.device)
    yield zero  # gradients: _local_sums fills it in
    yield g.square().sum()
    yield _count(g != 0, dtype)
    yield _count(~torch.isfinite(after), dtype)
    yield _count(~torch.isfinite(g), dtype)
    lower = (w - one.rates.lr).to(before.dtype)
    higher = (w + one.rates.lr).to(before.dtype)
    yield _count((lower != before) | (higher != before), dtype)
    yield _count((w - one.rates.lr * g).to(before.dtype) != before, dtype)
    yield zero  # state_changes: _local_sums fills it in
    yield zero  # bad_states: _local_sums fills it in
    clear = g.abs() > CLEAR * one.rates.eps
    yield from _sums_of_direction(change, g, change != 0, clear)
    undecayed = change + one.rates.decay * w
    # if an element does not move, taking out the decay leaves a rounding error
    yield from _sums_of_direction(undecayed, g, undecayed.abs() > spacing.abs(), clear)


def _sums_of_direction(
    direction: Tensor, g: Tensor, nonzero: Tensor, clear: Tensor
) -> Iterator[Tensor]:
    """Yield sums over some elements of a step, in the order of the fields of `DirectionSums`."""
    yield direction.square().sum()
    yield _count(nonzero, direction.dtype)
    yield (direction * g).sum()
    sizes = direction.abs() * clear
    yield sizes.square().sum()
    yield sizes.sum()
    yield _count(nonzero & clear, direction.dtype)


def _count(elements: Tensor, dtype: torch.dtype) -> Tensor:
    return elements.sum().to(dtype)
