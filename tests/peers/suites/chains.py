"""Chains with the names and arguments of the optimizers that other people's tests build."""

from __future__ import annotations

import inspect
from typing import Any

from torchzero_clip import Adam, Chain, Modular, Partition, Scale, Transform, named
from torchzero_clip.published.name import NAMES

MATRICES = {"muon", "muon_plus", "muoneq", "nanochat", "normuon"}
"""What is for matrices; vectors go to Adam."""


class Published(Modular):
    """The chain of a published method, as a class of optimizers with the method's arguments."""

    method: str
    front: tuple[Transform, ...] = ()

    def __init__(
        self,
        params: Any,
        lr: Any = None,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        foreach: Any = None,  # with these two torch's classes choose a kernel
        capturable: Any = None,
        **arguments: Any,
    ) -> None:
        if lr is not None:
            arguments["lr"] = lr
        target = "grad" if self.method == "cadamw" else "update"  # Cautious compares with it
        turned = [Scale(-1.0, target=target)] if maximize else []
        super().__init__(params, *turned, self.chain_of(arguments), fused=fused is not False)

    def chain_of(self, arguments: dict[str, Any]) -> Chain:
        if "weight_decay" not in takes(self.method) and not arguments.get("weight_decay"):
            arguments.pop("weight_decay", None)
        chain = named(self.method, **arguments)
        if self.method not in MATRICES:
            return Chain(*self.front, chain)
        *matrices, lr = chain
        kinds = {"matrices": Chain(*matrices), "rest": Adam()}
        return Chain(Partition(kinds, lambda _, p: "matrices" if p.dim() > 1 else "rest"), lr)


def published(
    method: str, name: str | None = None, kind: type[Published] = Published, **more: Any
) -> type[Published]:
    """The class for a method, under a name of the suite, with the method's signature."""
    recipe = inspect.signature(NAMES[method]).parameters.values()
    arguments = [p.replace(kind=p.KEYWORD_ONLY, annotation=p.empty) for p in recipe]
    params = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([params, *arguments])
    return type(name or method, (kind,), {"method": method, "__signature__": signature, **more})


def takes(method: str) -> frozenset[str]:
    """The arguments of a published method."""
    return frozenset(inspect.signature(NAMES[method]).parameters)
