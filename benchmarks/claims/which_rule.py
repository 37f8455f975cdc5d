"""The sentences of docs/which_rule.md."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from benchmarks.atlas.gradients import AFTER
from benchmarks.atlas.rules import ALONE, BEFORE_MUON
from benchmarks.claims.claim import (
    NOT_BETTER,
    NOT_WORSE,
    RESULTS,
    Compared,
    Seen,
    atlas,
    guide,
    missed,
    wrongly_clipped,
)
from benchmarks.guide.report import losses, results
from benchmarks.guide.runs import tuning

LIMIT, NONE = "Adam, global 1", "Adam, no clipping"
DECAYED = "AdamW with warm-up, global 1", "AdamW with warm-up, no clipping"
WRONG = "bad batches", "exploding", "heavy tails"
CALM, LONG = "nothing wrong", "bad batches, 600 steps"
SIMULATIONS = "language_trouble", "images", "ppo", "language", "diffusion", "recurrent"
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


def tuning_diverged(trouble: str) -> Seen:
    def shown() -> bool:
        found = tuning(results(), trouble, "SGD, no clipping")
        return len(found) == 4 and all(math.isinf(x) for scores in found.values() for x in scores)

    return Seen(
        f"guide.csv, {trouble}: the tuning losses of SGD without clipping at four learning rates "
        "are infinite",
        shown,
    )


NO_COST: tuple[Compared, ...] = (
    guide("not significantly different", CALM, LIMIT, NONE),
    guide(NOT_WORSE, CALM, "Adam, global 0.3", NONE),
    guide(NOT_WORSE, CALM, "Adam, global 0.1", NONE),
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
MUON = tuple(guide("better", x, "Muon, clip outside", "Muon, no clipping") for x in WRONG)
EMA = tuple(guide(NOT_WORSE, x, "Adam, ClipNormByEMA", LIMIT) for x in (*WRONG, CALM))
FOLLOWING = "ZClip", "AutoClip, 10 %", "ClipNormByEMA", "AdaGC, global", "AdaGC", "AGC"


def skipped_by_guard(trace: str) -> tuple[set[int], set[int]]:
    """Return the steps of a recorded run that are bad, and those that SkipSpike skips."""
    for line in (RESULTS / "policy.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if run["trace"] == trace:
            return set(run["known"]), set(run["skipped"])
    raise KeyError(trace)


def guard_skips_26_of_34() -> bool:
    bad, skipped = skipped_by_guard("language_trouble")
    return len(bad) == 34 and len(skipped) == 26 and skipped <= bad


def eight_come_first() -> bool:
    bad, skipped = skipped_by_guard("language_trouble")
    first = min(skipped)
    return first == 399 and len([step for step in bad if step < first]) == 8


RECORDED = Seen(
    "policy.jsonl, language_trouble: SkipSpike skips 26 of 34 bad steps and no other",
    guard_skips_26_of_34,
)

SENTENCES: dict[str, Sequence[Compared | Seen]] = {
    "The tuning runs also diverged at all four learning rates that we tried": (
        tuning_diverged("bad batches"),
        tuning_diverged("heavy tails"),
    ),
    "Without clipping, every run of SGD diverged in bad batches and in heavy tails.": (
        diverged("bad batches"),
        diverged("heavy tails"),
    ),
    "Every run of SGD without clipping diverged in heavy tails, also in tuning, at each of four "
    "learning rates.": (diverged("heavy tails"), tuning_diverged("heavy tails")),
    "We found no significant cost of a global threshold of 1, 0.3 or 0.1 with Adam in nothing "
    "wrong.": NO_COST,
    "Thresholds of 0.3 and 0.1 do clip in nothing wrong.": (
        Seen(
            "guide.csv: no pair of threshold 0.3 or 0.1 and no clipping is equal",
            lambda: all(pair.comparison.equal == 0 for pair in NO_COST[1:]),
        ),
    ),
    "In the three settings with a problem, warm-up and weight decay do not replace clipping.": [
        guide("better", trouble, *DECAYED) for trouble in WRONG
    ],
    "In exploding, warm-up and weight decay do not replace clipping": (
        guide("better", "exploding", *DECAYED),
    ),
    "Lower fixed thresholds were better there": [
        guide("better", "bad batches", f"Adam, global {threshold}", LIMIT)
        for threshold in ("0.3", "0.1")
    ],
    "Clipping inside is not significantly better in any of the six comparisons": [
        guide(NOT_BETTER, trouble, f"{method}, clip inside", f"{method}, clip outside")
        for trouble in ("bad batches", "heavy tails")
        for method in ("Muon", "SOAP", "Shampoo")
    ],
    "With Adam, a global threshold of 1 is not significantly worse than no clipping in any "
    "setting.": [guide(NOT_WORSE, setting, LIMIT, NONE) for setting in (*WRONG, CALM)],
    "In bad batches, no rule of the table below is significantly better than "
    '`ClipNorm(1.0, dim="global")` with an estimate above 0.01.': [
        close("bad batches", method)
        for method in (
            "Adam, SkipSpike, global 1",
            "Adam, ZClip",
            "Adam, AutoClip, 10 %",
            "Adam, ClipNormByEMA",
            "Adam, ClipNormGrowth",
            "Adam, AdaGC",
        )
    ],
    "In the setting nothing wrong, `ClipNormByEMA` has a lower loss than "
    '`ClipNorm(1.0, dim="global")`.': (guide("better", CALM, "Adam, ClipNormByEMA", LIMIT),),
    "In the other three settings, `ZClip` and `ClipNorm` are not significantly different.": [
        guide("not significantly different", setting, "Adam, ZClip", LIMIT)
        for setting in ("exploding", "heavy tails", CALM)
    ],
    "In four of six simulations, `ZClip` clips a larger share of good steps than `ClipNorm` at "
    "twice the median norm.": (
        Seen(
            "simulate.csv, the six simulations of the table: false alarms of ZClip and of ClipNorm "
            "at twice the median",
            lambda: (
                sum(
                    wrongly_clipped(trace, "ZClip, z_thresh")
                    > wrongly_clipped(trace, "ClipNorm, in medians")
                    for trace in SIMULATIONS
                )
                == 4
            ),
        ),
    ),
    "In the simulations `images` and `ppo`, `ZClip` clips a smaller share": (
        Seen(
            "simulate.csv, images and ppo: false alarms of ZClip and of ClipNorm at twice the "
            "median",
            lambda: all(
                wrongly_clipped(trace, "ZClip, z_thresh")
                < wrongly_clipped(trace, "ClipNorm, in medians")
                for trace in ("images", "ppo")
            ),
        ),
    ),
    "In the simulation, eight spikes come before step 399, and `SkipSpike` skips none of "
    "these eight spikes.": (
        Seen(
            "policy.jsonl, language_trouble: the first step that SkipSpike skips, and the bad "
            "steps before it",
            eight_come_first,
        ),
    ),
    "`SkipSpike` would have skipped 26 of 34 bad steps and no good step.": (RECORDED,),
    "skips 26 of 34 spikes and no good step": (RECORDED,),
    "In exploding, no rule with an adaptive threshold is significantly better than a global "
    "threshold of 1.": [
        guide(NOT_BETTER, "exploding", f"Adam, {rule}", LIMIT) for rule in FOLLOWING
    ],
    "In exploding, `AGC` and a threshold of 1 per tensor are worse than a global threshold of 1.": (
        guide("worse", "exploding", "Adam, AGC", LIMIT),
        guide("worse", "exploding", "Adam, each tensor 1", LIMIT),
    ),
    "after a spike of 1000 times the usual norm, Muon needs": (
        Seen(
            f"after a spike of 1000, Muon is back sooner with clipping: {FIXED_SEEDS}",
            lambda: (
                atlas("ClipNorm", "spike ×1000", BEFORE_MUON).back
                < atlas("no rule", "spike ×1000", BEFORE_MUON).back
            ),
        ),
        *MUON,
    ),
    "If a spike is in all tensors, Adam's updates are normal sooner after a skipped spike than "
    "after a clipped spike.": (SKIPPED,),
    "In bad batches, `SkipSpike` with `ClipNorm` is not significantly worse than `ClipNorm` "
    "alone.": [
        guide(NOT_WORSE, trouble, "Adam, SkipSpike, global 1", LIMIT)
        for trouble in ("bad batches", LONG)
    ],
    "No rule with an adaptive threshold is significantly better than a global threshold of 1 in "
    "heavy tails.": [
        guide(NOT_BETTER, "heavy tails", f"Adam, {rule}", LIMIT) for rule in FOLLOWING
    ],
    "With `ClipNorm` alone, the training never recovers": (
        Seen(
            f"after a NaN: {FIXED_SEEDS}",
            lambda: (
                math.isinf(atlas("ClipNorm", "NaN").back) and atlas("Guard", "NaN").back < AFTER
            ),
        ),
    ),
    "`ClipNormByEMA()` is not significantly worse in any setting": EMA,
    "losses up to 0.013 worse are within the intervals": (
        Seen(
            "guide.csv: the largest end of the four intervals of ClipNormByEMA",
            lambda: round(max(pair.comparison.high for pair in EMA), 3) == 0.013,
        ),
    ),
    "In bad batches, exploding and heavy tails, no rule with an adaptive threshold is "
    "significantly better than a global threshold of 1 with an estimate above 0.01.": [
        close(trouble, f"Adam, {rule}") for trouble in WRONG for rule in FOLLOWING
    ],
    "If the norms change a lot during training, this threshold can miss spikes": (
        Seen(
            "simulate.csv: ClipNorm at twice the median misses spikes in ppo and none in "
            "language_trouble",
            lambda: (
                missed("ppo", "ClipNorm, in medians")
                > missed("language_trouble", "ClipNorm, in medians")
            ),
        ),
    ),
    "A threshold of 1 is not the best threshold in the setting bad batches.": [
        guide("better", "bad batches", f"Adam, global {threshold}", LIMIT)
        for threshold in ("0.3", "0.1")
    ],
    "The two thresholds end at the same loss in 20 of 20 seeds.": (
        Seen(
            "guide.csv, bad batches: the losses with thresholds of 0.3 and 0.1, to the last digit",
            lambda: (
                losses(results(), "bad batches", "Adam, global 0.3")
                == losses(results(), "bad batches", "Adam, global 0.1")
            ),
        ),
    ),
    "the first spike does not change how much of the second spike passes `ZClip`.": (
        Seen(
            f"what gets through of a second spike, alone: {FIXED_SEEDS}",
            lambda: abs(atlas("ZClip", "spike ×1000", ALONE).again - 1) < 0.01,
        ),
    ),
    'With `AutoClip("auto")`, with `ClipNorm` and without any rule, they are not normal again '
    "within 400 steps.": (
        Seen(
            f"after a jump of all norms, before Adam: {FIXED_SEEDS}",
            lambda: (
                atlas("ZClip", "jump ×4").back < AFTER
                and math.isinf(atlas("AutoClip", "jump ×4").back)
                and math.isinf(atlas("ClipNorm", "jump ×4").back)
                and math.isinf(atlas("no rule", "jump ×4").back)
            ),
        ),
    ),
    "With `AdaGC`, Adam's updates are normal sooner than with a fixed threshold per tensor.": (
        TENSORS,
    ),
    "`ZClip` with the global norm needs as many steps as `ClipNorm` per tensor, and `SkipSpike` "
    "needs fewer.": (
        Seen(
            f"after a spike in one tensor: {FIXED_SEEDS}",
            lambda: (
                atlas("SkipSpike", "one tensor").back
                < atlas("ClipNorm, each tensor", "one tensor").back
                == atlas("ZClip", "one tensor").back
            ),
        ),
    ),
    "In bad batches, exploding and heavy tails, rules per tensor were never significantly better "
    "than global rules.": [
        guide(NOT_BETTER, trouble, *pair)
        for trouble in WRONG
        for pair in (("Adam, each tensor 1", LIMIT), ("Adam, AdaGC", "Adam, AdaGC, global"))
    ],
    "In bad batches, variants of Adam that are designed to be stable do not replace clipping. "
    "`StableAdam`, SPAM and Stable-SPAM are worse than Adam with a global threshold of 1.": [
        guide("worse", "bad batches", method, LIMIT)
        for method in ("StableAdam", "SPAM", "Stable-SPAM")
    ],
    "In the setting nothing wrong, `AGC`, SPAM and Stable-SPAM are worse than Adam without "
    "clipping.": [
        guide("worse", CALM, method, NONE) for method in ("Adam, AGC", "SPAM", "Stable-SPAM")
    ],
}
