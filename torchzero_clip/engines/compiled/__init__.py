"""The compiled engine: it records the operators of a step and compiles them to C++ or Triton.

`Compiled` is the engine that `Modular(..., compile=True)` uses. The code of the engine is in three
packages:

- `lists` records the operators that rules apply to lists of tensors.
- `printers` compiles the recorded operators.
- `replay` records whole steps and replays them.
"""

from torchzero_clip.engines.compiled.compiled import Compiled

__all__ = ["Compiled"]
