"""Compiled: recorded operators become one program, which C++ or torch compiles."""

from torchzero_clip.engines.compiled.engine import Compiled

__all__ = ["Compiled"]
