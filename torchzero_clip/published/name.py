"""What a published method is called, and the chain that it is."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torchzero_clip.core import Chain, Transform

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
        near = difflib.get_close_matches(str(name).lower(), NAMES, n=1, cutoff=0)
        raise ValueError(f"named: there is no {name!r}: did you mean {near[0]!r}?")
    takes = inspect.signature(NAMES[name]).parameters
    for given in arguments:
        if given not in takes:
            raise TypeError(f"named: {name!r} takes {', '.join(takes)}, got {given!r}")
    return NAMES[name](**arguments)


def links_of(chain: Transform) -> Iterator[tuple[Transform, str]]:
    """The links of a chain and of the chains inside it, each with its formula."""
    for link in chain if isinstance(chain, Chain) else [chain]:
        if isinstance(link, Chain):
            yield from links_of(link)
        else:
            formula = (inspect.getdoc(type(link)) or "").partition("\n\n")[0]
            yield link, " ".join(formula.split())
