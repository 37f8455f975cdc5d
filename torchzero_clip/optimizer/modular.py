"""Modular: a chain of transforms that is a torch.optim.Optimizer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import Never

from torchzero_clip.core.argument_values import got, is_row
from torchzero_clip.core.bucket import Bucket, in_buckets
from torchzero_clip.core.chain import Chain, bind, end, pass_over, prepare, send
from torchzero_clip.core.cohort import Roster
from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.engine import Engine, Records
from torchzero_clip.core.gradients import GradPlace, Where
from torchzero_clip.core.planning import planned
from torchzero_clip.core.step import Step, evaluate, one_number
from torchzero_clip.core.torch_private import traced, untraced
from torchzero_clip.core.transform import Transform
from torchzero_clip.engines import AT_ONCE, Compiled, Eager
from torchzero_clip.optimizer import averages, exact_weights, norm_groups
from torchzero_clip.optimizer import rounding as roundings
from torchzero_clip.optimizer.chain_meaning import refuse_step, warn_of_size, warn_of_small_state
from torchzero_clip.optimizer.cut_parameters import refuse_cuts
from torchzero_clip.optimizer.explain import explain
from torchzero_clip.optimizer.fingerprint import fingerprint, shared_start
from torchzero_clip.optimizer.keys import (
    GroupKeys,
    of_group,
    refuse_arguments,
    refuse_nameless,
    refuse_no_params,
)
from torchzero_clip.optimizer.loading import loading
from torchzero_clip.optimizer.metrics import metrics_of
from torchzero_clip.optimizer.places import warn_of_places
from torchzero_clip.optimizer.saving import has_rate, on_saving, safe_to_save
from torchzero_clip.optimizer.source_limits import unwritten
from torchzero_clip.optimizer.state_layout import StateLayout


class Modular(Optimizer):
    """Send the gradients through a chain of transforms and subtract what comes out.

    Args:
        params: Parameters, named parameters, or groups of either. A group may override every live
            hyperparameter of the chain: `{"params": ..., "max_norm": 0.5}`.
        *transforms: The chain, first to last.
        fused: Let factors, decays and learning rates wait for the last pass, and use torch's fused
            optimizers where the end of the chain is one; False runs every link by its own formula.
            The results agree to rounding.
        compile: Compile the operators of links between two norms into one kernel, at the first
            step. It takes a second, needs a C++ compiler on CPU and Triton on CUDA, and happens
            again for no change of a live value or of which parameters have gradients.
        rounding: How parameters in bfloat16 and float16 take the update: "nearest", which loses
            what is smaller than half a unit in the last place, or one that does not: "exact", which
            has float32 weights behind bfloat16, "kahan" or "stochastic". By default the first, with
            a warning where there are such parameters.
        state_dtype: "bfloat16" keeps state in the shape of the parameters in half the memory,
            rounded up or down at random; links compute with it in float32. Numbers, as norms and
            counts, stay in float32. A link may say otherwise with its own `state_dtype`.
        process_group: Processes that hold other parameters of the same model, the stages of a
            pipeline: norms of a group and of all are taken over all of them.
        grad: Where gradients are, if not in `.grad`: the name of another attribute of parameters,
            as "main_grad", or a function that gives the gradient of one. They are read and written
            there, and `.grad` counts where it is None or missing.

    In a distributed run all ranks call `step()`, `safe_to_save()`, and, if a rule keeps state of
    sharded matrices (SOAP, Shampoo and the like), `state_dict()` and `init_state()`. Every other
    method sends nothing, and may be called on one rank alone.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
    """

    _measures = True  # whether a step takes what somebody may ask of it
    _is_trial = False  # whether this rank takes its steps alone, for a look
    _options: Mapping[str, Any] = {  # and their defaults, for repr
        "fused": True,
        "compile": False,
        "rounding": "nearest",
        "state_dtype": "float32",
        "grad": "grad",
    }
    _keeps_like = "the parameters'"  # whose size the memory has that the engine keeps
    _chose_rounding = True  # until `__init__` has ended, and in a copy
    _makes_steps: bool | None = True  # of the parameters; None where it looks at those of others

    @untraced  # which forgets what is set on an optimizer
    def __init__(
        self,
        params: Iterable[Any],
        *transforms: Transform,
        fused: bool = True,
        compile: bool = False,
        rounding: str | None = None,
        state_dtype: str = "float32",
        process_group: Any = None,
        grad: Where = "grad",
        **others: Never,
    ) -> None:
        refuse_arguments(type(self).__name__, others, Modular.__init__)
        refuse_no_params(type(self).__name__, params)
        options = fused, compile, "nearest" if rounding is None else rounding, state_dtype
        roundings.check_options(type(self).__name__, *options, process_group)
        self._build(Chain(*transforms), *options, grad)
        if self._makes_steps:
            warn_of_size(self.links, self.chain)
        elif self._makes_steps is False:
            refuse_step(type(self).__name__, self.links)
        self.process_group = process_group
        if is_row(params):  # torch takes a group for one in a dict alone
            params = [dict(x) if isinstance(x, Mapping) else x for x in params]
        super().__init__(params, dict(self.keys.defaults))
        on_saving(self)
        warn_of_places(self)
        warn_of_small_state(self)
        self._chose_rounding = rounding is not None
        self._warn_of_lost_updates()

    def _build(
        self, chain: Chain, fused: bool, compile: bool, rounding: str, state_dtype: str, grad: Any
    ) -> None:
        if not len(chain):
            raise ValueError(
                f"{type(self).__name__} needs at least one transform: "
                "give ClipNorm(1.0), Adam(), LR(1e-3) and the like after the parameters"
            )
        self.chain, self.fused, self.compile = chain, fused, compile
        self.rounding, self.state_dtype = rounding, state_dtype
        self.grad, self.place = grad, GradPlace(grad)
        self.links = bind(chain, narrow=state_dtype == "bfloat16")
        self.engine: Engine = Compiled(self.links) if compile else Eager(fuses=fused)
        self.keys = GroupKeys(self.links)
        self.keys.check_structure(self.links)
        self._plan = planned(self.links, self.keys.defaults)
        averages.check_order(self.links)
        self.layout = StateLayout(self.keys.links, rounding)
        self._seen_dtypes: list[list[torch.dtype]] = []
        self._scheduled: set[str] = set()  # keys whose values schedules move
        self._records, self._reported = dict[str, Any](), dict[str, Any]()  # of the next step
        self._roster = Roster()
        self._said_on_norms: tuple[Any, ...] = ()  # by groups and parameters, a step before
        self._inside = False  # averaged()
        self._rounds = "" if rounding == "nearest" else rounding  # "nearest" where it is measured

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    @traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the gradients through the chain and move the parameters."""
        loss = None if closure is None else evaluate(closure)
        step = self._given(loss)
        self._records = step.engine.step(step, self._through)  # or as an earlier one was done
        return loss

    def _given(self, loss: Any) -> Step:
        """The step that comes, with its loss: what was reported, or that of a closure."""
        if not (self._seen_dtypes or torch.compiler.is_compiling() or has_rate(self.param_groups)):
            self._make_state(self.place.of)  # a first step that moves nothing is to make all
        told = None if loss is None else one_number(loss)
        return self._begin("step()", self._reported.pop("loss", told))

    def _through(self, step: Step) -> Records:
        """Send the gradients of a step through the chain."""
        if step.engine.fuses:
            step.tails = self._plan.tails
            step.factors = self._plan.factors
        with step:
            buckets = self._start(step)
            for link in self.links:
                buckets = send(link, buckets)  # an empty list ends the step
            self._end(step, buckets)
        if step.ended_early:
            self._complete(step)
        return step.record

    def _complete(self, step: Step) -> None:
        """Give a skipped step that ended early the counts, the state and the metrics that it lacks.

        An engine that keeps the flag on the device computes the whole step and discards it, so it
        has all three. State begins at its first values, and metrics that nobody measured are NaN.
        """
        pass_over(self.links, step)
        with step.unmeasured() as rest:
            buckets = in_buckets(rest, self.place.of)
            prepare(buckets, self.links)
            if self._makes_steps and any([bucket.rounding == "nearest" for bucket in buckets]):
                unknown = torch.full((), torch.nan, device=buckets[0].device)
                rest.record["rounding"] = {"moving": unknown, "lost": unknown}
        for path, record in rest.record.items():
            step.record.setdefault(path, record)

    def _start(self, step: Step) -> list[Bucket]:
        """What the first link sees."""
        return in_buckets(step, moves=True)

    def _end(self, step: Step, buckets: list[Bucket]) -> None:
        """Take what the last link returns, and run the tail of the chain."""
        end(buckets)
        if step.meters:
            step.record["rounding"] = step.lost()

    def _begin(self, name: str = "a step", loss: Any = None) -> Step:
        """A step of now; checked are keys, live values and dtypes that are others than before."""
        averages.refuse(self, name, shown=True)
        self.keys.check_groups(self.param_groups)
        self._check_norm_groups()
        live = self.keys.defaults, self.keys.seen
        more = self.process_group, self._roster, loss, live, self._rounds, self.place
        if torch.compiler.is_compiling():  # it forgets what is set on an optimizer, not in a dict
            self._records.clear()
            return Step(self.param_groups, self.state, self._records, AT_ONCE, *more)
        dtypes = [[p.dtype for p in group["params"][:1]] for group in self.param_groups]
        if dtypes != self._seen_dtypes:
            if self._seen_dtypes:  # before the first step there is no state, or it was checked
                self.layout.check_dtypes(self.param_groups, self.state)
            self._seen_dtypes = dtypes
        kind = self._measures, self._rounds, self.process_group, self._said_on_norms
        step = Step(self.param_groups, self.state, {}, self.engine, *more, kind)
        step.is_trial = self._is_trial
        return step

    def _check_norm_groups(self) -> None:
        """Check what groups and parameters say about norms, if it changed since the last step."""
        if torch.compiler.is_compiling():
            return
        said, before = norm_groups.said(self.param_groups), self._said_on_norms
        if len(said) == len(before) and all(map(operator.is_, said, before)):
            return
        for g, group in enumerate(self.param_groups):
            of_group(g, norm_groups.check, group)
            norm_groups.check_tags(g, group, self.process_group)
        self._said_on_norms = said

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients, as torch does; those that are not in `.grad` become zeros."""
        super().zero_grad(set_to_none)
        self.place.zero(averages.params_of(self))

    def report(self, *, loss: Tensor | float) -> None:
        """Tell the next step its loss, which guards and links that ask for it see on the device.

        A closure's loss they see by themselves.

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
            raise TypeError(f"report: loss must be a number or a tensor of one, got {got(loss)}")

    def skipped(self) -> bool:
        """Whether a guard skipped the last step. It waits for the device."""
        records = [record for record in self._records.values() if isinstance(record, dict)]
        return any([bool(record.get("why", 0)) for record in records])

    def safe_to_save(self, steps: int = 1) -> bool:
        """Whether a checkpoint of now is worth keeping: no guard skipped one of the last `steps`
        steps, and all weights and state are finite.

        Without a guard the numbers alone count. It synchronizes with the device once. In a
        distributed run all ranks must call it, and all get the same answer.

        Example:
            >>> import torch
            >>> from torchzero_clip import LR, Adam, Guard, Modular
            >>> model = torch.nn.Linear(10, 1)
            >>> opt = Modular(model.parameters(), Guard(), Adam(), LR(1e-3))
            >>> opt.safe_to_save(steps=10)
            True
        """
        return safe_to_save(self, self.keys.links, steps, {})

    def metrics(self) -> dict[str, Tensor]:
        """What the norm rules measured in the last step, under names such as "ClipNorm/norm".

        For every rule "norm" before it, its "limit", the "factor" it scaled by, and whether it
        "clipped": 0-dim or one entry a unit, on the device; nothing is computed or waited for until
        this is called. `to_floats` brings all to the host at once.

        Where parameters in half precision round to the nearest, also "rounding/lost": of the
        entries that a step would have moved in float32 the share that stayed. It is measured from
        the step behind the first call on.
        """
        if self.rounding == "nearest" and roundings.narrow(self):
            self._rounds = "nearest"
        return metrics_of(self._records)

    def explain(self, *, parameters: bool = False) -> str:
        """What the chain means where one might expect something else, and the plan of a step: what
        each link reads and writes, and what waits for a later pass.

        A step of a small model with the same chain is watched, with gradients that the limits cut.
        Where a rule takes one norm over several branches, it says how much of it each has, in the
        gradients that are there.

        Args:
            parameters: Add a table of the groups, rates, decays and links of parameters. Those that
                are alike but for their rates and the numbers in their names share a row.

        Example:
            >>> import torch
            >>> from torchzero_clip import LR, Adam, ClipNorm, Modular
            >>> model = torch.nn.Linear(10, 1)
            >>> opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
            >>> plan = opt.explain()
            >>> print(next(line for line in plan.splitlines() if line.startswith("ClipNorm(")))
            ClipNorm(max_norm=1.0), Adam(), LR(lr=0.001)
        """
        return explain(self, Modular, parameters)

    def to_source(self, name: str = "MyOptimizer") -> str:
        """The chain as one file of plain torch, with a class of this name.

        The file imports torch alone. Its groups have the same keys, and its state dict and this
        optimizer's load into each other. Links that cannot be written so are a SourceError.

        Args:
            name: What the class is called.

        Example:
            >>> import torch
            >>> from torchzero_clip import LR, Adam, ClipNorm, Modular
            >>> model = torch.nn.Linear(10, 1)
            >>> opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
            >>> source = opt.to_source("ClippedAdam")
            >>> print(next(line for line in source.splitlines() if line.startswith("class")))
            class ClippedAdam(torch.optim.Optimizer):
        """
        from torchzero_clip.source import SourceError, to_source  # which no other call needs

        if why := unwritten(self):
            raise SourceError(f"to_source: {why}")
        mark = fingerprint(self.keys.links)
        return to_source(self.chain, self.links, self.defaults, mark, name)

    @torch.no_grad()
    def init_state(self) -> None:
        """Make the state of every parameter now, as its first gradient would.

        Distributed checkpointing takes a fake step to make state, which moves counters; with this
        it need not. If a rule keeps state of sharded matrices, all ranks must call it.
        """
        self._make_state(lambda p: p if p.requires_grad else None)

    def _make_state(self, gradient: Callable[[Tensor], Tensor | None]) -> None:
        """Make the state of the parameters for which this is a tensor."""
        with self._begin() as step:
            prepare(in_buckets(step, gradient), self.links)

    # ------------------------------------------------------------------ weights for evaluation

    def averaged(
        self, name: str | None = None, *, model: Module | None = None
    ) -> AbstractContextManager[None]:
        """The weights for evaluation in the memory of the parameters, as long as it lasts.

        The training weights come back bit for bit at its end. Inside it there is no step, and
        nothing is saved or loaded.

        Args:
            name: The link whose weights are taken; the last that has some unless it is given.
            model: A model that FSDP2 shards. It may have gathered weights, of its root after an
                evaluation, and lets go of them at both ends.

        Example:
            >>> import torch
            >>> from torchzero_clip import LR, Adam, Modular, WeightEMA
            >>> model = torch.nn.Linear(10, 1)
            >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), WeightEMA(0.999))
            >>> with opt.averaged():
            ...     out = model(torch.randn(64, 10))
        """
        return averages.averaged(self, name, model)

    def averaged_state_dict(self, model: Module, name: str | None = None) -> dict[str, Any]:
        """The model's state dict with the weights for evaluation; the model stays as it is.

        Args:
            model: The model that is trained.
            name: As for `averaged`.
        """
        with torch.no_grad():
            return averages.averaged_state_dict(self, model, name)

    def eval(self, *, model: Module | None = None) -> None:
        """Put the weights for evaluation into the parameters until `train()`; for a chain that has
        none do nothing.

        It is for loops that ask an optimizer for it. `state_dict()` in between has the training
        weights, and loading it goes on from there.

        Args:
            model: A model that FSDP2 shards, as for `averaged`.
        """
        averages.evaluate(self, model)

    def train(self, *, model: Module | None = None) -> None:
        """Put the training weights back that `eval()` has taken out.

        Args:
            model: A model that FSDP2 shards, as for `averaged`.
        """
        averages.train(self, model)

    # ------------------------------------------------------------------ float32 behind bfloat16

    exact_state_dict = exact_weights.exact_state_dict
    load_exact = exact_weights.load_exact

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys are checked against the live hyperparameters of the chain."""
        if not isinstance(param_group, Mapping) or "params" not in param_group:
            given = list(param_group) if isinstance(param_group, Mapping) else param_group
            raise TypeError(f"a parameter group must be a dict with 'params', got {given!r}")
        group = dict(param_group)
        self.keys.tidy(group)
        held = group.pop("chain", {})
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            self._check_params(group)
        except Exception:
            self.param_groups.pop()
            raise
        group["chain"] = shared_start(self.keys.links, group["params"], held)
        self._warn_of_lost_updates()

    def _warn_of_lost_updates(self) -> None:
        """Warn if parameters in half precision round to the nearest and nobody chose that."""
        if self._makes_steps and not self._chose_rounding:
            roundings.warn_of_lost_updates(self)

    def _check_params(self, group: dict[str, Any]) -> None:
        """Raise a sentence where the chain cannot take the parameters of a group."""
        refuse_cuts(self.keys.links, group["params"])
        roundings.refuse_float16(type(self).__name__, self.rounding, group)
        for p in group["params"]:
            self.engine.check(p.device)
        refuse_nameless(self.keys.links, group)
        index = len(self.param_groups) - 1
        norm_groups.check_tags(index, group, self.process_group)

    # ------------------------------------------------------------------ saving and loading

    def load_state_dict(
        self, state_dict: dict[str, Any], *, keep: str | Sequence[str] = ()
    ) -> None:
        """Load a state dict of the same chain; raises before anything changes if it is another.

        Live values come with it, and a warning names those that were given otherwise.

        Args:
            state_dict: What `state_dict()` gave.
            keep: The names of live values that stay as they were given, as "max_norm".

        Example:
            >>> import torch
            >>> from torchzero_clip import LR, Adam, Modular
            >>> model = torch.nn.Linear(10, 1)
            >>> opt = Modular(model.parameters(), Adam(), LR(1e-3))
            >>> opt.load_state_dict(opt.state_dict(), keep=("lr",))
        """
        averages.refuse(self, "load_state_dict()")
        names = (keep,) if isinstance(keep, str) else tuple(keep)
        with loading(self, state_dict, names):
            super().load_state_dict(state_dict)
        self.keys.forget()
        self.engine.forget("load_state_dict()")

    def __repr__(self) -> str:
        given = [(name, getattr(self, name), default) for name, default in self._options.items()]
        options = [f"{name}={value!r}" for name, value, default in given if value != default]
        lines = [f"{type(self).__name__}({', '.join([*map(repr, self.chain), *options])})"]
        for i, group in enumerate(self.param_groups):
            shown = {key: value for key, value in group.items() if key not in RESERVED}
            lines.append(f"  group {i}: {len(group['params'])} parameters, {shown}")
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        averages.refuse(self, "a copy")
        if self.process_group is not None:
            raise TypeError(
                f"a {type(self).__name__} with a process_group is neither copied nor pickled: make "
                "another with the same chain, and load its state_dict"
            )
        options = {name: getattr(self, name) for name in Modular._options}
        return {**super().__getstate__(), "chain": self.chain, **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        copied = "chain" in state  # torch also comes here when it loads
        if copied:
            self.process_group = None
            options = [state.pop(*option) for option in Modular._options.items()]
            self._build(state.pop("chain"), *options)
            known = state["defaults"].keys() & self.keys.defaults
            self.keys.defaults.update({key: state["defaults"][key] for key in known})
        super().__setstate__(state)
        if copied:
            on_saving(self)
