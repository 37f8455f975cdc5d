"""The chains that race, and a reader of other chains from text.

A chain is written as in Python, with an optional name, or as JSON in the form of
`Chain.from_config`, or as a .json file with one chain or with names and chains:

    ClipNorm(1.0, dim="global"), Adam(), LR(3e-3)
    gentle = ClipNorm(0.1, dim="global"), Adam(), LR(3e-3)
    ["ZClip", "Adam", {"type": "LR", "lr": 0.003}]
    chains.json

Python text is never run: it becomes a config that contains only names of rules and plain values.
JSON may also name functions of modules, as docs/config.md describes.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
from pathlib import Path
from typing import Any

import torch

from torchzero_clip import Chain, Modular
from torchzero_clip.core.description import Description

# The learning rate is too high: even on clean data the model learns faster with 2e-3.
CHAINS = {
    "no clipping": "Adam(), LR(5e-3)",
    "ClipNorm, global": "ClipNorm(1.0, dim='global'), Adam(), LR(5e-3)",
    "ClipNorm, each tensor": "ClipNorm(1.0), Adam(), LR(5e-3)",
    "AutoClip": "AutoClip('percentile', percentile=90.0), Adam(), LR(5e-3)",
    "ZClip": "ZClip(max_norm=None), Adam(), LR(5e-3)",
    "AdaGC": "AdaGC(), Adam(), LR(5e-3)",
}
EXAMPLE = "ClipNorm(1.0, dim='global'), Adam(), LR(3e-3)"


def read_chains(texts: list[str] | None) -> dict[str, Chain]:
    """Return chains by name: the chains above, or the chains in the texts."""
    if texts is None:
        return {name: make(parse(text)[1], text) for name, text in CHAINS.items()}
    chains: dict[str, Chain] = {}
    for text in texts:
        for name, config in parse_all(text):
            chain = make(config, text)
            name = name or " → ".join(type(link).__name__ for link in chain)
            while name in chains:
                name += "'"
            chains[name] = chain
    return chains


def parse_all(text: str) -> list[tuple[str | None, Any]]:
    """Return (name or None, config) of every chain in one argument."""
    if not text.endswith(".json"):
        return [parse(text)]
    try:
        config = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {text}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{text} is not valid JSON: {error}") from None
    named = isinstance(config, dict) and "type" not in config
    return list(config.items()) if named else [(None, config)]


def parse(text: str) -> tuple[str | None, Any]:
    """Return (name or None, config) of a chain in JSON or written as in Python."""
    try:
        return None, json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        (statement,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError):
        raise ValueError(f"a chain must be like {EXAMPLE}, or JSON, got {text}") from None
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            pass
        case ast.Expr(value=value):
            name = None
        case _:
            raise ValueError(f"a chain must be like {EXAMPLE}, or JSON, got {text}")
    links = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value]
    return name, [plain(link) for link in links]


def plain(node: ast.expr) -> Any:
    """Return the config of a node: a rule with its arguments, a literal, or several of them."""
    if isinstance(node, ast.Name):
        return {"type": node.id}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return rule(node.func.id, node)
    if isinstance(node, (ast.Tuple, ast.List)):
        return [plain(element) for element in node.elts]
    with contextlib.suppress(ValueError):
        if isinstance(node, (ast.Constant, ast.UnaryOp)):
            return ast.literal_eval(node)
    raise ValueError(f"only rules, numbers and strings are allowed, got {ast.unparse(node)}")


def rule(name: str, call: ast.Call) -> dict[str, Any]:
    """Return the config of a call, in which positional arguments have their names."""
    arguments: dict[str, Any] = {}
    if name in Description.registry:  # if not, from_config has a better sentence
        signature = inspect.signature(Description.registry[name])
        try:
            arguments = signature.bind_partial(*map(plain, call.args)).arguments
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError(f"{name}: pass each argument once, got {ast.unparse(call)}")
        arguments[keyword.arg] = plain(keyword.value)
    return {"type": name, **arguments}


def make(config: Any, text: str) -> Chain:
    """Return the chain of a config, after checking that its links fit together."""
    try:
        chain = Chain.from_config(config)
        if len(chain):
            Modular([("w", torch.zeros(1, requires_grad=True))], chain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}, in {text}") from None
    if not len(chain):
        raise ValueError(f"a chain must have at least one rule, such as {EXAMPLE}, got {text}")
    return chain


def spell(chain: Chain) -> str:
    """Return the chain as text that `parse` reads."""
    return ", ".join(map(repr, chain))
