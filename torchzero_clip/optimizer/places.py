"""What a link means where it stands, and parameters that nothing reaches, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core.link import Link
from torchzero_clip.core.names import by_name
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.traits import Smoothing
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer import norm_groups
from torchzero_clip.optimizer.idle_clips import idle_clips
from torchzero_clip.optimizer.keys import nearest

DECAY_OF_A_STEP = 1e-3  # the least that, taken off every weight in each step, is surely a mistake


def warn_of_places(optimizer: Any) -> None:
    """Warn of links that do in their place what is seldom meant, with what to do."""
    for sentence, way in _told(optimizer):
        if way:
            warn(f"{sentence}: {way}")


def places(optimizer: Any) -> Iterator[str]:
    """Sentences about the place of links, and about parameters and values that nothing reads."""
    yield from [sentence for sentence, _ in _told(optimizer)]
    yield from _chosen(optimizer)
    yield from norm_groups.sentences(optimizer.param_groups)
    for key in optimizer.keys.defaults.keys() & vars(optimizer).keys():
        yield f"the attribute {key} is read by nothing: set param_groups[i][{key!r}]"
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not (optimizer.place.usual or any([optimizer.place.own(p) is not None for p in params])):
        yield f"no parameter has a gradient in grad={optimizer.grad!r}, so .grad counts"
    if params and not any([p.requires_grad for p in params]):
        yield "none of the parameters requires a gradient, so none will move"
    frozen = sum([optimizer.place.of(p) is not None and not p.requires_grad for p in params])
    if frozen:
        yield f"{frozen} parameters that require no gradient have one and go on: set it to None"


def _told(optimizer: Any) -> list[tuple[str, str]]:
    """Sentences, each with what to do where it is hardly ever meant."""
    idle = idle_clips(list(_in_turn(optimizer.links)), optimizer.param_groups)
    return [*_places(optimizer.links), *idle, *_zeros(optimizer.links), *_blocks(optimizer)]


def _places(links: Sequence[Link]) -> Iterator[tuple[str, str]]:
    """A sentence for each such link, and what to do where it is hardly ever meant."""
    rate = direction = momentum = clip = None
    decays: list[Link] = []
    for link in _in_turn(links):
        tfm, path = link.transform, link.path
        before: Link | None = rate or direction
        if "lr" in tfm.live:
            rate = link
        elif tfm.place == "step" and "weight_decay" in tfm.live:
            if rate is not None:
                yield _decay(link, rate)
            elif direction is not None and _scales_its_decay(direction.transform):
                far = f"is not scaled by what {direction.path} estimates, and decays far too much"
                way = f"leave it out, and give weight_decay to {direction.path}"
                yield f"{path} behind {direction.path} {far}", way
            decays.append(link)
        elif tfm.leaves == "ones":
            for decay in decays:
                joins = f"{decay.path} in front of {path} joins the gradient, as in torch's Adam"
                yield f"{joins}; behind {path} it is that of AdamW", ""
            if direction is not None and direction.transform.leaves == "ones":
                yield f"{path} behind {direction.path} sees its updates, not the gradient", ""
            first, second = [*getattr(tfm, "betas", ()), 0.0, 1.0][:2]
            if not isinstance(first, Tensor) and first > second:
                longer = f"{path} averages over more steps with the first of betas={tfm.betas}"
                yield f"{longer} than with the second: usually it is the other way round", ""
            if momentum is not None and _averages(tfm):
                said = (
                    f"{path} after {momentum.path} averages an update that is an average already: "
                    f"its first beta is the momentum of {path}"
                )
                yield said, f"leave {momentum.path} out" if direction is None else ""
            direction, decays = link, []
        elif tfm.leaves == "own":
            direction, decays = link, []
        elif tfm.leaves == "set" and before is not None and _number(tfm, "factor") < 0:
            way = "updates are subtracted here, and take no minus; to maximize, put Scale(-1) first"
            yield f"{tfm!r} behind {before.path} turns the step around", way
        elif tfm.drops and tfm.leaves == "gradient" and not tfm.asks:
            if before is not None:
                mean = f"{path} behind {before.path} takes the mean of updates, each of which"
                yield f"{mean} {before.path} has made of a part of the batch", ""
            elif clip is not None:
                yield f"{clip.path} in front of {path} limits parts of a batch, not their mean", ""
        elif (isinstance(tfm, NormRule) and tfm.place == "any") or "value" in tfm.live:
            clip = clip or link
            if rate is not None:
                yield f"{path} stands behind {rate.path} and limits the step, not the gradient", ""
        elif isinstance(tfm, Smoothing):
            momentum = link


def _averages(tfm: Any) -> bool:
    """Whether a rule with second moments averages the update too."""
    betas = getattr(tfm, "betas", None)
    if betas is None or getattr(tfm, "momentum", True) is False:
        return False
    first = betas[0]
    return isinstance(first, Tensor) or first > 0


def _scales_its_decay(tfm: Any) -> bool:
    return tfm.leaves == "own" and "weight_decay" in tfm.live


def _decay(link: Link, rate: Link) -> tuple[str, str]:
    share = _number(link.transform, "weight_decay")
    way = f"put it in front of {rate.path}; what is meant so is below {DECAY_OF_A_STEP}"
    why = f"which does not scale it, and takes {share} of each weight in every step"
    said = f"{link.path} stands behind {rate.path}, {why}"
    return said, way if share >= DECAY_OF_A_STEP else ""


def _zeros(links: Sequence[Link]) -> Iterator[tuple[str, str]]:
    """Limits of zero, which elsewhere mean that nothing is clipped, and shares for percents."""
    for link in [link for top in links for link in top.walk() if link.transforms]:
        for name in ("max_norm", "value"):
            if name in link.transform.live and _number(link.transform, name) == 0:
                way = f'leave the link out, or give {name}=float("inf"), to clip nothing'
                yield f"{link.path}: with {name}=0 every update becomes zero", way
        share = _number(link.transform, "percentile") if "percentile" in link.transform.live else 0
        if 0 < share < 1:
            way = f"write {100 * share:g} for the share {share}"
            yield f"{link.path}: percentile={share} is less than one percent", way


def _in_turn(links: Sequence[Link]) -> Iterator[Link]:
    """The links that all parameters pass one after another."""
    for link in [link for link in links if link.transforms]:
        passed = link.transform.inner == "chain" and not link.transform.asks
        yield from _in_turn(link.children) if passed else [link]


def _chosen(optimizer: Any) -> Iterator[str]:
    """Masks that choose no parameter."""
    rows = list(_named(optimizer))
    for link in optimizer.keys.links:
        where = "where" in getattr(link.transform, "asks", ())
        if where and rows and not any([link.transform.where(name, p) for name, p in rows]):
            yield f"{link.path} chooses none of the {len(rows)} parameters by its where"


def _blocks(optimizer: Any) -> Iterator[tuple[str, str]]:
    """Blocks for what is in the name of no parameter; stages of a pipeline know but their own."""
    names = [name for name, _ in _named(optimizer)]
    for link in optimizer.keys.links:
        given = getattr(link.transform, "blocks", None)
        for key in given if isinstance(given, Mapping) else ():
            known = any([by_name({key: 0}, name) for name in names])
            if not known and optimizer.process_group is None:
                near = nearest(key, [part for name in names for part in name.split(".")])
                other = "give a part of one" if names else "pass model.named_parameters()"
                way = f"did you mean {near!r}?" if near else other
                yield f"{link.path}: blocks has {key!r}, which is in the name of no parameter", way


def _named(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group.get("param_names", ()), group["params"], strict=False)


def _number(tfm: Any, name: str) -> float:
    """A number of a link, if the host has it."""
    value = getattr(tfm, name)
    if value is None or (isinstance(value, Tensor) and value.device.type != "cpu"):
        return float("nan")
    return float(value)
