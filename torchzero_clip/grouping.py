"""The function `groups`, which splits the parameters of a model into parameter groups."""

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
from torchzero_clip.core.names import alternatives
from torchzero_clip.core.user_warnings import warn

LayerPlace = tuple[float, ...]
"""A sort key for the layers of a model."""
JOINS_THE_LAYER_BEFORE = 99999  # timm's convention for the last number of a position
BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")
"""The pattern of a parameter's name up to the first number, such as "encoder.layer.3"."""


def groups(
    model: nn.Module,
    rules: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    lr: Any = None,
    layer_decay: float | None = None,
    layers: Sequence[str] | None = None,
    decay_vectors: bool = False,
) -> list[dict[str, Any]]:
    """Return parameter groups of a model: no decay for vectors, layer decay, and values by name.

    The groups are plain dicts with "params" and "param_names", for any torch optimizer. If no rule
    sets a value, the optimizer uses its default. Parameters that do not require gradients are
    skipped.

    Args:
        model: The model.
        rules: A dict from patterns of parameter names, such as "head.*" or "*.bias | *norm*", to
            values of a group, such as {"lr": 1e-4}. If several rules set the same value of a
            parameter, the first rule wins. Bars separate the parts of a pattern. If a pattern or a
            part matches no parameter, the function raises an error. If a rule never wins, it also
            raises an error.
        lr: The learning rate of parameters without a learning rate from a rule.
        layer_decay: The learning rate of each layer is the learning rate of the next layer, times
            this factor. The last layer has the full learning rate. If neither `lr` nor a rule gives
            a learning rate, the group stores the factor as "lr_scale", and the function warns.
            Schedulers of timm read "lr_scale".
        layers: Patterns of names, from the first layer to the last. By default, the layers come
            from the model's `group_matcher` method. Models of timm have this method. In other
            models, parameters that share their name up to the first number form a layer, such as
            "encoder.layer.3". Parameters before all of these layers form the first layer.
            Parameters after them form the last layer.
        decay_vectors: Whether weight decay also applies to biases, to parameters with fewer than
            two dims, and to parameters in the model's `no_weight_decay()`, which models of timm
            have. By default their weight decay is 0, whatever the rules say.

    Returns:
        A list of parameter groups.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, WeightDecay, groups
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Linear(32, 1))
        >>> param_groups = groups(model, {"1.*": {"lr": 1e-2}}, lr=1e-3, layer_decay=0.5)
        >>> for group in param_groups:
        ...     print(group["param_names"], group["lr"], group.get("weight_decay"))
        ['0.weight'] 0.0005 None
        ['0.bias'] 0.0005 0.0
        ['1.weight'] 0.01 None
        ['1.bias'] 0.01 0.0
        >>> opt = Modular(param_groups, Adam(), WeightDecay(0.1), LR(1e-3))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"groups: model must be a torch.nn.Module, got {model!r}")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    every = _values(model, rules or {}, {} if lr is None else {"lr": lr}, decay_vectors)
    values = {name: every[name] for name in trained}
    if layer_decay is not None:
        _scale(values, _scales(model, layer_decay, layers))
    by_values: dict[str, dict[str, Any]] = {}
    for name, p in trained.items():
        alike = repr(sorted(values[name].items()))
        group = by_values.setdefault(alike, {"params": [], "param_names": [], **values[name]})
        group["params"].append(p)
        group["param_names"].append(name)
    return list(by_values.values())


# ---------------------------------------------------------------------- rules


def _values(
    model: nn.Module, rules: Mapping[str, Any], base: Mapping[str, Any], decay_vectors: bool
) -> dict[str, dict[str, Any]]:
    """Return the group values of each parameter. The first rule that sets a value wins."""
    if not isinstance(rules, Mapping):
        raise TypeError(
            "groups: rules= must be a dict from patterns to values, such as "
            f"{{'head.*': {{'lr': 1e-4}}}}, got {rules!r}"
        )
    pairs = [(_matched(pattern, model), _checked(pattern, x)) for pattern, x in rules.items()]
    first = [] if decay_vectors else [(_without_decay(model), {"weight_decay": 0.0})]
    values = {name: dict(base) for name, _ in model.named_parameters()}
    for names, settings in reversed([*first, *pairs]):  # the first rule is written last, and wins
        for name in names:
            values[name].update(settings)
    for pattern, (names, settings) in zip(rules, pairs, strict=True):
        wins = any([values[name][key] == x for name in names for key, x in settings.items()])
        if settings and not wins:
            raise ValueError(
                f"groups: the pattern {pattern!r} has no effect: put this pattern before the "
                "patterns that match the same parameters. To apply weight decay to vectors "
                "and biases, pass decay_vectors=True"
            )
    return values


def _checked(pattern: str, settings: Any) -> Mapping[str, Any]:
    """Return the values of a rule. Raise an error if a group cannot have these values."""
    if not isinstance(settings, Mapping) or not RESERVED.isdisjoint(settings):
        raise TypeError(
            f"groups: the value of {pattern!r} must be a dict of hyperparameters, such as "
            f"{{'lr': 1e-4}}, without 'params', got {settings!r}"
        )
    return settings


def _matched(pattern: str, model: nn.Module) -> set[str]:
    """Return the parameter names that a pattern matches. Each part must match at least one."""
    if not isinstance(pattern, str):
        raise TypeError(f"groups: a pattern must be a string, such as 'head.*', got {pattern!r}")
    names = [name for name, _ in model.named_parameters()]
    matched: set[str] = set()
    for part in alternatives(pattern):
        of_part = {name for name in names if fnmatchcase(name, part)}
        if not of_part:
            raise ValueError(f"groups: {part!r} matches no parameter: {_hint(part, model)}")
        matched |= of_part
    return matched


def _hint(part: str, model: nn.Module) -> str:
    """Return a hint for a pattern without a match: a tied parameter's name, or a similar name."""
    first = {id(p): name for name, p in model.named_parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        if fnmatchcase(name, part):
            return f"{name!r} is the same parameter as {first[id(p)]!r}: use {first[id(p)]!r}"
    near = difflib.get_close_matches(part.replace("*", ""), first.values(), n=1, cutoff=0)
    return f"did you mean {near[0]!r}?" if near else "the model has no parameters"


def _without_decay(model: nn.Module) -> set[str]:
    """Return the names of vectors, scalars and biases, and the names in `no_weight_decay()`."""
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
    """Multiply the learning rates by the scales. Without a learning rate, store the scale."""
    unknown = [name for name in values if "lr" not in values[name]]
    if unknown:
        warn(
            f"groups: the learning rate of {unknown[0]!r} is not known, so layer_decay sets the "
            "key 'lr_scale', which only timm's schedulers use. To set learning rates, pass lr=, "
            "the learning rate of the last layer"
        )
    for name, settings in values.items():
        if "lr" in settings:
            settings["lr"] = settings["lr"] * scales[name]
        else:
            settings["lr_scale"] = scales[name]


def _scales(model: nn.Module, decay: float, layers: Sequence[str] | None) -> dict[str, float]:
    """Return the factor of each parameter's learning rate: decay ** (number of layers after it)."""
    if not (isinstance(decay, (int, float)) and 0 < decay < math.inf):
        raise ValueError(f"groups: layer_decay must be a number greater than 0, got {decay!r}")
    matcher = getattr(model, "group_matcher", None)
    if layers is not None:
        place_of = _by_patterns(model, layers)
    elif matcher is not None:
        place_of = _by_matcher(matcher(coarse=False))
    else:
        place_of = _by_number(model)
    places = {name: place_of(name) for name, _ in model.named_parameters()}
    depth = -1
    depths: dict[LayerPlace, int] = {}
    for place in sorted(set(places.values())):
        if depth < 0 or place[-1] != JOINS_THE_LAYER_BEFORE:
            depth += 1
        depths[place] = depth
    if depth < 1:
        raise ValueError(
            "groups: layer_decay found only one layer in this model: pass one pattern per "
            "layer, from the first layer to the last layer, such as layers=['embed.*', "
            "'body.*', 'head.*']"
        )
    return {name: decay ** (depth - depths[place]) for name, place in places.items()}


def _by_patterns(model: nn.Module, layers: Sequence[str]) -> Callable[[str], LayerPlace]:
    """Return a function from a name to the index of the user's pattern that matches the name."""
    names_by_layer = [_matched(pattern, model) for pattern in layers]

    def place_of(name: str) -> LayerPlace:
        for i, names in enumerate(names_by_layer):
            if name in names:
                return (i,)
        raise ValueError(
            f"groups: layers= must match all parameters, but {list(layers)!r} does not match "
            f"{name!r}"
        )

    return place_of


def _by_matcher(matcher: Any) -> Callable[[str], LayerPlace]:
    """Return a function from a name to its layer position, according to the model's matcher.

    The matcher, which timm defines, is a function or a dict of regular expressions. The position
    has the index of the first expression that matches, then the numbers that this expression finds
    in the name, then the fixed numbers of the expression. Names that no expression matches are in
    the last layer.
    """
    if callable(matcher):
        return lambda name: _as_place(matcher(name))
    specs: list[tuple[int, re.Pattern[str], tuple[float, ...]]] = []
    for i, spec in enumerate(matcher.values()):
        pairs = [(spec, ())] if isinstance(spec, str) else spec or ()
        for expression, fixed in pairs:
            specs.append((i, re.compile(expression), fixed or ()))

    def place_of(name: str) -> LayerPlace:
        for i, expression, fixed in specs:
            if match := expression.match(name):
                return (i, *map(float, filter(None, match.groups())), *fixed)
        return (math.inf,)

    return place_of


def _as_place(result: Any) -> LayerPlace:
    """Return the result of a matcher as a layer position. None means the last layer."""
    if result is None:
        return (math.inf,)
    return tuple(result) if is_row(result) else (result,)


def _by_number(model: nn.Module) -> Callable[[str], LayerPlace]:
    """Return a function from a name to its layer position, according to the first number.

    A name without a number has the position of the name before. After the last name with a number,
    names without a number are the last layer.
    """
    places: dict[str, LayerPlace] = {}
    blocks: dict[str, int] = {}
    block = -1
    for name, _ in model.named_parameters():
        if match := BLOCK.match(name):
            block = blocks.setdefault(match[0], len(blocks))
        places[name] = (block,)
    for name in reversed(places):
        if BLOCK.match(name):
            break
        places[name] = (len(blocks),)
    return places.__getitem__
