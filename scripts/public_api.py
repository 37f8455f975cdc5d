"""Record what users of a version rely on: public names, signatures and the form of checkpoints.

    python scripts/public_api.py                  # print the record of this code
    python scripts/public_api.py --write 0.1.0    # store it in tests/project/public_0.1.0.json

`tests/project/test_stability.py` compares the code with the stored record. Later code may add
names, arguments with defaults and keys. It may not take anything away. The record of a released
version never changes. Before the release, write the record again when a public name changes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torchzero_clip as tz  # noqa: E402
from tests.table import ROWS  # noqa: E402
from torchzero_clip import audit, compat, spec, testing  # noqa: E402
from torchzero_clip.attach.handle import Attached  # noqa: E402

FILES = ROOT / "tests" / "project"
MODULES: Mapping[str, ModuleType] = {
    "torchzero_clip": tz,
    "torchzero_clip.audit": audit,
    "torchzero_clip.compat": compat,
    "torchzero_clip.spec": spec,
    "torchzero_clip.testing": testing,
}
"""The modules whose public names are stable."""
USED = {"Modular": tz.Modular, "Attached": Attached, "TensorList": tz.TensorList}
"""The classes whose public methods are all stable."""
SUBCLASSED = {"Transform": tz.Transform, "NormRule": tz.NormRule}
"""The classes whose methods are stable if a page about custom rules names them."""


def signature(thing: Any) -> list[str]:
    """Return one text per argument: its name, its kind, and its default if it has one."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):  # a value, or a function written in C
        return []
    return [_argument(parameter) for parameter in parameters]


def _argument(parameter: inspect.Parameter) -> str:
    text = f"{parameter.name} {parameter.kind.description}"
    if parameter.default is parameter.empty:
        return text
    shown = repr(parameter.default)
    if " at 0x" in shown:  # an address differs in every process
        shown = type(parameter.default).__name__
    return f"{text} = {shown}"


def documented() -> set[str]:
    """Return all words of the pages about custom rules."""
    pages = [*ROOT.glob("docs/write_*.md"), ROOT / "docs/new_operator.md"]
    return {word for page in pages for word in re.findall(r"\w+", page.read_text("utf-8"))}


def methods(cls: type) -> dict[str, list[str]]:
    """Return the signatures of the public attributes that a class adds to torch's Optimizer."""
    names = [name for name in dir(cls) if not name.startswith("_")]
    own = [name for name in names if not hasattr(torch.optim.Optimizer, name)]
    if cls in SUBCLASSED.values():
        words = documented()
        own = [name for name in own if name in words]
    return {name: signature(inspect.getattr_static(cls, name)) for name in own}


def checkpoint(transform: tz.Transform) -> dict[str, Any]:
    """Return the keys of a state dict after two steps, with the form of each value."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(4, 6))
    try:
        opt = tz.Modular([("w", param)], transform, tz.LR(0.01))
    except ValueError:  # the transform has a learning rate itself
        opt = tz.Modular([("w", param)], transform)
    for _ in range(2):
        param.grad = torch.randn(4, 6)
        opt.report(loss=1.0)
        opt.step()
    saved = opt.state_dict()
    group = saved["param_groups"][0]
    return {
        "state": {key: _form(value) for key, value in saved["state"].get(0, {}).items()},
        "chain": {key: _form(value) for key, value in group.pop("chain").items()},
        "group": sorted(group),
    }


def _form(value: Any) -> str:
    """Return the dtype and the number of dims of a tensor, or the type of another value."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor with {value.dim()} dims"
    return type(value).__name__


def checkpoints() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield one construction of each rule, with the form of its state dict."""
    for row in ROWS:
        transform = next(iter(row.good.values()))()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some rules warn if they are alone in a chain
            yield repr(transform), checkpoint(transform)


def record() -> dict[str, dict[str, Any]]:
    """Return the record of this code: a table for each kind of thing."""
    tables: dict[str, dict[str, Any]] = {}
    for name, module in MODULES.items():
        tables[name] = {key: signature(getattr(module, key)) for key in module.__all__}
    for name, cls in {**USED, **SUBCLASSED}.items():
        tables[f"methods of {name}"] = methods(cls)
    tables["checkpoints"] = dict(checkpoints())
    return tables


def text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a record as JSON with one line per entry."""
    blocks = []
    for name, table in tables.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table)]
        blocks.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", metavar="VERSION", help="store the record of this version")
    version = parser.parse_args().write
    if version is None:
        print(text(record()), end="")
        return
    (FILES / f"public_{version}.json").write_text(text(record()), encoding="utf-8")


if __name__ == "__main__":
    main()
