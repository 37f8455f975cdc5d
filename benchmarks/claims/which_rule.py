"""The sentences of docs/which_rule.md."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.atlas.gradients import AFTER
from benchmarks.atlas.rules import ALONE, BEFORE_MUON
from benchmarks.claims.claim import Compared, Seen, atlas, guide, missed
from benchmarks.guide.report import losses, results

LIMIT, NONE = "Adam, global 1", "Adam, no clipping"
DECAYED = "AdamW with warm-up, global 1", "AdamW with warm-up, no clipping"
WRONG = "bad batches", "exploding", "heavy tails"
CALM, LONG = "nothing wrong", "bad batches, 600 steps"
FIXED_SEEDS = "atlas.csv, gradients from fixed seeds"


def close(trouble: str, method: str) -> Seen:
    """A method is at most a hundredth better than the limit."""
    tested = guide("", trouble, method, LIMIT)
    return Seen(
        f"at most 0.01 better: {tested}",
        lambda: tested.comparison.verdict != "better" or tested.comparison.shift > -0.01,
    )


def diverged(trouble: str) -> Seen:
    return Seen(
        f"guide.csv, {trouble}: the losses of all twenty runs of SGD without clipping are infinite",
        lambda: all(map(math.isinf, losses(results(), trouble, "SGD, no clipping").values())),
    )


NO_COST: tuple[Compared, ...] = (
    guide("not significantly different", CALM, LIMIT, NONE),
    guide("not worse", CALM, "Adam, global 0.3", NONE),
    guide("not worse", CALM, "Adam, global 0.1", NONE),
)
TENSORS = Seen(
    f"after a spike in one tensor: {FIXED_SEEDS}",
    lambda: (
        atlas("AdaGC", "one tensor").back
        < atlas("ClipNorm, each tensor", "one tensor").back
        < atlas("ClipNorm", "one tensor").back
        < AFTER
    ),
)
SKIPPED = Seen(
    f"after a spike of a million, SkipSpike against ClipNorm: {FIXED_SEEDS}",
    lambda: atlas("SkipSpike", "spike ×10⁶").back < atlas("ClipNorm", "spike ×10⁶").back,
)
PLANTED = Seen(
    "simulate.csv, one recorded run of PPO with planted spikes: ZClip misses fewer than ClipNorm "
    "at twice the median",
    lambda: missed("ppo", "ZClip, z_thresh") < missed("ppo", "ClipNorm, in medians"),
)
MUON = tuple(guide("better", x, "Muon, clip outside", "Muon, no clipping") for x in WRONG)
EMA = tuple(guide("not worse", x, "Adam, ClipNormByEMA", LIMIT) for x in (*WRONG, CALM))

SENTENCES: dict[str, Sequence[Compared | Seen]] = {
    "no cost was found if nothing is wrong": NO_COST,
    "better than without; warm-up does not replace it": (
        guide("better", "exploding", LIMIT, NONE),
        guide("better", "exploding", *DECAYED),
    ),
    "better than without; SGD without a limit diverged": (
        guide("better", "heavy tails", LIMIT, NONE),
        diverged("heavy tails"),
    ),
    "better than without in trainings": MUON,
    "back sooner than with a global limit, in the atlas; no training has this trouble": (TENSORS,),
    "not worse than a limit of 1 in four of our settings": EMA,
    "missed fewer planted spikes in one recorded run; no loss was compared": (PLANTED,),
    "With SGD every run without a limit diverged in bad batches and with heavy tails.": (
        diverged("bad batches"),
        diverged("heavy tails"),
    ),
    "We found no cost if nothing is wrong, for Adam.": NO_COST,
    "Layer norms, warm-up and decay do not replace a limit.": (
        guide("not significantly different", CALM, *DECAYED),
        *[guide("better", trouble, *DECAYED) for trouble in WRONG],
    ),
    "Variants of Adam that are made to be stable do not replace it.": [
        guide("worse", "bad batches", method, LIMIT)
        for method in ("StableAdam", "SPAM", "Stable-SPAM")
    ],
    "With `ClipNorm` it does not come back": (
        Seen(
            f"after a NaN: {FIXED_SEEDS}",
            lambda: (
                math.isinf(atlas("ClipNorm", "NaN").back) and atlas("Guard", "NaN").back < AFTER
            ),
        ),
    ),
    "Adam is back sooner after a skipped spike than after a clipped one: in the atlas": (SKIPPED,),
    "not worse than a limit alone in trainings; in the atlas, Adam is back sooner after a skipped "
    "spike than after a clipped one": (
        *[
            guide("not worse", trouble, "Adam, SkipSpike, global 1", LIMIT)
            for trouble in ("bad batches", LONG)
        ],
        SKIPPED,
    ),
    "Some other rules do cost something there.": [
        guide("worse", CALM, method, NONE) for method in ("Adam, AGC", "SPAM", "Stable-SPAM")
    ],
    "Before Muon too.": (
        Seen(
            f"after a spike of 1000, Muon is back sooner with a limit: {FIXED_SEEDS}",
            lambda: (
                atlas("ClipNorm", "spike ×1000", BEFORE_MUON).back
                < atlas("no rule", "spike ×1000", BEFORE_MUON).back
            ),
        ),
        *MUON,
    ),
    "Before SOAP and Shampoo as well.": [
        guide("better", trouble, f"{name}, clip outside", f"{name}, no clipping")
        for trouble in ("bad batches", "heavy tails")
        for name in ("SOAP", "Shampoo")
    ],
    "In none of three troubles was a rule that follows the norms significantly better than a "
    "global limit of 1 by more than a hundredth.": [
        close(trouble, f"Adam, {rule}")
        for trouble in WRONG
        for rule in ("ZClip", "AutoClip, 10 %", "ClipNormByEMA", "AdaGC, global")
    ],
    "`ZClip` lets no more through than before.": (
        Seen(
            f"what gets through of a second spike, alone: {FIXED_SEEDS}",
            lambda: abs(atlas("ZClip", "spike ×1000", ALONE).again - 1) < 0.01,
        ),
    ),
    "Lower limits do act": (
        Seen(
            "guide.csv: no pair of limit 0.3 or 0.1 and no clipping is equal",
            lambda: all(pair.comparison.equal == 0 for pair in NO_COST[1:]),
        ),
    ),
    "1 is not the best threshold of these trainings": [
        guide("better", "bad batches", f"Adam, global {threshold}", LIMIT)
        for threshold in ("0.3", "0.1")
    ],
    "Limits per tensor were better than global ones in none of three troubles": [
        guide("not better", trouble, *pair)
        for trouble in WRONG
        for pair in (("Adam, each tensor 1", LIMIT), ("Adam, AdaGC", "Adam, AdaGC, global"))
    ],
    "One per tensor, if spikes are in one tensor.": (TENSORS,),
    "Rules for all tensors that follow the norms are close": (
        Seen(
            "after a spike in one tensor, ZClip needs as many steps as limits per tensor, and "
            f"SkipSpike needs fewer: {FIXED_SEEDS}",
            lambda: (
                atlas("SkipSpike", "one tensor").back
                < atlas("ZClip", "one tensor").back
                == atlas("ClipNorm, each tensor", "one tensor").back
            ),
        ),
    ),
    "Without a rule Adam is not back within 400 steps.": (
        Seen(
            f"after a spike in one tensor: {FIXED_SEEDS}",
            lambda: math.isinf(atlas("no rule", "one tensor").back),
        ),
    ),
}
