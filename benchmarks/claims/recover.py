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


def losses(name: str) -> dict[int, float]:
    """Return the losses of the run that stayed, by step."""
    found = json.loads((RESULTS / "recover.json").read_text(encoding="utf-8"))
    return dict(found["runs"][name]["losses"])


def ratios_of_means() -> list[str]:
    """Return the mean step time with Recover over the mean without, for each engine."""
    text = (RESULTS / "printed" / "recover.txt").read_text(encoding="utf-8")
    return [f"{float(found):.2f}" for found in re.findall(r"ratio of the means ([\d.]+)", text)]


def ratios_of_blocks() -> list[str]:
    """Return the median ratio of blocks of 50 steps with its quartiles, for each engine."""
    text = (RESULTS / "printed" / "recover.txt").read_text(encoding="utf-8")
    return re.findall(r"of blocks of 50 steps (.+)", text)


def most_skipped_without_rollback() -> int:
    """Return the most steps that SkipSpike skips in a recorded run without a rollback."""
    lines = (RESULTS / "policy.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [json.loads(line) for line in lines]
    return max(len(run["skipped"]) for run in runs if run["trace"] != "ppo")


def left_out() -> int:
    """Return how many batches Recover left out."""
    found = json.loads((RESULTS / "recover.json").read_text(encoding="utf-8"))
    return sum(back[3] for back in found["runs"]["Recover"]["backs"])


def same_losses(one: str, other: str) -> bool:
    """Whether two runs have the same loss at every step that both have, the last one included."""
    ours = losses(one)
    theirs = losses(other)
    common = ours.keys() & theirs.keys()
    return len(common) > 40 and all([ours[step] == theirs[step] for step in common])


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
    "The test loss rises from 1.70 to 2.97 in the first ten bad batches, and is 2.90 after the "
    "shard. The test loss was already below 2.90 at step 10": (
        Seen(
            "recover.json, one run: the losses with clipping alone at steps 10, 300, 310 and 330",
            lambda: (
                [round(at("clip", step), 2) for step in (300, 310, 330)] == [1.70, 2.97, 2.90]
                and at("clip", 10) < 2.90
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
    "The losses with `Recover` equal the losses of a run without the bad shard to the last "
    "stored digit.": (
        Seen(
            "recover.json, one run: both have the same loss at every step that both measured",
            lambda: same_losses("Recover", "without the shard"),
        ),
    ),
    "the mean time of a step with snapshots is 0.96 times as long without `compile=True`, and "
    "0.98 times as long with `compile=True`.": (
        Seen(
            "printed/recover.txt: the ratios of the means in the default engine and with compile",
            lambda: ratios_of_means() == ["0.96", "0.98"],
        ),
    ),
    "In blocks of 50 steps, the median ratio is 0.95 (0.93 to 0.97) without `compile=True`, and "
    "0.99 (0.94 to 1.01) with it.": (
        Seen(
            "printed/recover.txt: the ratios of blocks in the default engine and with compile",
            lambda: ratios_of_blocks() == ["0.95 (0.93 to 0.97)", "0.99 (0.94 to 1.01)"],
        ),
    ),
    "`SkipSpike` skips at most 38 of 2000 steps.": (
        Seen(
            "policy.jsonl, all recorded runs but ppo: the most steps that SkipSpike skips",
            lambda: most_skipped_without_rollback() == 38,
        ),
    ),
    "leaves out the thirty bad batches and no other batch": (
        Seen("recover.json, one run: thirty batches are left out", lambda: left_out() == SHARD),
    ),
}
