"""What a published method is called, and the chain that it is."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torchzero_clip.core import Chain, Transform
from torchzero_clip.core.formula import formula_of

Recipe = TypeVar("Recipe", bound=Callable[..., Chain])

NAMES: dict[str, Callable[..., Chain]] = {}
"""The function that makes the chain of each name."""


def published(recipe: Recipe) -> Recipe:
    """Make a function's name one that `named` knows; an identity must hold it to the method."""
    NAMES[recipe.__name__] = recipe
    return recipe


def named(name: str, **arguments: Any) -> Chain:
    """The chain of a published method; `python -m torchzero_clip NAME` shows what is in it.

    Args:
        name: As people know it, such as "adamw" or "lamb".
        **arguments: Those of the method, with its defaults.

    Example:
        >>> import torch
        >>> from torchzero_clip import Modular, named
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), named("lamb", lr=1e-3, weight_decay=0.01))
    """
    if name not in NAMES:
        raise ValueError(f"named: there is no {name!r}: {instead_of(name)}")
    takes = inspect.signature(NAMES[name]).parameters
    for given in arguments:
        if given not in takes:
            raise TypeError(f"named: {name!r} takes {', '.join(takes)}, got {given!r}")
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
"""Names of other libraries, and the name here with the arguments that are theirs, or nearest."""


def instead_of(name: object, *others: str) -> str:
    """What to write for a name that nobody has here: the setting that it is, or the nearest names.

    `others` are names of other kinds, which are near as well.
    """
    said = str(name).lower().rpartition(".")[2].replace("-", "_")
    settings = {key.replace("_", ""): setting for key, setting in SETTINGS.items()}
    if setting := settings.get(said.replace("_", "")):
        arguments = [f", {key}={value!r}" for key, value in setting[1].items()]
        return f'take named("{setting[0]}"{"".join(arguments)})'
    spelt = {**{key: key for key in NAMES}, **{other.lower(): other for other in others}}
    near = difflib.get_close_matches(said, spelt, n=3, cutoff=0.6)
    near = near or difflib.get_close_matches(said, spelt, n=1, cutoff=0)
    *rest, last = [repr(spelt[key]) for key in near]
    return f"did you mean {', '.join(rest)}{' or ' * bool(rest)}{last}?"


def links_of(chain: Transform) -> Iterator[tuple[Transform, str]]:
    """The links of a chain and of the chains inside it, each with its formula."""
    for link in chain if isinstance(chain, Chain) else [chain]:
        if isinstance(link, Chain):
            yield from links_of(link)
        else:
            yield link, formula_of(type(link))
