"""Noise: a rule that adds annealed Gaussian noise."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Live, TensorList, Transform, count_step
from torchzero_clip.core.bounds import Finite, NonNegative


class Noise(Transform):
    """Gradient noise: adds Gaussian noise whose variance falls from step to step.

    u ← u + N(0, η / (1 + t)^γ)

    Here t is the step number, counted from 0. The optimizer saves the state of the random
    generator, so a resumed run draws the same noise. For a sharded tensor, every rank draws the
    noise of the whole tensor and uses the part of its shard. With `compile=True`, a chain with this
    rule runs every step without replay, because a replayed step would not draw new noise.

    Args:
        eta: η, the variance of the noise in the first step.
        gamma: γ, the exponent in the formula. A larger γ reduces the noise faster. Default: 0.55.
        seed: The seed of the generator. Default: 0.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, Noise
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Noise(0.01), LR(1e-2))

    Reference:
        Neelakantan et al., "Adding gradient noise improves learning for very deep networks",
        arXiv 1511.06807.
    """

    eta: Live[NonNegative]
    gamma: Live[Finite] = 0.55
    seed: int = 0

    widens = True
    impure = (
        "it draws new random numbers from a generator in each step: use compile=False, or remove "
        "Noise"
    )

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        count_step(buckets, by=0)
        for bucket in buckets:
            self._keep(bucket, self._generator(bucket))
        return buckets

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        t = count_step(buckets) - 1
        for bucket in buckets:
            generator = self._generator(bucket)
            noise = self._draw(bucket, generator)
            eta = bucket.group["eta"]
            gamma = bucket.group["gamma"]
            std = (eta / (1 + t) ** gamma) ** 0.5
            bucket.u = TensorList(noise, owned=True).mul_(std).add_(bucket.u)
            self._keep(bucket, generator)
        return buckets

    def _draw(self, bucket: Bucket, generator: torch.Generator) -> list[Tensor]:
        """Return normal noise for every parameter: the part that belongs to this rank."""
        kind: Any = {"dtype": bucket.u.dtype, "device": bucket.device}
        drawn = [torch.empty(p.shape, **kind) for p in bucket.originals]
        return bucket.parts([t.normal_(generator=generator) for t in drawn])

    def _generator(self, bucket: Bucket) -> torch.Generator:
        """Return a generator in the saved state, or a freshly seeded generator if none is saved."""
        path_hash = zlib.crc32(bucket.bound.path.encode())  # two links draw different noise
        generator = torch.Generator(bucket.device)
        generator.manual_seed(self.seed + path_hash)
        saved = bucket.step.groups[0]["chain"].get(self._key(bucket))
        if saved is not None:
            generator.set_state(saved.cpu())
        return generator

    def _keep(self, bucket: Bucket, generator: torch.Generator) -> None:
        """Save the state of a generator in all parameter groups."""
        generator_state = generator.get_state()
        for group in bucket.step.groups:
            group["chain"][self._key(bucket)] = generator_state

    def _key(self, bucket: Bucket) -> str:
        """Return the state name of the saved generator. The name depends on the device."""
        return f"{bucket.bound.path}/generator_{bucket.device.type}"
