"""A chain as a transformation of optax, which steps from inside JAX."""

from __future__ import annotations

from typing import Any

import torch

from .chains import defaults, published


def transformation(
    name: str, given: dict[str, Any], learning_rate: float, b1: float | None = None, **more: Any
) -> Any:
    """A chain as a transformation of optax, whose state in JAX is the count of its steps."""
    import jax
    import numpy
    import optax
    from jax.experimental import io_callback

    arguments = given | more
    if b1 is not None:
        arguments["betas"] = (b1, *defaults(name)["betas"][1:])
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
