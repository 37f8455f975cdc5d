"""release: each parameter steps as soon as its gradient is whole, which is then dropped."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchzero_clip.core import Bucket, Chain, NormRule, Step, Transform, in_buckets, norms
from torchzero_clip.core.division import UnitIds, UnitRecord
from torchzero_clip.core.engine import Engine, Records, Session, Through, Watch
from torchzero_clip.core.link import Link
from torchzero_clip.core.numbers import numbered
from torchzero_clip.core.part import Part, Roster, label
from torchzero_clip.core.stochastic import prepare_draws
from torchzero_clip.engines import AT_ONCE, Compiled, Eager
from torchzero_clip.optimizer import Modular
from torchzero_clip.optimizer.loss import evaluate

LIMITS = ("this step", "last step")
AGAIN = (
    "has a gradient again in a step in which it has moved already: call opt.step() after each "
    "backward(), set opt.last_backward = False before all but the last backward of a step, and "
    "use use_reentrant=False where activations are checkpointed"
)


def release(
    model: nn.Module | Iterable[Any],
    *transforms: Transform,
    limit: Literal["this step", "last step"] = "this step",
    **options: Any,
) -> Released:
    """An optimizer whose parameters step during `backward`, each as soon as its gradient is whole.

    The gradient is dropped then, so that one is alive at a time. The loop stays as it is: `step()`
    ends the step, and takes that of parameters which still have a gradient.

    Args:
        model: A module, or parameters as `Modular` takes them.
        *transforms: The chain, first to last, of rules that look at no more than a tensor.
        limit: "last step" lets rules about norms look further, as `ClipNorm(1.0, dim="global")`:
            they scale by the factor that the norm of the step before asks for, in the first step
            by 1.
        **options: As for `Modular`: fused, compile, rounding, state_dtype, process_group.

    Returns:
        A `Modular` with two more members: `last_backward`, False while the gradients of several
        batches are summed as usual, and `remove()`, which takes its hooks off the parameters.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, release
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = release(model, ClipNorm(1.0), Adam(), LR(1e-3))
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> print([p.grad for p in model.parameters()])
        [None, None]
        >>> opt.step()
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "release: DistributedDataParallel averages gradients over ranks in buckets, after "
            "these would have been used: shard the model with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    params = model.named_parameters() if isinstance(model, nn.Module) else model
    return Released(params, *transforms, limit=limit, **options)


RELEASED: weakref.WeakSet[Released] = weakref.WeakSet()
"""The optimizers that release gradients."""


class Released(Modular):
    """The optimizer that `release` returns."""

    _options: Mapping[str, Any] = {**Modular._options, "limit": "this step"}
    _keeps_like = "the largest parameter's"
    last_backward: bool = True
    """Whether gradients are whole after the next backward; False while they are still summed."""

    def __init__(
        self, params: Iterable[Any], *transforms: Transform, limit: str, **options: Any
    ) -> None:
        if limit not in LIMITS:
            raise ValueError(f"release: limit must be one of {list(LIMITS)}, got {limit!r}")
        self.limit, self._watching = limit, True
        self._lock = threading.RLock()  # tensors of several devices have a thread each
        self._hooks: dict[Tensor, Any] = {}
        self._rosters: dict[Tensor, Roster] = {}
        self._running: Running | None = None
        super().__init__(params, *transforms, **options)
        RELEASED.add(self)

    def _build(
        self, chain: Chain, fused: bool, compile: bool, rounding: str, state_dtype: str
    ) -> None:
        super()._build(chain, fused, compile, rounding, state_dtype)
        self.engine = (
            OneAtATime(Compiled(self.links)) if compile else Eager(defers=fused, keeps=False)
        )
        self._late = [LastStep(link) for link in _too_far(self.links, self.limit)]

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that still have a gradient, and end the step."""
        loss = None if closure is None else evaluate(closure)
        with self._lock:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self._release(p)
            self._finish()
            self._watch()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that are left; a step that has begun ends."""
        super().zero_grad(set_to_none)
        with self._lock:
            if self._running is not None:
                self._finish()

    @torch.no_grad()
    def _whole(self, p: Tensor) -> None:
        """The gradient of this parameter is whole, unless more batches are to come."""
        with self._lock:
            if self.last_backward and p.grad is not None:
                self._release(p)

    def _release(self, p: Tensor) -> None:
        """The step of one parameter, whose gradient goes."""
        running = self._running_step()
        index, place = running.places.get(p, (-1, -1))
        if index < 0:
            return  # it has left the optimizer
        group = self.param_groups[index]
        if p not in running.left[index]:
            raise RuntimeError(f"release: {label(index, group, place)} {AGAIN}")
        roster = self._rosters.setdefault(p, Roster())
        step = StepOfOne(running.groups, self.state, {}, self.engine, None, roster)
        step.where = index, group, place
        step.drawn = running.drawn
        record = self._through(step)
        p.grad = None
        running.drawn = step.drawn
        running.leave(index, place, p, record)

    def _running_step(self) -> Running:
        """The step on its way, begun if none is."""
        if self._running is None:
            self._begin()  # checks keys and live values
            params = [p for group in self.param_groups for p in group["params"]]
            if any([link.rounds(p) for link in self.keys.links for p in params]):
                prepare_draws(self.param_groups)
            self._running = Running(self.param_groups)
        return self._running

    @torch.no_grad()
    def _finish(self) -> None:
        running, self._running = self._running_step(), None
        self._records = running.end(self.param_groups)
        for late in self._late:
            given = self.param_groups, self.state, self._records, AT_ONCE, self.process_group
            with Step(*given) as step:
                late.decide(step)

    # ------------------------------------------------------------------ the hooks

    def _watch(self) -> None:
        """Put hooks on the parameters that have none, and need gradients."""
        found = {p for group in self.param_groups for p in group["params"]}
        for p in self._hooks.keys() - found:
            self._hooks.pop(p).remove()
        me = weakref.ref(self)
        for p in found - self._hooks.keys():
            if p.requires_grad and self._watching:
                self._hooks[p] = p.register_post_accumulate_grad_hook(Hook(me))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `Modular` does; its gradients are released from now on."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for place, p in enumerate(group["params"]):
            if any([p in other._hooks for other in list(RELEASED)]):
                self.param_groups.pop()
                where = label(len(self.param_groups), group, place)
                raise ValueError(
                    f"release: {where} has an optimizer already that releases its gradients: "
                    "remove() that one first"
                )
        self._watch()

    def remove(self) -> None:
        """Take the hooks off the parameters; `step()` goes on as that of any optimizer."""
        self._watching = False
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    # ------------------------------------------------------------------ what else is said

    def explain(self, *, parameters: bool = False) -> str:
        """The plan of a step in words, as if the gradients of all parameters were there."""
        late = [f"{late.link.path}: the factor of the step before" for late in self._late]
        lines = [
            "Each parameter by itself, when its gradient is whole",
            *late,
            super().explain(parameters=parameters),
        ]
        return "\n".join(lines)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # what GradScaler asks before its first step
        raise TypeError(
            "GradScaler divides gradients by its scale before the step, and released ones have "
            "been used by then: take bfloat16, which needs no GradScaler"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an optimizer that releases gradients belongs to its parameters and is neither copied "
            "nor pickled: release the copy of the model, and load this one's state_dict"
        )


class StepOfOne(Step):
    """The step of the parameter at a place of a group, which is given with its index."""

    released = True
    where: tuple[int, dict[str, Any], int]

    def parts(self, *_: Any) -> Sequence[tuple[Part, Sequence[Any]]]:
        index, group, place = self.where
        ((grad,),) = self.gradients.of([[group["params"][place]]], moves=True)
        return [(part, [grad]) for part in self.roster.parts(index, group, {place: grad})]


class Hook:
    """What a parameter calls when its gradient is whole; an optimizer that is gone does nothing."""

    def __init__(self, optimizer: Callable[[], Released | None]) -> None:
        self.optimizer = optimizer

    def __call__(self, p: Tensor) -> None:
        optimizer = self.optimizer()
        if optimizer is not None:
            optimizer._whole(p)


class Running:
    """A step on its way: the groups as its parameters see them, and those that have not moved.

    Args:
        groups: The parameter groups; their live values are taken now.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.places = {
            p: (index, place)
            for index, group in enumerate(groups)
            for place, p in enumerate(group["params"])
        }
        self.left = [dict.fromkeys(group["params"]) for group in groups]
        pairs = zip(groups, self.left, strict=True)
        self.groups = [{**g, "params": left, "chain": Held(g["chain"])} for g, left in pairs]
        self.records: dict[tuple[int, int], dict[str, Any]] = {}
        self.drawn = False  # whether the step is counted among those that round state

    def leave(self, index: int, place: int, p: Tensor, record: dict[str, Any]) -> None:
        """Note that a parameter has moved."""
        del self.left[index][p]
        self.records[index, place] = record

    def end(self, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Bring what links wrote for the groups into these; returns the records of the step."""
        for group, seen in zip(groups, self.groups, strict=False):  # one may have been added
            held = seen["chain"]
            group["chain"].clear()
            group["chain"].update(held, **held.written)
        found: dict[str, list[Any]] = {}
        for _, record in sorted(self.records.items(), key=lambda row: row[0]):
            for path, one in record.items():
                found.setdefault(path, []).append(one)
        return {
            path: Joint(some) if isinstance(some[0], UnitRecord) else some[-1]
            for path, some in found.items()
        }


class Held(dict[str, Any]):
    """What links keep once for a group: every parameter reads what the step before left, such as a
    count of steps, and what they write is for the next.
    """

    def __init__(self, chain: Mapping[str, Any]) -> None:
        super().__init__(chain)
        self.written: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.written[key] = value


class Joint:
    """The records that a link left for single parameters, as one; joined when they are read."""

    shared, scope = False, None

    def __init__(self, records: Sequence[UnitRecord]) -> None:
        self.records, self.groups, self.division = records, records[0].groups, self

    @property
    def norm(self) -> Tensor:
        """The norms of all units."""
        return self._joined([record.norm for record in self.records])

    @property
    def limits(self) -> list[Tensor]:
        """The limits of all units: a tensor is in one group, so one vector does."""
        rows = [(record.limits[0], record.norm) for record in self.records]
        each = [torch.as_tensor(limit, device=norm.device).expand_as(norm) for limit, norm in rows]
        return [self._joined(each)]

    @property
    def ratios(self) -> list[Tensor]:
        """The divisors of all units."""
        return [self._joined([record.ratios[0] for record in self.records])]

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        return vectors[0]

    def ids(self, groups: Sequence[Mapping[str, Any]]) -> UnitIds:
        each = [record.division.ids(groups) for record in self.records]
        lengths = [n for ids in each for n in ids.lengths or ()]
        rows = tuple([row for ids in each for row in ids.rows])
        return UnitIds(rows, tuple(lengths) if each[0].lengths is not None else None)

    def _joined(self, vectors: Sequence[Tensor]) -> Tensor:
        home = self.records[0].norm
        return torch.cat([vector.to(home) for vector in vectors])


class LastStep:
    """A norm rule that looks further than a tensor, at its link: it divides by what the norm of the
    step before asked for, and adds up the norm of this one.
    """

    def __init__(self, link: Link) -> None:
        self.link, self.rule = link, link.transform
        self.columns: dict[Tensor, Tensor] = {}  # the statistics of what has flowed in this step
        link.acts = self

    def init(self, param: Tensor) -> dict[str, Any]:
        return {**self.rule.init(param), "divisor": 1.0}

    def per_parameter(self, param: Tensor) -> dict[str, Any]:
        return {**self.rule.per_parameter(param), "divisor": 1.0}

    def per_group(self) -> dict[str, Any]:
        made: dict[str, Any] = self.rule.per_group()
        return made

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        made: list[Bucket] = self.rule.prepare(buckets)
        return made

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        measure = norms.measure(self.rule.ord)
        for bucket in buckets:
            columns = bucket.u.statistics(measure).unbind(1)
            self.columns.update(zip(bucket.originals, columns, strict=True))
            u, ratio = bucket.u.to(bucket.state_dtype), bucket.state["divisor"].stack()
            bucket.u = bucket.session.divide(u, ratio)
        return buckets

    def decide(self, step: Step) -> None:
        """The divisors for the next step, from all that has flowed in this one."""
        if not self.columns:
            return
        moved = in_buckets(step, lambda p: p if p in self.columns else None)
        buckets = [part for bucket in moved for part in bucket.seen_by(self.link).alike()]
        if self.link.numbered:
            numbered(buckets, advance=False)
        units = self.rule.units(buckets)
        columns = [self.columns[p] for bucket in units.buckets for p in bucket.originals]
        units.take(torch.stack([column.to(units.home) for column in columns], dim=1))
        for members, ratio in zip(units.groups, self.rule.decide(units).divisors, strict=True):
            for bucket in members:
                divisor = bucket.state["divisor"]
                new = units.as_list(bucket, ratio)
                divisor.copy_(new.where(new.isfinite(), divisor))  # a NaN ends with its step
        self.columns = {}


class OneAtATime:
    """An engine for one tensor at a time: the next takes over the memory that is kept for it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def check(self, device: torch.device) -> None:
        self.engine.check(device)

    def __repr__(self) -> str:
        return f"OneAtATime({self.engine!r})"

    def twin(self, watch: Watch | None = None) -> Engine:
        return self.engine.twin(watch)

    def kept(self) -> list[Tensor]:
        return self.engine.kept()

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> Session:
        kind = (params[0].device, params[0].dtype)
        return self.engine.open(kind, list(range(len(places))), params, grads)

    def in_turn(self) -> Engine:
        return self.engine.in_turn()

    def step(self, step: Step, through: Through) -> Records:
        return self.engine.step(step, through)

    def forget(self) -> None:
        self.engine.forget()

    def capture(self, devices: set[torch.device]) -> None:
        self.engine.capture(devices)

    def says(self, besides: Sequence[str]) -> list[str]:
        return self.engine.says(besides)


def _too_far(links: Iterable[Link], limit: str) -> list[Link]:
    """The links that look further than a tensor; raises unless the last step can tell them."""
    found: list[Link] = []
    for link in links:
        rule = link.transform
        plain = isinstance(rule, NormRule) and type(rule).step is NormRule.step
        if link.transforms and "loss" in rule.reads:
            raise ValueError(
                f"release: {link.path} needs the loss of each step, and gradients are used before "
                "anybody can report it"
            )
        scales = plain and type(rule).apply is NormRule.apply
        if link.transforms and rule.reach != "tensor":
            if not scales or limit != "last step":
                raise ValueError(_refusal(link, scales))
            found.append(link)
        if not plain:  # else a rule inside is asked for its limit alone
            found += _too_far(link.children, limit)
    return found


def _refusal(link: Link, scales: bool) -> str:
    """Why a rule cannot be released, and the two ways out."""
    reach = link.transform.reach
    late = "limit='last step', with which it scales by the factor from the norm of the step before"
    if not scales:
        late = "limit='last step' for a rule that only scales, as ClipNorm(1.0, dim='global') does"
    sentence = (
        f"release: {link.path} looks at a whole {reach}, and each gradient is gone before the next "
        f"one comes: take a rule that looks at single tensors, as ClipNorm(1.0) does, or {late}"
    )
    if type(link.transform).__module__.partition(".")[0] != __name__.partition(".")[0]:
        sentence += '. A class of your own that treats each tensor by itself says reach = "tensor"'
    return sentence
