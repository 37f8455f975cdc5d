"""The compiled engine: it records the operators of a step and compiles them to C++ or Triton.

`Compiled` is the engine that `Modular(..., compile=True)` uses. Its parts are in three packages:
`lists` records what rules do to lists of tensors, `printers` compiles the recorded operators, and
`replay` records whole steps and replays them.
"""

from torchzero_clip.engines.compiled.compiled import Compiled

__all__ = ["Compiled"]
