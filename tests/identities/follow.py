"""Following both sides of an identity: the same parameters, gradients and schedule for each."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tests.identities.inputs import STEPS

if TYPE_CHECKING:
    from tests.identities.identity import Identity

Trajectory = dict[str, Tensor]
"""For each parameter what it, or its gradient, was after every step, stacked."""


def groups_of(identity: Identity, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The two groups with their options."""
    names = [identity.inputs.group("a"), identity.inputs.group("b")]
    return [
        {"params": [params[n] for n in own], **options}
        for own, options in zip(names, identity.groups, strict=True)
    ]


def moved(
    identity: Identity,
    dtype: torch.dtype,
    make: Callable[[Any], torch.optim.Optimizer],
    each_step: Callable[[Any, int], None] | None = None,
) -> Trajectory:
    """The parameters after every step of an optimizer under a scheduler."""
    params = identity.inputs.parameters(dtype)
    opt = make(groups_of(identity, params))
    scheduler = LambdaLR(opt, identity.inputs.rate)
    steps = []
    for i in range(STEPS):
        for name, grad in identity.inputs.gradients(i, dtype).items():
            params[name].grad = grad
        if each_step is not None:
            each_step(opt, i + 1)
        opt.step()
        scheduler.step()
        steps.append({name: p.detach().clone() for name, p in params.items()})
    return stacked(steps)


def rewritten(
    identity: Identity, dtype: torch.dtype, make: Callable[[Any], Callable[[], Any]]
) -> Trajectory:
    """The gradients after every call of a rule that rewrites them; the parameters stay."""
    params = identity.inputs.parameters(dtype)
    rewrite, steps = make(groups_of(identity, params)), []
    for i in range(STEPS):
        for name, grad in identity.inputs.gradients(i, dtype).items():
            params[name].grad = grad
        rewrite()
        steps.append({name: p.grad.clone() for name, p in params.items() if p.grad is not None})
    return stacked(steps)


def judged(
    identity: Identity, dtype: torch.dtype, make: Callable[[Any], Callable[[], float]]
) -> Trajectory:
    """The thresholds that a rule gives at every call."""
    params = identity.inputs.parameters(dtype)
    observe, out = make(groups_of(identity, params)), []
    for i in range(STEPS):
        for name, grad in identity.inputs.gradients(i, dtype).items():
            params[name].grad = grad
        out.append(observe())
    return {"threshold": torch.tensor(out, dtype=torch.float64).unsqueeze(1)}


def stacked(steps: list[dict[str, Tensor]]) -> Trajectory:
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


def by_optax(identity: Identity, dtype: torch.dtype) -> Trajectory:
    """The parameters after every step of a transformation, one for each group."""
    jax, optax = need("jax"), need("optax")
    jax.config.update("jax_enable_x64", True)
    params = {n: numpy(p) for n, p in identity.inputs.parameters(dtype).items()}
    parts = []
    for letter, options in zip("ab", identity.groups, strict=True):
        names = identity.inputs.group(letter)
        rate = options.get("lr", 1.0)
        schedule = [rate * identity.inputs.rate(i) for i in range(STEPS + 1)]
        lr = lambda count, schedule=schedule: jax.numpy.asarray(schedule)[count]  # noqa: E731
        tfm = identity.theirs(**{**options, "lr": lr} if "lr" in options else options)
        parts.append((names, tfm, tfm.init({n: params[n] for n in names})))
    steps = []
    for i in range(STEPS):
        grads = {n: numpy(g) for n, g in identity.inputs.gradients(i, dtype).items()}
        out = {}
        for j, (names, tfm, state) in enumerate(parts):
            here = {n: params[n] for n in names}
            updates, state = tfm.update({n: grads[n] for n in names}, state, here)
            parts[j] = names, tfm, state
            out |= updates
            params |= (
                here if (identity.compare == "gradients") else optax.apply_updates(here, updates)
            )
        shown = out if (identity.compare == "gradients") else params
        steps.append({n: torch.tensor(need("numpy").array(x)).to(dtype) for n, x in shown.items()})
    return stacked(steps)


def numpy(tensor: Tensor) -> Any:
    return need("jax").numpy.asarray(tensor.detach().numpy())


def need(name: str) -> Any:
    """A library of the other side, or a skipped test."""
    return pytest.importorskip(name, reason=f"{name} is not installed: see CONTRIBUTING.md")


def official_file(repository: str, path: str, name: str | None = None) -> Any:
    """A file of a public repository, as a module; the checkout lies in $OFFICIAL_CODE."""
    file = Path(os.environ.get("OFFICIAL_CODE", ""), repository, path)
    if not file.is_file():
        pytest.skip(f"no {repository}/{path} in the folder $OFFICIAL_CODE: see CONTRIBUTING.md")
    spec = importlib.util.spec_from_file_location(name or "official_" + file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
