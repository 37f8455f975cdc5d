"""The command: see the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import benchmarks.claims
from benchmarks.claims import guide, papers, recover, which_rule
from benchmarks.claims.claim import Claim, marked

PAGES = {
    "papers.md": papers.SENTENCES,
    "which_rule.md": which_rule.SENTENCES,
    "guide.md": guide.SENTENCES,
    "recover.md": recover.SENTENCES,
}
CLAIMS = {
    page: tuple(Claim(page, sentence, rests) for sentence, rests in sentences.items())
    for page, sentences in PAGES.items()
}


def printed(page: str) -> Iterator[str]:
    """Yield the lines of a page."""
    yield f"{page}\n{'=' * len(page)}\n"
    for claim in CLAIMS[page]:
        yield f'"{claim.sentence}"'
        if not claim.found():
            yield "  NOT ON THE PAGE"
        for basis in claim.rests:
            yield f"  {basis}{'' if basis.holds() else '. DOES NOT FOLLOW'}"
        yield ""
    if shown := marked(page):
        yield "Comparisons whose verdict a script writes into the page:"
        yield from (f"  {basis}" for basis in shown)
        yield ""


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.claims",
        description=benchmarks.claims.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pages", nargs="*", metavar="page", help=", ".join(CLAIMS))
    pages = parser.parse_args(given).pages
    if unknown := sorted({*pages} - {*CLAIMS}):
        parser.error(f"no claims are listed for {', '.join(unknown)}")
    for page in pages or CLAIMS:
        print("\n".join(printed(page)))
    every = [claim for page in pages or CLAIMS for claim in CLAIMS[page]]
    failed = [x for x in every if not x.found() or not all(basis.holds() for basis in x.rests)]
    print(f"{len(every)} claims, {len(failed)} of them without support")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
