"""Any rule in front of any optimizer: Clipper for loops written by hand, attach for the rest."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import Self

from torchzero_clip.core import Bucket, Chain, Step, Transform, Units, bind, in_buckets
from torchzero_clip.core.norms import NAMED
from torchzero_clip.core.outside import warn
from torchzero_clip.core.private import traced
from torchzero_clip.core.sharding.layout import local
from torchzero_clip.modules.flow.identity import Identity
from torchzero_clip.optimizer import Modular, averages
from torchzero_clip.optimizer.behind import PARAMS, Behind
from torchzero_clip.optimizer.keys import SCHEDULER_KEYS, WELL_KNOWN, GroupKeys
from torchzero_clip.optimizer.loss import evaluate, one_number
from torchzero_clip.optimizer.meaning import refuse_step
from torchzero_clip.optimizer.saving import safe_to_save

TOTAL, WAITING = "total norm", "waiting"  # among what the links of a Clipper measured
KEY = "torchzero_clip"  # of a handle's state in the state dict of its optimizer
AFTER = "after"  # of the state of links behind the optimizer, in that of a handle


class Clipper(Modular):
    """A chain that rewrites gradients and leaves parameters alone.

    For training loops written by hand and framework hooks. It has the state, `param_groups` with
    live values, `state_dict` and `metrics` of an optimizer. Where the chain ends early (a guard
    skips the step, an accumulator waits) the gradients become None, so that the optimizer that
    steps next does nothing.

    Args:
        params: Parameters, named parameters, or groups of either.
        *transforms: The chain, first to last.
        compile: As for `Modular`: one kernel for what stands between two norms.
        process_group: Processes that hold other parameters of the same model, as for `Modular`.

    Example:
        >>> import torch
        >>> from torchzero_clip import Clipper, ZClip
        >>> model = torch.nn.Linear(10, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> clipper = Clipper(model.parameters(), ZClip())
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> norm = clipper.step()
        >>> optimizer.step()
    """

    _options: Mapping[str, Any] = {"compile": False}
    _makes_steps = False

    def __init__(
        self,
        params: Iterable[Any],
        *transforms: Transform,
        compile: bool = False,
        process_group: Any = None,
    ) -> None:
        more: Any = {"fused": False, "compile": compile, "process_group": process_group}
        super().__init__(params, *transforms, **more)

    @torch.no_grad()
    @traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Rewrite the gradients; returns their total norm before, a 0-dim tensor.

        With a closure it is called first, and its loss returned.
        """
        loss = None if closure is None else evaluate(closure)
        step = self._given(loss)
        self._records = step.engine.step(step, self._through)
        total: Tensor = self._records.pop(TOTAL).clone()  # the next step may write its memory
        return total if closure is None else loss

    def _through(self, step: Step) -> dict[str, Any]:
        """Send the gradients of a step through the chain; those that do not come back are None."""
        record = super()._through(step)
        if waiting := record.pop(WAITING):
            step.notes.host("gradients are left out on the host: p.requires_grad_(False)")
        for p in waiting:
            p.grad = None
        return record

    def _start(self, step: Step) -> list[Bucket]:
        buckets = in_buckets(step)
        reads = any([getattr(link.transform, "reads_grads", False) for link in self.keys.links])
        for bucket in buckets:
            if bucket.grads.dtype == bucket.state_dtype and not reads:
                bucket.update = bucket.writable_grads()  # it may as well flow there
        if self._measures and not buckets:
            self._warn_of_none()
        total = torch.zeros(())
        if buckets and self._measures:
            units = Units(buckets, "global", NAMED["l2"])
            total = units.norms_of([bucket.grads for bucket in units.buckets])[0]
        step.record[TOTAL] = total.to(torch.float32)
        step.record[WAITING] = {p for bucket in buckets for p in bucket.originals}
        return buckets

    def _end(self, step: Step, buckets: list[Bucket]) -> None:
        """Write what the last link returns into the gradients."""
        step.skip.read("gradients are left out on the host")
        for bucket in buckets:
            step.gradients.write(bucket.originals)
            rows = zip(bucket.originals, bucket.part.layouts, bucket.update, strict=True)
            for p, layout, u in rows:
                step.record[WAITING].discard(p)
                if p.grad is None:
                    step.notes.made("a gradient is made, once")
                    new = u.to(p.dtype, copy=True)
                    p.grad = new if layout is None else layout.wrap(new)
                elif u is not (grad := local(p.grad)):
                    grad.copy_(u)

    def _warn_of_none(self) -> None:
        given = any([group["params"] for group in self.param_groups])
        if given and self.process_group is None and not torch.compiler.is_compiling():
            warn(
                "Clipper: no parameter has a gradient, so nothing is clipped: call step() between "
                "backward() and the optimizer's step()",
            )


class Attached(Clipper):
    """The handle that `attach` returns: a Clipper tied to an optimizer, and a context manager."""

    def __init__(
        self,
        optimizer: Optimizer,
        *transforms: Transform,
        compile: bool = False,
        process_group: Any = None,
        in_checkpoint: bool = False,
        after: Transform | None = None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.after = (
            None if after is None else Behind(optimizer.param_groups, after, compile=compile)
        )
        self._in_checkpoint = in_checkpoint
        self._foreign = frozenset(optimizer.defaults)
        refuse_step("attach", bind(Chain(*transforms)))
        groups = [
            self._own_keys(group, GroupKeys(bind(Chain(*transforms))))
            for group in optimizer.param_groups
        ]
        super().__init__(groups, *transforms, compile=compile, process_group=process_group)
        # GradScaler hands scaled gradients to optimizers that say they can unscale them
        self._scales = optimizer.__dict__.get("_step_supports_amp_scaling")
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.__dict__["_step_supports_amp_scaling"] = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_pre_hook(self._take_out),
        ]
        if self.after is not None:
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        if in_checkpoint:
            self._hooks.append(optimizer.register_state_dict_post_hook(self._put_in))
        optimizer.__dict__["_torchzero_clip"] = weakref.ref(self)
        optimizer.__dict__["__getstate__"] = partial(_state_of_a_copy, self._optimizer)

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        mine = optimizer is not None and optimizer.__dict__.get("_torchzero_clip")
        if optimizer is not None and mine and mine() is self:
            del optimizer.__dict__["_torchzero_clip"], optimizer.__dict__["__getstate__"]
            optimizer.__dict__.pop("_step_supports_amp_scaling", None)
            if self._scales is not None:
                optimizer.__dict__["_step_supports_amp_scaling"] = self._scales

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _begin(self, name: str = "a step", loss: Any = None) -> Step:
        self._follow()
        return super()._begin(name, loss)

    def _follow(self) -> None:
        """Take over parameters that were added to the optimizer, or exchanged in it."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("the optimizer that this handle was attached to is gone")
        if len(optimizer.param_groups) < len(self.param_groups):
            left = {p for group in optimizer.param_groups for p in group["params"]}
            ours = [group for group in self.param_groups if left & set(group["params"])]
            self.param_groups[:] = ours[: len(optimizer.param_groups)]
        for i, theirs in enumerate(optimizer.param_groups):
            if i == len(self.param_groups):
                self.add_param_group(self._own_keys(theirs, self.keys))
            shared: dict[str, Any] = {k: theirs[k] for k in PARAMS if k in theirs}
            self.param_groups[i].update(shared)
        if self.after is not None:
            self.after.follow(optimizer.param_groups)

    def explain(self, *, parameters: bool = False) -> str:
        """The plan of the chain, behind sentences about what may not be as one expects."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        unread = [
            f"{key} of the optimizer's group {i} is {theirs[key]!r}, and {ours[key]!r} counts: set "
            f"handle.param_groups[{i}][{key!r}]."
            for i, (theirs, ours) in enumerate(zip(groups, self.param_groups, strict=False))
            for key in self.keys.defaults.keys() & theirs.keys() - self._foreign
            if theirs[key] != ours[key]
        ]
        shown = "whose weights for evaluation averaged() shows"
        behind = [] if self.after is None else [f"Behind each step: {self.after.chain!r}, {shown}."]
        return "\n".join([*unread, super().explain(parameters=parameters), *behind])

    def safe_to_save(self, steps: int = 1) -> bool:
        """Whether a checkpoint of now is worth keeping, the optimizer's own state included."""
        optimizer = self._optimizer()
        return safe_to_save(self, self.keys.links, steps, optimizer.state if optimizer else {})

    # ------------------------------------------------------------------ weights for evaluation

    def averaged(
        self, name: str | None = None, *, model: Module | None = None
    ) -> AbstractContextManager[None]:
        """The weights for evaluation of `after=` in the parameters, as `Modular.averaged` does."""
        return self._behind.averaged(name, model=model)

    def averaged_state_dict(self, model: Module, name: str | None = None) -> dict[str, Any]:
        """The model's state dict with the weights for evaluation of `after=`."""
        return self._behind.averaged_state_dict(model, name)

    def eval(self) -> None:
        """Put the weights for evaluation of `after=`, if there are any, into the parameters."""
        if self.after is not None:
            self.after.eval()

    def train(self) -> None:
        """Put the training weights back that `eval()` has taken out."""
        if self.after is not None:
            self.after.train()

    @property
    def _behind(self) -> Behind:
        if self.after is None:
            raise ValueError(
                "nothing behind this optimizer has weights for evaluation: give one to attach, as "
                "in attach(optimizer, after=WeightEMA(0.999))"
            )
        return self.after

    def _after_step(self, *_: Any) -> None:
        """Have the links behind the optimizer look at the weights that it has left."""
        self._follow()
        self._behind.look()

    # ------------------------------------------------------------------ saving and loading

    def state_dict(self) -> dict[str, Any]:
        """The state of the rules; the optimizer saves its own."""
        if self._optimizer() is not None:
            self._follow()
        behind = {} if self.after is None else {AFTER: self.after.state_dict()}
        return {**super().state_dict(), **behind}

    def load_state_dict(
        self, state_dict: dict[str, Any], *, keep: str | Sequence[str] = ()
    ) -> None:
        """Load what `state_dict` gave; live values named in `keep` stay as they were given."""
        if self._optimizer() is not None:
            self._follow()
        given = isinstance(state_dict, Mapping) and AFTER in state_dict
        if given is (self.after is None):
            there, here = ("", "no ") if given else ("no ", "")
            raise ValueError(
                f"the checkpoint has {there}state of links behind the optimizer, and this handle "
                f"has {here}such links: attach with after= as it was, or without"
            )
        if self.after is not None:
            state_dict = dict(state_dict)
            self.after.load_state_dict(state_dict.pop(AFTER))
        super().load_state_dict(state_dict, keep=keep)

    def _put_in(self, _: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        """The state dict of the optimizer with that of the rules in it."""
        return {**given, KEY: self.state_dict()}

    def _take_out(self, optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
        """Load the state of the rules from a state dict of the optimizer, and the rest goes on."""
        if KEY in given:
            self.load_state_dict(given[KEY])
            return {key: value for key, value in given.items() if key != KEY}
        if self._in_checkpoint:
            warn(
                f"this checkpoint of {type(optimizer).__name__} has nothing of its transforms, "
                "which stay as they are: it was saved without attach(..., in_checkpoint=True)",
            )
        return None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a handle belongs to its optimizer and is neither copied nor pickled: attach again, "
            "and load its state_dict"
        )

    def _own_keys(self, group: dict[str, Any], names: GroupKeys) -> dict[str, Any]:
        """Of an optimizer's group: the parameters, and live values of the chain that it set."""
        known = {*PARAMS, *names.defaults, *names.aliases}
        theirs = {*self._foreign, *SCHEDULER_KEYS, *(WELL_KNOWN.keys() - names.ambiguous.keys())}
        for key in group.keys() - known - theirs:
            names.refuse(key, group[key])
        return {key: group[key] for key in group if key in known - self._foreign}

    def _act(self) -> None:
        """Rewrite the gradients before a step of the optimizer, which takes no norm."""
        self._measures = False
        try:
            self.step()
        finally:
            self._measures = True

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Act now, or after every evaluation of the closure."""
        if self.after is not None:
            averages.refuse(self.after, "step()", shown=True)
            self._follow()
            self.after.begin()
        given = args[1:] if args and args[0] is optimizer else args
        closure = kwargs.get("closure", given[0] if given else None)
        if closure is None:
            self._act()
            return None

        def clipped_closure() -> Any:
            loss = closure()
            self._reported.setdefault("loss", one_number(loss))
            self._act()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": clipped_closure}
        first = args[: len(args) - len(given)]
        return (*first, clipped_closure, *given[1:]), kwargs


def _state_of_a_copy(original: Callable[[], Optimizer | None]) -> Any:
    """What a copy of an optimizer with a handle gets: all but the hooks, and a warning."""
    optimizer = original()
    assert optimizer is not None, "the optimizer itself holds this function"
    name = type(optimizer).__name__
    warn(
        f"a copy of this {name} has no transforms: they stay with the {name} that they were "
        "attached to. Attach to the copy as well, and load the handle's state_dict; or remove() "
        "the handle before copying",
    )
    return type(optimizer).__getstate__(optimizer)  # type: ignore[attr-defined, unused-ignore]


def attach(
    optimizer: Optimizer,
    *transforms: Transform,
    compile: bool = False,
    process_group: Any = None,
    in_checkpoint: bool = False,
    after: Transform | None = None,
) -> Attached:
    """Put transforms in front of any optimizer: they rewrite `.grad` before each of its steps.

    With a closure they act after every evaluation of it; under GradScaler they see unscaled
    gradients, and nothing runs in a step that is skipped. A copy of the optimizer (`copy.deepcopy`,
    `pickle`) has no transforms, as it has no hooks in torch, and a warning says so.

    Args:
        optimizer: Any torch optimizer but SparseAdam.
        *transforms: The chain, first to last.
        compile: As for `Modular`: one kernel for what stands between two norms.
        process_group: Processes that hold other parameters of the same model, as for `Modular`.
        in_checkpoint: Put the state of the transforms into `optimizer.state_dict()`, under the key
            "torchzero_clip"; otherwise save `handle.state_dict()` beside it. Loading takes it from
            there in any case.
        after: A link with weights for evaluation, as `WeightEMA(0.999)`, or a Chain of such: it
            runs behind each step of the optimizer, at the weights that this has left; compiled in
            one kernel of its own.

    Returns:
        A handle with `param_groups` (live values, one group for each of the optimizer's),
        `state_dict`, `metrics` and `remove`; also a context manager.

    Example:
        >>> import torch
        >>> from torchzero_clip import ZClip, attach
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = torch.optim.AdamW(model.parameters())
        >>> handle = attach(opt, ZClip())
    """
    if isinstance(optimizer, Modular):
        raise TypeError(
            f"attach: a {type(optimizer).__name__} is a chain already; put the transforms into it"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"attach: takes a torch.optim.Optimizer, got {optimizer!r}")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            "attach: SparseAdam takes sparse gradients, which no transform can rewrite: leave it "
            "as it is, or make the layer with sparse=False and attach to another optimizer"
        )
    if "_torchzero_clip" in optimizer.__dict__:
        raise ValueError(
            f"attach: this {type(optimizer).__name__} has transforms attached already; remove() "
            "their handle first, or attach all in one call"
        )
    if after is not None and not isinstance(after, Transform):
        raise TypeError(f"attach: after must be a Transform or a Chain, got {after!r}")
    if not transforms and after is not None:
        transforms = (Identity(),)
    if not transforms:
        raise ValueError("attach: give at least one transform, as in attach(optimizer, ZClip())")
    more: Any = {"process_group": process_group, "in_checkpoint": in_checkpoint, "after": after}
    handle = Attached(optimizer, *transforms, compile=compile, **more)
    if in_checkpoint and KEY not in optimizer.state_dict():
        handle.remove()
        raise TypeError(
            f"attach: {type(optimizer).__name__}.state_dict() has a format of its own, in which "
            "the state of the transforms has no place: leave in_checkpoint=False, and save "
            "handle.state_dict() beside it"
        )
    return handle
