"""Write the measured numbers, tables and drawings into the pages, from the code and its results.

    python scripts/refresh.py            # rewrites the pages and drawings that are not up to date
    python scripts/refresh.py --check    # names them instead, and fails if there are any

A page says between two comments what belongs there:

    <!-- seeds: soap -->Ten seeds<!-- /seeds -->

`scripts/pages/` has a function for each kind of comment. To add a number to a page, write the two
comments with nothing between them and run this script. A drawing is stored in docs/assets/drawn,
and the page shows it as an image.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.pages import drawings  # noqa: E402
from scripts.pages.kinds import KINDS, NUMBERS, RUNS  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SEPARATOR = "; "
"""Between the arguments of a kind. A bar would end a cell of a table."""
KIND = "|".join(sorted(KINDS, key=len, reverse=True))
MARKED = re.compile(rf"<!-- ({KIND})(?:: (.+?))? -->(.*?)<!-- /\1 -->", re.DOTALL)
"""What a comment asks for, its arguments, and what is between it and its end."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
NEAR = 1.0
"""How far a number of a drawing may be from the stored one: other processors round differently."""


class Refreshed:
    """A page as it should be.

    Attributes:
        page: The file.
        text: What it should contain.
        drawings: The drawings that it shows, by file.

    Args:
        page: The file.
        quick: Leave the drawings of rules as they are, since drawing them runs the rules.
    """

    def __init__(self, page: Path, *, quick: bool = False) -> None:
        self.page = page
        self.quick = quick
        self.drawings: dict[Path, str] = {}
        self.text = MARKED.sub(self._filled, page.read_text(encoding="utf-8"))

    def _filled(self, match: re.Match[str]) -> str:
        kind, arguments, _ = match.groups()
        if self.quick and kind in RUNS:
            return match[0]
        opened = f"<!-- {kind}: {arguments} -->" if arguments else f"<!-- {kind} -->"
        given = [] if arguments is None else arguments.split(SEPARATOR)
        text = KINDS[kind](*given)
        text, found = drawings.stored(text, f"{kind} {arguments or ''}", self.page)
        self.drawings |= found
        if kind not in NUMBERS:
            text = f"\n\n{text}\n\n"
        return f"{opened}{text}<!-- /{kind} -->"

    def stale(self) -> Iterator[tuple[Path, str]]:
        """Yield each file that is not up to date, with what it should contain."""
        if self.page.read_text(encoding="utf-8") != self.text:
            yield self.page, self.text
        for path, text in self.drawings.items():
            if not path.exists() or not same_drawing(path.read_text(encoding="utf-8"), text):
                yield path, text


def same_drawing(one: str, other: str) -> bool:
    """Whether two drawings differ by no more than processors do."""
    if NUMBER.split(one) != NUMBER.split(other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(abs(float(x) - float(y)) <= NEAR for x, y in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if one is stale")
    check = parser.parse_args().check
    pages = [Refreshed(page) for page in PAGES]
    shown = {path for page in pages for path in page.drawings}
    stale = [found for page in pages for found in page.stale()]
    unused = [path for path in drawings.FOLDER.glob("*.svg") if path not in shown]
    for path, text in stale:
        print(path.relative_to(ROOT))
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for path in unused:
        print(f"{path.relative_to(ROOT)}: no page shows it")
        if not check:
            path.unlink()
    if check and (stale or unused):
        sys.exit("These are not up to date. Run: python scripts/refresh.py")


if __name__ == "__main__":
    main()
