"""Every sentence of the pages that compares methods follows from the committed data."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from benchmarks.claims.__main__ import CLAIMS, main
from benchmarks.claims.claim import (
    COMPARED,
    DOCS,
    NOT_BETTER,
    NOT_WORSE,
    Claim,
    Compared,
    Seen,
    marked,
    plain,
    text_of,
)
from tests.helpers import at_once

EVERY = [claim for claims in CLAIMS.values() for claim in claims]
COMPARING = re.compile(
    r"\b(better|worse|beats?|ahead|no differences?|no cost|costs? nothing|slower|faster|sooner"
    r"|lower|higher|less accurate|does not repair|as good|close to)\b"
)
MEASURED = re.compile(r"<!-- (?:effect|mean|came|cell|alarms|equal): .+? -->")
OTHERS = ("**The paper.**", "**The setting.**", "**What differs in scale.**")
LEGENDS = (
    "A run that does not get there counts as worse",
    "Better, worse and not significantly different are verdicts after Holm's correction",
    "means that the loss is 0.015 lower",
    "means that the loss is 0.01 to 0.06 higher",
    "not significantly worse (uncorrected interval: 0.01 to 0.06)",
    "we do not know whether separate thresholds make agents better",
    "fewer missed spikes need not mean a better agent",
    "A dot left of 0 is better.",
    "A method with an unlucky choice looks worse than it is.",
)
"""Sentences that say what a word or a picture means, or what cannot be said."""
METHODS = ("How they ran", "What ran", "What was decided while results came in")
"""Sections that say how runs are made and judged."""


@at_once("claim", EVERY)
def test_a_sentence_is_on_its_page_and_follows_from_the_data(claim: Claim) -> None:
    assert claim.found(), f"{claim.page} does not contain: {claim.sentence}"
    assert claim.rests
    assert [str(basis) for basis in claim.rests if not basis.holds()] == []


@at_once("claim", EVERY)
def test_a_sentence_says_significant_if_a_study_may_be_too_small(claim: Claim) -> None:
    verdicts = {basis.says for basis in claim.rests if isinstance(basis, Compared)}
    if verdicts & {NOT_BETTER, NOT_WORSE}:
        assert "significant" in claim.sentence, claim.sentence


def paragraphs(page: str) -> Iterator[str]:
    """Yield the prose that states what the project found: no code, table, heading or quotation."""
    text = (DOCS / page).read_text(encoding="utf-8")
    text = re.sub(r"^---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
    heading = ""
    for part in re.split(r"\n\s*\n|\n(?=- |#|\|)", text):
        part = part.strip()
        if part.startswith("#"):
            heading = part.lstrip("# ").partition(" {")[0]
        elif heading not in METHODS and not part.startswith(("|", "!", *OTHERS)):
            yield part


def sentences(page: str) -> Iterator[str]:
    """Yield each sentence, with § in front of a number that a script writes."""
    for part in paragraphs(page):
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z`§])", plain(MEASURED.sub("§", part)))


@pytest.mark.parametrize("page", CLAIMS)
def test_every_sentence_that_compares_has_its_test(page: str) -> None:
    """Its verdict is written by a script, or it is in the list of claims."""
    claimed = [found[0] for claim in CLAIMS[page] if (found := claim.found())]
    missing = []
    for sentence in sentences(page):
        text = sentence.replace("§", "")
        if not COMPARING.search(re.sub(r"`[^`]*`", "", text)) or "§" in sentence:
            continue
        if any(legend in text for legend in LEGENDS):
            continue
        if not any(claim in text or text.rstrip(".:") in claim for claim in claimed):
            missing.append(text)
    assert missing == []


@pytest.mark.parametrize("page", CLAIMS)
def test_every_comparison_that_a_page_shows_has_its_numbers(page: str) -> None:
    shown = marked(page)
    text = (DOCS / page).read_text(encoding="utf-8")
    assert bool(shown) == bool(COMPARED.search(text))
    for basis in shown:
        assert basis.comparison.pairs >= 10
        assert basis.comparison.corrected <= 1


def test_a_verdict_that_the_data_do_not_give_fails() -> None:
    key = "bad batches", "Adam, global 1", "Adam, no clipping"
    assert Compared("guide", key, "better").holds()
    assert Compared("guide", key, NOT_WORSE).holds()
    for wrong in ("worse", NOT_BETTER, "not significantly different"):
        assert not Compared("guide", key, wrong).holds()
    assert not Seen("nothing", lambda: False).holds()


def test_a_claim_with_another_verdict_is_printed_as_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(claim for claim in EVERY if claim.page == "guide.md" and claim.found())
    key = "bad batches", "Adam, global 1", "Adam, no clipping"
    wrong = Claim("guide.md", first.sentence, (Compared("guide", key, "worse"),))
    monkeypatch.setitem(CLAIMS, "guide.md", (wrong, Claim("guide.md", "Not there.", ())))
    with pytest.raises(SystemExit) as left:
        main(["guide.md"])
    assert left.value.code == 1
    printed = capsys.readouterr().out
    assert "DOES NOT FOLLOW" in printed
    assert "NOT ON THE PAGE" in printed
    assert "2 claims, 2 of them without support" in printed


@pytest.mark.slow
def test_the_command_prints_every_claim_with_its_test(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    for claim in EVERY:
        assert f'"{claim.sentence}"' in printed
        for basis in claim.rests:
            assert str(basis) in printed
    assert f"{len(EVERY)} claims, 0 of them without support" in printed
    assert "Holm over" in printed


def test_a_sentence_is_found_with_a_gap_for_a_number() -> None:
    words = text_of("guide.md").split()[20:40]
    gap = " ".join([*words[:5], "…", *words[12:]])
    assert Claim("guide.md", gap, ()).found()
    assert not Claim("guide.md", gap + " nowhere", ()).found()
