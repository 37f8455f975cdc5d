"""`Recover`: roll back a run that diverges to a snapshot, and continue without the bad batches.

The training loop calls `recover`. `judging` decides from the losses and from the steps that guards
skipped whether training diverges. A `snapshot` is a copy of the run in host memory.
"""

from torchzero_clip.recovering.recover import Back, Recover

__all__ = ["Back", "Recover"]
