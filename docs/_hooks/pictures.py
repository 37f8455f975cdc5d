"""Draws what a rule does to a run of norms, while the docs are built, by running the rule.

A page asks with `<!-- picture: ZClip() -->`; the picture takes the colours of the page.
"""

import math
import random
import re

from markupsafe import escape

ASKED = re.compile(r"<!-- picture: (.+?) -->")
STEPS, SPIKE, JUMP = 600, 150, 300
LOW, HIGH = 0.1, 100.0
LEFT, TOP, WIDTH, HEIGHT = 44, 16, 632, 220


def on_page_markdown(markdown, **_):
    return ASKED.sub(lambda match: draw(match[1]), markdown)


def norms():
    """Norms near 1, a spike of 50, and from then on near 4."""
    source = random.Random(0)
    for step in range(STEPS):
        level = 4.0 if step >= JUMP else 1.0
        spike = 50.0 if step == SPIKE else 1.0
        yield level * spike * math.exp(source.gauss(0.0, 0.2))


def outcome(rule):
    """The norms after the rule, step by step."""
    import torch

    import torchzero_clip

    weight = torch.zeros(1, requires_grad=True)
    clipper = torchzero_clip.Clipper([weight], eval(rule, vars(torchzero_clip)))
    for norm in norms():
        weight.grad = torch.tensor([norm])
        clipper.step()
        yield abs(weight.grad.item())


def place(step, norm):
    share = math.log(max(norm, LOW) / LOW) / math.log(HIGH / LOW)
    return f"{LEFT + step / STEPS * WIDTH:.1f},{TOP + (1 - min(share, 1)) * HEIGHT:.1f}"


def curve(kind, values):
    points = " ".join(place(step, value) for step, value in enumerate(values))
    return f'<polyline class="{kind}" points="{points}"/>'


def draw(rule):
    parts = []
    for tick in (0.1, 1, 10, 100):
        y = place(0, tick).split(",")[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{tick:g}</text>')
    for step in range(0, STEPS + 1, 100):
        x = place(step, 1).split(",")[0]
        parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 21}" text-anchor="middle">{step}</text>')
    parts += [curve("before", norms()), curve("after", outcome(rule))]
    label = escape(f"Norms before and after {rule}, over {STEPS} steps")
    svg = (
        f'<svg viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 30}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
    caption = (
        f'<figcaption><span class="before">norm before</span> and <span class="after">after'
        f"</span> <code>{escape(rule)}</code>, step by step: a spike at step {SPIKE}, and from "
        f"step {JUMP} on four times the level.</figcaption>"
    )
    return f'<figure class="picture">{svg}{caption}</figure>'
