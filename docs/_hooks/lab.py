"""Shows the picture of the lab for a recorded run, while the docs are built, by simulating it.

A page asks with `<!-- lab: language_trouble -->`. A slider moves over results that are in the page:
nothing is computed by it, and no rule is written twice.
"""

import json
import math
import re
from functools import cache
from pathlib import Path

ASKED = re.compile(r"<!-- lab: (\w+) -->")
POSITIONS = 20  # of each slider
LAB = Path(__file__).parents[2] / "torchzero_clip" / "study" / "lab"


def on_page_content(html, **_):
    return ASKED.sub(lambda match: figure(match[1]), html)


def moving(trace):
    """The rules of the page, and the path of what their slider moves."""
    from torchzero_clip import ClipNorm, ZClip
    from torchzero_clip.study.lab.rules import rounded

    twice = rounded(2 * trace.total.nanmedian().item())
    yield ClipNorm(twice, dim="global"), ("max_norm",)
    yield ZClip(max_norm=None), ("z_thresh",)


@cache
def results(name):
    """The norms of a run, its bad steps, and what each rule does at each position of its slider."""
    import torch

    from torchzero_clip import Trace
    from torchzero_clip.study.lab import rules
    from torchzero_clip.study.lab.session import recorded
    from torchzero_clip.study.lab.simulations import Verdict, Walk, joined

    trace = Trace.read(recorded()[name])
    bad = trace.spikes.nonzero().flatten().tolist()
    told = {"norms": numbers(trace.total), "bad": bad, "rules": []}
    for rule, path in moving(trace):
        (slider,) = [slider for slider in rules.sliders(rule, trace) if slider.path == path]
        values = [x for x in slider.positions if x is not None]
        chosen = sorted({slider.value, *values[:: math.ceil(len(values) / POSITIONS)]})
        rows = []
        moved = [rules.moved(rule, path, value) for value in chosen]
        walks = [Walk(moved)] * len(moved) if rule.init_unit() else [Walk([x]) for x in moved]
        for one, walk in zip(moved, walks, strict=True):
            steps = joined([steps for _, steps in walk.steps(trace, repr(one))])
            cut = (steps.clipped > 0).nonzero().flatten()
            level = len(steps.limit.unique()) == 1
            verdict = Verdict(bad)
            verdict.add(torch.arange(len(steps.left)), steps)
            told_of = verdict.summary()
            rows.append(
                {
                    "text": repr(one),
                    "limit": numbers(steps.limit[:1])[0] if level else None,
                    "limits": [] if level else numbers(steps.limit[cut]),
                    "cut": cut.tolist(),
                    "left": numbers(steps.left[cut]),
                    "share": told_of["clipped"],
                    "false": told_of["false"],
                    "missed": told_of["missed"],
                }
            )
        told["rules"].append({"name": path[-1], "start": chosen.index(slider.value), "made": rows})
    return told


def numbers(x):
    return [float(f"{n:.4g}") if math.isfinite(n) else None for n in x.tolist()]


def figure(name):
    told = results(name)
    sliders = []
    for k, rule in enumerate(told["rules"]):
        first = rule["made"][rule["start"]]["text"]
        sliders.append(
            f'<label for="lab-{name}-{k}">{k + 1}: <code>{rule["name"]}</code> of '
            f"<code>{first.partition('(')[0]}</code></label>"
            f'<input type="range" id="lab-{name}-{k}" min="0" max="{len(rule["made"]) - 1}" '
            f'value="{rule["start"]}"><output for="lab-{name}-{k}"></output>'
        )
    data = json.dumps(told, separators=(",", ":"))
    style, drawing = [(LAB / f"picture.{kind}").read_text("utf-8") for kind in ("css", "js")]
    script = (Path(__file__).with_suffix(".js")).read_text("utf-8")
    label = f"The norms of the run {name}, two rules' limits, and the steps that they clip"
    return (
        f'<style>{style}</style><figure class="lab"><svg class="run" role="img" '
        f'aria-label="{label}" height="300"></svg>{"".join(sliders)}'
        f'<script type="application/json">{data}</script></figure>'
        f"<script>{{{drawing}\n{script}}}</script>"
    )
