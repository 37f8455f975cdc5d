"""The kinds of comments that `scripts/refresh.py` fills in, and the function for each."""

from __future__ import annotations

from collections.abc import Callable

from scripts.pages import evidence, identities, layouts, packages, pictures, rules

NUMBERS: dict[str, Callable[..., str]] = {
    "effect": evidence.effect,  # trouble; method; other: a comparison of the guide
    "equal": evidence.equal,  # trouble; method; other: in how many pairs both have the same loss
    "mean": evidence.mean,  # task; method; other: a comparison of averages of weights
    "cell": evidence.cell,  # rule; place; trouble; column: a cell of the atlas
    "alarms": evidence.alarms,  # trace; family: false alarms and missed spikes of a simulation
    "came": evidence.came,  # script; row; column: a cell of a table of examples/published
    "printed": evidence.printed,  # table; row; column: a cell that a benchmark printed
    "norm of": evidence.norm_of,  # trace; median or smallest: of the global norms of a run
    "raced": evidence.raced,  # table; decimals; races: ratios that a benchmark printed
    "verdicts": evidence.verdicts,  # table: how many bars are met
    "seeds": evidence.seeds,  # script: how many seeds it ran
    "race": evidence.race,  # chain; learning rate: the loss at the end of the demo's race
}
"""What is part of a sentence."""

BLOCKS: dict[str, Callable[..., str]] = {
    "atlas": evidence.atlas,
    "atlas picture": evidence.atlas_picture,
    "averages": evidence.averages,
    "clips": evidence.clips,
    "guide": evidence.guide,
    "matrices": evidence.matrices,
    "moved": evidence.moved,
    "printed table": evidence.printed_table,  # table: all of what a benchmark printed
    "private": evidence.private,
    "published": evidence.published,
    "race table": evidence.race_table,
    "recover": evidence.recover,
    "simulate": evidence.simulate,
    "suites": evidence.suites,
    "waits": evidence.waits,
    "rules": rules.table,
    "settings": rules.settings,
    "methods": identities.methods,
    "names": identities.names,
    "identities": identities.listed,
    "packages": packages.drawn,
    "way": packages.way,
    "layouts": layouts.drawn,
}
"""What stands between paragraphs: tables, lists and drawings of results."""

RUNS: dict[str, Callable[..., str]] = {
    "picture": pictures.draw,
    "curve": pictures.draw_curve,
    "norm curve": pictures.draw_norm_curve,
    "singular values": pictures.draw_singular_values,
    "rows": pictures.draw_rows,
    "weights": pictures.draw_weights,
}
"""Drawings of a rule, which is run for them."""

KINDS = NUMBERS | BLOCKS | RUNS
