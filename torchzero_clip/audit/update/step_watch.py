"""The watch over a block of code: copies before the step, and hooks in the step."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from torchzero_clip.audit.update.fingerprints import fingerprint, tensors_in
from torchzero_clip.audit.update.step_sums import Rates
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.sharding.collectives import sum_
from torchzero_clip.core.sharding.layout import layout_of, local, placements

StatePrints = dict[str, dict[str, int]]
"""For each parameter, the fingerprint of each tensor of its state."""


class StepWatch:
    """A context manager that copies weights before the step, and gradients in the step.

    Leaving the context removes the hooks and drops the copies, also after an error.

    Args:
        model: The model.
        optimizers: The optimizers whose steps are watched.
        quiet: Whether to print no message about the memory of the copies.

    Attributes:
        params: The parameters of the model by name.
        weights: A copy of each parameter that requires a gradient.
        frozen: The fingerprint of each other parameter.
        gradients: A copy of each gradient. With several steps, the sum of the gradients.
        scale: How many times too large the gradients are, because of a fused GradScaler.
        rates: The learning rate, weight decay and eps of each parameter in the step.
        groups: For each parameter, the numbers of its optimizers and of its groups in them.
        foreign: For each parameter of an optimizer that the model does not have, its place.
        steps: The number of steps of each optimizer.
        skipped: The number of steps of each optimizer in which a fused GradScaler skips the update.
        states: The fingerprints of the state when the block began.
        state_changed: The names of parameters whose state changed in the block, before the step.
        moved_early: The names of parameters that changed in the block, before the step.
        weight_bytes: The bytes of the copies of weights.
        gradient_bytes: The bytes of the copies of gradients.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], quiet: bool) -> None:
        self.params = dict(model.named_parameters())
        self.optimizers = optimizers
        self.quiet = quiet
        self.weights: dict[str, Tensor] = {}
        self.frozen: dict[str, int] = {}
        self.gradients: dict[str, Tensor] = {}
        self.scale: dict[str, float] = {}
        self.rates: dict[str, Rates] = {}
        self.groups: dict[str, list[tuple[int, int]]] = {name: [] for name in self.params}
        self.foreign: list[str] = []
        self.steps = [0] * len(optimizers)
        self.skipped = [0] * len(optimizers)
        self.states: StatePrints = {}
        self.state_changed: set[str] = set()
        self.moved_early: set[str] = set()
        self._exit = ExitStack()
        trained = {name: p for name, p in self.params.items() if _is_trained(p)}
        self.weight_bytes = sum(map(_bytes, trained.values()))
        # a gradient may have another dtype, but it does not exist yet
        self.gradient_bytes = sum(map(_bytes, trained.values()))
        self._trained = trained

    def __enter__(self) -> Self:
        if not self.quiet and _is_first_rank():
            sys.stderr.write(f"audit_update: {self.cost}\n")
        with ExitStack() as on_error:
            on_error.callback(self._drop)
            for name, p in self._trained.items():
                self.weights[name] = p.detach().clone()
            for name, p in self.params.items():
                if name not in self._trained:
                    self.frozen[name] = fingerprint(p)
            self.states = self.state_prints()
            for i, optimizer in enumerate(self.optimizers):
                self._find_groups(i, optimizer)
                self._keep_rates(optimizer)
                self._watch(i, optimizer)
            on_error.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._drop()

    @property
    def cost(self) -> str:
        """The memory of the copies, in words."""
        total = self.weight_bytes + self.gradient_bytes
        return (
            f"copies {in_bytes(total)}: {in_bytes(self.weight_bytes)} of weights now, and "
            f"{in_bytes(self.gradient_bytes)} of gradients in the step"
        )

    def state_prints(self) -> StatePrints:
        """Return the fingerprints of the state of each parameter, as the state is now."""
        prints: StatePrints = {}
        for name, p in self.params.items():
            tensors = {}
            for optimizer in self.optimizers:
                # .get adds no entry to the state, although the state is a defaultdict
                tensors.update(dict(tensors_in(optimizer.state.get(p, {}))))
            prints[name] = {key: fingerprint(t) for key, t in tensors.items()}
        return prints

    def _find_groups(self, i: int, optimizer: Optimizer) -> None:
        """Find the groups of each parameter of the model in one optimizer."""
        names = {id(p): name for name, p in self.params.items()}
        for g, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                name = names.get(id(p))
                if name is None:
                    shape = " x ".join(map(str, p.shape))
                    self.foreign.append(f"parameter {j} ({shape}) of group {g}")
                else:
                    self.groups[name].append((i, g))

    def _keep_rates(self, optimizer: Optimizer) -> None:
        """Note the learning rates and weight decays. A scheduler may change them after the step."""
        names = {id(p): name for name, p in self.params.items()}
        for group in optimizer.param_groups:
            lr = float(group.get("lr", math.inf))
            decay = float(group.get("weight_decay") or 0.0)
            eps = group.get("eps")
            rates = Rates(
                lr=lr,
                decay=lr * decay if math.isfinite(lr) else 0.0,
                eps=float(eps) if isinstance(eps, (int, float)) else 0.0,
            )
            for p in group["params"]:
                if id(p) in names:
                    self.rates[names[id(p)]] = rates

    def _drop(self) -> None:
        self._exit.close()
        self.weights.clear()
        self.gradients.clear()

    def _watch(self, i: int, optimizer: Optimizer) -> None:
        """Register the hooks of one optimizer."""

        def before_step(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not any(self.steps):
                self._see_what_changed()
            self._keep_rates(optimizer)
            if not _has_closure(args, kwargs):
                self._check_all_ranks_have_gradients(optimizer)
                self._keep_gradients(optimizer)

        def after_step(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _has_closure(args, kwargs):  # the closure has computed the gradients
                self._keep_gradients(optimizer)
            self.steps[i] += 1
            found_inf = getattr(optimizer, "found_inf", None)
            self.skipped[i] += int(found_inf is not None and bool(found_inf))

        self._exit.callback(optimizer.register_step_pre_hook(before_step).remove)
        self._exit.callback(optimizer.register_step_post_hook(after_step).remove)

    @torch.no_grad()
    def _see_what_changed(self) -> None:
        """Note the weights and the state that changed in the block before the first step."""
        for name, copy in self.weights.items():
            if not torch.equal(_bits(self.params[name]), _bits(copy)):
                self.moved_early.add(name)
        for name, prints in self.state_prints().items():
            if prints != self.states[name]:
                self.state_changed.add(name)

    def _check_all_ranks_have_gradients(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if a DTensor has a gradient on only some ranks of its mesh.

        Otherwise, the ranks would call different collectives in the step, and wait for each other.
        """
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names_on: dict[Any, list[str]] = {}
        for name, p in self.params.items():
            layout = layout_of(p)
            if layout is not None:
                names_on.setdefault(layout.mesh, []).append(name)
        for mesh, names in names_on.items():
            params = [self.params[name] for name in names]
            have_gradient = [id(p) in mine and gradient_of(p) is not None for p in params]
            ranks = torch.tensor(have_gradient, dtype=torch.int64, device=mesh.device_type)
            for d in range(mesh.ndim):
                ranks = sum_(ranks, mesh.get_group(d))
            size = mesh.size()
            for name, count in zip(names, ranks.tolist(), strict=True):
                if 0 < count < size:
                    raise RuntimeError(
                        f"audit_update: {name} has a gradient on {count} of the {size} ranks of "
                        "its mesh. A sharded parameter must have a gradient on all ranks, or on no "
                        "rank: use the parameter in the loss of every rank"
                    )

    @torch.no_grad()
    def _keep_gradients(self, optimizer: Optimizer) -> None:
        """Copy the gradients of an optimizer, or add them to the copies of earlier steps."""
        scale = getattr(optimizer, "grad_scale", None)
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in self._trained.items():
            gradient = gradient_of(p)
            if id(p) not in mine or gradient is None:
                continue
            self.scale[name] = 1.0 if scale is None else float(scale)
            if placements(gradient) != placements(p):
                sharded: Any = gradient
                gradient = sharded.redistribute(placements=placements(p))
            if name in self.gradients:
                self.gradients[name] = self.gradients[name] + gradient
            else:
                self.gradients[name] = gradient.detach().clone()


def gradient_of(p: Tensor) -> Tensor | None:
    """Return the gradient of a parameter. Megatron stores it in `main_grad`."""
    gradient = p.grad
    if gradient is None:
        gradient = getattr(p, "main_grad", None)
    return gradient


def in_bytes(size: int) -> str:
    """Return a number of bytes with a unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return counted(size, "byte")


def _bytes(tensor: Tensor) -> int:
    part = local(tensor)
    return part.numel() * part.element_size()


def _bits(tensor: Tensor) -> Tensor:
    """Return the values on this rank as bytes, so that NaN equals NaN."""
    flat = local(tensor).detach().reshape(-1)
    return flat.view(torch.uint8)


def _is_trained(p: Tensor) -> bool:
    """Return whether a step can move a parameter."""
    return p.requires_grad and p.numel() > 0


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    _, *others = args  # the first argument is the optimizer
    return any([callable(value) for value in (*others, *kwargs.values())])


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return (
        not distributed.is_available()
        or not distributed.is_initialized()
        or distributed.get_rank() == 0
    )
