"""Snapshot: everything that a run needs to continue from a step, in host memory that is reused.

Each tensor is copied once and is put back into its own memory, so that nothing exists twice and
compiled steps are replayed as before. From a GPU the copies go to pinned memory in the order of its
stream, and the host does not wait. (That has not been run on a card.)
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from torchzero_clip.core.sharding.layout import Layout, layout_of, local
from torchzero_clip.core.tensor_kinds import is_sharded
from torchzero_clip.core.torch_private import tree_leaves
from torchzero_clip.optimizer.averages import reshard
from torchzero_clip.optimizer.chain_runner import ChainRunner

PARAMS = "params"  # the key of a group that has its parameters


REASON = "recover.load_state_dict()"
"""What `explain()` names as the reason why the next steps are not replayed."""


class DictCopy(NamedTuple):
    """A dict that the run writes, and what was in it.

    Attributes:
        path: Its name in a state dict of the snapshot.
        entries: The dict itself.
        kept: A copy, with the same tensors.
    """

    path: str
    entries: dict[Any, Any]
    kept: dict[Any, Any]


class Gradient(NamedTuple):
    """A gradient that was still being summed.

    Attributes:
        param: Its parameter.
        own: Whether it is not in `.grad`, but in the place that the optimizer was given.
        layout: How it is sharded.
        host: The copy of the part that is here.
    """

    param: Tensor
    own: bool
    layout: Layout | None
    host: Tensor


class Snapshot:
    """A place for the state of a run.

    Args:
        optimizers: Those that step: their state, and all in their groups.
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
        self._chains = [opt for opt in optimizers if isinstance(opt, ChainRunner)]
        self._place = self._chains[0].place
        own = [m for m in model.modules() if type(m).get_extra_state is not Module.get_extra_state]
        self._parts = [(part.state_dict, part.load_state_dict) for part in parts]
        self._parts += [(module.get_extra_state, module.set_extra_state) for module in own]
        self.hosts = list[Tensor]()

    @torch.no_grad()
    def take(self, progress: Any, summing: bool = False) -> None:
        """Keep the run as it is.

        Args:
            progress: Where the run is.
            summing: Whether the gradients are still being summed over batches. They are copied
                then; otherwise the optimizer has used them.
        """
        reshard(self._model)
        self._params = self._all_params()
        self._dicts = [DictCopy(path, each, held(each)) for path, each in self._live()]
        self._whose = [(opt, opt.state, list(opt.param_groups)) for opt in self._optimizers]
        said = [state() for state, _ in self._parts]
        values = [x for live in self._dicts for x in live.kept.values()]
        mine = [*self._params, *[x for x in values if isinstance(x, Tensor)]]
        others = [t for t in tree_leaves(said) if isinstance(t, Tensor) and not is_sharded(t)]
        grads = list(self._gradients()) if summing else []
        found = {id(t): t for t in [*mine, *others, *[grad for _, _, grad in grads]]}
        pairs = itertools.zip_longest(found.values(), self.hosts[: len(found)])
        self.hosts = list(itertools.starmap(on_host, pairs))
        copies = dict(zip(found, self.hosts, strict=True))
        self._copied = [(t, copies[id(t)]) for t in {id(t): t for t in mine}.values()]
        self._said = copy.deepcopy(said, copies)
        self._summed = [
            Gradient(p, own, layout_of(grad), copies[id(grad)]) for p, own, grad in grads
        ]
        self._without = {p for p in self._params if p.grad is None}
        self.progress, self._phases = progress, [opt.engine.phase() for opt in self._chains]
        self._random = random_states()

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the run what it was, except for random numbers."""
        reshard(self._model)
        for (_, load), said in zip(self._parts, self._said, strict=True):
            load(copy.deepcopy(said))
        for opt, state, groups in self._whose:  # one that loads a checkpoint gets others
            opt.state, opt.param_groups[:] = state, groups
        for live in self._dicts:
            live.entries.clear()
            live.entries.update(held(live.kept))
        for t, host in self._copied:
            local(t).detach().copy_(host, non_blocking=True)
        self._put_gradients_back()
        for again in self._phases:
            again()

    def set_random(self) -> None:
        """Have random numbers come as they did: last, since a loader that begins may draw some."""
        set_random_states(self._random)

    def _put_gradients_back(self) -> None:
        """Drop the gradients of batches that were undone, and restore those that were summed."""
        for p in self._params:
            if p in self._without:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
        self._place.zero(self._params)
        for p, own, layout, host in self._summed:
            here = self._place.own(p) if own else p.grad
            if here is None or local(here).shape != host.shape:
                part = host.to(local(p).device, copy=True)
                p.grad = part if layout is None else layout.wrap(part)
            else:
                local(here).detach().copy_(host, non_blocking=True)

    # ------------------------------------------------------------------ what there is

    def _all_params(self) -> list[Tensor]:
        """Return the parameters of the model, and those that only a group has."""
        groups = [group for opt in self._optimizers for group in opt.param_groups]
        rows = [*self._model.parameters(), *[p for group in groups for p in group[PARAMS]]]
        return list({id(p): p for p in rows}.values())

    def _live(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield the dicts that the run continues from, each with its path in a state dict."""
        places = {p: i for i, p in enumerate(self._all_params())}
        for i, opt in enumerate(self._optimizers):
            yield f"{i}/state", opt.state
            for p, row in opt.state.items():
                if isinstance(row, dict):
                    yield f"{i}/state/{places.get(p, p)}", row
            for g, group in enumerate(opt.param_groups):
                yield f"{i}/groups/{g}", group
                for key, x in group.items():
                    if isinstance(x, dict):
                        yield f"{i}/groups/{g}/{key}", x
        for name, module in self._model.named_modules():
            yield f"buffers/{name}", module._buffers

    def _gradients(self) -> Iterator[tuple[Tensor, bool, Tensor]]:
        """Yield each parameter that has a gradient, whether it is not in `.grad`, and it."""
        for p in self._params:
            if (grad := self._place.own(p)) is not None:
                yield p, True, grad
            if p.grad is not None:
                yield p, False, p.grad

    # ------------------------------------------------------------------ on disk

    def state_dict(self) -> dict[str, Any]:
        """Return all that is kept except `progress`, as plain data and tensors on the host.

        From here on, steps after a rollback to this snapshot are recorded again. So they are in a
        run that loads it, and their numbers would differ by rounding from those of replayed steps.
        """
        if any([host.is_pinned() for host in self.hosts]):
            torch.cuda.synchronize()  # the copies may be on their way
        copies = {id(t): host for t, host in self._copied}
        index = {id(p): i for i, p in enumerate(self._params)}
        for grad in self._summed:
            if grad.layout != (None if grad.own else layout_of(grad.param)):
                raise RuntimeError(
                    "Recover: the gradients of a snapshot are sharded unlike their parameters: "
                    "call recover.step() after a step of the optimizer, and save then"
                )
        self._phases = [partial(opt.engine.forget, REASON) for opt in self._chains]
        rows = [(g.param, g.own, g.host) for g in self._summed]
        return {
            "params": [copies[id(p)] for p in self._params],
            "dicts": {live.path: self._shown(live.kept, copies, index) for live in self._dicts},
            "grads": [[index[id(p)], own, host] for p, own, host in rows],
            "without": sorted([index[id(p)] for p in self._without]),
            "said": self._said,
            "random": self._random,
        }

    def _shown(
        self, kept: Mapping[Any, Any], copies: Mapping[int, Tensor], index: Mapping[int, int]
    ) -> dict[str, Any]:
        """Return what is kept of a dict, with copies of tensors, and numbers for parameters."""
        out: dict[str, Any] = {}
        for key, x in kept.items():
            if key == PARAMS:
                out[key] = [index[id(p)] for p in x]
            elif not isinstance(x, dict):  # a dict inside has a path of its own
                out[key] = copies[id(x)] if isinstance(x, Tensor) else x
        return out

    def load_state_dict(self, saved: Mapping[str, Any], progress: Any) -> None:
        """Become the snapshot that `state_dict` gave, of the run as it is loaded now.

        Nothing of the run changes. It must be the run that was saved: its model, its optimizers and
        its parts are loaded already.
        """
        params, live = self._all_params(), dict(self._live())
        missing = sorted(saved["dicts"].keys() - live.keys())
        other = len(params) != len(saved["params"]) or len(self._parts) != len(saved["said"])
        if missing or other:
            raise ValueError(
                "Recover: the snapshots of the checkpoint are of another run: load its model, "
                "optimizer and parts first, and then recover.load_state_dict"
                + (f"; here are no {missing}" if missing else "")
            )
        self._params, self._copied, self._dicts = params, [], []
        for p, host in zip(params, saved["params"], strict=True):
            self._pair(p, host)
        for path, shown in saved["dicts"].items():
            kept: dict[Any, Any] = {}
            for key, x in shown.items():
                if key == PARAMS:
                    kept[key] = [params[i] for i in x]
                elif isinstance(x, Tensor):
                    kept[key] = self._pair(live[path].get(key), x)
                else:
                    kept[key] = x
            self._dicts.append(DictCopy(path, live[path], kept))
        paths = {id(each): path for path, each in live.items()}
        for _, entries, kept in self._dicts:
            inner = {key: x for key, x in entries.items() if isinstance(x, dict)}
            kept.update({k: x for k, x in inner.items() if paths.get(id(x)) in saved["dicts"]})
        self._whose = []
        for i, opt in enumerate(self._optimizers):
            groups = enumerate(opt.param_groups)
            known = [group for g, group in groups if f"{i}/groups/{g}" in saved["dicts"]]
            self._whose.append((opt, opt.state, known))
        self._summed = [
            Gradient(params[i], own, None if own else layout_of(params[i]), host)
            for i, own, host in saved["grads"]
        ]
        self._without = {params[i] for i in saved["without"]}
        self._said, self._random = saved["said"], saved["random"]
        self.hosts = [host for _, host in self._copied]
        self.hosts += [t for t in tree_leaves(self._said) if isinstance(t, Tensor)]
        self.hosts += [grad.host for grad in self._summed]
        self._phases = [partial(opt.engine.forget, REASON) for opt in self._chains]
        self.progress = progress

    def _pair(self, here: Any, host: Tensor) -> Tensor:
        """Note that a copy belongs to a tensor of the run, which is made if there is none."""
        if not isinstance(here, Tensor) or local(here).shape != host.shape:
            here = host.to(local(self._params[0]).device, copy=True)
        self._copied.append((here, host))
        return here


def held(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy of a dict and of the lists in it."""
    return {key: list(x) if type(x) is list else x for key, x in row.items()}


def on_host(t: Tensor, host: Tensor | None) -> Tensor:
    """A copy of the part that is here, in the memory of an older one where that fits."""
    here = local(t).detach()
    if host is None or (host.shape, host.dtype) != (here.shape, here.dtype):
        host = torch.empty_like(here, device="cpu", pin_memory=here.is_cuda)
    return host.copy_(here, non_blocking=True)


SETTERS: dict[str, Callable[[Any], Any]] = {
    "python": lambda state: random.setstate((state[0], tuple(state[1]), state[2])),
    "torch": torch.set_rng_state,
    "cuda": torch.cuda.set_rng_state_all,
    "numpy": lambda state: sys.modules["numpy"].random.set_state(tuple(state)),
}


def random_states() -> dict[str, Any]:
    """Return the random states of Python, torch and, if it is in use, numpy, as plain data."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the random states of `random_states`."""
    for name, state in states.items():
        if name != "numpy" or "numpy" in sys.modules:
            SETTERS[name](state)
