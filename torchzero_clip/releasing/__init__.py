"""The function `release`: an optimizer that updates each parameter during `backward`.

After the update of a parameter, its gradient is dropped. The module `released` contains the
optimizer and its hooks. `step_in_progress` collects the updates of single parameters into one step.
`last_step` contains norm rules that scale by the factor of the previous step. With `one_at_a_time`,
all parameters share the memory that the largest parameter needs.
"""

from torchzero_clip.releasing.released import Released, release

__all__ = ["Released", "release"]
