"""Warnings, told at the line of the user: the first one outside of this library and of torch."""

from __future__ import annotations

import copy
import traceback
import warnings
from pathlib import Path

import torch

ROOMS = Path(torch.__file__).parent, Path(__file__).parents[1]
INSIDE = (copy.__file__, *[f"{room}/" for room in ROOMS])


def warn(sentence: str) -> None:
    """Warn whoever called this library."""
    files = [frame.filename for frame in traceback.extract_stack()[-2::-1]]
    level = next((i for i, file in enumerate(files, 2) if not file.startswith(INSIDE)), 2)
    warnings.warn(sentence, stacklevel=level)
