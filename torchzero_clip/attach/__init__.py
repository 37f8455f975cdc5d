"""Rules before any optimizer: Clipper for loops written by hand, attach for all others."""

from torchzero_clip.attach.attaching import attach
from torchzero_clip.attach.clipper import Clipper
from torchzero_clip.attach.handle import Attached
from torchzero_clip.attach.megatron import megatron_entry

__all__ = ["Attached", "Clipper", "attach", "megatron_entry"]
