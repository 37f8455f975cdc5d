"""The line of the user, for warnings: the first one outside of this library and of torch."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

INSIDE = tuple([f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parent)])


def level() -> int:
    """The `stacklevel` of that line for a warning of the function that calls this."""
    files = [frame.filename for frame in traceback.extract_stack()[-2::-1]]
    return next((i for i, file in enumerate(files, 1) if not file.startswith(INSIDE)), 1)
