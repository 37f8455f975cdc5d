"""Following both sides of an identity: the same parameters, gradients and schedules for each."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.helpers import saved
from tests.identities.inputs import STEPS

if TYPE_CHECKING:
    from tests.identities.identity import Identity

EVALUATION = 5
"""The steps from one evaluation to the next, where there are some."""
RESUMED = 8
"""The step before which a run is resumed in training; in the evaluation after it, once more."""
Trajectory = dict[str, Tensor]
"""For each parameter what it, or its gradient, was after every step, stacked."""


Values = Callable[[str, int], dict[str, Any]]
"""What a group, "a" or "b", has as its live values in a step."""


def groups_of(identity: Identity, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The two groups with their options."""
    return [
        {"params": [params[n] for n in identity.inputs.group(letter)], **identity.options(letter)}
        for letter in "ab"
    ]


def schedule(identity: Identity, params: Mapping[str, Any], groups: Any, values: Any) -> None:
    """Give all groups, which may be more than two, the values of their letter."""
    first = {id(params[name]) for name in identity.inputs.group("a")}
    for group in groups:
        group.update(values["a" if id(group["params"][0]) in first else "b"])


def moved(
    identity: Identity,
    dtype: torch.dtype,
    make: Callable[[Any], torch.optim.Optimizer],
    values: Values,
    each_step: Callable[[Any, int], None] | None = None,
    resumes: bool = False,
) -> Trajectory:
    """The parameters after every step of an optimizer, all of whose live values change.

    Where it `resumes`, another one takes its state dict, in training and in an evaluation.
    """

    def again(opt: torch.optim.Optimizer) -> Any:
        other = make(groups_of(identity, params))
        other.load_state_dict(saved(opt.state_dict()))
        return other

    params = identity.inputs.parameters(dtype)
    opt = make(groups_of(identity, params))
    steps: list[dict[str, Tensor]] = []
    shown: list[dict[str, Tensor]] = []
    for i in range(STEPS):
        give_gradients(identity, params, i, dtype)
        schedule(identity, params, opt.param_groups, {x: values(x, i) for x in "ab"})
        if each_step is not None:
            each_step(opt, i + 1)
        opt = again(opt) if resumes and i == RESUMED else opt
        with identity.within():
            opt.step()
        steps.append({name: p.detach().clone() for name, p in params.items()})
        if identity.evaluates and i % EVALUATION == 0:
            opt.eval()  # type: ignore[attr-defined]
            shown.append({f"{name} shown": p.detach().clone() for name, p in params.items()})
            opt = again(opt) if resumes and RESUMED < i <= RESUMED + EVALUATION else opt
            opt.train()  # type: ignore[attr-defined]
    return {**stacked(steps), **stacked(shown)}


def rewritten(
    identity: Identity, dtype: torch.dtype, make: Callable[[Any], Any], values: Values
) -> Trajectory:
    """The gradients after every call of a rule that rewrites them; the parameters stay.

    What is made is the rule, and the groups that it reads its options from.
    """
    params, steps = identity.inputs.parameters(dtype), []
    rewrite, groups = make(groups_of(identity, params))
    for i in range(STEPS):
        give_gradients(identity, params, i, dtype)
        schedule(identity, params, groups, {x: values(x, i) for x in "ab"})
        rewrite()
        rows = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}
        steps.append({name: row.detach().clone() for name, row in rows.items()})
    return stacked(steps)


def judged(
    identity: Identity, dtype: torch.dtype, make: Callable[[Any], Any], values: Values
) -> Trajectory:
    """The thresholds that a rule gives at every call."""
    params, out = identity.inputs.parameters(dtype), []
    observe, groups = make(groups_of(identity, params))
    for i in range(STEPS):
        give_gradients(identity, params, i, dtype)
        schedule(identity, params, groups, {x: values(x, i) for x in "ab"})
        out.append(observe())
    return {"threshold": torch.tensor(out, dtype=torch.float64).unsqueeze(1)}


def give_gradients(
    identity: Identity, params: Mapping[str, Any], step: int, dtype: torch.dtype
) -> None:
    for name, grad in identity.inputs.gradients(step, dtype).items():
        params[name].grad = grad


def stacked(steps: list[dict[str, Tensor]]) -> Trajectory:
    return {name: torch.stack([step[name] for step in steps]) for name in (steps or [{}])[0]}


def by_optax(identity: Identity, dtype: torch.dtype) -> Trajectory:
    """The parameters after every step of a transformation, one for each row.

    It is made anew in every step with the values of then; its state is the row's, and stays where
    the row has no gradient.
    """
    jax, optax = need("jax"), need("optax")
    with in_64_bits(jax):
        return _by_optax(identity, dtype, jax, optax)


def _by_optax(identity: Identity, dtype: torch.dtype, jax: Any, optax: Any) -> Trajectory:
    params = {n: numpy(p) for n, p in identity.inputs.parameters(dtype).items()}
    states: dict[str, Any] = {}
    steps = []
    for i in range(STEPS):
        shown = {name: jax.numpy.zeros_like(p) for name, p in params.items()}
        for name, grad in identity.inputs.gradients(i, dtype).items():
            if grad is None:
                continue
            letter = "a" if name in identity.inputs.group("a") else "b"
            row = {name: params[name]}
            tfm = identity.theirs(**identity.options(letter, i))
            state = states[name] if name in states else tfm.init(row)
            updates, states[name] = tfm.update({name: numpy(grad)}, state, row)
            shown |= updates
            if identity.compare == "parameters":
                params |= optax.apply_updates(row, updates)
        out = shown if identity.compare == "gradients" else params
        steps.append({n: torch.tensor(need("numpy").array(x)).to(dtype) for n, x in out.items()})
    return stacked(steps)


@contextlib.contextmanager
def in_64_bits(jax: Any) -> Iterator[None]:
    """While it lasts JAX has float64; other tests of the process have what they had."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def numpy(tensor: Tensor) -> Any:
    return need("jax").numpy.asarray(tensor.detach().numpy())


def need(name: str) -> Any:
    """A library of the other side, or a skipped test."""
    reason = f"{name}, or a package that it imports, is not installed"
    return pytest.importorskip(name, reason=f"{reason}: see tests/identities/README.md")


@contextlib.contextmanager
def official_package(repository: str) -> Iterator[None]:
    """A public repository, whose packages can be imported; the checkout lies in $OFFICIAL_CODE."""
    folder = Path(os.environ.get("OFFICIAL_CODE", ""), repository)
    if not os.environ.get("OFFICIAL_CODE") or not folder.is_dir():
        pytest.skip(f"no {repository} in the folder $OFFICIAL_CODE: see tests/identities/README.md")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def official_path(repository: str, path: str) -> Path:
    """A file of a public repository; the checkout lies in $OFFICIAL_CODE."""
    file = Path(os.environ.get("OFFICIAL_CODE", ""), repository, path)
    if not file.is_file():
        pytest.skip(
            f"no {repository}/{path} in the folder $OFFICIAL_CODE: see tests/identities/README.md"
        )
    return file


def official_text(repository: str, path: str) -> str:
    """What such a file says, where importing it would do more than define."""
    return official_path(repository, path).read_text()


def official_file(repository: str, path: str, name: str | None = None) -> Any:
    """Such a file as a module."""
    file = official_path(repository, path)
    spec = importlib.util.spec_from_file_location(name or "official_" + file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
