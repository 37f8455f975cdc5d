"""A chain as a transformation of optax, which steps from inside JAX."""

from __future__ import annotations

from typing import Any

import torch

from .chains import defaults, published

HELD: dict[str, Any] = {}  # the chain that steps now, and its weights; a process runs one


def transformation(
    name: str,
    given: dict[str, Any],
    learning_rate: float,
    b1: float | None = None,
    warmup_steps: int = 1,
    **more: Any,
) -> Any:
    """A chain as a transformation of optax, whose state in JAX is the count of its steps."""
    import jax
    import numpy
    import optax
    from jax.experimental import io_callback

    arguments = given | more
    if b1 is not None:
        arguments["betas"] = (b1, *defaults(name)["betas"][1:])
    cls = published(name, engine={"compile": True})

    def step(now: Any, grads: Any, params: Any) -> Any:
        values, tree = jax.tree.flatten(jax.tree.map(numpy.array, params))
        count = int(numpy.array(now))
        if count == 0:
            HELD["weights"] = [torch.nn.Parameter(torch.tensor(value)) for value in values]
            HELD["chain"] = cls(HELD["weights"], learning_rate, **arguments)
        HELD["chain"].param_groups[0]["lr"] = learning_rate * min(1.0, (count + 1) / warmup_steps)
        weights, grads = HELD["weights"], jax.tree.leaves(grads)
        for weight, value, grad in zip(weights, values, grads, strict=True):
            weight.data.copy_(torch.from_numpy(value))
            weight.grad = torch.from_numpy(numpy.array(grad))
        HELD["chain"].step()
        moved = [w.detach().numpy() - v for w, v in zip(weights, values, strict=True)]
        return jax.tree.unflatten(tree, moved)

    def update(grads: Any, count: Any, params: Any = None, **_: Any) -> Any:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        return io_callback(step, shapes, count, grads, params, ordered=True), count + 1

    return optax.GradientTransformationExtraArgs(lambda _: jax.numpy.zeros((), int), update)


def average(params: Any) -> Any:
    """The weights that a chain which keeps an average is judged with."""
    import jax

    jax.block_until_ready(params)
    with HELD["chain"].averaged():
        weights = [weight.detach().clone().numpy() for weight in HELD["weights"]]
    return jax.tree.unflatten(jax.tree.structure(params), [jax.numpy.array(w) for w in weights])
