"""The keys of hyperparameters in `param_groups`, and checks of the keys in a group."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchzero_clip.core.argument_values import agree, live_value
from torchzero_clip.core.description import ON_NORMS, RESERVED, class_with, no_argument
from torchzero_clip.core.link import Link, read_elsewhere
from torchzero_clip.core.traits import Smoothing
from torchzero_clip.core.transform import Transform
from torchzero_clip.optimizer import norm_groups

SCHEDULER_KEYS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
WELL_KNOWN = {  # the keys of torch's optimizers, each with the link that reads it
    "lr": "LR(...)",
    "weight_decay": "WeightDecay(...)",
    "momentum": "Momentum(...)",
    "dampening": "Momentum(dampening=...)",
    "nesterov": "Momentum(nesterov=True)",
    "betas": "Adam(...)",
    "amsgrad": "Adam(amsgrad=True)",
    "centered": "RMSprop(centered=True)",
    "maximize": "Scale(-1)",
    "max_norm": "ClipNorm(...)",
}
NAMES_OF_MAX_NORM = "clip_grad", "clip_norm", "grad_clip", "gradient_clip_val", "max_grad_norm"
NAMES_ELSEWHERE = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    **dict.fromkeys(NAMES_OF_MAX_NORM, "max_norm"),
}
"""For names of hyperparameters in other libraries, the names in this library."""
MOST_EDITS = 2
"""The largest number of edits between a misspelled key and the correct key."""


class GroupKeys:
    """The keys of all hyperparameters of a chain.

    If only one link owns a name, the key is the name. Otherwise the key is "Link/name".

    Args:
        links: The links of the chain.
        others: Links outside of the chain whose hyperparameters are in the same groups.
    """

    def __init__(self, links: Sequence[Link], others: Sequence[Link] = ()) -> None:
        self.links = [link for top in links for link in top.walk()]
        self._all_links = [link for top in (*links, *others) for link in top.walk()]
        self.seen: list[list[Any]] = []  # the values of each group in the last step
        self._seen_keys: list[frozenset[str]] = []
        self.defaults: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}  # from every qualified name to the key in use
        self.ambiguous: dict[str, list[str]] = {}
        self.owners: dict[str, list[Link]] = {}
        for link in self._all_links:
            for name in link.transform.live:
                self.owners.setdefault(name, []).append(link)
        for name, owners in self.owners.items():
            if name == "lr" and len(owners) > 1:
                raise ValueError(
                    f"only one transform may have an lr, got {[link.path for link in owners]}: to "
                    "use several learning rates, create parameter groups, or put Scale(factor) "
                    "into branches"
                )
            if len(owners) > 1:
                self.ambiguous[name] = [f"{link.path}/{name}" for link in owners]
            for link in owners:
                qualified = f"{link.path}/{name}"
                key = qualified if name in self.ambiguous else name
                link.keys[name] = key
                self.aliases[qualified] = key
                self.defaults[key] = getattr(link.transform, name)
        for link in self.links:
            self._follow_reads(link, link.transform)

    def tidy(self, group: dict[str, Any], later: bool = False) -> None:
        """Rename the keys of a group to the current keys, add defaults, and check all values.

        Args:
            group: The group, which is changed.
            later: Whether this is a later check of the same group. If so, a value under a qualified
                name is newer than the value under the current key, and replaces it.
        """
        if later and "chain" not in group:
            raise ValueError(
                "param_groups must not be replaced: call add_param_group, or change the list "
                "param_groups in place"
            )
        for key in [k for k in group if k not in (*RESERVED, *ON_NORMS, *self.defaults)]:
            if key in self.aliases:
                short = self.aliases[key]
                if short in group and not later:
                    raise ValueError(
                        f"a parameter group must not have both {key!r} and {short!r}, which "
                        "are two names of the same hyperparameter"
                    )
                group[short] = group.pop(key)
            elif key not in SCHEDULER_KEYS:
                self.refuse(key, group[key])
        norm_groups.check(group)
        for key, value in self.defaults.items():
            group[key] = live_value(group.get(key, value))
        for link in self._all_links:
            self._check_link(link, group)

    def values(self, group: dict[str, Any]) -> list[Any]:
        """Return the hyperparameters of a group."""
        return [group[key] for key in self.defaults]

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Check keys and values that have changed since the last step."""
        if list(map(frozenset, groups)) != self._seen_keys:
            for g, group in enumerate(groups):
                of_group(g, self.tidy, group, True)
            self._seen_keys = list(map(frozenset, groups))
            self.seen = list(map(self.values, groups))
        if not torch.compiler.is_compiling():
            for g, group in enumerate(groups):
                values = self.values(group)
                if not all(map(operator.is_, values, self.seen[g])):
                    self.seen[g] = of_group(g, self.check_changed, group, values, self.seen[g])

    def forget(self) -> None:
        """Make the next step check all keys and values, because the groups were replaced."""
        self._seen_keys = []

    def check_changed(
        self, group: dict[str, Any], values: Sequence[Any], seen: Sequence[Any]
    ) -> list[Any]:
        """Check the links whose hyperparameters are new objects, and return all hyperparameters.

        The method compares objects instead of values, because a comparison of tensors would
        synchronize with the device.
        """
        pairs = zip(self.defaults, values, seen, strict=True)
        changed = {key for key, new, old in pairs if new is not old}
        for key in changed:
            group[key] = live_value(group[key])
        for link in self._all_links:
            if not changed.isdisjoint(link.keys.values()):
                self._check_link(link, group)
        return self.values(group)

    def _check_link(self, link: Link, group: dict[str, Any]) -> None:
        """Raise the constructor's error if a link does not accept the values in a group."""
        if link.keys:
            now = {name: group[key] for name, key in link.keys.items()}
            self._follow_reads(link, link.transform.with_values(now))

    def _follow_reads(self, link: Link, now: Any) -> None:
        """Find the other links whose hyperparameters a link reads, given its present values."""
        for name in read_elsewhere(now):
            link.read[name] = _owner_for(link, name, self.owners.get(name, []))

    def refuse(self, key: str, value: Any) -> None:
        """Raise an error for a key that is ambiguous, fixed, misspelled or read by no link.

        Other unknown keys belong to the user and are accepted.
        """
        if key in self.ambiguous:
            raise ValueError(
                f"the key {key!r} of a parameter group is ambiguous, because several transforms "
                f"have this hyperparameter: use one of {self.ambiguous[key]}"
            )
        if self._is_fixed(key, value):
            return
        if key in WELL_KNOWN:
            if value is None or (isinstance(value, numbers.Real) and value == 0):
                return
            for link in self.links:
                rule = link.transform
                if isinstance(rule, Smoothing) and key in rule.torch_names:
                    own = link.keys[rule.torch_names[key]]
                    raise ValueError(
                        f"a parameter group has {key}={value!r}, but {link.path} uses the "
                        f"name {own!r}: use the key {own!r} instead of {key!r}"
                    )
            raise ValueError(
                f"a parameter group has {key}={value!r}, but no transform uses it: add "
                f"{WELL_KNOWN[key]} to the transforms"
            )
        meant = NAMES_ELSEWHERE.get(key)
        if meant in self.defaults or meant in self.ambiguous:
            raise ValueError(f"unknown key {key!r} of a parameter group: use {meant!r} instead")
        if near := nearest(key, [*self.defaults, *self.aliases, *self.ambiguous]):
            raise ValueError(f"unknown key {key!r} of a parameter group: did you mean {near!r}?")

    def _is_fixed(self, key: str, value: Any) -> bool:
        """Return whether a key is the name of a fixed argument that has this value.

        Raise an error if the key is such a name, and no link has this value.
        """
        values = {link: link.fixed()[key] for link in self._all_links if key in link.fixed()}
        if key in WELL_KNOWN:  # momentum=0.9 does not mean the argument momentum=True of Adam
            is_flag = isinstance(value, bool)
            values = {link: x for link, x in values.items() if isinstance(x, bool) == is_flag}
        if not values:
            return False
        if any([agree(x, value) for x in values.values()]):
            return True
        rule = next(iter(values))
        name = key.rpartition("/")[2]
        raise ValueError(
            f"a parameter group has {key}={value!r}, but the argument {name} of {rule.path} is "
            f"fixed for all groups: pass {name}= to {type(rule.transform).__name__}. A group may "
            f"set only live hyperparameters, which are {[*self.defaults]}"
        )

    def check_structure(self, tops: Sequence[Link]) -> None:
        """Raise an error if a guard is not first, or if no link reads a clipped gradient."""
        guards = [link for link in self.links if link.is_guard]
        for link in guards:
            if link not in tops[: len(guards)]:
                raise ValueError(
                    f"{link.path} must be the first transform, got the transforms in the "
                    f"order {[top.path for top in tops]}"
                )
        unread: list[tuple[str, str]] = []
        _follow(tops, None, unread)
        if unread:
            clip, producer = unread[0]
            raise ValueError(
                f'{clip} with target="grad" has no effect, because {producer} has already '
                f"computed the update from the gradients: put {clip} before {producer}, or "
                f'pass target="update" to {clip}. If one of your classes reads '
                'group["grads"], set reads = ("grads",) in this class'
            )


def refuse_arguments(owner: str, unknown: Mapping[str, Any], init: Any) -> None:
    """Raise an error for keyword arguments that an optimizer does not accept."""
    for name, value in unknown.items():
        link = WELL_KNOWN.get(name, f"{class_with(name)}(...)")
        if link == "a link(...)":
            raise TypeError(f"{owner}: {no_argument(init, name)}")
        link = link.replace("(...)", f"({name}={value!r})")
        raise TypeError(
            f"{owner}: there is no argument {name!r}: add {link} to the transforms. If a framework "
            f"passes {name}=, use optimizer_class(...), which returns a class with this argument"
        )


def refuse_no_params(owner: str, params: Any) -> None:
    """Raise an error if a module or a transform is passed instead of the parameters."""
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"{owner}: params must be parameters, got a module: pass model.parameters()"
        )
    if isinstance(params, Transform):
        raise TypeError(
            f"{owner}: the first argument must be the parameters, got {params!r}: pass "
            "model.parameters() first, and then the transforms"
        )


def _owner_for(link: Link, name: str, owners: Sequence[Link]) -> Link:
    """Return the link that owns a hyperparameter that another link reads.

    Raise an error unless there is exactly one owner in the innermost chain that has any.
    """
    for depth in range(link.path.count("/"), -1, -1):
        start = link.path.split("/")[:depth]
        near = [other for other in owners if other.path.split("/")[:depth] == start]
        if len(near) == 1:
            return near[0]
    if owners:
        paths = [other.path for other in owners]
        raise ValueError(
            f"{link.path} reads {name}, so only one transform may have {name}, got {paths}"
        )
    hint = WELL_KNOWN.get(name, f"a transform with the argument {name}")
    raise ValueError(
        f"{link.path} reads {name}, but no transform has {name}: add {hint} to the transforms"
    )


def _follow(
    links: Sequence[Link], produced: str | None, unread: list[tuple[str, str]]
) -> str | None:
    """Collect the links with target="grad" that come after a link that returned an update.

    Args:
        links: The links to follow.
        produced: The path of the last link before `links` that returned an update.
        unread: A list that receives the path of each such link and the path of the link that
            returned the update. A later link that reads gradients empties the list.

    Returns:
        The path of the last link that returned an update.
    """
    for link in [link for link in links if link.transforms]:
        tfm = link.transform
        if "grads" in tfm.reads:
            unread.clear()
        if tfm.inner == "chain":
            produced = _follow(link.children, produced, unread)
        elif tfm.inner == "branches":
            ends = [_follow([child], produced, unread) for child in link.children]
            produced = next((end for end in ends if end is not None), produced)
        elif tfm.target == "update":
            produced = produced if tfm.leaves == "gradient" else link.path
        elif produced is not None:
            unread.append((link.path, produced))
    return produced


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that the user probably meant, or None.

    The known name is at most two edits away from the given name, and shares at least one letter
    with it.
    """
    far = {other: _distance(name.lower(), other.lower()) for other in known}
    near = [other for other, edits in far.items() if edits <= min(MOST_EDITS, len(other) - 1)]
    return min(near, key=far.__getitem__, default=None)


def _distance(a: str, b: str, most: int = MOST_EDITS) -> int:
    """Return the number of edits between two names, at most `most` + 1.

    A swap of neighbors counts as one edit.
    """
    if a and b and a[0] == b[0]:
        return _distance(a[1:], b[1:], most)
    if not (a and b and most):
        return min(len(a) + len(b), most + 1)
    ways = [(a[1:], b[1:]), (a[1:], b), (a, b[1:])]
    if a[:2] == b[1::-1]:
        ways.append((a[2:], b[2:]))
    return 1 + min([_distance(*way, most - 1) for way in ways])


def of_group(g: int, check: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a check. If the check raises an error, add the group to the message."""
    try:
        return check(*args)
    except (TypeError, ValueError) as error:
        raise type(error)(f"group {g}: {error}") from None


def refuse_nameless(links: Sequence[Link], group: Mapping[str, Any], remedy: str) -> None:
    """Raise an error with a remedy if a rule needs parameter names and parameters have no names."""
    for link in links:
        if getattr(link.transform, "scope", None) == "layer" and "param_names" not in group:
            raise ValueError(
                f"{link.path}: dim='layer' needs the names of the parameters: {remedy}"
            )
