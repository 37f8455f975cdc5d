"""Warnings that point at the user's line: the first line outside of this library and of torch."""

from __future__ import annotations

import copy
import traceback
import warnings
from pathlib import Path

import torch

LIBRARY_FOLDERS = (Path(torch.__file__).parent, Path(__file__).parents[1])
INTERNAL_FILES = (copy.__file__, *[f"{folder}/" for folder in LIBRARY_FOLDERS])


def warn(sentence: str) -> None:
    """Warn at the line of the user that led to this call."""
    files = [frame.filename for frame in traceback.extract_stack()[-2::-1]]
    outside = (i for i, file in enumerate(files, 2) if not file.startswith(INTERNAL_FILES))
    warnings.warn(sentence, stacklevel=next(outside, 2))
