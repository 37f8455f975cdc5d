"""Identity: a rule that changes nothing."""

from __future__ import annotations

from torchzero_clip.core import Bucket, Transform
from torchzero_clip.core.traits import Routing


class Identity(Transform, Routing):
    """Identity returns the update unchanged.

    Use it as a placeholder, for example in place of a clipping rule that is switched off.

    u ← u

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Identity, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> clipping = False
        >>> clip = ClipNorm(1.0) if clipping else Identity()
        >>> opt = Modular(model.parameters(), clip, Adam(), LR(1e-3))
    """

    leaves = "gradient"
    reach = "tensor"
    pure = True
    takes_all = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return buckets
