"""The functions `published` and `named`: register a published method, and return its chain."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torchzero_clip.core import Chain, Transform
from torchzero_clip.core.formula import formula_of

Recipe = TypeVar("Recipe", bound=Callable[..., Chain])

NAMES: dict[str, Callable[..., Chain]] = {}
"""For the name of each method, the function that returns its chain."""


def published(recipe: Recipe) -> Recipe:
    """Register a function, so that `named` finds the method under the name of the function.

    The test suite must compare each registered method with its original code.
    """
    NAMES[recipe.__name__] = recipe
    return recipe


def named(name: str, **arguments: Any) -> Chain:
    """Return the chain of a published method.

    `python -m torchzero_clip NAME` prints the links of the chain, their formulas and the reference.

    Args:
        name: The name of the method, such as "adamw" or "lamb".
        **arguments: Arguments of the method, such as lr=1e-3. The defaults depend on the method.

    Returns:
        A chain, which can be passed to `Modular` alone or together with other links.

    Example:
        >>> import torch
        >>> from torchzero_clip import Modular, named
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), named("lamb", lr=1e-3, weight_decay=0.01))
    """
    if name not in NAMES:
        raise ValueError(f"named: unknown optimizer {name!r}: {instead_of(name)}")
    accepted = inspect.signature(NAMES[name]).parameters
    for argument in arguments:
        if argument not in accepted:
            raise TypeError(
                f"named: {name!r} has no argument {argument!r}; its arguments are "
                f"{', '.join(accepted)}"
            )
    return NAMES[name](**arguments)


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam_amsgrad": ("adam", {"amsgrad": True}),
    "adam_l2": ("adam", {"weight_decay": 0.01}),
    "adamw_amsgrad": ("adamw", {"amsgrad": True}),
    "adamw_hf": ("adamw", {"eps": 1e-6}),
    "adamw_torch": ("adamw", {}),
    "adamw_torch_fused": ("adamw", {}),
    "adoptw": ("adopt", {"decouple": True}),
    "amsgrad": ("adam", {"amsgrad": True}),
    "c_adamw": ("cadamw", {}),
    "cautious_adamw": ("cadamw", {}),
    "heavy_ball": ("sgd", {"momentum": 0.9}),
    "mars": ("mars_adamw", {}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "nadamw": ("nadam", {"decoupled_weight_decay": True}),
    "nag": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "nlars": ("lars", {"nesterov": True}),
    "polargrad": ("polar", {}),
    "radamw": ("radam", {"decoupled_weight_decay": True}),
    "rmsprop_centered": ("rmsprop", {"centered": True}),
    "rmsprop_momentum": ("rmsprop", {"momentum": 0.9}),
    "sgd_momentum": ("sgd", {"momentum": 0.9}),
    "sgd_nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "sgdm": ("sgd", {"momentum": 0.9}),
    "sign_sgd": ("signum", {"momentum": 0.0}),
}
"""For names in other libraries, the equivalent or nearest name and arguments here."""


def instead_of(name: object, *others: str) -> str:
    """Return a hint for an unknown name: the equivalent setting here, or similar names.

    Args:
        name: The name that is unknown.
        *others: Other valid names that the hint may suggest, in addition to the names of methods.
    """
    wanted = str(name).lower().rpartition(".")[2].replace("-", "_")
    settings = {key.replace("_", ""): setting for key, setting in SETTINGS.items()}
    if setting := settings.get(wanted.replace("_", "")):
        arguments = [f", {key}={value!r}" for key, value in setting[1].items()]
        return f'use named("{setting[0]}"{"".join(arguments)})'
    spelling = {**{key: key for key in NAMES}, **{other.lower(): other for other in others}}
    near = difflib.get_close_matches(wanted, spelling, n=3, cutoff=0.6)
    if not near:
        near = difflib.get_close_matches(wanted, spelling, n=1, cutoff=0)
    *rest, last = [repr(spelling[key]) for key in near]
    if not rest:
        return f"did you mean {last}?"
    return f"did you mean {', '.join(rest)} or {last}?"


def links_of(chain: Transform) -> Iterator[tuple[Transform, str]]:
    """Yield each link of a chain, and of all inner chains, together with its formula."""
    for link in chain if isinstance(chain, Chain) else [chain]:
        if isinstance(link, Chain):
            yield from links_of(link)
        else:
            yield link, formula_of(type(link))
