"""The rules, the places where they stand, and their settings in terms of what is usual there.

The page of a rule in `docs/modules` says how it comes into the atlas, in a line or several: a name,
the links that Python makes of the `Usual` x, and, where it does not stand everywhere, its places:

    <!-- atlas entry: SkipLarge | SkipLarge(10 * x.norm) | before Adam, alone | together -->

`together` is for a rule that sees more than its unit, so that every run needs a model of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torchzero_clip
from benchmarks.atlas.gradients import SIZE
from torchzero_clip import Adam, Momentum, Orthogonalize, Transform

PAGES = Path(__file__).parents[2] / "docs" / "modules"
WRITTEN = re.compile(r"^<!-- atlas entry: (.+) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Usual:
    """What a rule may know of a place: the median norm of a healthy update there, and the scope.

    The scope is "global" for what one reads, and "layer" where many runs are the layers of one
    model: the unit is the model of one run either way.
    """

    norm: float
    scope: Any = "global"

    @property
    def entry(self) -> float:
        return self.norm / SIZE**0.5


BEFORE_ADAM, AFTER_ADAM, BEFORE_MUON, ALONE = "before Adam", "after Adam", "before Muon", "alone"
INSTEAD = "for Adam"
PLACES: dict[str, tuple[list[Transform], list[Transform]]] = {  # what stands in front, and behind
    BEFORE_ADAM: ([], [Adam()]),
    AFTER_ADAM: ([Adam()], []),
    BEFORE_MUON: ([], [Momentum(0.95, nesterov=True), Orthogonalize()]),
    ALONE: ([], []),
    INSTEAD: ([], []),
}
EVERYWHERE = (BEFORE_ADAM, AFTER_ADAM, BEFORE_MUON, ALONE)


@dataclass(frozen=True)
class Entry:
    """A rule of the atlas.

    Args:
        make: The links, from what is usual at the place.
        page: The name of the class whose page has its picture.
        places: Where it can stand.
        together: Whether it sees more than its unit, so that every run needs a model of its own.
    """

    make: Callable[[Usual], list[Transform]]
    page: str
    places: tuple[str, ...] = EVERYWHERE
    together: bool = False


def links(text: str) -> Callable[[Usual], list[Transform]]:
    """What a page says of x, as a function of it."""
    code = compile(f"[{text}]", text, "eval")
    return lambda x: list(eval(code, {**vars(torchzero_clip), "x": x}))


def entries() -> Iterator[tuple[str, Entry]]:
    """The rules of all pages, each with its name."""
    for page in sorted(PAGES.glob("*/*.md"), key=lambda page: page.parts[-2:]):
        text = page.read_text()
        for written in WRITTEN.findall(text):
            name, made, *rest = written.split(" | ")
            together = rest[-1:] == ["together"]
            places = rest[0].split(", ") if rest[together:] else EVERYWHERE
            shown = re.findall(r"^::: torchzero_clip\.(\w+)$", text, re.MULTILINE)
            if len(rest) > 2 or not set(places) <= set(PLACES):
                raise ValueError(
                    f"{page.name}: an atlas entry is a name, links, its places of {list(PLACES)} "
                    f"and the word together, got {written!r}"
                )
            yield name, Entry(links(made), shown[0], tuple(places), together)


RULES: dict[str, Entry] = dict(sorted(entries(), key=lambda row: row[0] != "no rule"))
CASES = [(rule, place) for rule, found in RULES.items() for place in found.places]
