"""A drawing of weights, in which each element has the color of its matrix."""

from html import escape

STEP = 22
"""Pixels from one element to the next."""
RADIUS = 8
TOP = 58
LEFT = 24
COLUMNS = 7
PANEL_WIDTH = 370
PANEL_HEIGHT = TOP + 8 * STEP + 20
EXAMPLES = (
    ("gate, then up", (8, COLUMNS), "(gate rows) d -> gate rows d, gate=2"),
    ("interleaved gate and up", (8, COLUMNS), "(rows gate) d -> gate rows d, gate=2"),
    ("2 queries, 1 key, 1 value", (8, COLUMNS), "(head rows) d -> head rows d, rows=2"),
    ("heads along the columns", (7, 8), "d (head k) -> head d k, head=4"),
)
"""The title, the shape and the layout of each weight."""


def owners(entry, shape):
    """Return for each element of a weight the number of the matrix that it belongs to."""
    import torch

    from torchzero_clip import logical_matrices

    places = torch.arange(shape[0] * shape[1]).view(shape)
    owner = torch.empty(places.numel(), dtype=torch.long)
    for number, matrix in enumerate(logical_matrices(entry, places)):
        owner[matrix.flatten()] = number
    return owner.view(shape).tolist()


def panel(left, top, title, shape, entry):
    """Return one weight: a circle per element."""
    parts = [
        f'<text class="title" x="{left + LEFT}" y="{top + 20}">{escape(title)}</text>',
        f'<text class="code" x="{left + LEFT}" y="{top + 40}">{escape(entry)}</text>',
    ]
    for i, row in enumerate(owners(entry, shape)):
        for j, number in enumerate(row):
            x = left + LEFT + RADIUS + STEP * j
            y = top + TOP + RADIUS + STEP * i
            parts.append(f'<circle class="s{number}" cx="{x}" cy="{y}" r="{RADIUS}"/>')
    return "".join(parts)


def drawn():
    """Return the drawing of all examples, two in a row."""
    panels = [
        panel(PANEL_WIDTH * (i % 2), PANEL_HEIGHT * (i // 2), *example)
        for i, example in enumerate(EXAMPLES)
    ]
    height = PANEL_HEIGHT * ((len(EXAMPLES) + 1) // 2)
    label = "Four weights. Elements of one color belong to one matrix."
    return (
        f'<figure class="diagram"><svg viewBox="0 0 {2 * PANEL_WIDTH} {height}" role="img" '
        f'aria-label="{label}">{"".join(panels)}</svg>'
        "<figcaption>Each circle is an element of a weight, and each color is a matrix. "
        "A row of circles is a row of the weight.</figcaption></figure>"
    )
