"""The meaning of a chain: the size of updates, the scope of norms, and unread settings."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from torchzero_clip.core.argument_values import equal
from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.division import layer_of
from torchzero_clip.core.link import Link
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.norms import NAMED, measure
from torchzero_clip.core.plurals import counted
from torchzero_clip.optimizer import norm_groups
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.optimizer.branches import differs
from torchzero_clip.optimizer.metrics import metrics_of

if TYPE_CHECKING:
    from torchzero_clip.optimizer.chain_runner import ChainRunner

CLIPPED_NORM_ERROR = 3e-6
"""The largest relative difference between a norm and its limit after torch's clipping."""
SET_ELSEWHERE = {
    "lr": "set the learning rate of that optimizer",
    "weight_decay": "set the weight_decay of that optimizer",
}


@dataclass
class Flow:
    """The known properties of the update at one place of the chain.

    Args:
        factors: The factors, such as learning rates, that still scale the update. No later link has
            set the size of the update.
        unit_entries: The link after which all elements of the update are near 1. None if a later
            link has changed the size.
        lost: Learning rates without effect, each with the later link that cancels it.
        norms: The norm rules outside of other links, each with the `unit_entries` before it.
        masks: Masks that contain a factor. The factor does not scale parameters outside of the
            mask.
    """

    factors: list[Link] = field(default_factory=list)
    unit_entries: Link | None = None
    lost: list[tuple[Link, Link]] = field(default_factory=list)
    norms: list[tuple[Link, Link | None]] = field(default_factory=list)
    masks: list[Link] = field(default_factory=list)

    def send(self, links: Sequence[Link], inside: bool = False) -> Flow:
        """Follow the update through links, and return what is known after the last link."""
        for link in [link for link in links if link.transforms]:
            tfm = link.transform
            kind = tfm.inner
            if kind == "chain" and tfm.asks:
                self._mask(link)
            elif kind == "chain":
                self.send(link.children, True)
            elif kind == "branches":
                self._branch(link.children)
            elif tfm.leaves == "set" or "lr" in tfm.live:
                self.factors.append(link)
                self.unit_entries = None
            elif tfm.leaves in ("own", "ones"):
                self.lost += [(lr, link) for lr in self.factors if "lr" in lr.transform.live]
                self.factors = []
                self.unit_entries = link if tfm.leaves == "ones" else None
            elif isinstance(tfm, NormRule) and tfm.place == "any" and not inside:
                self.norms.append((link, self.unit_entries))
        return self

    def _mask(self, link: Link) -> None:
        """Follow the update inside a mask. A factor inside does not scale other parameters."""
        end = Flow(list(self.factors)).send(link.children, True)
        self.lost += end.lost
        if end.factors and not self.factors:
            self.masks.append(link)
        self.unit_entries = None

    @property
    def sized(self) -> bool:
        """Whether something sets the size of updates. Several masks may do so together."""
        return bool(self.factors or self.lost or len(self.masks) > 1)

    def _branch(self, children: Sequence[Link]) -> None:
        """Follow each branch. A size is set after the branches if all of them set it."""
        ends = [Flow(list(self.factors)).send([child], True) for child in children]
        known_rates = [rate for rate, _ in self.lost]
        for rate, link in [pair for end in ends for pair in end.lost]:
            if rate not in known_rates:
                self.lost.append((rate, link))
                known_rates.append(rate)
        self.factors = ends[0].factors if all([end.factors for end in ends]) else []
        self.unit_entries = None


def refuse_step(owner: str, links: Sequence[Link]) -> None:
    """Raise an error for links that define the step if another optimizer makes the step."""
    for link in [link for top in links for link in top.walk() if link.transforms]:
        live = link.transform.live
        if link.transform.place in ("step", "end") or "lr" in live:
            reasons = [words for key, words in SET_ELSEWHERE.items() if key in live]
            belongs = "use this transform after LR in a Modular"
            _refuse(owner, link, "; ".join(reasons) or belongs)
    for last in links[-1:]:
        factor = getattr(last.transform, "factor", 1.0)
        if last.transform.leaves == "set" and _looks_like_a_rate(factor):
            _refuse(owner, last, SET_ELSEWHERE["lr"])


def _refuse(owner: str, link: Link, reason: str) -> NoReturn:
    raise ValueError(
        f"{owner}: {link.transform!r} cannot be used in {owner}, because a different "
        f"optimizer updates the parameters: {reason}"
    )


def _looks_like_a_rate(factor: Any) -> bool:
    """Return whether a factor is as small as a learning rate. Loss scales are powers of two."""
    x = abs(factor.item() if isinstance(factor, Tensor) else factor)
    return 0 < x <= 0.01 and math.frexp(x)[0] != 0.5


# ---------------------------------------------------------------------- for explain()


def sentences(optimizer: ChainRunner) -> Iterator[str]:
    """Yield everything that `explain()` reports in addition to the warnings at construction."""
    yield from _empty_masks(optimizer)
    yield from norm_groups.sentences(optimizer.param_groups)
    for key in optimizer.keys.defaults.keys() & vars(optimizer).keys():
        yield f"the attribute {key} of the optimizer has no effect: set param_groups[i][{key!r}]"
    yield from _unusual_params(optimizer)
    if not optimizer._moves_params:
        for link in [link for link in optimizer.links if link.transform.leaves == "ones"]:
            yield (
                f"{link.path} passes updates whose elements are near 1 to the next optimizer, "
                "regardless of the size of the gradient"
            )
    flow = Flow().send(optimizer.links)
    for link, unit_entries in flow.norms:
        yield from _norms(optimizer.param_groups, link, unit_entries)
    of_gradients = [link for link, unit_entries in flow.norms if unit_entries is None]
    yield from _clipped_before(optimizer, of_gradients)


def _empty_masks(optimizer: ChainRunner) -> Iterator[str]:
    """Yield a sentence for each mask that chooses no parameter."""
    params = list(named_params(optimizer))
    for link in optimizer.keys.links:
        where = "where" in getattr(link.transform, "asks", ())
        if where and params and not any([link.transform.where(name, p) for name, p in params]):
            yield f"{link.path} has no effect: where= selects no parameter"


def _unusual_params(optimizer: ChainRunner) -> Iterator[str]:
    params = params_of(optimizer)
    place = optimizer.place
    if not (place.usual or any([place.own(p) is not None for p in params])):
        yield f"no parameter has a gradient in grad={optimizer.grad!r}, so .grad is used"
    if params and not any([p.requires_grad for p in params]):
        yield "no parameter has requires_grad=True, so no parameter will change"
    frozen = sum([place.of(p) is not None and not p.requires_grad for p in params])
    if frozen:
        yield (
            f"the step updates {counted(frozen, 'parameter')} with requires_grad=False, because "
            "a gradient is set: set .grad to None"
        )


def named_params(optimizer: ChainRunner) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter with its name. Parameters that were given without names are skipped."""
    for group in optimizer.param_groups:
        yield from zip(group.get("param_names", ()), group["params"], strict=False)


def _norms(
    groups: Sequence[Mapping[str, Any]], link: Link, unit_entries: Link | None
) -> Iterator[str]:
    """Yield how many norms a rule has, and how large the norms are if elements are near 1."""
    rule = link.transform
    has_limit = rule.has_metrics and not rule.sets_norm
    if not (rule.clips and has_limit) or measure(rule.ord) != NAMED["l2"]:
        return
    count = sum([len(group["params"]) for group in groups])
    if rule.scope is None and count > 1:
        how = 'pass dim="global"'
        if "dim" not in type(rule).__dataclass_fields__:
            how = f"declare dim as a field of {type(rule).__name__}, and {how}"
        yield (
            f"{link.path} clips each of the {count} parameters by its own norm; for one norm over "
            f"all parameters, as in torch.nn.utils.clip_grad_norm_, {how}"
        )
    elif not isinstance(rule.scope, (str, type(None))) and rule.scope == rule.dim:
        yield (
            f"{link.path}: dim={rule.dim} uses one norm per slice; dim=None uses one norm per "
            'tensor, and dim="global" one norm over all parameters, as in '
            "torch.nn.utils.clip_grad_norm_"
        )
    if rule.scope in ("global", "layer"):
        yield from _values_of_shared_norms(groups, link)
    if rule.scope == "group":
        yield from _split_by_decay(groups, link)
    if unit_entries is not None and rule.scope in (None, "global", "group"):
        yield from _norms_near_root_n(groups, link, unit_entries)


def _norms_near_root_n(
    groups: Sequence[Mapping[str, Any]], link: Link, unit_entries: Link
) -> Iterator[str]:
    """Yield a sentence if a rule probably clips in every step, because elements are near 1."""
    rule = link.transform
    name = rule.limit_is or "max_norm"
    whole = sum([p.numel() for group in groups for p in group["params"]])
    for group in groups:
        sizes = [p.numel() for p in group["params"]]
        largest = {None: max(sizes, default=0), "group": sum(sizes), "global": whole}
        n = largest[rule.scope]
        limit = group[link.keys[name]] if name in link.keys else 0
        if limit is not None and limit < math.sqrt(n):
            yield (
                f"{link.path} clips updates of {unit_entries.path}, whose norms are near √n, here "
                f"{math.sqrt(n):,.4g} for n={counted(n, 'element')}: a limit below √n clips in "
                "every step; use ClipRMS for a limit that does not depend on n"
            )
            return


def _values_of_shared_norms(groups: Sequence[Mapping[str, Any]], link: Link) -> Iterator[str]:
    """Yield a sentence if groups with different hyperparameters share a norm."""
    rule = link.transform
    groups_of = defaultdict[Any, list[Mapping[str, Any]]](list)  # for each norm
    for group in [group for group in groups if group["params"] and group.get("clip", True)]:
        norms = {group.get("norm_group")}
        if rule.scope == "layer":
            norms = set(map(layer_of, group["param_names"]))
        for norm in norms:
            groups_of[norm].append(group)
    keys = [key for inner in link.walk() for key in inner.keys.values()]
    different = [key for key in keys if any([differs(some, key) for some in groups_of.values()])]
    if not different:
        return
    scope = "one norm over all parameters" if rule.scope == "global" else "one norm per layer"
    state = ""
    if rule.init_unit():
        state = ", and the state of a norm follows the values of the first group"
    yield (
        f"{link.path} uses {scope}, but the groups have different values of "
        f"{', '.join(different)}: each group has its own limit for the same norm{state}; for one "
        'norm per parameter group, use dim="group"'
    )


def _split_by_decay(groups: Sequence[Mapping[str, Any]], link: Link) -> Iterator[str]:
    """Yield a sentence if two groups with separate norms differ only in their weight decay."""
    own = RESERVED | {"weight_decay"}
    settings = [{k: x for k, x in group.items() if k not in own} for group in groups]
    decays = [group.get("weight_decay") for group in groups]
    for a, b in itertools.combinations(range(len(groups)), 2):
        one_decays = (decays[a] == 0) != (decays[b] == 0)
        if one_decays and settings[a].get("clip", True) and equal(settings[a], settings[b]):
            yield (
                f"{link.path} uses separate norms for the groups {a} and {b}, which differ only "
                "in weight_decay; for one norm over both, pass decay_vectors=True to groups(...), "
                'or use dim="global" and a norm_group'
            )
            return


def _clipped_before(optimizer: ChainRunner, rules: Sequence[Link]) -> Iterator[str]:
    """Yield a sentence if other code seems to clip already: the last norm was a round number."""
    link = next((x for x in optimizer.links if x.transform.leaves != "gradient"), None)
    if link is None or link not in rules:
        return
    rule = link.transform
    norm = metrics_of(optimizer._records).get(f"{link.path}/norm")
    sliced = not (rule.scope is None or isinstance(rule.scope, str))
    if norm is None or sliced or measure(rule.ord) != NAMED["l2"]:
        return
    total = float(torch.linalg.vector_norm(norm))
    limit = float(f"{total:.2g}") if math.isfinite(total) else 0.0
    if limit and abs(total - limit) <= CLIPPED_NORM_ERROR * limit:
        yield (
            f"the global norm of the gradients was {limit} in the last step, so the gradients "
            f"were probably clipped before {link.path}, for example by your framework"
        )
