"""Identity: nothing."""

from __future__ import annotations

from torchzero_clip.core import Bucket, Transform


class Identity(Transform):
    """u ← u

    Example:
        >>> clip = ClipNorm(1.0) if clipping else Identity()
        >>> opt = Modular(model.parameters(), clip, Adam(), LR(1e-3))
    """

    passes_gradient = True
    reach = "tensor"
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return buckets
