"""`Recover`: roll back a run that diverges to a snapshot, and continue without the bad batches.

The training loop calls `Recover.step`. The module `judging` decides whether training diverges. It
uses the losses and the steps that guards skipped. The module `snapshot` copies a run to host
memory.
"""

from torchzero_clip.recovering.recover import Back, Recover

__all__ = ["Back", "Recover"]
