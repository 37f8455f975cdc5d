"""What a chain means, in words: where its learning rate acts, and what its norms are of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchzero_clip.core.link import Link
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.norms import NAMED, measure
from torchzero_clip.core.state import state_dtype
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer.metrics import metrics_of
from torchzero_clip.optimizer.places import places

CLIP_OF_TORCH = 3e-6  # how near its limit a norm comes that torch's clip brought there
OWN_SETTINGS = {
    "lr": "the learning rate is that of the optimizer that steps next",
    "weight_decay": "give weight_decay to the optimizer that steps next",
}


@dataclass
class Flow:
    """What is known of the update at a place of the chain.

    Args:
        factors: The links since whose factor, as a learning rate, nothing has set another size.
        behind: The link whose entries are near 1, as long as nothing has changed their size.
        lost: Learning rates without effect, each with the link behind it that divides it out.
        norms: The norm rules that stand in no other link, each with the link it is `behind`.
        masks: Masks with a factor inside, which the parameters that they leave out do not get.
    """

    factors: list[Link] = field(default_factory=list)
    behind: Link | None = None
    lost: list[tuple[Link, Link]] = field(default_factory=list)
    norms: list[tuple[Link, Link | None]] = field(default_factory=list)
    masks: list[Link] = field(default_factory=list)

    def send(self, links: Sequence[Link], inside: bool = False) -> Flow:
        """Follow the update through links; returns what is known behind the last."""
        for link in [link for link in links if link.transforms]:
            kind, tfm = link.transform.inner, link.transform
            if kind == "chain" and tfm.asks:
                self._mask(link)
            elif kind == "chain":
                self.send(link.children, True)
            elif kind == "branches":
                self._branch(link.children)
            elif tfm.leaves == "set" or "lr" in tfm.live:
                self.factors.append(link)
                self.behind = None
            elif tfm.leaves in ("own", "ones"):
                self.lost += [(lr, link) for lr in self.factors if "lr" in lr.transform.live]
                self.factors = []
                self.behind = link if tfm.leaves == "ones" else None
            elif isinstance(tfm, NormRule) and tfm.place == "any" and not inside:
                self.norms.append((link, self.behind))
        return self

    def _mask(self, link: Link) -> None:
        """Follow the parameters of a mask: a size is set where that of the others is, too."""
        end = Flow(list(self.factors)).send(link.children, True)
        self.lost += end.lost
        if end.factors and not self.factors:
            self.masks.append(link)
        self.behind = None

    @property
    def sized(self) -> bool:
        """Whether something sets the size of updates. Two masks or more may share the work."""
        return bool(self.factors or self.lost or len(self.masks) > 1)

    def _branch(self, children: Sequence[Link]) -> None:
        """Follow each branch: behind them a size is set where all of them set it."""
        ends = [Flow(list(self.factors)).send([child], True) for child in children]
        for lr, link in [pair for end in ends for pair in end.lost]:
            if lr not in [known for known, _ in self.lost]:
                self.lost.append((lr, link))
        self.factors = ends[0].factors if all([end.factors for end in ends]) else []
        self.behind = None


def warn_of_size(links: Sequence[Link], chain: Any) -> None:
    """Warn where no learning rate acts: there is none, or what comes behind divides it out."""
    flow = Flow().send(links)
    for lr, link in flow.lost:
        warn(
            f"{_divided(lr, link)}: put it behind {link.path}; a factor that is meant for what "
            f"enters {link.path} is Scale(...)",
        )
    if not flow.sized:
        warn(
            f"{_full(flow)} by {chain!r}{'' if flow.masks else ', and schedulers find no lr'}: "
            "put LR(...) behind, or LR(1.0) where full size is meant",
        )


def warn_of_small_state(optimizer: Any) -> None:
    """Warn of state in bfloat16 where no kernel converts it."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    wide = [p for p in params if state_dtype(p) == torch.float32][:1]
    slow = [link.path for link in optimizer.keys.links for p in wide if link.rounds(p)]
    if slow and not optimizer.compile:
        warn(
            f"{', '.join(slow)} keeps its state in bfloat16, widened and rounded tensor by tensor "
            "here: a step takes several times as long as with state in float32. Give compile=True "
            "as well, where a kernel does it on its way",
        )


def refuse_step(owner: str, links: Sequence[Link]) -> None:
    """Raise a sentence for links about the step where another optimizer makes it."""
    for link in [link for top in links for link in top.walk() if link.transforms]:
        live = getattr(link.transform, "live", ())
        if link.transform.place in ("step", "end") or "lr" in live:
            why = [words for key, words in OWN_SETTINGS.items() if key in live]
            behind = "it belongs behind LR in the chain of a Modular"
            _refuse(owner, link, "; ".join(why) or behind)
    for last in links[-1:]:
        factor = getattr(last.transform, "factor", 1.0)
        if last.transform.leaves == "set" and _looks_like_a_rate(factor):
            _refuse(owner, last, OWN_SETTINGS["lr"])


def sentences(optimizer: Any) -> Iterator[str]:
    """What the chain of an optimizer means where that may not be what its reader expects."""
    flow = Flow().send(optimizer.links)
    if optimizer._makes_steps:
        yield from [_divided(lr, link) for lr, link in flow.lost]
        if not flow.sized:
            yield _full(flow)
    yield from places(optimizer)
    if not optimizer._makes_steps:
        for link in [link for link in optimizer.links if link.transform.leaves == "ones"]:
            ones = f"{link.path} leaves entries near 1, whatever the gradient"
            yield f"{ones}, for the optimizer that steps next"
    for link, behind in flow.norms:
        yield from _norms(optimizer.param_groups, link, behind)
    yield from _clipped_before(optimizer, [link for link, behind in flow.norms if behind is None])


def _divided(lr: Link, link: Link) -> str:
    return f"{lr.path} stands in front of {link.path}, which divides it out"


def _full(flow: Flow) -> str:
    outside = f" outside {flow.masks[0].path}" if flow.masks else ""
    return f"no LR{outside}: updates are subtracted at full size"


def _refuse(owner: str, link: Link, why: str) -> NoReturn:
    raise ValueError(f"{owner}: no step is made here, so {link.transform!r} has no place: {why}")


def _looks_like_a_rate(factor: Any) -> bool:
    """Whether a factor is as small as learning rates are, and no power of two, as loss scales."""
    x = abs(factor.item() if isinstance(factor, Tensor) else factor)
    return 0 < x <= 0.01 and math.frexp(x)[0] != 0.5


def _norms(groups: Sequence[Mapping[str, Any]], link: Link, behind: Link | None) -> Iterator[str]:
    """How many norms a rule takes, and how large they are behind a link with entries near 1."""
    rule, key = link.transform, link.keys.get("max_norm")
    if key is None or measure(rule.ord) != NAMED["l2"]:
        return
    sizes = [[p.numel() for p in group["params"]] for group in groups]
    count = sum(map(len, sizes))
    if rule.scope is None and count > 1:
        yield f'{link.path}: {count} norms, one a tensor: torch\'s clip has one (dim="global")'
    elif not isinstance(rule.scope, (str, type(None))):
        slices = f"{link.path}: dim={rule.dim} takes one norm a slice, dim=None one a tensor"
        yield f'{slices}, and torch\'s clip one of all (dim="global")'
    if behind is None or rule.scope not in (None, "global", "group"):
        return
    united = {"global": [sum(map(sum, sizes))] * len(groups), "group": list(map(sum, sizes))}
    largest = united.get(rule.scope) or [max(each, default=0) for each in sizes]
    for group, n in zip(groups, largest, strict=True):
        limit = group[key]
        if limit is not None and limit < math.sqrt(n):
            sees = f"sees norms near √n, here {math.sqrt(n):,.4g}, and cuts every step"
            at = f"{link.path} at {float(limit)} behind {behind.path}"
            yield f"{at} {sees}: ClipRMS does not depend on n"
            return


def _clipped_before(optimizer: Any, rules: Sequence[Link]) -> Iterator[str]:
    """Whether the norm of the last step's gradients is a round number: somebody's limit."""
    measured = metrics_of(optimizer._records)
    first = [link for link in optimizer.links if link.transform.leaves != "gradient"][:1]
    for link in [link for link in rules if link in first]:
        norm = measured.get(f"{link.path}/norm")
        sliced = not (link.transform.scope is None or isinstance(link.transform.scope, str))
        if norm is None or sliced or measure(link.transform.ord) != NAMED["l2"]:
            return
        total = float(torch.linalg.vector_norm(norm))
        limit = float(f"{total:.2g}") if math.isfinite(total) else 0.0
        if limit and abs(total - limit) <= CLIP_OF_TORCH * limit:
            was = f"the norm of all gradients was {limit} in the last step"
            yield f"{was}: another clip stands in front, such as the framework's own, at its limit"
