"""A run that goes wrong goes back: `recover` is what a loop calls.

`judging` says from losses and the flags of guards whether a run is in trouble, and `snapshot` is
all that it goes on from, in host memory.
"""

from torchzero_clip.recovering.recover import Back, Recover

__all__ = ["Back", "Recover"]
