"""Averaged weights, which temporarily replace the training weights."""

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
from torchzero_clip.core.torch_private import modules_with_sharding
from torchzero_clip.core.transform import averages
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer.rounding import in_model, weights_of

SHOWN = "averaged/shown"
"""A key in the chain dict of a group. Its value is 1 between eval() and train(), otherwise 0."""
TRAINING = "averaged/training"
"""A key in the state of a parameter. It has the training weights between eval() and train()."""
NONE = (
    "this chain has no averaged weights: add a transform that averages weights after LR, such as "
    "WeightEMA(0.999) or ScheduleFree()"
)
NO_TRAINING_WEIGHTS = (
    "train(): the optimizer has no training weights that fit the model. If you changed the dtype "
    "of the model after eval(), convert the model back, call train(), and then convert it again. "
    "If you loaded a checkpoint that was saved between eval() and train(), call init_state() and "
    "eval() of the new optimizer before you load the checkpoint, because "
    "torch.distributed.checkpoint loads only state that exists before loading"
)


def shown_at_start(links: Sequence[Link]) -> dict[str, int]:
    """Return the entry of the key `SHOWN` for a new group, if a link has averaged weights.

    Distributed checkpointing loads only values whose keys exist before loading.
    """
    return {SHOWN: 0} if any([averages(link.transform) for link in links]) else {}


def check_order(links: Sequence[Link], seen: Link | None = None) -> Link | None:
    """Raise an error if a link after a link with averaged weights still changes the update.

    Args:
        links: The links to check.
        seen: The last link with averaged weights before these links.

    Returns:
        The last link with averaged weights, if there is one.
    """
    for link in [link for link in links if link.transforms]:
        tfm = link.transform
        if tfm.inner == "branches":
            ends = [check_order([child], seen) for child in link.children]
            seen = next((end for end in ends if end is not None), seen)
        elif tfm.inner == "chain":
            seen = check_order(link.children, seen)
        else:
            if seen is not None and (tfm.drops or tfm.leaves != "gradient"):
                raise ValueError(
                    f"{seen.path} must come after all transforms that change the update: put "
                    f"{seen.path} after {link.path}"
                )
            seen = link if averages(tfm) else seen
    return seen


class AveragedParam(NamedTuple):
    """A parameter that has averaged weights.

    Attributes:
        param: The parameter as the optimizer holds it.
        weights: The averaged weights. If the parameter is sharded, they are the local part.
        in_state: Whether the weights are a state tensor.
    """

    param: Tensor
    weights: Tensor
    in_state: bool

    @property
    def swaps(self) -> bool:
        """Whether `put` swaps the parameter and the averaged weights."""
        return self.in_state and self.weights.dtype == self.param.dtype


def averaged_params(optimizer: Any, name: str | None = None) -> Iterator[AveragedParam]:
    """Yield every parameter that has averaged weights.

    Args:
        optimizer: The optimizer.
        name: The path of the link whose weights are used. None means the last link that has
            averaged weights of the parameter.
    """
    links = _links_with_averages(optimizer.keys.links, name)
    for group in optimizer.param_groups:
        values = {
            link.path: {**link.values(group), **_state_of_link(link, group["chain"])}
            for link in links
        }
        for p in group["params"]:
            for link in links:
                if state := _state_of_link(link, optimizer.state.get(p, {})):
                    now = weights_of(optimizer, p)
                    weights = link.transform.averaged(now, state, values[link.path])
                    is_state = any([weights is t for t in state.values()])
                    yield AveragedParam(p, weights, is_state)
                    break


def _links_with_averages(links: Sequence[Link], name: str | None) -> list[Link]:
    """Return the link with a name, or all links with averaged weights, last link first."""
    averaging = [link for link in links if averages(link.transform)]
    if not averaging:
        raise ValueError(NONE)
    if name is None:
        return averaging[::-1]
    paths = [link.path for link in averaging]
    if name not in paths:
        raise ValueError(f"averaged: name= must be None or one of {paths}, got {name!r}")
    return [link for link in averaging if link.path == name]


def _state_of_link(link: Link, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a link, by name, from the state of a parameter or a group."""
    tensors = [(str(key).rpartition("/"), t) for key, t in state.items() if isinstance(t, Tensor)]
    return {name: local(t) for (path, _, name), t in tensors if path == link.path}


# ---------------------------------------------------------------------- exchanging the weights

Moves: TypeAlias = "list[tuple[Tensor, Tensor]]"
"""Pairs of a target and a source. The order is reversed, so the last pair is copied first."""


class Substitution:
    """Replaces the training weights by averaged weights, until `undo`.

    Copying a pair twice has the same effect as copying it once. So an interrupted copy is simply
    repeated. `undo` allocates no memory.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        # the moves that undo the exchange, and after them the rest of the exchange itself
        self._moves: Moves = []
        self._spare: dict[Any, Tensor] = {}
        self._largest: dict[Any, int] = {}
        for p in map(local, params):
            kind = p.device, p.dtype
            self._largest[kind] = max(p.numel(), self._largest.get(kind, 0))

    @torch.no_grad()
    def put(self, averaged: AveragedParam) -> Tensor | None:
        """Put averaged weights into a parameter, and return a copy of the training weights.

        Return None if the method has swapped the parameter with a state tensor instead.
        """
        if averaged.swaps:
            training = None
            moves = self._swap(averaged)
        else:
            training = averaged.param.detach().clone()
            moves = [(local(averaged.param), averaged.weights)]
        self._moves += [*self._back(averaged, training), *moves]
        self._run(len(moves))
        return training

    def expect(self, averaged: AveragedParam, training: Tensor | None) -> None:
        """Prepare `undo` for averaged weights that an earlier Substitution put into a parameter."""
        self._moves += self._back(averaged, training)

    @torch.no_grad()
    def undo(self) -> None:
        """Put the training weights back, even if `put` was interrupted."""
        interrupted: KeyboardInterrupt | None = None
        while self._moves:
            try:
                self._run(len(self._moves))
            except KeyboardInterrupt as error:  # raised again when all weights are back
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _run(self, count: int) -> None:
        """Copy the last pairs, and remove each pair after its copy."""
        for _ in range(count):
            target, source = self._moves[-1]
            target.copy_(source)
            self._moves.pop()

    def _back(self, averaged: AveragedParam, training: Tensor | None) -> Moves:
        """Return the moves that restore the training weights."""
        if training is None:
            return self._swap(averaged)
        return [(local(averaged.param), local(training))]

    def _swap(self, averaged: AveragedParam) -> Moves:
        """Return the moves that swap a parameter and a state tensor."""
        p = local(averaged.param)
        kind = p.device, p.dtype
        if kind not in self._spare:
            self._spare[kind] = torch.empty(self._largest[kind], dtype=p.dtype, device=p.device)
        spare = self._spare[kind][: p.numel()].view(p.shape)
        return [(averaged.weights, spare), (p, averaged.weights), (spare, p)]


@contextmanager
def averaged(optimizer: Any, name: str | None, model: Module | None) -> Iterator[None]:
    """Put the averaged weights into the parameters until the end of the context."""
    refuse(optimizer, "averaged()", shown=True)
    _links_with_averages(optimizer.keys.links, name)  # raises an error before anything changes
    warn_of_gathered("averaged()", optimizer, model)
    substitution = Substitution(params_of(optimizer))
    hook = optimizer.register_state_dict_pre_hook(lambda opt: refuse(opt, "state_dict()"))
    try:
        optimizer._inside = True
        for param in averaged_params(optimizer, name):
            substitution.put(param)
        reshard(model)
        yield
    finally:
        try:
            substitution.undo()
        finally:
            optimizer._inside = False
            hook.remove()
            reshard(model)


def warn_of_gathered(method: str, optimizer: Any, model: Module | None) -> None:
    """Warn that FSDP2 may keep gathered weights, unless a model is given."""
    layouts = [layout for p in params_of(optimizer) if (layout := layout_of(p)) is not None]
    if model is None and any([layout.split for layout in layouts]) and _uses_fsdp2():
        warn(
            f"{method}: FSDP2 keeps the gathered weights of its root module after an "
            "evaluation, so the next training step would use the averaged weights. Pass the "
            f"model, as in {method.removesuffix(')')}model=model), or call model.reshard() "
            "before and after this call"
        )


def _uses_fsdp2() -> bool:
    """Return whether FSDP2 has sharded a module that exists in this process."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return False
    return any([isinstance(x, module.FSDPModule) for x in modules_with_sharding()])


def reshard(model: Module | None) -> None:
    """Make the FSDP2 modules of a model release the weights that they have gathered."""
    for module in [] if model is None else model.modules():
        if callable(release := getattr(module, "reshard", None)):
            release()


def evaluate(optimizer: Any, model: Module | None) -> None:
    """Put the averaged weights into the parameters, until `train`."""
    refuse(optimizer, "eval()")
    if is_shown(optimizer) or not shown_at_start(optimizer.keys.links):
        return
    warn_of_gathered("eval()", optimizer, model)
    substitution = Substitution(params_of(optimizer))
    try:
        for averaged_param in averaged_params(optimizer):
            training = substitution.put(averaged_param)
            if training is not None:
                optimizer.state[averaged_param.param][TRAINING] = training
        for group in optimizer.param_groups:
            group["chain"][SHOWN] = 1
        reshard(model)
    except BaseException:
        substitution.undo()
        _forget(optimizer)
        raise


def train(optimizer: Any, model: Module | None) -> None:
    """Restore the training weights that `evaluate` has replaced."""
    refuse(optimizer, "train()")
    if not is_shown(optimizer):
        return
    substitution = Substitution(params_of(optimizer))
    for averaged_param in averaged_params(optimizer):
        training = optimizer.state[averaged_param.param].get(TRAINING)
        if training is None and not averaged_param.swaps:
            raise RuntimeError(NO_TRAINING_WEIGHTS)
        substitution.expect(averaged_param, training)
    warn_of_gathered("train()", optimizer, model)
    try:
        substitution.undo()
    finally:
        _forget(optimizer)
        reshard(model)


def is_shown(optimizer: Any) -> bool:
    """Return whether `evaluate` has put the averaged weights into the parameters."""
    return any([group.get("chain", {}).get(SHOWN) for group in optimizer.param_groups])


def refuse(optimizer: Any, method: str, shown: bool = False) -> None:
    """Raise an error for a call of a method while the parameters are the averaged weights.

    Args:
        optimizer: The optimizer.
        method: The name of the method, for the error.
        shown: Whether a call between `evaluate` and `train` is an error too. A call inside
            `averaged` always is.
    """
    if optimizer._inside:
        raise RuntimeError(
            f"{method} is not allowed in the with block of averaged(), because the parameters "
            f"are the averaged weights during this block: leave the block before {method}"
        )
    if shown and is_shown(optimizer):
        raise RuntimeError(
            f"{method} is not allowed between eval() and train(), because eval() replaces the "
            f"parameters with the averaged weights: call train() before {method}"
        )


@torch.no_grad()
def averaged_state_dict(optimizer: Any, model: Module, name: str | None) -> dict[str, Any]:
    """Return the state dict of a model, with the averaged weights in place of its parameters."""
    refuse(optimizer, "averaged_state_dict()", shown=True)
    weights = {p: weights_of(optimizer, p) for p in params_of(optimizer)}
    for param, averaged_weights, _ in averaged_params(optimizer, name):
        weights[param] = averaged_weights.to(weights[param].dtype, copy=True)
    return in_model("averaged_state_dict", model, weights)


def params_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _forget(optimizer: Any) -> None:
    """Remove everything that `evaluate` has stored in the state."""
    for p in params_of(optimizer):
        optimizer.state.get(p, {}).pop(TRAINING, None)
    for group in optimizer.param_groups:
        group["chain"][SHOWN] = 0
