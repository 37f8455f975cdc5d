"""Averages: the weights for evaluation, for a while in the memory of the parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from torchzero_clip.core.link import Link
from torchzero_clip.core.sharding.layout import layout_of, local
from torchzero_clip.core.transform import averages
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer.rounding import in_model, weights_of

SHOWN = "averaged/shown"  # in the chain of a group, while eval() has them in the parameters
TRAINING = "averaged/training"  # in the state of a parameter, what it is in training meanwhile
NONE = (
    "no link of this chain has weights for evaluation: put one behind LR, as WeightEMA(0.999) or "
    "ScheduleFree()"
)


def check_order(links: Sequence[Link], seen: Link | None = None) -> Link | None:
    """Raise a sentence where a link changes the step behind one that averages what it leaves."""
    for link in [link for link in links if link.transforms]:
        tfm = link.transform
        if tfm.inner == "branches":
            seen = next(filter(None, [check_order([one], seen) for one in link.children]), seen)
        elif tfm.inner == "chain":
            seen = check_order(link.children, seen)
        else:
            if seen is not None and (tfm.drops or tfm.leaves != "gradient"):
                raise ValueError(
                    f"{seen.path} must see the step that is subtracted, and {link.path} behind it "
                    f"changes it: put {seen.path} behind {link.path}"
                )
            seen = link if averages(tfm) else seen
    return seen


class Shown(NamedTuple):
    """A parameter that has weights for evaluation; of sharded ones the parts on this rank.

    Attributes:
        param: The parameter as the optimizer holds it.
        weights: Its weights for evaluation.
        held: Whether these are memory of state in the parameter's dtype, to be exchanged with it.
    """

    param: Tensor
    weights: Tensor
    held: bool


def rows(optimizer: Any, name: str | None = None) -> Iterator[Shown]:
    """Every parameter with weights for evaluation: of the last link that has some, or of one.

    Args:
        optimizer: The optimizer.
        name: The path of a link, or None.
    """
    links = _links(optimizer.keys.links, name)
    for group in optimizer.param_groups:
        values = {
            link.path: {**link.values(group), **_held(link, group["chain"])} for link in links
        }
        for p in group["params"]:
            for link in links:
                if held := _held(link, optimizer.state.get(p, {})):
                    now = weights_of(optimizer, p)
                    weights = link.transform.averaged(now, held, values[link.path])
                    own = any([weights is t for t in held.values()])
                    yield Shown(p, weights, own and weights.dtype == p.dtype)
                    break


def _links(links: Sequence[Link], name: str | None) -> list[Link]:
    """The links with weights for evaluation, the last first, or the one of this name."""
    found = [link for link in links if averages(link.transform)]
    if not found:
        raise ValueError(NONE)
    if name is None:
        return found[::-1]
    if name not in [link.path for link in found]:
        raise ValueError(
            f"averaged: name must be None or one of {[link.path for link in found]}, got {name!r}"
        )
    return [link for link in found if link.path == name]


def _held(link: Link, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The link's state of one parameter, or the numbers that it keeps for a group, by name."""
    rows = [(str(key).rpartition("/"), t) for key, t in state.items() if isinstance(t, Tensor)]
    return {name: local(t) for (path, _, name), t in rows if path == link.path}


# ---------------------------------------------------------------------- in the place of weights

Moves: TypeAlias = "list[tuple[Tensor, Tensor]]"
"""Pairs of tensors, the last pair first: each first one takes the values of the other."""


class Substitution:
    """Weights for evaluation in the memory of parameters, until `undo`.

    Each of its copies may be made twice, so that one which was interrupted is made again, and
    nothing on the way back asks for memory.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._moves: Moves = []  # the way back, and behind it what is left of the way there
        self._spare: dict[Any, Tensor] = {}
        self._largest: dict[Any, int] = {}
        for p in map(local, params):
            kind = p.device, p.dtype
            self._largest[kind] = max(p.numel(), self._largest.get(kind, 0))

    @torch.no_grad()
    def put(self, row: Shown) -> Tensor | None:
        """Put weights into the memory of their parameter; returns the copy of what was there.

        None where they have changed places with state.
        """
        kept = None if row.held else row.param.detach().clone()
        there = self._swap(row) if row.held else [(local(row.param), row.weights)]
        self._moves += [*self._back(row, kept), *there]
        self._run(len(there))
        return kept

    def expect(self, row: Shown, kept: Tensor | None) -> None:
        """Know the way back for weights that were put there before."""
        self._moves += self._back(row, kept)

    @torch.no_grad()
    def undo(self) -> None:
        """Put the training weights back, whatever was done of the way there."""
        interrupted: KeyboardInterrupt | None = None
        while self._moves:
            try:
                self._run(len(self._moves))
            except KeyboardInterrupt as error:  # once all are back
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _run(self, count: int) -> None:
        """Make the last moves."""
        for _ in range(count):
            target, source = self._moves[-1]
            target.copy_(source)
            self._moves.pop()

    def _back(self, row: Shown, kept: Tensor | None) -> Moves:
        if row.held:
            return self._swap(row)
        return [] if kept is None else [(local(row.param), local(kept))]

    def _swap(self, row: Shown) -> Moves:
        p, weights = local(row.param), row.weights
        kind = p.device, p.dtype
        if kind not in self._spare:
            self._spare[kind] = torch.empty(self._largest[kind], dtype=p.dtype, device=p.device)
        spare = self._spare[kind][: p.numel()].view(p.shape)
        return [(weights, spare), (p, weights), (spare, p)]


@contextmanager
def averaged(optimizer: Any, name: str | None, model: Module | None) -> Iterator[None]:
    """The weights for evaluation in the parameters, as long as the context lasts."""
    refuse(optimizer, "averaged()", shown=True)
    _links(optimizer.keys.links, name)
    warn_of_gathered("averaged()", optimizer, model)
    substitution = Substitution(params_of(optimizer))
    hook = optimizer.register_state_dict_pre_hook(lambda opt: refuse(opt, "state_dict()"))
    try:
        optimizer._inside = True
        for row in rows(optimizer, name):
            substitution.put(row)
        reshard(model)
        yield
    finally:
        try:
            substitution.undo()
        finally:
            optimizer._inside = False
            hook.remove()
            reshard(model)


def warn_of_gathered(what: str, optimizer: Any, model: Module | None) -> None:
    """Warn that FSDP2 may hold gathered weights that nobody lets go of, unless a model is given."""
    layouts = [layout for p in params_of(optimizer) if (layout := layout_of(p)) is not None]
    if model is None and any([layout.split for layout in layouts]) and _uses_fsdp2():
        warn(
            f"{what}: FSDP2 keeps the weights that it gathers of its root module in an evaluation, "
            "so the next training step would run with the averaged weights: give the model, as in "
            f"{what.removesuffix(')')}model=model), or call model.reshard() before and after"
        )


def _uses_fsdp2() -> bool:
    """Return whether FSDP2 has sharded a module of this process: it makes classes for them."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and bool(module.FSDPModule.__subclasses__())


def reshard(model: Module | None) -> None:
    """Have the modules of FSDP2 let go of weights that they have gathered, and hold no longer."""
    for module in [] if model is None else model.modules():
        if callable(let_go := getattr(module, "reshard", None)):
            let_go()


def evaluate(optimizer: Any, model: Module | None) -> None:
    """Put the weights for evaluation into the parameters, until `train`."""
    refuse(optimizer, "eval()")
    if is_shown(optimizer) or not any([averages(x.transform) for x in optimizer.keys.links]):
        return
    warn_of_gathered("eval()", optimizer, model)
    substitution = Substitution(params_of(optimizer))
    try:
        for row in rows(optimizer):
            kept = substitution.put(row)
            if kept is not None:
                optimizer.state[row.param][TRAINING] = kept
        for group in optimizer.param_groups:
            group["chain"][SHOWN] = 1
        reshard(model)
    except BaseException:
        substitution.undo()
        _forget(optimizer)
        raise


def train(optimizer: Any, model: Module | None) -> None:
    """Put the training weights back that `evaluate` has taken out."""
    refuse(optimizer, "train()")
    if not is_shown(optimizer):
        return
    substitution = Substitution(params_of(optimizer))
    for row in rows(optimizer):
        substitution.expect(row, optimizer.state[row.param].get(TRAINING))
    warn_of_gathered("train()", optimizer, model)
    try:
        substitution.undo()
    finally:
        _forget(optimizer)
        reshard(model)


def is_shown(optimizer: Any) -> bool:
    """Whether the parameters are the weights for evaluation since `evaluate`."""
    return any([SHOWN in group.get("chain", ()) for group in optimizer.param_groups])


def refuse(optimizer: Any, what: str, shown: bool = False) -> None:
    """Raise a sentence where the parameters are the weights for evaluation: inside `averaged`, and
    where it is asked for since `evaluate`.
    """
    if optimizer._inside:
        raise RuntimeError(
            f"{what} inside averaged(): the parameters are the weights for evaluation there, and "
            "the training weights come back at its end: leave it first"
        )
    if shown and any([SHOWN in group.get("chain", ()) for group in optimizer.param_groups]):
        raise RuntimeError(
            f"{what} after eval(): the parameters are the weights for evaluation: call train() "
            "first, which puts the training weights back"
        )


def averaged_state_dict(optimizer: Any, model: Module, name: str | None) -> dict[str, Any]:
    """The state dict of a model, with the weights for evaluation in place of its parameters."""
    refuse(optimizer, "averaged_state_dict()", shown=True)
    found = {p: weights_of(optimizer, p) for p in params_of(optimizer)}
    for row in rows(optimizer, name):
        found[row.param] = row.weights.to(found[row.param].dtype, copy=True)
    return in_model("averaged_state_dict", model, found)


def params_of(optimizer: Any) -> list[Tensor]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _forget(optimizer: Any) -> None:
    for p in params_of(optimizer):
        optimizer.state.get(p, {}).pop(TRAINING, None)
    for group in optimizer.param_groups:
        group["chain"].pop(SHOWN, None)
