"""The results as a table, as pictures, and as the sentences that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from benchmarks import axes
from benchmarks.atlas.gradients import AFTER, TROUBLES
from benchmarks.atlas.rules import (
    AFTER_ADAM,
    ALONE,
    BEFORE_ADAM,
    BEFORE_MUON,
    CASES,
    INSTEAD,
    PLACES,
    RULES,
)
from benchmarks.atlas.runs import DRAWN, SHOWN, Curve, Row, chain_of

FIRST = "spike ×1000"  # the trouble that the table shows first, before Adam
HEAD = {
    "place": "place",
    "rule": "rule",
    "trouble": "problem",
    "largest": "largest step",
    "back": "steps to recover",
    "touched": "steps changed",
    "averages": "error of averages",
    "again": "next spike",
    "along": "cosine",
}


def number(value: float) -> str:
    """Three digits, as the table has them."""
    if math.isnan(value):
        return "—"
    if math.isinf(value):
        return "∞"
    return f"{value:.0f}" if 1000 <= value < 1e5 else f"{value:.3g}"


def cells(row: Row) -> dict[str, str]:
    shown = {name: number(getattr(row, name)) for name in (*HEAD,)[3:]}
    shown["touched"] = "—" if math.isnan(row.touched) else f"{100 * row.touched:.3g} %"
    return {"place": row.place, "rule": row.rule, "trouble": row.trouble, **shown}


def table(rows: Sequence[Row], pages: dict[str, str]) -> str:
    """All results; a script in the page sorts and chooses. `pages` are the addresses of rules."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in HEAD.values())
    lines = []
    for row in rows:
        shown = {name: escape(text) for name, text in cells(row).items()}
        page = pages.get(RULES[row.rule].page)
        if page is not None:
            shown["rule"] = f'<a href="{page}">{shown["rule"]}</a>'

        numbers = "".join(f"<td>{text}</td>" for text in shown.values())
        lines.append(f"<tr>{numbers}</tr>")
    body = "\n".join(lines)
    return (
        f'<div class="frame">\n<table class="dense atlas" data-place="{BEFORE_ADAM}" '
        f'data-trouble="{FIRST}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def first_table(rows: Sequence[Row], pages: dict[str, str]) -> str:
    """What the table shows first: every rule before Adam, and one trouble."""
    lines = [f"| {' | '.join(HEAD.values())} |", "|" + "---|" * 3 + "--:|" * (len(HEAD) - 3)]
    for row in rows:
        if (row.place, row.trouble) == (BEFORE_ADAM, FIRST):
            shown = cells(row)
            page = pages.get(RULES[row.rule].page)
            if page is not None:
                shown["rule"] = f"[{row.rule}]({page})"
            lines.append(f"| {' | '.join(shown.values())} |")
    return "\n".join(lines)


def troubles() -> str:
    lines = [f"| {name} | {trouble.about} |" for name, trouble in TROUBLES.items()]
    return "\n".join(["| problem | gradients |", "|---|---|", *lines])


def settings() -> str:
    """The rules as they stand before Adam, or where else they can."""
    lines = [f"| {rule} | `{chain_of(rule, found.places[0])}` |" for rule, found in RULES.items()]
    return "\n".join(["| rule | chain |", "|---|---|", *lines])


# ---------------------------------------------------------------------- sentences


def find(rows: Iterable[Row], rule: str, place: str, trouble: str) -> Row:
    return next(r for r in rows if (r.rule, r.place, r.trouble) == (rule, place, trouble))


Claim = tuple[str, bool]  # a sentence, and whether the results hold it


def in_front(rows: Sequence[Row]) -> Claim:
    before = find(rows, "ClipNorm", BEFORE_ADAM, FIRST)
    after = find(rows, "ClipNorm", AFTER_ADAM, FIRST)
    none = find(rows, "no rule", AFTER_ADAM, FIRST)
    text = (
        "**Clip before Adam, not after.** After Adam, `ClipNorm` limits the step in which a spike "
        "of 1000 occurs. But 400 steps later, the relative error of Adam's averages is still "
        f"{number(after.averages)}, as large as without clipping. If `ClipNorm` comes before Adam, "
        f"the error is {number(before.averages)}, and Adam's steps are normal again after "
        f"{number(before.back)} steps."
    )
    same = math.isclose(after.averages, none.averages, rel_tol=1e-3)
    return text, same and before.averages < 0.01 and before.back < AFTER


def adam_stops(rows: Sequence[Row]) -> Claim:
    spike = find(rows, "no rule", BEFORE_ADAM, "spike ×10⁶")
    calm = find(rows, "no rule", BEFORE_ADAM, "none")
    text = (
        "**After a spike, Adam makes little progress.** Without clipping, a spike of a million "
        f"makes no step of Adam longer than {number(spike.largest)} times the normal step. But the "
        "steps are not normal again within 400 steps. The sum of all steps has a cosine of "
        f"{number(spike.along)} with the true direction. Without the spike, the cosine is "
        f"{number(calm.along)}."
    )
    return text, spike.largest < 5 and math.isinf(spike.back) and spike.along < calm.along / 2


def muon_turns(rows: Sequence[Row]) -> Claim:
    none = find(rows, "no rule", BEFORE_MUON, FIRST)
    clip = find(rows, "ClipNorm", BEFORE_MUON, FIRST)
    text = (
        "**After a spike, Muon's steps have a wrong direction.** With a spike of 1000, no step of "
        f"Muon is longer than {number(none.largest)} times the normal step, with or without "
        f"clipping. Without clipping, Muon needs {number(none.back)} steps to recover. With "
        f"`ClipNorm` before Muon, it needs {number(clip.back)}."
    )
    return text, max(none.largest, clip.largest) < 1.5 and clip.back < none.back


def follow_or_forget(rows: Sequence[Row]) -> Claim:
    rules = "ZClip", "AutoClip", "ClipNormGrowth"
    jumps = {rule: find(rows, rule, ALONE, "jump ×4").back for rule in rules}
    again = {rule: find(rows, rule, ALONE, FIRST).again for rule in rules}
    text = (
        "**Some adaptive rules follow the norms and are fooled by spikes. Some resist spikes and "
        "do not follow. Others do both.** Three rules without an optimizer show this. `AutoClip` "
        "learns from the norms before clipping. It adapts to norms that are four times as large "
        f"after {number(jumps['AutoClip'])} steps. But after a spike of 1000, the next spike "
        f"passes {number(again['AutoClip'])} times as large as without the first one. `ZClip` "
        "learns from the norms after clipping. The next spike passes no larger than without the "
        "first one. But `ZClip` does not adapt to the larger norms within 400 steps. "
        f"`ClipNormGrowth` adapts after {number(jumps['ClipNormGrowth'])} steps, and the next "
        "spike passes no larger."
    )
    fooled = again["AutoClip"] > 10 and jumps["AutoClip"] < AFTER
    resists = math.isclose(again["ZClip"], 1, abs_tol=0.01) and math.isinf(jumps["ZClip"])
    both = math.isclose(again["ClipNormGrowth"], 1, abs_tol=0.01)
    return text, fooled and resists and both and jumps["ClipNormGrowth"] < AFTER


def numbers_that_are_none(rows: Sequence[Row]) -> Claim:
    broken = [r for r in rows if r.place == BEFORE_ADAM and r.trouble in ("NaN", "infinity")]
    safe = [r.rule for r in broken if r.trouble == "NaN" and math.isfinite(r.largest)]
    names = ", ".join(f"`{rule}`" for rule in safe)
    count = len({r.rule for r in broken})
    text = (
        f"**NaN needs a guard.** Of the {count} rules and settings before Adam, {len(safe)} keep a "
        f"NaN gradient out of the weights: {names}."
    )
    return text, "Guard" in safe and "ClipNorm" not in safe


def claims() -> list[Callable[[Sequence[Row]], Claim]]:
    return [in_front, adam_stops, muon_turns, follow_or_forget, numbers_that_are_none]


def sentences(rows: Sequence[Row]) -> list[str]:
    return [claim(rows)[0] for claim in claims()]


# ---------------------------------------------------------------------- pictures

LEFT, PANEL, GAP, TOP, HEIGHT = 84, 290, 26, 30, 190
LOW, HIGH = 0.01, 1e4


def picture(curves: Sequence[Curve], page: str) -> str | None:
    """How the size of the step goes on around a spike and a jump, for the rule of a page."""
    rule = next((name for name, found in RULES.items() if found.page == page), None)
    own = [curve for curve in curves if curve.rule == rule]
    if rule is None or not own:
        return None
    places = [place for place in PLACES if place in {curve.place for curve in own}]
    parts = []
    for p, trouble in enumerate(DRAWN):
        left = LEFT + p * (PANEL + GAP)
        parts.append(f'<text x="{left + PANEL / 2:g}" y="18" text-anchor="middle">{trouble}</text>')
        for tick in (0.01, 1, 100, 10_000):
            y = height(tick)
            parts.append(f'<line class="grid" x1="{left}" x2="{left + PANEL}" y1="{y}" y2="{y}"/>')
            if not p:
                label = f'<text x="{left - 6}" y="{y}" dy="4" text-anchor="end">{tick:g}</text>'
                parts.append(label)
        for step in range(SHOWN[0], SHOWN[-1] + 2, 10):
            x = across(step - SHOWN[0], left)
            y = TOP + HEIGHT + 18
            parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{step}</text>')
        upright = "" if p else "size of the step"
        parts.append(axes.names(left, TOP, PANEL, HEIGHT, "step", upright))
        for curve in own:
            if curve.trouble == trouble:
                sizes = map(float, curve.sizes.split())
                points = " ".join(f"{across(i, left)},{height(x)}" for i, x in enumerate(sizes))
                kind = f"place{places.index(curve.place)}"
                parts.append(f'<polyline class="{kind}" points="{points}"/>')
    spans = ", ".join(f'<span class="place{i}">{place}</span>' for i, place in enumerate(places))
    chain = "the rule in Adam's stead" if places == [INSTEAD] else f"<code>{escape(rule)}</code>"
    label = escape(f"The size of steps around a spike and a jump: {rule}")
    width = LEFT + 2 * PANEL + GAP + 10
    return (
        f'<figure class="picture atlas">\n<svg viewBox="0 0 {width} {TOP + HEIGHT + axes.ROOM}" '
        f'role="img" aria-label="{label}">{"".join(parts)}</svg>\n<figcaption>The size '
        f"of each step relative to healthy steps, around a spike of 1000 and a lasting jump by 4, "
        f"for {chain}: {spans}.</figcaption>\n</figure>"
    )


def across(i: int, left: float) -> str:
    return f"{left + i / (len(SHOWN) - 1) * PANEL:.1f}"


def height(size: float) -> str:
    size = HIGH if math.isnan(size) else min(max(size, LOW), HIGH)
    return f"{TOP + (1 - math.log(size / LOW) / math.log(HIGH / LOW)) * HEIGHT:.1f}"


def complete(rows: Sequence[Row]) -> bool:
    """Whether the results are of all cases, in their order."""
    every = [(rule, place, trouble) for rule, place in CASES for trouble in TROUBLES]
    return every == [(row.rule, row.place, row.trouble) for row in rows]
