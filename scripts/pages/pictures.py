"""Drawings of what a rule does, made by running the rule.

`picture` shows a run of norms, `curve` the elements of a gradient from -3 to 3, `norm curve` norms
up to 3 for a weight of norm 1, `singular values` and `rows` a matrix, and `weights` a weight in
training and the one for evaluation.
"""

import math
import random
from html import escape

from benchmarks import axes

STEPS, SPIKE, JUMP = 600, 150, 300
LOW, HIGH = 0.1, 100.0
LEFT, TOP, WIDTH, HEIGHT = 76, 16, 600, 220


POINTS, END = 241, 3.0
ROWS, COLUMNS = 48, 64
RATE, NOISE, HIGHEST = 0.1, 3.0, 2.0


def response(rule, norms):
    """(before, after) of every entry of one gradient, or of the norms of many."""
    import torch

    import torchzero_clip

    xs = torch.linspace(0.0 if norms else -END, END, POINTS)
    for grad in xs.view(-1, 1, 1) if norms else [xs]:
        weight = torch.ones_like(grad, requires_grad=True)
        weight.grad = grad.clone()
        torchzero_clip.Clipper([weight], eval(rule, vars(torchzero_clip))).step()
        yield from zip(grad.flatten().tolist(), weight.grad.flatten().tolist(), strict=True)


def draw_curve(rule, norms=False):
    """The input-output curve of a rule."""
    low = 0.0 if norms else -END

    def at(x, y):
        across = (x - low) / (END - low) * WIDTH
        up = (min(max(y, low), END) - low) / (END - low) * HEIGHT
        return f"{LEFT + across:.1f},{TOP + HEIGHT - up:.1f}"

    parts = []
    for tick in range(int(low), int(END) + 1):
        y, x = at(low, tick).split(",")[1], at(tick, low).split(",")[0]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{tick}</text>')
        parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 21}" text-anchor="middle">{tick}</text>')
    rows = list(response(rule, norms))
    for kind, points in (("before", [(x, x) for x, _ in rows]), ("after", rows)):
        points = " ".join(at(x, y) for x, y in points)
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
    what = "norm" if norms else "element"
    parts.append(axes.names(LEFT, TOP, WIDTH, HEIGHT, f"{what} before", f"{what} after"))
    label = escape(f"The {what} of the gradient before and after {rule}")
    where = ", for a weight of norm 1" if norms else ", with all elements in one tensor"
    caption = (
        f'<figcaption><span class="after">{what} after</span> <code>{escape(rule)}</code> as a '
        f'function of the <span class="before">{what} before</span>{where}.</figcaption>'
    )
    svg = (
        f'<svg viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + axes.ROOM}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
    return f'<figure class="picture">{svg}{caption}</figure>'


def draw_norm_curve(rule):
    """What a rule makes of norms, for a weight of norm 1."""
    return draw_curve(rule, norms=True)


def sizes(rule, what):
    """The singular values, or the norms of the rows, of a matrix before the rule and after it."""
    import torch

    import torchzero_clip

    source = torch.Generator().manual_seed(0)
    grad = torch.randn(ROWS, COLUMNS, generator=source) / math.sqrt(COLUMNS)
    grad *= torch.logspace(0.5, -1, ROWS).unsqueeze(1)
    weight = torch.zeros_like(grad, requires_grad=True)
    weight.grad = grad.clone()
    torchzero_clip.Clipper([weight], eval(rule, vars(torchzero_clip))).step()
    for matrix in (grad, weight.grad):
        yield (torch.linalg.svdvals(matrix) if what != "rows" else matrix.norm(dim=1)).tolist()


def draw_matrix(rule, what):
    """What a rule makes of the singular values of a matrix, or of the norms of its rows."""
    low, high = 0.01, 10.0

    def at(i, y):
        share = math.log(min(max(y, low), high) / low) / math.log(high / low)
        return f"{LEFT + i / (ROWS - 1) * WIDTH:.1f},{TOP + (1 - share) * HEIGHT:.1f}"

    parts = []
    for tick in (0.01, 0.1, 1, 10):
        y = at(0, tick).split(",")[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{tick:g}</text>')
    for kind, values in zip(("before", "after"), sizes(rule, what), strict=True):
        points = " ".join(at(i, y) for i, y in enumerate(values))
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
    each = "the norm of each row" if what == "rows" else "each singular value"
    lower, upright = ("row", "norm") if what == "rows" else ("from the largest", "singular value")
    parts.append(axes.names(LEFT, TOP, WIDTH, HEIGHT, lower, upright))
    label = escape(f"{each} of a matrix before and after {rule}")
    svg = (
        f'<svg viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + axes.ROOM}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
    caption = (
        f'<figcaption>{each} of a matrix of {ROWS} x {COLUMNS}, <span class="before">before</span> '
        f'and <span class="after">after</span> <code>{escape(rule)}</code>.</figcaption>'
    )
    return f'<figure class="picture">{svg}{caption}</figure>'


def draw_singular_values(rule):
    return draw_matrix(rule, "singular values")


def draw_rows(rule):
    return draw_matrix(rule, "rows")


def weights(rule):
    """A weight in training and the one for evaluation, on a parabola whose slope is known badly."""
    import torch

    import torchzero_clip

    weight = torch.full((1,), HIGHEST, requires_grad=True)
    link = eval(rule, vars(torchzero_clip))
    opt, source = torchzero_clip.Modular([weight], torchzero_clip.LR(RATE), link), random.Random(0)
    for _ in range(STEPS // 2):
        weight.grad = weight.detach() + source.gauss(0.0, NOISE)
        opt.step()
        trained = weight.item()
        with opt.averaged():
            yield trained, weight.item()


def draw_weights(rule):
    """What a rule shows of a weight that jumps around its best value, 0."""

    def at(step, y):
        across = step / (STEPS // 2) * WIDTH
        up = (min(max(y, -HIGHEST), HIGHEST) + HIGHEST) / (2 * HIGHEST) * HEIGHT
        return f"{LEFT + across:.1f},{TOP + HEIGHT - up:.1f}"

    parts = []
    for tick in (-2, -1, 0, 1, 2):
        y = at(0, tick).split(",")[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{tick}</text>')
    for step in range(0, STEPS // 2 + 1, 50):
        x = at(step, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 21}" text-anchor="middle">{step}</text>')
    for kind, values in zip(("before", "after"), zip(*weights(rule), strict=True), strict=True):
        points = " ".join(at(step, y) for step, y in enumerate(values))
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
    parts.append(axes.names(LEFT, TOP, WIDTH, HEIGHT, "step", "weight"))
    label = escape(f"A weight in training and the averaged weight of {rule}")
    svg = (
        f'<svg viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + axes.ROOM}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
    caption = (
        '<figcaption><span class="before">A weight in training</span> with noisy gradients, and '
        f'<span class="after">the averaged weight</span> of <code>{escape(rule)}</code>. The '
        "optimum is 0.</figcaption>"
    )
    return f'<figure class="picture">{svg}{caption}</figure>'


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

    weight, link = torch.zeros(1, requires_grad=True), eval(rule, vars(torchzero_clip))
    whole = [] if "lr" in link.live else [torchzero_clip.LR(1.0)]
    opt = torchzero_clip.Modular([weight], link, *whole)
    for norm in norms():
        weight.data.zero_()
        weight.grad = torch.tensor([norm])
        opt.step()
        yield abs(weight.item())


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
    parts.append(axes.names(LEFT, TOP, WIDTH, HEIGHT, "step", "norm"))
    label = escape(f"Norms before and after {rule}, over {STEPS} steps")
    svg = (
        f'<svg viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + axes.ROOM}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
    caption = (
        f'<figcaption><span class="before">norm before</span> and <span class="after">after'
        f"</span> <code>{escape(rule)}</code>, step by step, with a spike at step {SPIKE} "
        f"and norms that are four times as large from step {JUMP} on.</figcaption>"
    )
    return f'<figure class="picture">{svg}{caption}</figure>'
