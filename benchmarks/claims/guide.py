"""The sentences of docs/guide.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.claims.claim import NOT_BETTER, Compared, Seen, averages, guide
from benchmarks.claims.which_rule import (
    CALM,
    DECAYED,
    LIMIT,
    NO_COST,
    NONE,
    TENSORS,
    WRONG,
)
from benchmarks.guide.report import results
from benchmarks.guide.runs import TUNING, tuning
from benchmarks.studies import averaged
from benchmarks.studies.averaged import TASKS

LANGUAGE = tuple(task for task in TASKS if task.startswith("language"))
EMAS = "constant, EMA 0.9", "constant, EMA 0.99"
HALF = "constant, mean of the second half"


def close_rates() -> bool:
    """Return whether the two best rates of SPAM differ by less than its seeds of tuning do."""
    found = tuning(results(), "bad batches", "SPAM")
    first, second = sorted(found, key=lambda rate: sum(found[rate]))[:2]
    ahead = (sum(found[second]) - sum(found[first])) / len(TUNING)
    return ahead < min(max(found[rate]) - min(found[rate]) for rate in (first, second))


def schedule_free_at_end() -> bool:
    """Return whether the largest rate that ran is the best for Schedule-Free with heavy tails."""
    case = "labels with heavy tails", "Schedule-Free"
    found = tuning(averaged.results(), *case)
    return averaged.best(averaged.results(), *case) == max(found) == 10


SENTENCES: dict[str, Sequence[Compared | Seen]] = {
    "`ScheduleFree` has a constant learning rate after the warm-up, and is better than a tuned "
    "cosine in all three tasks": [
        averages("better", task, "Schedule-Free", "cosine") for task in TASKS
    ],
    "With heavy tails, its best learning rate is 10 times the usual rate, which is the end of the "
    "grid.": (Seen("averaged.csv: the best rate on the seeds of tuning", schedule_free_at_end),),
    "`WeightEMA` makes a constant learning rate better in all three tasks, with either decay.": [
        averages("better", task, method, "constant") for task in TASKS for method in EMAS
    ],
    "`WeightEMA(0.99)` at a constant learning rate is worse in all three tasks.": [
        averages("worse", task, EMAS[1], "cosine") for task in TASKS
    ],
    "`WeightEMA(0.9)` is worse in two tasks, and not significantly different with bad batches.": [
        averages(
            "not significantly different" if "bad batches" in task else "worse",
            task,
            EMAS[0],
            "cosine",
        )
        for task in TASKS
    ],
    "With a cosine, `WeightEMA(0.9)` makes the loss slightly worse": [
        averages("worse", task, "cosine, EMA 0.9", "cosine") for task in TASKS
    ],
    "A mean of the second half is worse than `WeightEMA(0.9)` in the two tasks of language": [
        averages("worse", task, HALF, EMAS[0]) for task in LANGUAGE
    ],
    "If nothing is wrong, no significant difference between a fixed global threshold and no "
    "clipping contradicts the claim for Adam.": (
        guide("not significantly different", CALM, *DECAYED),
        *NO_COST,
    ),
    "But `ClipNormByEMA` before Adam is … than no clipping, although nothing is wrong.": (
        guide("better", CALM, "Adam, ClipNormByEMA", NONE),
    ),
    "In bad batches our runs contradict the claim": (guide("better", "bad batches", *DECAYED),),
    "There, layer norms, warm-up and weight decay together do not replace clipping": (
        guide("worse", "bad batches", DECAYED[1], LIMIT),
    ),
    "In both settings, warm-up and weight decay do not make clipping unnecessary.": [
        guide("better", trouble, *DECAYED) for trouble in ("exploding", "heavy tails")
    ],
    "in one run with fixed gradients, `ClipNorm` and `AdaGC` per tensor recover sooner than "
    "`ClipNorm` with a global threshold.": (TENSORS,),
    "`SPAM`'s rate in bad batches is ahead of the next one by less than the two seeds differ.": (
        Seen("guide.csv: the losses of the two seeds of tuning", close_rates),
    ),
    "Thresholds per tensor were not significantly better in any of the three settings with a "
    "problem.": [
        guide(NOT_BETTER, trouble, *pair)
        for trouble in WRONG
        for pair in (("Adam, each tensor 1", LIMIT), ("Adam, AdaGC", "Adam, AdaGC, global"))
    ],
}
