"""Snapshot: all that a run goes on from, in host memory that is used again.

Each tensor is copied once, and comes back into its own memory, so that nothing is there twice and
compiled steps are repeated as before. From a GPU copies go to pinned memory in the order of its
stream, and the host does not wait. (No card has run that yet.)
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from torchzero_clip.core.private import tree_leaves
from torchzero_clip.core.sharding.layout import local
from torchzero_clip.core.tensors import is_sharded
from torchzero_clip.optimizer import Modular
from torchzero_clip.optimizer.averages import reshard


class Snapshot:
    """A place for the state of a run.

    Args:
        optimizers: Those that step: what they keep, and all in their groups.
        model: Its parameters and buffers, and what its modules save besides.
        parts: What else has a state dict.

    Attributes:
        progress: Where the run is, as whoever takes it says.
        hosts: The copies of tensors.
    """

    progress: Any

    def __init__(
        self, optimizers: Sequence[Optimizer], model: Module, parts: Sequence[Any]
    ) -> None:
        self._optimizers, self._model = optimizers, model
        own = [m for m in model.modules() if type(m).get_extra_state is not Module.get_extra_state]
        self._parts = [(part.state_dict, part.load_state_dict) for part in parts]
        self._parts += [(module.get_extra_state, module.set_extra_state) for module in own]
        self.hosts = list[Tensor]()

    @torch.no_grad()
    def take(self, progress: Any) -> None:
        """Keep the run as it is."""
        reshard(self._model)
        groups = [group for opt in self._optimizers for group in opt.param_groups]
        params = [p for group in groups for p in group["params"]]
        self._dicts = [(each, held(each)) for each in self._live()]
        self._whose = [(opt, opt.state, list(opt.param_groups)) for opt in self._optimizers]
        said = [state() for state, _ in self._parts]
        modules = list(self._model.modules())
        self._named = [(m, name, t) for m in modules for name, t in m.named_buffers(recurse=False)]
        values = [x for _, kept in self._dicts for x in kept.values()]
        values += [t for _, _, t in self._named]
        mine = [*self._model.parameters(), *params, *[x for x in values if isinstance(x, Tensor)]]
        others = [t for t in tree_leaves(said) if isinstance(t, Tensor) and not is_sharded(t)]
        found = {id(t): t for t in [*mine, *others]}
        pairs = itertools.zip_longest(found.values(), self.hosts[: len(found)])
        self.hosts = list(itertools.starmap(on_host, pairs))
        self._tensors = list({id(t): t for t in mine}.values())  # the first ones of those found
        self._said = copy.deepcopy(said, dict(zip(found, self.hosts, strict=True)))
        chains = [opt for opt in self._optimizers if isinstance(opt, Modular)]
        self.progress, self._phases = progress, [opt.engine.phase() for opt in chains]
        self._random = list(random_states())

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the run what it was, but for random numbers."""
        reshard(self._model)
        for (_, load), said in zip(self._parts, self._said, strict=True):
            load(copy.deepcopy(said))
        for opt, state, groups in self._whose:  # one that loads a checkpoint gets others
            opt.state, opt.param_groups[:] = state, groups
        for module, name, t in self._named:
            setattr(module, name, t)
        for each, kept in self._dicts:
            each.clear()
            each.update(held(kept))
        for t, host in zip(self._tensors, self.hosts, strict=False):
            local(t).detach().copy_(host, non_blocking=True)
        for again in self._phases:
            again()

    def set_random(self) -> None:
        """Have random numbers come as they did: last, since a loader that begins may draw some."""
        for setter, state in self._random:
            setter(state)

    def _live(self) -> Iterator[dict[Any, Any]]:
        """The dicts that hold what the run goes on from, beside its parameters."""
        for opt in self._optimizers:
            yield opt.state
            yield from opt.state.values()
            for group in opt.param_groups:
                yield from [group, *[x for x in group.values() if isinstance(x, dict)]]


def held(row: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of a dict and of the lists in it."""
    return {key: list(x) if type(x) is list else x for key, x in row.items()}


def on_host(t: Tensor, host: Tensor | None) -> Tensor:
    """A copy of the part that is here, in the memory of an older one where that fits."""
    here = local(t).detach()
    if host is None or (host.shape, host.dtype) != (here.shape, here.dtype):
        host = torch.empty_like(here, device="cpu", pin_memory=here.is_cuda)
    return host.copy_(here, non_blocking=True)


def random_states() -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """What sets the random states of Python, torch and, where it is in use, numpy; and these."""
    yield random.setstate, random.getstate()
    yield torch.set_rng_state, torch.get_rng_state()
    if torch.cuda.is_initialized():
        yield torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.random.set_state, numpy.random.get_state()
