"""Modular: a chain of transforms that is a torch.optim.Optimizer."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.core.bucket import Bucket, collect, has_grad, state_dtype
from torchzero_clip.core.hyper import Names
from torchzero_clip.core.metrics import metrics_of
from torchzero_clip.core.transform import Chain, Transform, bind


class Modular(Optimizer):
    """Send the gradients through a chain of transforms and subtract what comes out.

    Args:
        params: Parameters, named parameters, or groups of either. A group may override every live
            hyperparameter of the chain: `{"params": ..., "max_norm": 0.5}`.
        *transforms: The chain, first to last.

    Example:
        >>> opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
    """

    def __init__(self, params: Iterable[Any], *transforms: Transform) -> None:
        self._build(Chain(*transforms))
        super().__init__(params, dict(self.names.defaults))

    def _build(self, chain: Chain) -> None:
        self.chain = chain
        self.links = bind(chain)
        self.names = Names(self.links)
        self.names.check_structure(self.links)
        self._stateful = any([link.stateful for link in self.names.links])
        self._seen_keys: list[frozenset[str]] = []
        self._records: dict[str, Any] = {}
        self._rooms: dict[tuple[int, int], Tensor] = {}

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the gradients through the chain and move the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._run(self._buckets())
        return loss

    def _run(self, buckets: list[Bucket]) -> None:
        for bucket in self._through(buckets):
            torch._foreach_sub_(bucket.params.tensors, bucket.update.tensors)

    def _through(self, buckets: list[Bucket]) -> list[Bucket]:
        """The chain. A link that returns no buckets ends the step."""
        for link in self.links:
            if buckets:
                buckets = link.step(buckets)
        return buckets

    def metrics(self) -> dict[str, Tensor]:
        """What the norm rules measured in the last step, under names such as "ClipNorm/norm".

        For every rule "norm" before it, its "limit", the "factor" it scaled by, and whether it
        "clipped": 0-dim or one entry a unit, on the device; nothing is computed or waited for until
        this is called. `to_floats` brings all to the host at once.
        """
        return metrics_of(self._records)

    def init_state(self) -> None:
        """Make the state of every parameter now, as its first gradient would.

        Distributed checkpointing takes a fake step to make state, which moves counters; with this
        it need not.
        """
        self._prepare(self._buckets(lambda p: p.requires_grad))

    def _prepare(self, buckets: list[Bucket]) -> None:
        for link in self.links:
            if buckets:
                link.prepare(buckets)

    def _buckets(self, wanted: Callable[[Tensor], bool] = has_grad) -> list[Bucket]:
        """The parameters that take part in this step."""
        self._check_keys()
        state = self.state if self._stateful else None
        self._records = {}
        return collect(self.param_groups, state, self._records, self._room, wanted)

    def _room(self, g: int, places: Sequence[int]) -> list[Tensor]:
        """Memory for the updates of some parameters of a group."""
        params, rooms = self.param_groups[g]["params"], self._rooms
        for i in places:
            p, held = params[i], rooms.get((g, i))
            if held is None or held.shape != p.shape or held.dtype != state_dtype(p):
                rooms[g, i] = torch.empty_like(p, dtype=state_dtype(p))
        return [rooms[g, i] for i in places]

    # ------------------------------------------------------------------ groups

    def _check_keys(self) -> None:
        keys = [frozenset(group) for group in self.param_groups]
        if keys != self._seen_keys:
            for group in self.param_groups:
                self.names.tidy(group, later=True)
            self._seen_keys = [frozenset(group) for group in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys are checked against the live hyperparameters of the chain."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        group = dict(param_group)
        self.names.tidy(group)
        mine = self._fingerprints()
        theirs = group.pop("chain", {})
        if theirs.get("structure") == mine["structure"]:
            mine = {k: v.clone() if isinstance(v, Tensor) else v for k, v in theirs.items()} | mine
        group["chain"] = mine
        super().add_param_group(group)
        if "param_names" not in self.param_groups[-1]:
            for link in self.names.links:
                if getattr(link.transform, "scope", None) == "layer":
                    self.param_groups.pop()
                    raise ValueError(
                        f"{link.path}: dim='layer' needs to know the names of the parameters: pass "
                        "model.named_parameters() instead of model.parameters()"
                    )

    def _fingerprints(self) -> dict[str, Any]:
        """Numbers that tell two chains apart: their links, and their fixed arguments."""
        links = self.names.links
        names = [f"{link.path}:{type(link.transform).__name__}" for link in links]
        fixed = [f"{k}={v!r}" for link in links for k, v in sorted(_fixed(link.transform).items())]
        return {
            "structure": zlib.crc32("\n".join(names).encode()),
            "settings": zlib.crc32("\n".join(fixed).encode()),
        }

    # ------------------------------------------------------------------ saving and loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the same chain; raises before anything changes if it is another."""
        seen: dict[str, Any] = {}

        def look(_: Optimizer, given: dict[str, Any]) -> None:
            self._check_checkpoint(given)
            seen.update(given)

        def restore(_: Optimizer) -> None:
            self._restore(seen)

        before = self.register_load_state_dict_pre_hook(look)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _check_checkpoint(self, given: dict[str, Any]) -> None:
        """Raise unless every tensor has the name and shape that this chain gives it."""
        groups = given["param_groups"]
        ours = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in groups]
        if ours != theirs:
            raise ValueError(
                f"the checkpoint has groups of {theirs} parameters, this optimizer of {ours}"
            )
        mine = self._fingerprints()
        for g, group in enumerate(groups):
            chain = group.get("chain")
            if not isinstance(chain, dict):
                raise ValueError(
                    f"group {g} of the checkpoint has no 'chain': it was saved by another kind of "
                    "optimizer, whose state this chain cannot read"
                )
            if chain.get("structure") != mine["structure"]:
                raise ValueError(
                    f"the checkpoint was saved by another chain; this one is {self.chain!r}"
                )
            missing = set(self.names.defaults) - set(group)
            if missing:
                raise ValueError(f"group {g} of the checkpoint lacks {sorted(missing)}")
            if chain.get("settings") != mine["settings"]:
                warnings.warn(
                    "the checkpoint was saved by a chain with other fixed arguments than "
                    f"{self.chain!r}",
                    stacklevel=4,
                )
        for index, p in _numbered(groups, self.param_groups):
            if given["state"].get(index):
                self._check_state(index, p, given["state"][index])

    def _check_state(self, index: Any, p: Tensor, held: dict[str, Any]) -> None:
        left = set(held)
        for link in self.names.links:
            expected = link.layout(p)
            if left.isdisjoint(expected):
                continue
            for key, example in expected.items():
                if key not in held:
                    raise ValueError(f"the checkpoint lacks {key!r} of parameter {index}")
                value = held[key]
                if not isinstance(value, Tensor):
                    if example.dim():
                        raise ValueError(
                            f"the checkpoint has {value!r} where {key!r} of parameter {index} is a "
                            f"tensor of shape {tuple(example.shape)}"
                        )
                elif value.shape != example.shape:
                    raise ValueError(
                        f"the checkpoint has shape {tuple(value.shape)} for {key!r} of parameter "
                        f"{index}, here it is {tuple(example.shape)}"
                    )
                elif value.dtype != example.dtype:
                    raise ValueError(
                        f"the checkpoint has dtype {value.dtype} for {key!r} of parameter {index}, "
                        f"here it is {example.dtype}"
                    )
            left -= expected.keys()
        if left:
            raise ValueError(
                f"the checkpoint has {sorted(left)} for parameter {index}, which no link makes"
            )

    def _restore(self, given: dict[str, Any]) -> None:
        """Give state its own dtype back: torch casts it to the parameter's."""
        for index, p in _numbered(given["param_groups"], self.param_groups):
            for key, value in given["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][key] = value.to(device=p.device)
                else:
                    layouts = [link.layout(p) for link in self.names.links]
                    example = next(row[key] for row in layouts if key in row)
                    self.state[p][key] = torch.full_like(example, value, device=p.device)
        self._seen_keys = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "chain": self.chain}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "chain" in state:
            self._build(state.pop("chain"))
        super().__setstate__(state)


def _fixed(tfm: Any) -> dict[str, Any]:
    """The arguments that cannot change; a function counts by its name."""
    fields = {name: getattr(tfm, name) for name in tfm.__dataclass_fields__ if name not in tfm.live}
    inner = dict(tfm.children())
    return {
        name: getattr(value, "__qualname__", value)
        for name, value in fields.items()
        if not (inner and isinstance(value, (Transform, tuple, list, dict)))
    }


def _numbered(groups: Any, param_groups: Any) -> list[tuple[Any, Tensor]]:
    pairs = zip(groups, param_groups, strict=True)
    return [(i, p) for a, b in pairs for i, p in zip(a["params"], b["params"], strict=True)]
