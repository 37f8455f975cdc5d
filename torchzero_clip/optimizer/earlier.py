"""Older checkpoints, of chains in which other transforms stood in some places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchzero_clip.core.link import Link
from torchzero_clip.core.transform import Earlier, Successor
from torchzero_clip.optimizer.fingerprint import MARK, fingerprint, marks
from torchzero_clip.optimizer.keys import GroupKeys

Row = dict[str, Any]


class Older:
    """A chain as older checkpoints have it: it makes groups and state of now from those of then."""

    def __init__(self, links: Sequence[Link]) -> None:
        tfms = [link.transform for link in links]
        before = [tfm.earlier() if isinstance(tfm, Successor) else None for tfm in tfms]
        then = [
            Link(link.transform if was is None else was.transform, _path(link, was), ())
            for link, was in zip(links, before, strict=True)
        ]
        GroupKeys(then, follow=False)  # which gives each its keys
        self.places = list(zip(then, before, links, strict=True))
        self.mark_then, self.mark = fingerprint(then), fingerprint(links)

    def wrote(self, group: Mapping[str, Any]) -> bool:
        """Whether a group is of such a checkpoint."""
        shared = group.get("chain")
        found = marks(shared)[:1] if isinstance(shared, dict) else []
        return found == self.mark_then[:1] != self.mark[:1]

    def group(self, given: Row) -> Row:
        """A group with the keys of now, and the fingerprint of now."""
        names: dict[str, str | None] = {}
        for then, was, now in self.places:
            for name, key in then.keys.items():
                new = name if was is None else was.live[name]
                names[key] = None if new is None else now.keys[new]
        renamed = [(names.get(key, key), value) for key, value in given.items()]
        mark, arguments = given["chain"][MARK], marks(given["chain"])[1:]
        if arguments == self.mark_then[1:]:
            arguments = self.mark[1:]
        mine = torch.tensor([*self.mark[:1], *arguments], device=mark.device)
        made = {key: value for key, value in renamed if key is not None}
        return {**made, "chain": {**given["chain"], MARK: mine}}

    def state(self, where: str, held: Mapping[str, Any], given: Row) -> Row:
        """The state of a parameter, from that in a group of the checkpoint."""
        made = dict(held)
        for then, was, now in self.places:
            own = [key for key in held if key.rpartition("/")[0] == then.path]
            if was is None or not own:
                continue
            state = {key.rpartition("/")[2]: made.pop(key) for key in own}
            try:
                live = {name: given[key] for name, key in then.keys.items()}
                state = was.state(state, live)
            except KeyError as missing:
                raise ValueError(f"the checkpoint lacks {missing} of {where}") from None
            made.update({f"{now.path}/{name}": value for name, value in state.items()})
        return made


def _path(link: Link, was: Earlier | None) -> str:
    """Where a link stood then: the class is in the path, unless a name is."""
    if was is None or link.transform.name:
        return link.path
    parent, slash, own = link.path.rpartition("/")
    now, then = type(link.transform).__name__, type(was.transform).__name__
    return parent + slash + own.replace(now, then, 1)
