"""optax's tests of convergence, on chains inside JAX's own loop.

`contrib/_common_test.py` takes 30,000 steps towards a minimum: of two parabolas, of Rosenbrock's
valley, of vectors and matrices together. A chain steps for the optimizer of its name, alone or
under a wrapper of optax that chooses its learning rate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from .chains import published

SOURCE = "google-deepmind/optax"
COMMIT = "2edbcbe2390da13983b92cbef94ac0460ecde1c5"
FILES = {"optax/contrib/_common_test.py": "510ef3159b7d"}
PATHS = ["."]
SETTINGS = {"JAX_PLATFORMS": "cpu"}
CHOICE = "test_optimizers and not accept and not inject"
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}

OURS: dict[str, dict[str, Any]] = {  # with the defaults that are others in optax
    "ademamix": {},
    "muon": {"weight_decay": 0.0},
    "sgd": {},
    "adam": {},
    "adamw": {"weight_decay": 1e-4},
    "lamb": {},
    "lion": {},
    "rmsprop": {"alpha": 0.9},
}
THEIRS = (
    "acprop simplified_ademamix adopt cocob dadapt_adamw dog dowg madgrad momo momo_adam prodigy "
    "schedule_free_sgd schedule_free_adamw sophia galore adamax adamaxw adan amsgrad noisy_sgd "
    "novograd optimistic_gradient_descent adabelief radam sm3 yogi"
)


def transformation(name: str, learning_rate: float, b1: float | None = None, **more: Any) -> Any:
    """A chain as a transformation of optax, whose state in JAX is the count of its steps."""
    import jax
    import numpy
    import optax
    from jax.experimental import io_callback

    arguments = OURS[name] | more | ({} if b1 is None else {"betas": (b1, 0.99)})
    held: dict[str, Any] = {}

    def step(count: Any, grads: Any, params: Any) -> Any:
        values, tree = jax.tree.flatten(params)
        values = [torch.from_numpy(numpy.array(value)) for value in values]
        if count == 0:
            held["weights"] = [torch.nn.Parameter(value.clone()) for value in values]
            held["chain"] = published(name)(held["weights"], learning_rate, **arguments)
        for weight, value, grad in zip(
            held["weights"], values, jax.tree.leaves(grads), strict=True
        ):
            weight.data.copy_(value)
            weight.grad = torch.from_numpy(numpy.array(grad))
        held["chain"].step()
        ends = [weight.detach() for weight in held["weights"]]
        return jax.tree.unflatten(
            tree, [(w - v).numpy() for w, v in zip(ends, values, strict=True)]
        )

    def update(grads: Any, count: Any, params: Any = None, **_: Any) -> Any:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        return io_callback(step, shapes, count, grads, params, ordered=True), count + 1

    return optax.GradientTransformationExtraArgs(lambda _: jax.numpy.zeros((), int), update)


def put_ours() -> None:
    from optax import contrib
    from optax._src import alias

    def left_out(**_: Any) -> None:
        pytest.skip("no chain has this name")

    chains = {name: partial(transformation, name) for name in OURS}
    for name, factory in (dict.fromkeys(THEIRS.split(), left_out) | chains).items():
        setattr(contrib if hasattr(contrib, name) else alias, name, factory)
