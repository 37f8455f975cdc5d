"""The class `ChainRunner`, the base of `Modular`, `Clipper` and `AfterStep`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.core.argument_values import got, is_row
from torchzero_clip.core.bucket import Bucket, in_buckets
from torchzero_clip.core.chain import Chain, bind, pass_over, prepare, send
from torchzero_clip.core.cohort import Roster
from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.engine import Engine, Records
from torchzero_clip.core.gradients import GradPlace, Where
from torchzero_clip.core.link import Link
from torchzero_clip.core.planning import planned
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.step import Step, one_number
from torchzero_clip.core.torch_private import untraced
from torchzero_clip.core.transform import Transform
from torchzero_clip.engines import AT_ONCE, Compiled, Eager
from torchzero_clip.optimizer import averages, norm_groups
from torchzero_clip.optimizer import rounding as roundings
from torchzero_clip.optimizer.cut_parameters import refuse_cuts
from torchzero_clip.optimizer.fingerprint import shared_start
from torchzero_clip.optimizer.keys import GroupKeys, of_group, refuse_nameless, refuse_no_params
from torchzero_clip.optimizer.loading import loading, names_to_keep
from torchzero_clip.optimizer.metrics import metrics_of
from torchzero_clip.optimizer.saving import has_rate, on_saving, safe_to_save
from torchzero_clip.optimizer.state_layout import StateLayout


class ChainRunner(Optimizer):
    """The base of all classes that send the tensors of parameter groups through a chain.

    A runner owns the chain, the parameter groups, the keys of hyperparameters, the state, the
    engine and the records of the last step. A subclass defines the method that runs a step. It also
    defines which buckets the first link receives (`_start`), and how the buckets of the last link
    are used (`_end`).

    Args:
        params: Parameters, named parameters, or groups of either.
        *transforms: The chain, first to last.
        compile, process_group, grad, fused, rounding, state_dtype: As for `Modular`.
    """

    _options: Mapping[str, Any] = {  # the options and their defaults, which repr does not show
        "fused": False,
        "compile": False,
        "rounding": "nearest",
        "state_dtype": "float32",
        "grad": "grad",
    }
    _moves_params = False  # whether steps subtract an update, so that the chain needs a rate
    _measures = True  # whether a step computes values that only its caller might read
    _is_trial = False  # whether this rank runs the chain alone, without the other ranks
    _how_to_name = "pass model.named_parameters() instead of model.parameters()"
    _memory_unit = "all parameters"  # explain() gives the memory of the engine in this unit

    @untraced  # torch.compile would lose the attributes that are set on an optimizer
    def __init__(
        self,
        params: Iterable[Any],
        *transforms: Transform,
        compile: bool,
        process_group: Any,
        grad: Where,
        fused: bool = False,
        rounding: str = "nearest",
        state_dtype: str = "float32",
    ) -> None:
        owner = type(self).__name__
        refuse_no_params(owner, params)
        roundings.check_options(owner, fused, compile, rounding, state_dtype, process_group)
        self._build(Chain(*transforms), fused, compile, rounding, state_dtype, grad)
        self.process_group = process_group
        if is_row(params):  # torch accepts only a dict as a group, no other mapping
            params = [dict(x) if isinstance(x, Mapping) else x for x in params]
        super().__init__(params, dict(self.keys.defaults))
        on_saving(self)

    def _build(
        self, chain: Chain, fused: bool, compile: bool, rounding: str, state_dtype: str, grad: Any
    ) -> None:
        """Set all attributes that follow from the chain and the options."""
        if not len(chain):
            raise ValueError(
                f"{type(self).__name__} requires at least one transform: pass transforms after "
                "the parameters, for example ClipNorm(1.0), Adam(), LR(1e-3)"
            )
        self.chain = chain
        self.fused = fused
        self.compile = compile
        self.rounding = rounding
        self.state_dtype = state_dtype
        self.grad = grad
        self.place = GradPlace(grad)
        self.links = bind(chain, narrow=state_dtype == "bfloat16")
        self.engine: Engine = Compiled(self.links) if compile else Eager(fuses=fused)
        self.keys = self._keys_of(self.links)
        self.keys.check_structure(self.links)
        self._plan = planned(self.links, self.keys.defaults)
        averages.check_order(self.links)
        self.layout = StateLayout(self.keys.links, rounding)
        self._has_begun = False  # whether a step or init_state() has begun
        self._scheduled: set[str] = set()  # the keys whose values a schedule changes
        self._records: dict[str, Any] = {}  # what the links measured in the last step
        self._reported: dict[str, Any] = {}  # values that report() keeps for the next step
        self._roster = Roster()
        self._seen_on_norms: tuple[Any, ...] = ()  # the norm settings of groups in the last step
        self._inside = False  # whether the code runs inside averaged()
        # "nearest" from the first metrics() on, so that steps measure the updates that are lost
        self._rounds = "" if rounding == "nearest" else rounding

    def _keys_of(self, links: Sequence[Link]) -> GroupKeys:
        """Return the keys of the hyperparameters in the parameter groups."""
        return GroupKeys(links)

    # ------------------------------------------------------------------ the step

    def _given(self, loss: Any) -> Step:
        """Return the next step. Its loss is the reported loss, or else the closure's loss."""
        if not (self._has_begun or torch.compiler.is_compiling() or has_rate(self.param_groups)):
            # a first step at a rate of 0 must make all state
            self._make_state(self.place.of, "step()")
        own_loss = None if loss is None else one_number(loss)
        return self._begin("step()", self._reported.pop("loss", own_loss))

    def _through(self, step: Step) -> Records:
        """Send the gradients of a step through the chain."""
        if step.engine.fuses:
            step.tails = self._plan.tails
            step.factors = self._plan.factors
        with step:
            buckets = self._start(step)
            self._check_dtypes(buckets)
            for link in self.links:
                buckets = send(link, buckets)  # an empty list ends the step
            self._end(step, buckets)
        if step.ended_early:
            self._complete(step)
        return step.record

    def _check_dtypes(self, buckets: list[Bucket]) -> None:
        """Check the dtypes of state if the dtype of a parameter may have changed."""
        if torch.compiler.is_compiling():
            return
        for bucket in buckets:
            cohort = bucket.cohort
            if not cohort.has_checked_dtypes:
                roundings.refuse_float16(type(self).__name__, self.rounding, bucket.settings)
                self.layout.check_dtypes(cohort, bucket.settings, self.state)
                roundings.drop_unused(cohort.dtype, bucket.param_states)
                cohort.has_checked_dtypes = True  # a parameter of another dtype has a new cohort

    def _start(self, step: Step) -> list[Bucket]:
        """Return the buckets that the first link receives."""
        raise NotImplementedError

    def _end(self, step: Step, buckets: list[Bucket]) -> None:
        """Use the buckets that the last link returns."""
        raise NotImplementedError

    def _complete(self, step: Step) -> None:
        """Add the missing counts, state and metrics after a skipped step that ended early.

        If the engine keeps the skip flag on the device, it computes the whole step and discards the
        result, so nothing is missing. New state has its first values. Metrics that no rule measured
        are NaN.
        """
        pass_over(self.links, step)
        with step.unmeasured() as rest:
            buckets = in_buckets(rest, self.place.of)
            prepare(buckets, self.links)
            if any([bucket.rounding == "nearest" for bucket in buckets]):
                unknown = torch.full((), torch.nan, device=buckets[0].device)
                rest.record["rounding"] = {"moving": unknown, "lost": unknown}
        for path, record in rest.record.items():
            step.record.setdefault(path, record)

    def _begin(self, name: str = "a step", loss: Any = None) -> Step:
        """Return a new step. Check keys and hyperparameters if they have changed."""
        averages.refuse(self, name, shown=True)
        self.keys.check_groups(self.param_groups)
        self._check_norm_groups()
        live = self.keys.defaults, self.keys.seen
        more = self.process_group, self._roster, loss, live, self._rounds, self.place
        if torch.compiler.is_compiling():  # it loses what is set on an optimizer, not in a dict
            self._records.clear()
            return Step(self.param_groups, self.state, self._records, AT_ONCE, *more)
        self._has_begun = True
        kind = self._measures, self._rounds, self.process_group, self._seen_on_norms
        trial = self._is_trial
        return Step(self.param_groups, self.state, {}, self.engine, *more, kind, is_trial=trial)

    def _check_norm_groups(self) -> None:
        """Check the norm settings of groups and parameters if they have changed."""
        if torch.compiler.is_compiling():
            return
        settings = norm_groups.settings_of(self.param_groups)
        before = self._seen_on_norms
        if len(settings) == len(before) and all(map(operator.is_, settings, before)):
            return
        for g, group in enumerate(self.param_groups):
            of_group(g, norm_groups.check, group)
            norm_groups.check_tags(g, group, self.process_group)
        self._seen_on_norms = settings

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients as torch does. Gradients outside of `.grad` become zeros."""
        super().zero_grad(set_to_none)
        self.place.zero(averages.params_of(self))

    def report(self, *, loss: Tensor | float) -> None:
        """Pass the loss to the next step, for guards and links that need the loss.

        The loss stays on the device.

        If you pass a closure to `step`, its loss is reported automatically.

        Example:
            >>> import torch
            >>> from torchzero_clip import LR, Adam, Modular, SkipSpike
            >>> model = torch.nn.Linear(10, 1)
            >>> opt = Modular(model.parameters(), SkipSpike(), Adam(), LR(1e-3))
            >>> loss = model(torch.randn(64, 10)).square().mean()
            >>> loss.backward()
            >>> opt.report(loss=loss)
            >>> opt.step()
        """
        self._reported["loss"] = one_number(loss)
        if self._reported["loss"] is None:
            raise TypeError(
                f"report: loss= must be a number or a tensor with one element, got {got(loss)}"
            )

    # ------------------------------------------------------------------ reports

    def skipped(self) -> bool:
        """Return whether a guard skipped the last step. This synchronizes with the device."""
        records = [record for record in self._records.values() if isinstance(record, dict)]
        return any([bool(record.get("why", 0)) for record in records])

    def safe_to_save(self, steps: int = 1) -> bool:
        """Return whether a checkpoint of the current state is worth keeping.

        It is worth keeping if no guard skipped any of the last `steps` steps, and if all weights
        and state are finite. Without a guard, only the second condition counts.

        The method synchronizes with the device once. In a distributed run all ranks must call it,
        and all ranks get the same answer.

        Example:
            >>> import torch
            >>> from torchzero_clip import LR, Adam, Guard, Modular
            >>> model = torch.nn.Linear(10, 1)
            >>> opt = Modular(model.parameters(), Guard(), Adam(), LR(1e-3))
            >>> opt.safe_to_save(steps=10)
            True
        """
        return safe_to_save(self, steps, {})

    def metrics(self) -> dict[str, Tensor]:
        """Return the measurements of the last step, under names such as "ClipNorm/norm".

        Each norm rule has four measurements:

        - "norm" is the norm before the rule.
        - "limit" is the largest norm that the rule allows.
        - "factor" is the number that the rule multiplied by.
        - "clipped" is whether the norm was above the limit.

        Each value is a 0-dim tensor, or a vector with one element per unit.

        The tensors stay on the device. Nothing is computed before this method is called, and it
        does not synchronize. `to_floats` copies all values to the host in one transfer.
        """
        return metrics_of(self._records)

    # ------------------------------------------------------------------ state and groups

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state of every parameter now instead of at the first gradient.

        Distributed checkpointing takes a fake step to create state, and the fake step advances
        counters. After this method it needs no fake step. If a rule keeps state of sharded
        matrices, all ranks must call this method.
        """
        self._make_state(lambda p: p if p.requires_grad else None, "init_state()")

    def _make_state(self, gradient: Callable[[Tensor], Tensor | None], caller: str) -> None:
        """Create the state of all parameters for which `gradient` returns a tensor."""
        with self._begin(caller) as step:
            buckets = in_buckets(step, gradient)
            self._check_dtypes(buckets)
            prepare(buckets, self.links)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and check its keys against the hyperparameters of the chain."""
        if not isinstance(param_group, Mapping) or "params" not in param_group:
            shown = list(param_group) if isinstance(param_group, Mapping) else param_group
            raise TypeError(f"a parameter group must be a dict with 'params', got {shown!r}")
        group = dict(param_group)
        self.keys.tidy(group)
        shared_state = group.pop("chain", {})
        if not isinstance(shared_state, Mapping):
            raise TypeError(
                "the value of 'chain' in a parameter group must be a dict from "
                f"state_dict()['param_groups'], got {shared_state!r}"
            )
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            self._check_params(group)
            start = averages.shown_at_start(self.keys.links)
            group["chain"] = start | shared_start(self.keys.links, group["params"], shared_state)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_params(self, group: dict[str, Any]) -> None:
        """Raise an error if the chain does not support the parameters of a group."""
        refuse_cuts(self.keys.links, group["params"])
        roundings.refuse_float16(type(self).__name__, self.rounding, group)
        for p in group["params"]:
            self.engine.check(p.device)
        refuse_nameless(self.keys.links, group, self._how_to_name)
        norm_groups.check_tags(len(self.param_groups) - 1, group, self.process_group)

    # ------------------------------------------------------------------ saving and loading

    def load_state_dict(
        self, state_dict: dict[str, Any], *, keep: str | Sequence[str] = ()
    ) -> None:
        """Load a state dict of the same chain. Other chains raise an error before anything changes.

        The hyperparameters of the checkpoint replace those of this optimizer. A warning names each
        hyperparameter whose value changes.

        Args:
            state_dict: The result of `state_dict()`.
            keep: The names of hyperparameters, such as "max_norm", that keep their present values.

        Example:
            >>> import torch
            >>> from torchzero_clip import LR, Adam, Modular
            >>> model = torch.nn.Linear(10, 1)
            >>> opt = Modular(model.parameters(), Adam(), LR(1e-3))
            >>> opt.load_state_dict(opt.state_dict(), keep=("lr",))
        """
        averages.refuse(self, "load_state_dict()")
        with loading(self, state_dict, names_to_keep(keep)):
            super().load_state_dict(state_dict)
        self.keys.forget()
        self.engine.forget("load_state_dict()")

    def __repr__(self) -> str:
        changed = [
            f"{name}={getattr(self, name)!r}"
            for name, default in self._options.items()
            if getattr(self, name) != default
        ]
        lines = [f"{type(self).__name__}({', '.join([*map(repr, self.chain), *changed])})"]
        for i, group in enumerate(self.param_groups):
            shown = {key: value for key, value in group.items() if key not in RESERVED}
            lines.append(f"  group {i}: {counted(len(group['params']), 'parameter')}, {shown}")
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        averages.refuse(self, "a copy")
        if self.process_group is not None:
            raise TypeError(
                f"a {type(self).__name__} with a process_group cannot be copied or pickled: "
                "construct a new optimizer with the same transforms, and pass the "
                "state_dict() of the old optimizer to load_state_dict() of the new optimizer"
            )
        options = {name: getattr(self, name) for name in self._options}
        return {**super().__getstate__(), "chain": self.chain, **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        is_copy = "chain" in state  # torch also calls this method when it loads a state dict
        if is_copy:
            self.process_group = None
            options = [state.pop(name) for name in self._options]
            self._build(state.pop("chain"), *options)
            known = state["defaults"].keys() & self.keys.defaults
            self.keys.defaults.update({key: state["defaults"][key] for key in known})
        super().__setstate__(state)
        if is_copy:
            on_saving(self)
