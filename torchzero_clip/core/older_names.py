"""What classes said of themselves by other names, which they may go on saying: it warns."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torchzero_clip.core.outside import warn

OLDER = {
    "reach": {"separable": "model"},
    "place": {"goes_first": "first", "about_step": "step"},
    "leaves": {"update_size": "own", "passes_gradient": "gradient"},
    "drops": {"starts_with_state": "first"},
    "reads": {
        "counts_steps": "step",
        "reads_loss": "loss",
        "reads_grads": "grads",
        "reads_params": "param",
    },
    "state_kinds": {"turns": "linear", "permutes": "squares", "exact_state": "weights"},
}
"""For each name the older ones, and the word for each there."""
USUAL = {"place": "any", "leaves": "update", "drops": False}


def take_older_names(cls: Any) -> None:
    """Have a class say by the names of now what it says by older ones, in its body or a mixin's."""
    heard = {x for base in cls.__bases__ if hasattr(base, "registry") for x in base.__mro__}
    body = {k: v for x in reversed(cls.__mro__) if x not in heard for k, v in vars(x).items()}
    for new, words in OLDER.items():
        for old in [old for old in words if old in body and old not in cls.__dataclass_fields__]:
            said, before = body[old], inspect.getattr_static(cls, new)
            setattr(cls, new, property(partial(_now, new, words[old], said, before)))
            word = said if isinstance(said, str) else words[old]
            warn(f"{cls.__name__} says {old}, which is now {new}, with {word!r}")


def _now(new: str, word: str, said: Any, before: Any, rule: Any) -> Any:
    """The value of now, of what a body says by an older name and what its bases have."""
    if new == "reach":
        return "tensor" if said else word
    said, before = [x.fget(rule) if isinstance(x, property) else x for x in (said, before)]  # type: ignore[misc]
    if new == "reads":
        return (*before, word) if said else tuple([x for x in before if x != word])
    if new == "state_kinds":
        others = {name: kind for name, kind in before.items() if kind != word}
        return {**others, **dict.fromkeys(said, word)}
    if isinstance(said, str):
        return "update" if said == "follows" else said
    return word if said else USUAL[new] if before == word else before
