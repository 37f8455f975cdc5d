"""The sentences of docs/recover.md about its table."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from benchmarks.claims.claim import DOCS, RESULTS, Compared, Seen

SHARD = 30


def ends() -> dict[str, float]:
    """Return the loss at the end of each run."""
    found = json.loads((RESULTS / "recover.json").read_text(encoding="utf-8"))
    return {name: run["losses"][-1][1] for name, run in found["runs"].items()}


def seed_of_script() -> int:
    """Return the seed of the script that made the file."""
    text = (DOCS.parent / "examples" / "recover.py").read_text(encoding="utf-8")
    (found,) = re.findall(r"^STEPS, SEED, RATE, TESTED = \d+, (\d+),", text, re.MULTILINE)
    return int(found)


def at(name: str, step: int) -> float:
    """Return the loss of a run after a step, the last time that it was there."""
    found = json.loads((RESULTS / "recover.json").read_text(encoding="utf-8"))
    return next(loss for x, loss in reversed(found["runs"][name]["losses"]) if x == step)


def left_out() -> int:
    """Return how many batches Recover left out."""
    found = json.loads((RESULTS / "recover.json").read_text(encoding="utf-8"))
    return sum(back[3] for back in found["runs"]["Recover"]["backs"])


SENTENCES: dict[str, Sequence[Compared | Seen]] = {
    "The table and the picture show the results of a single random seed": (
        Seen(
            "recover.json: one list of losses for each of four runs",
            lambda: (
                [*ends()] == ["without the shard", "clip", "clip and skip", "Recover"]
                and seed_of_script() == 0
            ),
        ),
    ),
    "The thirty steps on bad batches raise the test loss from 1.70 to 2.90. The test loss was "
    "already below 2.90 at step 50": (
        Seen(
            "recover.json, one run: the losses with clipping alone at steps 300, 330 and 50",
            lambda: (
                round(at("clip", 300), 2) == 1.70
                and round(at("clip", 330), 2) == 2.90
                and at("clip", 50) < at("clip", 330)
            ),
        ),
    ),
    "skips at least the first twenty bad batches": (
        Seen(
            "recover.json, one run: the loss stays the same for the first twenty batches of the "
            "shard and not for the next ten",
            lambda: (
                at("clip and skip", 300) == at("clip and skip", 320)
                and at("clip and skip", 330) > at("clip and skip", 320)
            ),
        ),
    ),
    "The losses with `Recover` equal the losses of a run without the bad shard to the last digit": (
        Seen(
            "recover.json, one run: both have the same loss at the end",
            lambda: ends()["Recover"] == ends()["without the shard"],
        ),
    ),
    "leaves out the thirty bad batches and no other batch": (
        Seen("recover.json, one run: thirty batches are left out", lambda: left_out() == SHARD),
    ),
}
