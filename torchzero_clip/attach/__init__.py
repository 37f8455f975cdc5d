"""Rules for other optimizers: `Clipper` in a loop that you write, `attach` in all other loops."""

from torchzero_clip.attach.attaching import attach
from torchzero_clip.attach.clipper import Clipper
from torchzero_clip.attach.handle import Attached
from torchzero_clip.attach.megatron import megatron_entry

__all__ = ["Attached", "Clipper", "attach", "megatron_entry"]
