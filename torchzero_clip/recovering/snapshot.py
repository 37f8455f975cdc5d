"""Snapshot: a copy in host memory of everything that a run needs to continue from a step.

A snapshot copies each tensor once. A rollback copies the values back into the same tensors. So no
tensor is allocated twice, and compiled steps are replayed as before. Later snapshots reuse the host
memory. Copies from a GPU go to pinned memory in the order of the stream, so the host does not wait
for them. (No test has run this on a GPU.)
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
from torchzero_clip.recovering.progress import Progress

PARAMS = "params"
"""The key of a parameter group under which its parameters are stored."""
REASON = "recover.load_state_dict()"
"""The reason that `explain()` gives if the next steps are not replayed."""


class DictCopy(NamedTuple):
    """A dict that changes during training, and a copy of its contents.

    Attributes:
        path: The name of the dict in the state dict of a snapshot.
        entries: The dict itself.
        contents: A shallow copy. It has the same tensors as the dict.
    """

    path: str
    entries: dict[Any, Any]
    contents: dict[Any, Any]


class Gradient(NamedTuple):
    """A gradient that was being accumulated when the snapshot was taken.

    Attributes:
        param: The parameter.
        own: Whether the gradient is stored in the place that replaces `.grad` for the optimizer.
        layout: How the gradient is sharded, or None.
        host: The copy of the gradient (or of its local shard) on the host.
    """

    param: Tensor
    own: bool
    layout: Layout | None
    host: Tensor


class Snapshot:
    """A copy of a run in host memory, to which a rollback returns.

    Args:
        optimizers: The optimizers. A snapshot copies their state and their parameter groups.
        model: The model. A snapshot copies the parameters, the buffers, and the results of
            `get_extra_state` of all modules.
        parts: Other objects with a state dict.

    Attributes:
        progress: The progress of the run when the snapshot was taken.
        hosts: The copies of tensors on the host.
    """

    progress: Progress

    def __init__(
        self, optimizers: Sequence[Optimizer], model: Module, parts: Sequence[Any]
    ) -> None:
        self._optimizers = optimizers
        self._model = model
        self._chains = [opt for opt in optimizers if isinstance(opt, ChainRunner)]
        self._place = self._chains[0].place
        self._parts = [(part.state_dict, part.load_state_dict) for part in parts]
        for module in model.modules():
            if type(module).get_extra_state is not Module.get_extra_state:
                self._parts.append((module.get_extra_state, module.set_extra_state))
        self.hosts: list[Tensor] = []

    @torch.no_grad()
    def take(self, progress: Progress, accumulating: bool = False) -> None:
        """Copy the run as it is.

        Args:
            progress: The progress of the run.
            accumulating: Whether gradients are being accumulated over several batches. In this
                case, the gradients are copied, too. Otherwise the optimizer has used them already.
        """
        reshard(self._model)
        self._params = self._all_params()
        self._dicts = [DictCopy(path, live, copied(live)) for path, live in self._live_dicts()]
        self._containers = [(opt, opt.state, list(opt.param_groups)) for opt in self._optimizers]
        states = [state_dict() for state_dict, _ in self._parts]
        values = [x for live in self._dicts for x in live.contents.values()]
        own_tensors = [*self._params, *[x for x in values if isinstance(x, Tensor)]]
        tensors_of_parts = [
            t for t in tree_leaves(states) if isinstance(t, Tensor) and not is_sharded(t)
        ]
        gradients = list(self._current_gradients()) if accumulating else []
        tensors = [*own_tensors, *tensors_of_parts, *[grad for _, _, grad in gradients]]
        by_id = {id(t): t for t in tensors}
        pairs = itertools.zip_longest(by_id.values(), self.hosts[: len(by_id)])
        self.hosts = list(itertools.starmap(on_host, pairs))
        copies = dict(zip(by_id, self.hosts, strict=True))
        self._pairs = [(t, copies[id(t)]) for t in {id(t): t for t in own_tensors}.values()]
        self._states_of_parts = copy.deepcopy(states, copies)  # with the copies as its tensors
        self._gradients = [
            Gradient(p, own, layout_of(grad), copies[id(grad)]) for p, own, grad in gradients
        ]
        self._without_grad = {p for p in self._params if p.grad is None}
        self.progress = progress
        self._restore_engines = [opt.engine.phase() for opt in self._chains]
        self._random_states = random_states()

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the run to the snapshot, except for the random states."""
        reshard(self._model)
        for (_, load_state_dict), state in zip(self._parts, self._states_of_parts, strict=True):
            load_state_dict(copy.deepcopy(state))
        for opt, state, groups in self._containers:  # loading a checkpoint may have replaced them
            opt.state = state
            opt.param_groups[:] = groups
        for live in self._dicts:
            live.entries.clear()
            live.entries.update(copied(live.contents))
        for t, host in self._pairs:
            local(t).detach().copy_(host, non_blocking=True)
        self._put_gradients_back()
        for restore in self._restore_engines:
            restore()

    def set_random(self) -> None:
        """Restore the random states. Call this last, because a loader may draw random numbers."""
        set_random_states(self._random_states)

    def _put_gradients_back(self) -> None:
        """Restore accumulated gradients, and discard gradients of batches after the snapshot."""
        for p in self._params:
            if p in self._without_grad:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
        self._place.zero(self._params)
        for p, own, layout, host in self._gradients:
            here = self._place.own(p) if own else p.grad
            if here is None or local(here).shape != host.shape:
                shard = host.to(local(p).device, copy=True)
                p.grad = shard if layout is None else layout.wrap(shard)
            else:
                local(here).detach().copy_(host, non_blocking=True)

    # ------------------------------------------------------------------ the parts of a run

    def _all_params(self) -> list[Tensor]:
        """Return the parameters of the model, and those that are only in a parameter group."""
        groups = [group for opt in self._optimizers for group in opt.param_groups]
        params = [*self._model.parameters(), *[p for group in groups for p in group[PARAMS]]]
        return list({id(p): p for p in params}.values())

    def _live_dicts(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield the dicts that change during training, each with its path in a state dict."""
        places = {p: i for i, p in enumerate(self._all_params())}
        for i, opt in enumerate(self._optimizers):
            yield f"{i}/state", opt.state
            for p, state in opt.state.items():
                if isinstance(state, dict):
                    yield f"{i}/state/{places.get(p, p)}", state
            for g, group in enumerate(opt.param_groups):
                yield f"{i}/groups/{g}", group
                for key, x in group.items():
                    if isinstance(x, dict):
                        yield f"{i}/groups/{g}/{key}", x
        for name, module in self._model.named_modules():
            yield f"buffers/{name}", module._buffers

    def _current_gradients(self) -> Iterator[tuple[Tensor, bool, Tensor]]:
        """Yield for each gradient: the parameter, `Gradient.own`, and the gradient."""
        for p in self._params:
            if (grad := self._place.own(p)) is not None:
                yield p, True, grad
            if p.grad is not None:
                yield p, False, p.grad

    # ------------------------------------------------------------------ on disk

    def state_dict(self) -> dict[str, Any]:
        """Return everything except `progress`, as plain data and tensors on the host.

        If the run is rolled back to this snapshot after this call, the engines record steps again
        instead of replaying them. A run that loads the state dict also has to record its steps.
        Without this rule, the two runs would differ by rounding.
        """
        if any([host.is_pinned() for host in self.hosts]):
            torch.cuda.synchronize()  # copies to pinned memory may not be complete
        copies = {id(t): host for t, host in self._pairs}
        index = {id(p): i for i, p in enumerate(self._params)}
        for grad in self._gradients:
            if grad.layout != (None if grad.own else layout_of(grad.param)):
                raise RuntimeError(
                    "Recover: for a sharded model, state_dict() cannot save a snapshot that "
                    "was taken between backward() and the step of the optimizer. Call "
                    "optimizer.step() first, then recover.step(), and then "
                    "recover.state_dict()"
                )
        self._restore_engines = self._forget_recorded_steps()
        return {
            "params": [copies[id(p)] for p in self._params],
            "dicts": {live.path: self._saved(live.contents, copies, index) for live in self._dicts},
            "grads": [[index[id(grad.param)], grad.own, grad.host] for grad in self._gradients],
            "without": sorted([index[id(p)] for p in self._without_grad]),
            "said": self._states_of_parts,
            "random": self._random_states,
        }

    def _forget_recorded_steps(self) -> list[Callable[[], None]]:
        """Return a function for each engine that makes it record its next steps again."""
        return [partial(opt.engine.forget, REASON) for opt in self._chains]

    def _saved(
        self, contents: Mapping[Any, Any], copies: Mapping[int, Tensor], index: Mapping[int, int]
    ) -> dict[str, Any]:
        """Return a dict for a file. Tensors become their copies, and parameters become indices."""
        saved: dict[str, Any] = {}
        for key, x in contents.items():
            if key == PARAMS:
                saved[key] = [index[id(p)] for p in x]
            elif not isinstance(x, dict):  # an inner dict has its own path
                saved[key] = copies[id(x)] if isinstance(x, Tensor) else x
        return saved

    def load_state_dict(self, saved: Mapping[str, Any], progress: Progress) -> None:
        """Load a snapshot that `state_dict` returned. The run itself does not change.

        The model, the optimizers and the parts of the saved run must have been loaded before.
        """
        params = self._all_params()
        live = dict(self._live_dicts())
        missing = sorted(saved["dicts"].keys() - live.keys())
        differs = len(params) != len(saved["params"]) or len(self._parts) != len(saved["said"])
        if missing or differs:
            raise ValueError(
                "Recover: the snapshots in the checkpoint do not match this model, optimizer and "
                "parts: load the state of the model, the optimizer and the parts first, and then "
                "call recover.load_state_dict" + (f". Missing here: {missing}" if missing else "")
            )
        self._params = params
        self._pairs = []
        for p, host in zip(params, saved["params"], strict=True):
            self._pair(p, host)
        self._dicts = []
        for path, saved_entries in saved["dicts"].items():
            contents: dict[Any, Any] = {}
            for key, x in saved_entries.items():
                if key == PARAMS:
                    contents[key] = [params[i] for i in x]
                elif isinstance(x, Tensor):
                    contents[key] = self._pair(live[path].get(key), x)
                else:
                    contents[key] = x
            self._dicts.append(DictCopy(path, live[path], contents))
        paths = {id(entries): path for path, entries in live.items()}
        for _, entries, contents in self._dicts:
            inner = {key: x for key, x in entries.items() if isinstance(x, dict)}
            contents.update({k: x for k, x in inner.items() if paths.get(id(x)) in saved["dicts"]})
        self._containers = []
        for i, opt in enumerate(self._optimizers):
            groups = enumerate(opt.param_groups)
            saved_groups = [group for g, group in groups if f"{i}/groups/{g}" in saved["dicts"]]
            self._containers.append((opt, opt.state, saved_groups))
        self._gradients = [
            Gradient(params[i], own, None if own else layout_of(params[i]), host)
            for i, own, host in saved["grads"]
        ]
        self._without_grad = {params[i] for i in saved["without"]}
        self._states_of_parts = saved["said"]
        self._random_states = saved["random"]
        self.hosts = [host for _, host in self._pairs]
        self.hosts += [t for t in tree_leaves(self._states_of_parts) if isinstance(t, Tensor)]
        self.hosts += [grad.host for grad in self._gradients]
        self._restore_engines = self._forget_recorded_steps()
        self.progress = progress

    def _pair(self, here: Any, host: Tensor) -> Tensor:
        """Note the tensor of the run that a copy belongs to. Create the tensor if there is none."""
        if not isinstance(here, Tensor) or local(here).shape != host.shape:
            here = host.to(local(self._params[0]).device, copy=True)
        self._pairs.append((here, host))
        return here


def copied(live: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a dict and of its lists. The tensors are not copied."""
    return {key: list(x) if type(x) is list else x for key, x in live.items()}


def on_host(t: Tensor, host: Tensor | None) -> Tensor:
    """Copy a tensor, or its local shard, to the host.

    Args:
        t: The tensor.
        host: An older copy, or None. If its shape and dtype are the same, its memory is reused.
    """
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
    """Return the random states of Python, torch and NumPy (if it is imported) as plain data."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the random states that `random_states` returned."""
    for name, state in states.items():
        if name != "numpy" or "numpy" in sys.modules:
            SETTERS[name](state)
