"""Names that an older text of torch imports from torch's helpers, and that torch has no more."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path
from types import FunctionType
from typing import Any


class Absent(list[Any]):
    """Stands for a helper that no chosen test uses: an empty list, a decorator of nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and isinstance(args[0], FunctionType) else self


def put_absent(file: str) -> None:
    """Put `Absent` where a file of the suite imports what this torch has not."""
    tree = ast.parse((Path(os.environ["SUITE_SOURCE"]) / file).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.testing._"):
            module = vars(importlib.import_module(str(node.module)))
            for name in node.names:
                module.setdefault(name.name, Absent())
