"""Noise: annealed Gaussian noise."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Live, TensorList, Transform, count_step
from torchzero_clip.core.bounds import NonNegative


class Noise(Transform):
    """u ← u + N(0, η / (1 + t)^γ), the variance falling with the step t

    The generator's state is saved with the optimizer, so that a resumed run draws what it would
    have drawn. Every rank draws for the whole tensor and takes its part. With `compile=True` no
    step of a chain with it is replayed: a replay would draw nothing.

    Args:
        eta: η, the variance at the start.
        gamma: γ, how fast it falls.
        seed: Where the generator starts.

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
    gamma: Live[float] = 0.55
    seed: int = 0

    widens = True
    impure = (
        "it draws from a generator in each step, where a replay would draw nothing, and a subclass "
        "cannot mend that: leave compile out, or Noise"
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
            eta, gamma = bucket.group["eta"], bucket.group["gamma"]
            std = (eta / (1 + t) ** gamma) ** 0.5
            bucket.u = TensorList(noise, owned=True).mul_(std).add_(bucket.u)
            self._keep(bucket, generator)
        return buckets

    def _draw(self, bucket: Bucket, generator: torch.Generator) -> list[Tensor]:
        """Normal numbers for every parameter; of whole ones where they are sharded."""
        kind: Any = {"dtype": bucket.u.dtype, "device": bucket.device}
        drawn = [torch.empty(p.shape, **kind) for p in bucket.originals]
        return bucket.parts([t.normal_(generator=generator) for t in drawn])

    def _generator(self, bucket: Bucket) -> torch.Generator:
        place = zlib.crc32(bucket.bound.path.encode())  # two links draw different numbers
        generator = torch.Generator(bucket.device)
        generator.manual_seed(self.seed + place)
        held = bucket.step.groups[0]["chain"].get(self._key(bucket))
        if held is not None:
            generator.set_state(held.cpu())
        return generator

    def _keep(self, bucket: Bucket, generator: torch.Generator) -> None:
        drawn = generator.get_state()
        for group in bucket.step.groups:
            group["chain"][self._key(bucket)] = drawn

    def _key(self, bucket: Bucket) -> str:
        return f"{bucket.bound.path}/generator_{bucket.device.type}"
