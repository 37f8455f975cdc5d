"""The sentences of docs/papers.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from benchmarks.claims.claim import Compared, Seen
from benchmarks.guide.paired import interval, shift, wilcoxon
from examples.published import prodigy
from examples.published.smoothness import LSTM, power
from examples.published.study import results
from examples.published.tables import TABLES

PLAIN, MOMENTUM = "without momentum", "momentum 0.9"
TASKS = (*TABLES, prodigy.NETWORK)
NO_CLIP = "no clip"


def median(name: str, case: str, method: str, column: str) -> float:
    """Return the median over seeds of a column of a table."""
    found = results(name)
    measure = found.study.columns[column]
    return statistics.median(found.by(measure, case, method).values())


def medians(name: str, what: str, shown: Callable[[], bool]) -> Seen:
    return Seen(f"{name}.csv, medians of {results(name).seeds} seeds: {what}", shown)


def rare(says: str, case: str, method: str) -> Compared:
    return Compared("heavy_tails", (case, method, "gradient descent"), says)


def steps(says: str, method: str) -> Compared:
    return Compared("grokking", ("", method, "Adam with decay"), says)


def scheduled(says: str, table: str, method: str) -> Compared:
    return Compared("schedule_free", (table, method, "linear decay"), says)


def at_rate(says: str, rate: str, method: str) -> Compared:
    return Compared("batch_rates", (rate, method, NO_CLIP), says)


def old_bases(says: str, what: str) -> Compared:
    return Compared("soap", ("Old bases", what), says)


def never(method: str) -> Seen:
    """A method of the grokking study has the other sums right in no run."""
    return Seen(
        f"grokking.csv: no run of {method} has 95 % of the other sums right within 400 steps",
        lambda: all(map(math.isinf, results("grokking").scores("", method).values())),
    )


def known(method: str) -> Seen:
    """A method of the grokking study knows what it learns from in every run."""
    return Seen(
        f"grokking.csv: all runs of {method} end with more than 99 % of what they learn from",
        lambda: all(v[-2] > 0.99 for v in results("grokking").values("", method).values()),
    )


def errors() -> list[float]:
    """Return how many more held-out digits the network has wrong with Prodigy than with Adam."""
    found = results("prodigy")
    right = [found.by(lambda v: v[-1], prodigy.NETWORK, m) for m in ("Adam", "Prodigy")]
    return [450 * (right[0][seed] - right[1][seed]) for seed in right[0]]


def ahead(other: str) -> int:
    """Return in how many seeds AGC 0.01 has a higher accuracy at a batch of 256."""
    own, theirs = [results("large_batches").scores("256", m) for m in ("AGC 0.01", other)]
    return sum(own[seed] < theirs[seed] for seed in own)


def lost_every_20() -> tuple[str, str, str, str]:
    """Return how much more SOAP loses than Shampoo: the shift, its interval, and p."""
    more = {}
    for name in ("SOAP", "Shampoo"):
        old, new = [results("soap").scores("", f"{name}, every {n}") for n in (20, 1)]
        more[name] = {seed: old[seed] - new[seed] for seed in old}
    differences = [more["SOAP"][seed] - more["Shampoo"][seed] for seed in more["SOAP"]]
    low, high = interval(differences)
    found = shift(differences), low, high, wilcoxon(differences)
    return f"{found[0]:.3f}", f"{low:.3f}", f"{high:.2f}", f"{found[3]:.3f}"


def fits() -> list[float]:
    """Return R² of the fitted power for each run of the LSTM, in ascending order."""
    found = []
    for method in ("fixed", "clipped"):
        for values in results("smoothness").values(LSTM, method).values():
            norms = [math.log(x) for x in values[1::2]]
            curvatures = [math.log(x) for x in values[2::2]]
            found.append(statistics.correlation(norms, curvatures) ** 2)
    return sorted(found)


def exponents(method: str) -> list[float]:
    return sorted(results("smoothness").by(power, LSTM, method).values())


def factors() -> list[float]:
    """Return how many times as many steps the best fixed learning rate needs on x⁴."""
    return [
        median("smoothness", start, "fixed", "loss, steps")
        / median("smoothness", start, "clipped", "loss, steps")
        for start in ("2", "4", "8", "16")
    ]


SENTENCES: dict[str, Sequence[Compared | Seen]] = {
    "Without momentum, our runs agree with the paper.": (
        rare("better", PLAIN, "Adam"),
        rare("better", PLAIN, "sign"),
        medians(
            "heavy_tails",
            "on the rare classes Adam and sign descent are below 1, gradient descent is above 4",
            lambda: (
                max(median("heavy_tails", PLAIN, m, "rare") for m in ("Adam", "sign")) < 1
                and median("heavy_tails", PLAIN, "gradient descent", "rare") > 4
            ),
        ),
    ),
    "Clipping the global norm does not repair gradient descent, and neither does normalizing it.": (
        rare("not significantly different", PLAIN, "clipped"),
        rare("not significantly different", PLAIN, "normalised"),
    ),
    "With a momentum of 0.9, our runs disagree with the paper.": [
        rare("worse", MOMENTUM, method) for method in ("Adam", "sign", "clipped", "normalised")
    ],
    "and all four other methods are worse": [
        rare("worse", MOMENTUM, method) for method in ("Adam", "sign", "clipped", "normalised")
    ],
    "OrthoGrad and weight decay do what the paper reports.": (
        steps("better", "OrthoGrad"),
        steps("worse", "Adam"),
        never("Adam"),
    ),
    "do not get there within 400 steps in any of ten seeds": (never("Adam"), never("Grokfast")),
    "Both have memorized the sums of the training set by then.": (known("Adam"), known("Grokfast")),
    "Prodigy ends at a lower loss than D-Adaptation in all five tasks": [
        Compared("prodigy", ("Prodigy against D-Adaptation", task), "better") for task in TASKS
    ],
    "By the error rate on held-out examples, Prodigy is not significantly different from Adam on "
    "the four tables, and worse with the network.": [
        Compared(
            "prodigy",
            ("Prodigy against Adam by error rate", task),
            "worse" if task == prodigy.NETWORK else "not significantly different",
        )
        for task in TASKS
    ],
    "less accurate than Adam in ten of ten seeds, by one to five of 450 examples": (
        Compared("prodigy", ("Prodigy against Adam by error rate", prodigy.NETWORK), "worse"),
        Seen(
            "prodigy.csv: one to five examples in each of ten seeds",
            lambda: len(errors()) == 10 and all(0.9 < x < 5.1 for x in errors()),
        ),
    ),
    "D-Adaptation ends at a higher loss than Adam in all five tasks.": [
        Compared("prodigy", (task, "D-Adaptation", "Adam"), "worse") for task in TASKS
    ],
    "Against Adam at its best learning rate, Prodigy ends at a higher loss in four of five": [
        Compared("prodigy", (task, "Prodigy", "Adam"), says)
        for task, says in zip(
            TASKS, ("worse", "not significantly different", "worse", "worse", "worse"), strict=True
        )
    ],
    "With decay, Grokfast was slower than decay alone.": (steps("worse", "Grokfast with decay"),),
    "Schedule-Free is better than linear decay on three tables, and not significantly different "
    "on wine.": [
        scheduled(
            "not significantly different" if table == "wine" else "better", table, "Schedule-Free"
        )
        for table in TABLES
    ],
    "The mean of all weights is worse than linear decay on all four tables": [
        scheduled("worse", table, "mean of all") for table in TABLES
    ],
    "Primal averaging is worse on wine and better on iris.": (
        scheduled("worse", "wine", "primal averaging"),
        scheduled("better", "iris", "primal averaging"),
    ),
    "On the other two tables, it is not significantly different.": [
        scheduled("not significantly different", table, "primal averaging")
        for table in ("digits", "breast_cancer")
    ],
    "A constant learning rate is worse than linear decay on breast cancer, and not significantly "
    "different on the other three tables.": [
        scheduled(
            "worse" if table == "breast_cancer" else "not significantly different",
            table,
            "constant",
        )
        for table in TABLES
    ],
    "At 256, the tightest threshold is ahead of `AGC(0.04)` in nine of ten seeds and of "
    "`AGC(0.16)` in eight.": (
        Seen(
            "large_batches.csv: in how many of ten seeds AGC 0.01 has a higher accuracy",
            lambda: (ahead("AGC 0.04"), ahead("AGC 0.16")) == (9, 8),
        ),
        Compared(
            "large_batches",
            ("AGC 0.01 against", "AGC 0.04, batch 256"),
            "not significantly different",
        ),
        Compared(
            "large_batches",
            ("AGC 0.01 against", "AGC 0.16, batch 256"),
            "not significantly different",
        ),
    ),
    "At 16 and at 64, the three thresholds are not significantly different.": [
        Compared(
            "large_batches",
            ("AGC 0.01 against", f"{other}, batch {batch}"),
            "not significantly different",
        )
        for batch in (16, 64)
        for other in ("AGC 0.04", "AGC 0.16")
    ],
    "The learning rates differ: `AGC(0.16)` has 0.48 at a batch of 256, the other two have 1.6.": (
        Seen(
            "large_batches.csv: the learning rates that a seed of tuning chose at a batch of 16",
            lambda: (
                [results("large_batches").best("256", f"AGC {x}") for x in (0.01, 0.04, 0.16)]
                == [0.1, 0.1, 0.03]
            ),
        ),
    ),
    "Clipping allows a larger learning rate.": (
        at_rate("better", "0.5", "AGC 0.01"),
        at_rate("better", "1.6", "AGC 0.01"),
        at_rate("better", "5", "AGC 0.01"),
    ),
    "At a small learning rate, a batch of 256 trains without it.": (
        at_rate("worse", "0.05", "AGC 0.01"),
        at_rate("worse", "0.05", "AGC 0.04"),
        at_rate("not significantly different", "0.05", "AGC 0.16"),
        medians(
            "batch_rates",
            "without clipping, more than 0.95 is right at 0.05",
            lambda: median("batch_rates", "0.05", NO_CLIP, "accuracy") > 0.95,
        ),
    ),
    "With each method at its own best learning rate, little of the difference is left.": (
        at_rate("better", "own best", "AGC 0.01"),
        at_rate("not significantly different", "own best", "AGC 0.04"),
        at_rate("not significantly different", "own best", "AGC 0.16"),
        Seen(
            "batch_rates.csv: at their own best, the shift is below 0.02; at 1.6, it is above 0.8",
            lambda: (
                at_rate("", "own best", "AGC 0.01").comparison.shift > -0.02
                and at_rate("", "1.6", "AGC 0.01").comparison.shift < -0.8
            ),
        ),
    ),
    "`AGC(0.01)` is worse than `AGC(0.16)` at the two smaller learning rates, and better at the "
    "three larger ones.": [
        Compared("batch_rates", ("AGC 0.01 against", f"AGC 0.16, {rate}"), says)
        for rate, says in (
            ("0.05", "worse"),
            ("0.16", "worse"),
            ("0.5", "better"),
            ("1.6", "better"),
            ("5", "better"),
        )
    ],
    "`AGC(0.01)` is worse than `AGC(0.04)` at 0.05 and 0.16, not significantly different at 0.5 "
    "and 1.6, and better at 5.": [
        Compared("batch_rates", ("AGC 0.01 against", f"AGC 0.04, {rate}"), says)
        for rate, says in (
            ("0.05", "worse"),
            ("0.16", "worse"),
            ("0.5", "not significantly different"),
            ("1.6", "not significantly different"),
            ("5", "better"),
        )
    ],
    "Our runs do not show that SOAP becomes worse more slowly.": (
        old_bases("worse", "SOAP, every 100 against every 1"),
        old_bases("worse", "Shampoo, every 100 against every 1"),
        old_bases("not significantly different", "what SOAP loses by that against Shampoo"),
    ),
    "The difference is 0.051 (uncorrected interval: 0.002 to 0.10; uncorrected p = 0.049)": (
        Seen(
            "soap.csv: what SOAP loses with new bases every 20 steps, minus what Shampoo loses",
            lambda: lost_every_20() == ("0.051", "0.002", "0.10", "0.049"),
        ),
    ),
    "SOAP has the lower median loss at each interval.": (
        medians(
            "soap",
            "SOAP against Shampoo with renewals every 1, 5, 20 and 100 steps",
            lambda: all(
                median("soap", "", f"SOAP, every {n}", "loss")
                < median("soap", "", f"Shampoo, every {n}", "loss")
                for n in (1, 5, 20, 100)
            ),
        ),
    ),
    "The curvature grows with the norm of the gradient.": (
        Seen(
            "smoothness.csv: every exponent of every seed is between 0 and 1",
            lambda: all(0 < x < 1 for m in ("fixed", "clipped") for x in exponents(m)),
        ),
    ),
    "R² of the fit is 0.39 to 0.90 over the seeds": (
        Seen(
            "smoothness.csv: the smallest and the largest R² over the runs of the LSTM",
            lambda: [f"{x:.2f}" for x in (fits()[0], fits()[-1])] == ["0.39", "0.90"],
        ),
    ),
    "On the LSTM, clipping ends at a slightly lower loss.": (
        Compared("smoothness", (LSTM, "clipped", "fixed"), "better"),
        *[
            Compared("smoothness", ("LSTM, clipped against fixed", seeds), "better")
            for seeds in ("seeds 0 to 9", "seeds 10 to 19")
        ],
    ),
    "On x⁴, the factor between the two grows with the distance, from a distance of 4 on.": (
        medians(
            "smoothness",
            "the factors from 4, 8 and 16",
            lambda: factors()[1:] == sorted(factors()[1:]),
        ),
    ),
    "So the factor at 2 is larger than the factor at 4.": (
        medians("smoothness", "the factors from 2 and 4", lambda: factors()[0] > factors()[1]),
    ),
}
