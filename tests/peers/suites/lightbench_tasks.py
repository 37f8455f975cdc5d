"""LightBench's exploding and adversarial gradients, solved within its steps by plain chains.

Its first problem is the mean of exp(scale · |w|), and a run wins when the root mean square of w
comes below 0.01 within 500 steps at some learning rate; its second is a parabola with a pull that
swings, and 0.001 within 100 steps. Its search for rates needs CUDA; here it is a grid.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import MagicMock

SOURCE = "HomebrewML/LightBench"
COMMIT = "98c77c68c4ae858dd39f057184c3f85dbbf731e1"
FILES = {
    "lightbench/exploding_gradient.py": "c5772e56a024",
    "lightbench/adversarial_gradient.py": "b212077267f6",
    "lightbench/utils.py": "bfb773c454af",
}
RUNS = [str(Path(__file__).with_name("lightbench_cases.py"))]
PATHS = ["."]
SETTINGS: dict[str, str] = {}
LEFT_OUT: dict[str, str] = {}
DIFFERS = {
    "swings.*trivial": "the gradient only grows in these 100 steps, and no learning rate ends "
    "within 0.004",
}


def put_ours() -> None:
    """What its modules import, and the problems do not need."""
    for name in ("typer", "optuna", "heavyball"):
        sys.modules[name] = MagicMock()
    for name in ("utils", "chainable", "helpers"):
        sys.modules[f"heavyball.{name}"] = MagicMock()
