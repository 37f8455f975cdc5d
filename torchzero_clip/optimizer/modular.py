"""Modular: a chain of transforms that is a torch.optim.Optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.core.bucket import Bucket, collect, has_grad, state_dtype
from torchzero_clip.core.compiler import Compiler
from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.fused import Deferred
from torchzero_clip.core.norms.shards import local, refuse_flat
from torchzero_clip.core.pieces import InPieces, run_kernel
from torchzero_clip.core.tape import Recorded, Tape
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.tensors import all_plain
from torchzero_clip.core.transform import Chain, Transform, bind
from torchzero_clip.optimizer.checkpoint import (
    check_checkpoint,
    complete,
    restore_state,
    shared_start,
)
from torchzero_clip.optimizer.explain import explain
from torchzero_clip.optimizer.keys import Names
from torchzero_clip.optimizer.metrics import metrics_of
from torchzero_clip.optimizer.rounding import (
    adapted,
    check_rounding,
    prepare,
    rounds,
    subtract,
    without,
)


class Modular(Optimizer):
    """Send the gradients through a chain of transforms and subtract what comes out.

    Args:
        params: Parameters, named parameters, or groups of either. A group may override every live
            hyperparameter of the chain: `{"params": ..., "max_norm": 0.5}`.
        *transforms: The chain, first to last.
        fused: Use torch's fused kernels where the end of the chain is one, and on CPU let links
            that treat every entry by itself run together, on pieces of tensors; False runs every
            link by its own formula. The results agree to rounding.
        compile: Compile what the links do between norms into kernels of their own, at the first
            step. It takes seconds, needs a C++ compiler on CPU and Triton on CUDA, and happens
            again for no change of a live value or of which parameters have gradients.
        rounding: How parameters in bfloat16 and float16 take the update: "nearest", "stochastic" or
            "kahan", which do not lose what is smaller than half a unit in the last place.
        process_group: Processes that hold other parameters of the same model, the stages of a
            pipeline: norms of a group and of all are taken over all of them.

    Example:
        >>> opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
    """

    def __init__(
        self,
        params: Iterable[Any],
        *transforms: Transform,
        fused: bool = True,
        compile: bool = False,
        rounding: str = "nearest",
        process_group: Any = None,
    ) -> None:
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes parameters, got a module: pass model.parameters()"
            )
        if isinstance(params, Transform):
            raise TypeError(
                f"{type(self).__name__} takes the parameters first, got {params!r}: pass "
                "model.parameters(), and the chain after it"
            )
        rounding = check_rounding(type(self).__name__, rounding)
        self._build(Chain(*transforms), fused, compile, rounding)
        self.process_group = process_group
        super().__init__(params, dict(self.names.defaults))

    def _build(self, chain: Chain, fused: bool, compile: bool, rounding: str) -> None:
        if not len(chain):
            raise ValueError(
                f"{type(self).__name__} needs at least one transform: "
                "give ClipNorm(1.0), Adam(), LR(1e-3) and the like after the parameters"
            )
        self.chain, self.fused, self.rounding = chain, fused, rounding
        self.compiler = Compiler() if compile else None
        self.links = bind(chain)
        self.names = Names(self.links)
        self.names.check_structure(self.links)
        self._seen_keys: list[frozenset[str]] = []
        self._records: dict[str, Any] = {}
        self._rooms: dict[tuple[int, bool], dict[int, Tensor]] = {}

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
        buckets, late = self._late(buckets)
        self._finish(self._through(buckets), late)

    def _late(self, buckets: list[Bucket]) -> tuple[list[Bucket], list[TensorList | Tape]]:
        """Let updates wait for the kernel at the end of the chain, where that is allowed."""
        late: list[TensorList | Tape] = []
        if torch.compiler.is_compiling():
            return buckets, late
        for bucket in buckets:
            if self.compiler is not None:
                bucket.use_tape(self.compiler, late)
            elif self.fused:
                bucket.in_pieces = True
                bucket.late = None if rounds(bucket, self.rounding) else late
        return buckets, late

    def _finish(self, buckets: list[Bucket], late: list[TensorList | Tape]) -> None:
        """Subtract what came out; updates that nobody asked for move their state."""
        rest = [bucket for bucket in buckets if not _applied(bucket, self.rounding)]
        for update in reversed(late):  # what came later asks for the pieces of what came before
            update._settle()
        subtract(rest, self.rounding)
        for bucket in rest:
            if isinstance(bucket.update, Recorded):
                bucket.update.forget()
        for update in late:
            if isinstance(update, Tape):
                update.end()

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

    def explain(self) -> str:
        """The plan of a step in words: what each link reads and writes, and what waits for a later
        pass.

        A step of a small model with the same chain is watched, with gradients that the limits cut.

        Example:
            >>> print(opt.explain())
        """
        return explain(self)

    @torch.no_grad()
    def init_state(self) -> None:
        """Make the state of every parameter now, as its first gradient would.

        Distributed checkpointing takes a fake step to make state, which moves counters; with this
        it need not.
        """
        self._prepare(self._buckets(lambda p: p.requires_grad))

    def _prepare(self, buckets: list[Bucket]) -> None:
        for link in self.links:
            if buckets:
                buckets = link.prepare(buckets)
        prepare(buckets, self.rounding)

    def _buckets(self, wanted: Callable[[Tensor], bool] = has_grad) -> list[Bucket]:
        """The parameters that take part in this step."""
        self._check_keys()
        self._records = {}
        return collect(
            self.param_groups, self.state, self._records, self._room, wanted, self.process_group
        )

    def _room(self, g: int, places: Sequence[int], spare: bool = False) -> list[Tensor]:
        """Memory for the updates of some parameters of a group, and a second for who needs it."""
        params = [self.param_groups[g]["params"][i] for i in places]
        if not all_plain(params):
            params = [local(p) for p in params]
        room, dtype = self._rooms.setdefault((g, spare), {}), state_dtype(params[0])
        for i, p, held in zip(places, params, list(map(room.get, places)), strict=True):
            if held is None or held.shape != p.shape or held.dtype != dtype:
                room[i] = torch.empty_like(p, dtype=dtype)
        return [room[i] for i in places]

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
        held = group.pop("chain", {})
        super().add_param_group(group)
        params = self.param_groups[-1]["params"]
        try:
            refuse_flat(params)
            if self.compiler is not None:
                for p in params:
                    self.compiler.check(p.device)
        except Exception:
            self.param_groups.pop()
            raise
        self.param_groups[-1]["chain"] = shared_start(self.names.links, params, held)
        if "param_names" not in self.param_groups[-1]:
            for link in self.names.links:
                if getattr(link.transform, "scope", None) == "layer":
                    self.param_groups.pop()
                    raise ValueError(
                        f"{link.path}: dim='layer' needs to know the names of the parameters: pass "
                        "model.named_parameters() instead of model.parameters()"
                    )

    # ------------------------------------------------------------------ saving and loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the same chain; raises before anything changes if it is another."""
        seen: dict[str, Any] = {}

        def look(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            given = complete(given, self.names)
            check_checkpoint(without(given), self.param_groups, self.names, repr(self.chain))
            seen.update(adapted(given, self.param_groups, self.rounding))
            return seen

        def restore(_: Optimizer) -> None:
            restore_state(seen, self.param_groups, self.state, self.names)
            self._seen_keys = []

        before = self.register_load_state_dict_pre_hook(look)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __repr__(self) -> str:
        rounding = [f"rounding={self.rounding!r}"] if self.rounding != "nearest" else []
        lines = [f"{type(self).__name__}({', '.join([*map(repr, self.chain), *rounding])})"]
        for i, group in enumerate(self.param_groups):
            shown = {key: value for key, value in group.items() if key not in RESERVED}
            lines.append(f"  group {i}: {len(group['params'])} parameters, {shown}")
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                f"a {type(self).__name__} with a process_group is neither copied nor pickled: make "
                "another with the same chain, and load its state_dict"
            )
        mine = {
            "chain": self.chain,
            "fused": self.fused,
            "compile": self.compiler is not None,
            "rounding": self.rounding,
        }
        return {**super().__getstate__(), **mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "chain" in state:  # a copy; torch also comes here when it loads
            self.process_group = None
            rounding = state.pop("rounding", "nearest")
            compile = state.pop("compile", False)
            self._build(state.pop("chain"), state.pop("fused"), compile, rounding)
        super().__setstate__(state)


def _applied(bucket: Bucket, rounding: str) -> bool:
    """Let a kernel subtract the update where it can, or its pieces as they are made."""
    update = bucket.update
    if rounds(bucket, rounding):
        return False
    if isinstance(update, InPieces) and update.waits:
        run_kernel(update, lambda u, p: torch._foreach_sub_(p, u), bucket.params.tensors)
        return True
    return isinstance(update, (Deferred, Recorded)) and update.apply()
