"""release: an optimizer whose parameters step during `backward`, and drop their gradients.

`released` is the optimizer with its hooks. `step_in_progress` collects the steps of single
parameters into one step. `last_step` has norm rules that scale by the factor of the step before.
`one_at_a_time` lets all parameters share the memory of the largest one.
"""

from torchzero_clip.releasing.released import Released, release

__all__ = ["Released", "release"]
