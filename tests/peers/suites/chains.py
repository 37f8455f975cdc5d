"""Chains with the names and arguments of the optimizers that other people's tests build."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torchzero_clip import LR, Adam, Chain, Modular, Partition, Scale, Transform, named
from torchzero_clip.published import NAMES, matrix_methods, per_head

VECTORS_TOO = {"klsoap", "kron", "shampoo", "soap", "soap_hyperball"}  # else to Adam
MATRIX_MODULES = {matrix_methods.__name__, per_head.__name__}
MATRICES = {name for name in NAMES if NAMES[name].__module__ in MATRIX_MODULES} - VECTORS_TOO


class Published(Modular):
    """The chain of a published method, as a class of optimizers with the method's arguments.

    Groups may have them too, as in torch; where one chooses links, as a momentum, all have these.
    """

    method: str
    front: tuple[Transform, ...] = ()
    engine: ClassVar[dict[str, bool]] = {}

    def __init__(
        self,
        params: Any,
        lr: Any = None,
        *,
        fused: bool | None = None,
        foreach: Any = None,  # with these two torch's classes choose a kernel
        capturable: Any = None,
        **arguments: Any,
    ) -> None:
        arguments |= {} if lr is None else {"lr": lr}
        dicts = isinstance(params, list) and params and isinstance(params[0], dict)
        groups = [dict(group) for group in params] if dicts else []
        names = defaults(self.method).keys() | {"maximize"}
        theirs = [{key: group.pop(key) for key in names & group.keys()} for group in groups]
        chosen = dict(arguments)
        for given in theirs:
            chosen |= {key: value for key, value in given.items() if not chosen.get(key)}
        turned = chosen.pop("maximize", False)
        engine = self.engine or {"fused": fused is not False}
        super().__init__(groups or params, *self.links(chosen, turned), **engine)
        for group, given in zip(self.param_groups, theirs, strict=False):
            live = {**defaults(self.method), **arguments, **given}
            group.update({key: live[key] for key in chosen.keys() & group.keys()})
            if turned:
                where = "factor" if "factor" in group else "Scale/factor"
                group[where] = -1.0 if live.get("maximize") else 1.0

    def links(self, arguments: dict[str, Any], turned: bool) -> list[Transform]:
        if "weight_decay" not in defaults(self.method) and not arguments.get("weight_decay"):
            arguments = {k: value for k, value in arguments.items() if k != "weight_decay"}
        chain = named(self.method, **arguments)
        compares = any(
            "grads" in tfm.reads for tfm in chain.walk()
        )  # with the gradient, which turns
        front = [*[Scale(-1.0, target="grad" if compares else "update")] * turned, *self.front]
        if self.method not in MATRICES:
            return [*front, chain]
        lr = next(place for place, link in enumerate(chain) if isinstance(link, LR))
        kinds = {"matrices": Chain(*list(chain)[:lr]), "rest": Adam()}
        parts = Partition(kinds, lambda _, p: "matrices" if p.dim() > 1 else "rest")
        return [*front, parts, *list(chain)[lr:]]


def published(
    method: str, name: str | None = None, kind: type[Published] = Published, **more: Any
) -> type[Published]:
    """The class for a method, under a name of the suite, with the method's signature."""
    recipe = inspect.signature(NAMES[method]).parameters.values()
    arguments = [p.replace(kind=p.KEYWORD_ONLY, annotation=p.empty) for p in recipe]
    params = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([params, *arguments])
    return type(name or method, (kind,), {"method": method, "__signature__": signature, **more})


def defaults(method: str) -> dict[str, Any]:
    """The arguments of a published method, each with its default."""
    return {p.name: p.default for p in inspect.signature(NAMES[method]).parameters.values()}
