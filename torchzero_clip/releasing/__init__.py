"""Gradients that are dropped during `backward`: `released` has the optimizer and its hooks.

`running` keeps the step on its way, since its parameters come one by one; `last_step` has rules
that look further than a tensor scale by what the step before has measured, and `one_at_a_time` lets
all of them use the memory of the largest.
"""

from torchzero_clip.releasing.released import Released, release

__all__ = ["Released", "release"]
