"""The class `Modular`: a torch.optim.Optimizer that runs a chain of transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import Never

from torchzero_clip.core.autocast import without_autocast
from torchzero_clip.core.bucket import Bucket, in_buckets
from torchzero_clip.core.chain import end
from torchzero_clip.core.gradients import Where
from torchzero_clip.core.step import Step, evaluate
from torchzero_clip.core.torch_private import traced, untraced
from torchzero_clip.core.transform import Transform
from torchzero_clip.optimizer import averages, exact_weights
from torchzero_clip.optimizer import rounding as roundings
from torchzero_clip.optimizer.chain_runner import ChainRunner
from torchzero_clip.optimizer.construction_warnings import (
    warn_of_construction,
    warn_of_lost_updates,
)
from torchzero_clip.optimizer.explain import explain
from torchzero_clip.optimizer.fingerprint import fingerprint
from torchzero_clip.optimizer.keys import refuse_arguments
from torchzero_clip.optimizer.replaced_parameters import warn_of_replaced_parameters
from torchzero_clip.optimizer.source_limits import why_not_written


class Modular(ChainRunner):
    """Send the gradients through a chain of transforms and subtract the result.

    Args:
        params: Parameters, named parameters, or groups of either. A group may override every
            hyperparameter of the chain: `{"params": ..., "max_norm": 0.5}`.
        *transforms: The chain, first to last.
        fused: True runs the end of the chain in one pass over memory if that is possible. For
            example, `Adam`, `WeightDecay` and `LR` are one call of torch's fused AdamW. False runs
            every link with its own formula. The results agree up to rounding.
        compile: Compile the operators of the links between two norms into one kernel, at the first
            step. Compilation takes about a second. It needs a C++ compiler on CPU and Triton on
            CUDA. A changed hyperparameter, or gradients of other parameters, do not need a new
            compilation.
        rounding: How parameters in bfloat16 and float16 are updated. "nearest" loses every update
            of less than half a ULP. "exact" keeps float32 weights for parameters in bfloat16.
            "kahan" carries the lost part of an update over to the next step. "stochastic" rounds up
            or down at random, and loses nothing on average. The default is "nearest", with a
            warning if there are such parameters.
        state_dtype: "bfloat16" stores state with the shape of a parameter in half the memory, with
            stochastic rounding. Links convert the state to float32 for computation. Scalars, such
            as norms and counts, stay in float32. A link can override this option with its own
            `state_dtype`.
        process_group: The processes that hold other parameters of the same model, such as the
            stages of a pipeline. Group norms and global norms cover the parameters of all these
            processes.
        grad: Where gradients are stored, if not in `.grad`: the name of another attribute of
            parameters, such as "main_grad", or a function that returns the gradient of a parameter.
            The gradients are read and written there. If the attribute is None or missing, `.grad`
            is used.

    In a distributed run all ranks must call `step()` and `safe_to_save()`. If a rule keeps state of
    sharded matrices (SOAP or Shampoo, for example), all ranks must also call `state_dict()` and
    `init_state()`. All other methods do not communicate, so a single rank can call them.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
    """

    _options = {**ChainRunner._options, "fused": True}
    _moves_params = True
    _chose_rounding = True  # False only in an optimizer that was made without the argument

    @untraced  # torch.compile would lose the attributes that are set on an optimizer
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
        super().__init__(
            params,
            *transforms,
            fused=fused,
            compile=compile,
            rounding="nearest" if rounding is None else rounding,
            state_dtype=state_dtype,
            process_group=process_group,
            grad=grad,
        )
        warn_of_construction(self)
        self._chose_rounding = rounding is not None
        self._warn_of_lost_updates()

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    @traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the gradients through the chain and move the parameters."""
        loss = None if closure is None else evaluate(closure)
        step = self._given(loss)
        with without_autocast():
            self._records = step.engine.step(step, self._through)  # the engine may replay a step
        return loss

    def _start(self, step: Step) -> list[Bucket]:
        buckets = in_buckets(step, moves=True)
        if not buckets:
            warn_of_replaced_parameters(self.param_groups)
        return buckets

    def _end(self, step: Step, buckets: list[Bucket]) -> None:
        """Subtract the last link's update from the parameters, or run the tail of the chain."""
        end(buckets)
        if step.meters:
            step.record["rounding"] = step.lost()

    # ------------------------------------------------------------------ reports

    def metrics(self) -> dict[str, Tensor]:
        """Return the measurements of the last step, under names such as "ClipNorm/norm".

        Each norm rule has four measurements:

        - "norm" is the norm before the rule.
        - "limit" is the largest norm that the rule allows.
        - "factor" is the number that the rule multiplied by.
        - "clipped" is whether the norm was above the limit.

        Each value is a 0-dim tensor, or a vector with one element per unit.

        If parameters in half precision round to nearest, there is also "rounding/lost", the share
        of lost updates. A lost update would change an element in float32, but rounding removes the
        change. Steps measure this share after the first call of this method.

        The tensors stay on the device. Nothing is computed before this method is called, and it
        does not synchronize. `to_floats` copies all values to the host in one transfer.
        """
        if self.rounding == "nearest" and roundings.has_half_precision(self):
            self._rounds = "nearest"
        return super().metrics()

    def explain(self, *, parameters: bool = False) -> str:
        """Describe anything about the chain that might surprise you, and the plan of a step.

        The plan lists the bytes that each link reads and writes, and the work that is delayed until
        a later pass over memory. `explain` gets the plan from a step of a small model with the same
        chain. The gradients in this step exceed the limits of clipping rules. If a rule computes
        one norm over several branches, the text reports the share of each branch in this norm for
        the present gradients.

        Args:
            parameters: Add a table of the groups, learning rates, decays and links of parameters,
                and of other hyperparameters whose values differ between groups. Parameters that
                differ only in their learning rates and in the numbers in their names share a row.

        Example:
            >>> import torch
            >>> from torchzero_clip import LR, Adam, ClipNorm, Modular
            >>> model = torch.nn.Linear(10, 1)
            >>> opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
            >>> plan = opt.explain()
            >>> print(next(line for line in plan.splitlines() if line.startswith("ClipNorm(")))
            ClipNorm(max_norm=1.0), Adam(), LR(lr=0.001)
        """
        return explain(self, TrialOptimizer, parameters)

    def to_source(self, name: str = "MyOptimizer") -> str:
        """Return the chain as the text of one Python file, with a class of this name.

        The file imports only torch. The parameter groups of the class have the same keys. You can
        load state dicts of the class into this optimizer, and state dicts of this optimizer into
        the class. If a link cannot be written this way, the method raises a `SourceError`.

        Args:
            name: The name of the class.

        Example:
            >>> import torch
            >>> from torchzero_clip import LR, Adam, ClipNorm, Modular
            >>> model = torch.nn.Linear(10, 1)
            >>> opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
            >>> source = opt.to_source("ClippedAdam")
            >>> print(next(line for line in source.splitlines() if line.startswith("class")))
            class ClippedAdam(torch.optim.Optimizer):
        """
        from torchzero_clip.source import SourceError, to_source  # only this method needs it

        if reason := why_not_written(self):
            raise SourceError(f"to_source: {reason}")
        mark = fingerprint(self.keys.links)
        return to_source(self.chain, self.links, self.defaults, mark, name)

    # ------------------------------------------------------------------ averaged weights

    def averaged(
        self, name: str | None = None, *, model: Module | None = None
    ) -> AbstractContextManager[None]:
        """Put the averaged weights into the parameters until the end of the context.

        At the end, the parameters are bitwise the training weights again. Inside the context,
        `step()`, saving and loading raise an error.

        Args:
            name: The link whose averaged weights are used. By default it is the last link that has
                averaged weights.
            model: A model that FSDP2 shards. After an evaluation, the root module of the model may
                still have gathered weights. The context releases these weights at its start and at
                its end.

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
        """Return the model's state dict with the averaged weights. The model does not change.

        Args:
            model: The model that is trained.
            name: As for `averaged`.
        """
        return averages.averaged_state_dict(self, model, name)

    def eval(self, *, model: Module | None = None) -> None:
        """Put the averaged weights into the parameters until `train()` is called.

        Some training loops call `eval()` on every optimizer. The method does nothing if no link of
        the chain has averaged weights. A `state_dict()` between `eval()` and `train()` contains the
        training weights, so training can resume from it.

        Args:
            model: A model that FSDP2 shards, as for `averaged`.
        """
        averages.evaluate(self, model)

    def train(self, *, model: Module | None = None) -> None:
        """Put the training weights back into the parameters after `eval()`.

        Args:
            model: A model that FSDP2 shards, as for `averaged`.
        """
        averages.train(self, model)

    # ------------------------------------------------------------------ float32 weights

    exact_state_dict = exact_weights.exact_state_dict
    load_exact = exact_weights.load_exact

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and check its keys against the hyperparameters of the chain."""
        super().add_param_group(param_group)
        self._warn_of_lost_updates()

    def _warn_of_lost_updates(self) -> None:
        """Warn if parameters in half precision round to nearest by default."""
        if not self._chose_rounding:
            warn_of_lost_updates(self)


class TrialOptimizer(Modular):
    """An optimizer that `explain` runs on one rank alone, with some of the parameters."""

    _is_trial = True
