"""groups: parameter groups of a model, by what its parameters are and what they are called."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from torchzero_clip.core.argument_values import is_row
from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.user_warnings import warn

LayerPlace = tuple[float, ...]  # of a layer among the others
JOINS_THE_ONE_BEFORE = 99999  # as timm has it, at the end of a place
BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")  # a name up to its first number


def groups(
    model: nn.Module,
    rules: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    lr: Any = None,
    layer_decay: float | None = None,
    layers: Sequence[str] | None = None,
    decay_vectors: bool = False,
) -> list[dict[str, Any]]:
    """Parameter groups of a model: no weight decay for vectors and biases, layer decay, and values
    by name.

    They are plain dicts with "params" and "param_names", for any optimizer of torch's kind. A value
    that no rule sets is left to the optimizer. Parameters that require no gradient are left out.

    Args:
        model: The model.
        rules: For a pattern of names, as "head.*" or "*.bias | *norm*", the values of a group. Of
            several that set the same value, the first match wins. A pattern, or a part of it
            between bars, that matches no parameter is an error, and so is a rule that never wins.
        lr: The learning rate of what no rule gives one.
        layer_decay: The rate of a layer is this times that of the layer behind it; the last one has
            the full rate. Where neither `lr` nor a rule says the rate, the factor stands under
            "lr_scale", which timm's schedulers read, and a warning says so.
        layers: Patterns of names, from the first layer to the last. By default they are what the
            model's own `group_matcher` says, as those of timm do; in other models what shares the
            name up to its first number is a layer ("encoder.layer.3"), what comes before all of
            these is the first one, and what comes behind them the last.
        decay_vectors: Whether parameters of one dim or none, biases, and what the model lists in
            its own `no_weight_decay()`, as those of timm do, have the decay of the others. Without
            it theirs is 0, whatever the rules say.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, WeightDecay, groups
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Linear(32, 1))
        >>> made = groups(model, {"1.*": {"lr": 1e-2}}, lr=1e-3, layer_decay=0.5)
        >>> for group in made:
        ...     print(group["param_names"], group["lr"], group.get("weight_decay"))
        ['0.weight'] 0.0005 None
        ['0.bias'] 0.0005 0.0
        ['1.weight'] 0.01 None
        ['1.bias'] 0.01 0.0
        >>> opt = Modular(made, Adam(), WeightDecay(0.1), LR(1e-3))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"groups: takes the model, a torch.nn.Module, got {model!r}")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    told = _values(model, rules or {}, {} if lr is None else {"lr": lr}, decay_vectors)
    values = {name: told[name] for name in trained}
    if layer_decay is not None:
        _scale(values, _scales(model, layer_decay, layers))
    made: dict[str, dict[str, Any]] = {}
    for name, p in trained.items():
        alike = repr(sorted(values[name].items()))
        group = made.setdefault(alike, {"params": [], "param_names": [], **values[name]})
        group["params"].append(p)
        group["param_names"].append(name)
    return list(made.values())


# ---------------------------------------------------------------------- rules


def _values(
    model: nn.Module, rules: Mapping[str, Any], base: Mapping[str, Any], decay_vectors: bool
) -> dict[str, dict[str, Any]]:
    """What the group of each parameter has; of several rules for a value the first one wins."""
    if not isinstance(rules, Mapping):
        raise TypeError(
            "groups: rules are a dict of patterns and values, as {'head.*': {'lr': 1e-4}}, got "
            f"{rules!r}"
        )
    rows = [(_matched(p, model), _checked(p, given)) for p, given in rules.items()]
    first = [] if decay_vectors else [(_without_decay(model), {"weight_decay": 0.0})]
    values = {name: dict(base) for name, _ in model.named_parameters()}
    for names, given in reversed([*first, *rows]):  # so that the first one has the last word
        for name in names:
            values[name].update(given)
    for pattern, (names, given) in zip(rules, rows, strict=True):
        if given and not any([values[n][key] == given[key] for n in names for key in given]):
            raise ValueError(
                f"groups: the rule {pattern!r} changes nothing: of several rules for a value the "
                "first one wins, and vectors and biases have no decay whatever rules say, unless "
                "decay_vectors=True"
            )
    return values


def _checked(pattern: str, given: Any) -> Mapping[str, Any]:
    """The values that a rule gives; raises a sentence where they are none of a group."""
    if not isinstance(given, Mapping) or not RESERVED.isdisjoint(given):
        raise TypeError(
            f"groups: the rule {pattern!r} must give values of a group, as {{'lr': 1e-4}}, and not "
            f"what is in it, got {given!r}"
        )
    return given


def _matched(pattern: str, model: nn.Module) -> set[str]:
    """The names of parameters that a pattern matches, each part of it at least one."""
    if not isinstance(pattern, str):
        raise TypeError(f"groups: a pattern is a string, as 'head.*', got {pattern!r}")
    names, matched = [name for name, _ in model.named_parameters()], set[str]()
    for part in map(str.strip, pattern.split("|")):
        here = {name for name in names if fnmatchcase(name, part)}
        if not here:
            raise ValueError(f"groups: {part!r} matches no parameter: {_hint(part, model)}")
        matched |= here
    return matched


def _hint(part: str, model: nn.Module) -> str:
    """The parameter that may have been meant: the same one under another name, or the nearest."""
    first = {id(p): name for name, p in model.named_parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        if fnmatchcase(name, part):
            return f"{name!r} is tied to {first[id(p)]!r}, which is the name that counts"
    near = difflib.get_close_matches(part.replace("*", ""), first.values(), n=1, cutoff=0)
    return f"the nearest is {near[0]!r}" if near else "the model has none"


def _without_decay(model: nn.Module) -> set[str]:
    """Vectors, numbers, biases, and what the model says itself in timm's words."""
    listed: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    return {
        name
        for name, p in model.named_parameters()
        if p.dim() < 2
        or name.rpartition(".")[2] == "bias"
        or any([fnmatchcase(name, pattern) for pattern in listed])
    }


# ---------------------------------------------------------------------- layers


def _scale(values: Mapping[str, dict[str, Any]], scales: Mapping[str, float]) -> None:
    """Multiply the rates that are known; for others timm's schedulers are told by what."""
    unknown = [name for name in values if "lr" not in values[name]]
    if unknown:
        warn(
            f"groups: the learning rate of {unknown[0]!r} is not known here, so what layer_decay "
            "makes of it stands under 'lr_scale', which timm's schedulers read and no optimizer "
            "does: give lr=, the rate of the last layer"
        )
    for name, given in values.items():
        if "lr" in given:
            given["lr"] = given["lr"] * scales[name]
        else:
            given["lr_scale"] = scales[name]


def _scales(model: nn.Module, decay: float, layers: Sequence[str] | None) -> dict[str, float]:
    """What the rate of each parameter is multiplied by: decay once for each layer behind it."""
    if not (isinstance(decay, (int, float)) and 0 < decay < math.inf):
        raise ValueError(f"groups: layer_decay must be a number greater than 0, got {decay!r}")
    matcher = getattr(model, "group_matcher", None)
    if layers is not None:
        place = _given(model, layers)
    elif matcher is not None:
        place = _told(matcher(coarse=False))
    else:
        place = _numbered(model)
    places = {name: place(name) for name, _ in model.named_parameters()}
    depth, layer = -1, dict[LayerPlace, int]()
    for each in sorted(set(places.values())):
        depth += depth < 0 or each[-1] != JOINS_THE_ONE_BEFORE
        layer[each] = depth
    if depth < 1:
        raise ValueError(
            "groups: layer_decay finds a single layer in this model: say which there are, first to "
            "last, as layers=['embed.*', 'body.*', 'head.*']"
        )
    return {name: decay ** (depth - layer[each]) for name, each in places.items()}


def _given(model: nn.Module, layers: Sequence[str]) -> Callable[[str], LayerPlace]:
    """The place of a name among patterns of the user's."""
    rows = [_matched(pattern, model) for pattern in layers]

    def place(name: str) -> LayerPlace:
        for i, names in enumerate(rows):
            if name in names:
                return (i,)
        raise ValueError(f"groups: {name!r} is in none of layers={list(layers)!r}")

    return place


def _told(matcher: Any) -> Callable[[str], LayerPlace]:
    """The place of a name by a model's own matcher: a function, or expressions, as timm has them.

    The numbers that an expression finds come after its own number, and behind them what is fixed.
    What no expression matches is the last layer.
    """
    if callable(matcher):
        return lambda name: _place(matcher(name))
    specs = [
        (i, re.compile(expression), fixed or ())
        for i, told in enumerate(matcher.values())
        for expression, fixed in ([(told, ())] if isinstance(told, str) else told or ())
    ]

    def place(name: str) -> LayerPlace:
        for i, expression, fixed in specs:
            if match := expression.match(name):
                return (i, *map(float, filter(None, match.groups())), *fixed)
        return (math.inf,)

    return place


def _place(told: Any) -> LayerPlace:
    if told is None:
        return (math.inf,)
    return tuple(told) if is_row(told) else (told,)


def _numbered(model: nn.Module) -> Callable[[str], LayerPlace]:
    """The place of a name by the first number in it; what has none is where the one before is."""
    places, blocks, here = dict[str, LayerPlace](), dict[str, int](), -1
    for name, _ in model.named_parameters():
        if match := BLOCK.match(name):
            here = blocks.setdefault(match[0], len(blocks))
        places[name] = (here,)
    for name in reversed(places):
        if BLOCK.match(name):
            break
        places[name] = (len(blocks),)  # behind all blocks
    return places.__getitem__
