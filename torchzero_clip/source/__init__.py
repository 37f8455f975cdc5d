"""Source: a chain as one file of plain torch."""

from torchzero_clip.source.file import to_source
from torchzero_clip.source.values import SourceError

__all__ = ["SourceError", "to_source"]
