"""One table of everything that may surprise the user of a chain, for warnings and explain().

Each function in the table yields remarks. `explain()` shows the message of each remark. If the
chain is probably a mistake, the remark also has a remedy, and the constructor warns.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.argument_values import equal
from torchzero_clip.core.link import Link
from torchzero_clip.core.logical_matrices import entry_of
from torchzero_clip.core.names import without_match
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.sharding.ranks import rank_and_world
from torchzero_clip.core.state import state_dtype
from torchzero_clip.core.traits import Smoothing
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.optimizer.branches import links_for
from torchzero_clip.optimizer.chain_meaning import Flow, named_params
from torchzero_clip.optimizer.idle_clips import idle_clips
from torchzero_clip.optimizer.rounding import has_half_precision

if TYPE_CHECKING:
    from torchzero_clip.optimizer.chain_runner import ChainRunner

DECAY_PER_STEP = 1e-3
"""A weight decay of this share of every weight per step, or more, counts as a mistake."""


class Remark(NamedTuple):
    """Something about a chain that may surprise its user.

    Attributes:
        message: A sentence about the chain, for `explain()`.
        remedy: How to change the chain. The constructor warns about each remark with a remedy.
    """

    message: str
    remedy: str = ""


def remarks(optimizer: ChainRunner) -> Iterator[Remark]:
    """Yield a remark for everything about a chain that may surprise its user."""
    for find in REMARKS:
        yield from find(optimizer)


def warn_of_construction(optimizer: ChainRunner) -> None:
    """Warn about everything in a new optimizer that is probably a mistake.

    If a pattern of names matches no parameter, raise ValueError.
    """
    _check_name_patterns(optimizer)
    for message, remedy in [*remarks(optimizer), *_slow_state(optimizer)]:
        if remedy:
            warn(f"{message}: {remedy}")


# ---------------------------------------------------------------------- the size of updates


def _learning_rates(optimizer: ChainRunner) -> Iterator[Remark]:
    """Yield remarks on learning rates without effect, or on a missing learning rate."""
    if not optimizer._moves_params:
        return
    flow = Flow().send(optimizer.links)
    for rate, link in flow.lost:
        yield Remark(
            f"{rate.path} has no effect, because {link.path} after it normalizes the update",
            f"put {rate.path} after {link.path}. To scale the input of {link.path}, use Scale(...)",
        )
    if flow.sized:
        return
    outside = ""
    more = "Schedulers also need an lr"
    if flow.masks:
        outside = f" for parameters outside {flow.masks[0].path}"
        more = "To scale only the updates of certain parameters, use Scale(...)"
    yield Remark(
        f"the chain has no learning rate{outside}, so updates are subtracted without scaling",
        f"add LR(...) at the end of {optimizer.chain!r}, or LR(1.0) for no scaling. {more}",
    )


# ---------------------------------------------------------------------- the order of links


@dataclass
class Before:
    """The links before a link that determine the meaning of the link.

    Attributes:
        rate: The link with the learning rate.
        direction: The last link that decides the direction of updates, such as `Adam`.
        momentum: The last link that averages updates.
        clip: The first link that clips.
        decays: The links with a weight decay after the direction.
    """

    rate: Link | None = None
    direction: Link | None = None
    momentum: Link | None = None
    clip: Link | None = None
    decays: list[Link] = field(default_factory=list)

    @property
    def update(self) -> Link | None:
        """The last link that turned the gradient into an update, or None."""
        return self.rate or self.direction


def _misplaced_links(optimizer: ChainRunner) -> Iterator[Remark]:
    before = Before()
    for link in _links_in_order(optimizer.links):
        rule = link.transform
        if "lr" in rule.live:
            before.rate = link
        elif rule.place == "step" and "weight_decay" in rule.live:
            yield from _misplaced_decay(link, before)
            before.decays.append(link)
        elif rule.leaves in ("own", "ones"):
            if rule.leaves == "ones":
                yield from _misplaced_direction(link, before)
            before.direction = link
            before.decays = []
        elif rule.leaves == "set":
            yield from _minus_sign(link, before)
        elif rule.drops and rule.leaves == "gradient" and not rule.asks:
            yield from _misplaced_accumulator(link, before)
        elif (isinstance(rule, NormRule) and rule.place == "any") or "value" in rule.live:
            if before.rate is not None:
                rate = before.rate.path
                yield Remark(
                    f"{link.path} comes after {rate}, so {link.path} limits the step instead "
                    "of the gradient"
                )
            before.clip = before.clip or link
        elif isinstance(rule, Smoothing):
            before.momentum = link


def _misplaced_decay(link: Link, before: Before) -> Iterator[Remark]:
    rate = before.rate
    direction = before.direction
    if rate is not None:
        share = _number(link.transform, "weight_decay")
        remedy = ""
        if share >= DECAY_PER_STEP:
            remedy = (
                f"put {link.path} before {rate.path}, or use a weight_decay below {DECAY_PER_STEP}"
            )
        yield Remark(
            f"{link.path} comes after {rate.path}, so weight_decay is not multiplied by the "
            f"learning rate, and each step removes the fraction {share} of every weight",
            remedy,
        )
    elif direction is not None and _scales_its_decay(direction.transform):
        yield Remark(
            f"{link.path} after {direction.path} decays weights far too much, because "
            f"{direction.path} estimates the step size and does not scale {link.path}",
            f"remove {link.path}, and pass weight_decay to {direction.path}",
        )


def _misplaced_direction(link: Link, before: Before) -> Iterator[Remark]:
    """Yield remarks on a link, such as `Adam`, whose updates have elements near 1."""
    path = link.path
    for decay in before.decays:
        yield Remark(
            f"{decay.path} before {path} is L2 regularization, as in torch.optim.Adam; after "
            f"{path}, it would be decoupled weight decay, as in torch.optim.AdamW"
        )
    if before.direction is not None and before.direction.transform.leaves == "ones":
        other = before.direction.path
        yield Remark(f"{path} after {other} receives the updates of {other}, not the gradient")
    betas: tuple[Any, ...] = getattr(link.transform, "betas", ())
    if len(betas) >= 2 and not isinstance(betas[0], Tensor) and betas[0] > betas[1]:
        yield Remark(
            f"{path} has betas={betas}, whose first value is larger than the second; usually the "
            "first value is smaller"
        )
    if before.momentum is not None and _averages_updates(link.transform):
        momentum = before.momentum.path
        yield Remark(
            f"{path} after {momentum} averages the gradient twice, because the first beta of "
            f"{path} is a momentum too",
            f"remove {momentum}" if before.direction is None else "",
        )


def _minus_sign(link: Link, before: Before) -> Iterator[Remark]:
    if before.update is not None and _number(link.transform, "factor") < 0:
        yield Remark(
            f"{link.transform!r} after {before.update.path} reverses the step",
            "remove the minus sign, because the optimizer subtracts updates. To maximize, put "
            "Scale(-1) first",
        )


def _misplaced_accumulator(link: Link, before: Before) -> Iterator[Remark]:
    if before.update is not None:
        path = before.update.path
        yield Remark(
            f"{link.path} after {path} averages updates that {path} has computed from parts of a "
            f"batch; to average gradients, put {link.path} first"
        )
    elif before.clip is not None:
        clip = before.clip.path
        yield Remark(
            f"{clip} before {link.path} clips the gradients of parts of a batch, not their mean"
        )


def _averages_updates(rule: Any) -> bool:
    """Return whether a rule with second moments also averages the update."""
    betas = getattr(rule, "betas", None)
    if betas is None or getattr(rule, "momentum", True) is False:
        return False
    return isinstance(betas[0], Tensor) or betas[0] > 0


def _scales_its_decay(rule: Any) -> bool:
    return rule.leaves == "own" and "weight_decay" in rule.live


def _links_in_order(links: Sequence[Link]) -> Iterator[Link]:
    """Yield, in order, the links that all parameters pass."""
    for link in [link for link in links if link.transforms]:
        if link.transform.inner == "chain" and not link.transform.asks:
            yield from _links_in_order(link.children)
        else:
            yield link


# ---------------------------------------------------------------------- values


def _clips_without_effect(optimizer: ChainRunner) -> Iterator[Remark]:
    links = list(_links_in_order(optimizer.links))
    for clip, limit, bound in idle_clips(links, optimizer.param_groups):
        yield Remark(
            f"{clip.path} with the limit {limit:g} never clips: after {bound.link.path}, "
            f"{bound.noun} are at most {bound.limit:g}",
            f"remove {clip.path}, or put {clip.path} before {bound.link.path}"
            if bound.exact
            else "",
        )


def _odd_limits(optimizer: ChainRunner) -> Iterator[Remark]:
    """Yield remarks on tiny percentages, and on limits of 0. Other libraries read 0 as no limit."""
    for link in [link for link in optimizer.keys.links if link.transforms]:
        rule = link.transform
        for name in ("max_norm", "value"):
            if name in rule.live and _number(rule, name) == 0:
                yield Remark(
                    f"{link.path}: with {name}=0, every update becomes zero",
                    f'to disable clipping, remove {link.path}, or pass {name}=float("inf")',
                )
        share = _number(rule, "percentile") if "percentile" in rule.live else 0
        if 0 < share < 1:
            yield Remark(
                f"{link.path}: percentile={share} is less than one percent",
                f"for the fraction {share}, write percentile={100 * share:g}",
            )


def _different_layouts(optimizer: ChainRunner) -> Iterator[Remark]:
    """Yield a remark on the first parameter in which two rules see different matrices."""
    links = optimizer.keys.links
    if all([getattr(link.transform, "layout", None) is None for link in links]):
        return
    for name, p in named_params(optimizer):
        try:
            passed = list(links_for(optimizer.links, name, p))
        except ValueError:  # a label without a rule, which the first step reports
            return
        of_matrices = [link for link in passed if _has_layout(link)]
        entries = [entry_of(link.transform, name, p) for link in of_matrices]
        for link, entry in zip(of_matrices, entries, strict=True):
            if not equal(entry, entries[0]):
                yield Remark(
                    f"{of_matrices[0].path} sees {name} with the layout {entries[0]!r}, but "
                    f"{link.path} sees it with {entry!r}",
                    "give the same layout= to both",
                )
                return


def _has_layout(link: Link) -> bool:
    return "layout" in type(link.transform).__dataclass_fields__


def _check_name_patterns(optimizer: ChainRunner) -> None:
    """Raise ValueError if a pattern in an option of a rule matches no parameter."""
    if optimizer.process_group is not None or optimizer._is_trial:
        return  # the parameter may belong to another stage of a pipeline, or not take part
    names: list[str] = []
    for group in optimizer.param_groups:
        names += group.get("param_names") or [""] * len(group["params"])
    for link in optimizer.keys.links if names else ():
        for name_of_field in ("layout", *getattr(link.transform, "asks", ())):
            option = getattr(link.transform, name_of_field, None)
            if not isinstance(option, Mapping):
                continue
            part = without_match(option, names)
            # a dict of all names, as from `matrices_and_rest`, may have names that are not trained
            if part is None or option.keys() >= set(names):
                continue
            remedy = "pass model.named_parameters() to the optimizer"
            if any(names):
                near = difflib.get_close_matches(part.replace("*", ""), names, n=1, cutoff=0)
                remedy = f"the nearest is {near[0]!r}"
            where = f"{part!r} in {name_of_field}"
            raise ValueError(f"{link.path}: {where} matches no parameter: {remedy}")


def _number(rule: Any, name: str) -> float:
    """Return a value of a rule as a number, or NaN if the value is not on the host."""
    value = getattr(rule, name, None)
    if value is None or (isinstance(value, Tensor) and value.device.type != "cpu"):
        return float("nan")
    return float(value)


REMARKS: tuple[Callable[[ChainRunner], Iterator[Remark]], ...] = (
    _learning_rates,
    _misplaced_links,
    _clips_without_effect,
    _odd_limits,
    _different_layouts,
)
"""The table, in the order in which `explain()` shows the remarks."""


# ---------------------------------------------------------------------- precision


def _slow_state(optimizer: ChainRunner) -> Iterator[Remark]:
    """Yield a remark if state in bfloat16 is converted one tensor at a time, without a kernel."""
    wide = [p for p in params_of(optimizer) if state_dtype(p) == torch.float32][:1]
    slow = [link.path for link in optimizer.keys.links for p in wide if link.rounds(p)]
    if slow and not optimizer.compile:
        yield Remark(
            f"state in bfloat16 ({', '.join(slow)}) makes steps several times slower without "
            "compile=True",
            "pass compile=True as well",
        )


WARNED: set[str] = set()
"""The warnings that this process has given and will not repeat."""


def warn_of_lost_updates(optimizer: ChainRunner) -> None:
    """Warn once, on the first rank, if parameters in half precision round to nearest."""
    if rank_and_world()[0] == 0 and not WARNED and has_half_precision(optimizer):
        WARNED.add("lost updates")
        warn(
            "parameters are in half precision, so small updates are lost in rounding. Pass "
            "rounding='exact', 'kahan' or 'stochastic' to keep small updates. 'exact' and "
            "'kahan' need 2 additional bytes per bfloat16 parameter, and 'stochastic' needs "
            "no additional memory. Pass rounding='nearest' to accept the lost updates, which "
            "metrics() reports as rounding/lost"
        )
