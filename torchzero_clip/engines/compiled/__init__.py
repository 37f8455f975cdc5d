"""Compiled: recorded operators become one program, which is compiled as C++ or Triton."""

from torchzero_clip.engines.compiled.compiled import Compiled

__all__ = ["Compiled"]
