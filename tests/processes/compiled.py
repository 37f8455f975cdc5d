"""Another module, in which every optimizer has `compile=True` unless it says else.

    torchrun --nproc-per-node 2 -m tests.processes.compiled tests.processes.sharded brief fsdp
    torchrun --nproc-per-node 2 -m tests.processes.compiled native tests.processes.sharded fsdp

Programs run node by node, unless it is to be natively, which takes a second of each chain.
"""

from __future__ import annotations

import inspect
import runpy
import sys

from torchzero_clip import Modular
from torchzero_clip.engines import Compiled

if __name__ == "__main__":
    defaults = inspect.unwrap(Modular.__init__).__kwdefaults__
    assert defaults is not None
    assert defaults["compile"] is False
    defaults["compile"] = True
    if "native" not in sys.argv:
        Compiled.backend = "plain"
    _, module, *arguments = [word for word in sys.argv if word != "native"]
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
