"""A drawing of the packages of the library, and the functions that a step enters."""

from functools import cache

WIDTH, HEIGHT, ROW, BOX = 740, 44, 92, 140
SAYS = {
    "core": "the contract",
    "engines": "the arithmetic",
    "modules": "the rules",
    "published": "methods by name",
    "optimizer": "torch.optim’s side",
    "source": "files of plain torch",
    "attach": "before another",
    "releasing": "gradients used at once",
    "beside": "functions to call",
    "study": "recorded runs",
    "audit": "what a step asks",
    "recovering": "runs that go back",
    "spec": "plain numbers",
}


def way():
    """The functions that a step of the headline chain enters, by file."""
    from scripts import house

    rows = house.entered(house.headline()).items()
    lines = [f"| `{file}` | {', '.join([f'`{name}`' for name in names])} |" for file, names in rows]
    return "\n".join(["| in | |", "|---|---|", *lines])


def imports():
    """Return for each package those that its files import from."""
    from scripts import house

    if lacks := house.ROOMS.keys() - SAYS.keys() - {"top"}:
        raise KeyError(f"scripts/pages/packages.py must say in SAYS what {sorted(lacks)} are")
    known = {name: set() for name in SAYS}
    for path, others in house.arrows().items():
        mine = house.room(path)
        if mine in known:
            known[mine] |= {house.room(other) for other in others} & known.keys() - {mine}
    return known


def drawn():
    """Draw each package above all that it imports."""
    known = imports()

    @cache
    def floor(room):
        return max([floor(other) + 1 for other in known[room]], default=0)

    @cache
    def reached(room):
        return known[room].union(*map(reached, known[room]))

    floors = [[room for room in known if floor(room) == i] for i in range(len(known))]
    floors = [row for row in floors if row]
    height = ROW * len(floors)
    places = {
        room: (WIDTH * (2 * i + 1) / (2 * len(row)), height - ROW * n - ROW / 2)
        for n, row in enumerate(floors)
        for i, room in enumerate(row)
    }
    parts = []
    for room, others in known.items():
        x, y = places[room]
        for other in sorted(others):
            # what a room knows through another one needs no line
            if not any(other in reached(via) for via in others):
                to, low = places[other]
                line = f"M{x:.0f} {y + HEIGHT / 2:.0f} L{to:.0f} {low - HEIGHT / 2 - 9:.0f}"
                parts.append(f'<g class="flow"><path d="{line}"/></g>')
                head = f"M{to:.0f} {low - HEIGHT / 2:.0f} l-5.5 -10 h11 z"
                parts.append(f'<g class="heads"><path d="{head}"/></g>')
    for room, (x, y) in places.items():
        parts.append(
            f'<g class="stores"><rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" '
            f'height="{HEIGHT}" rx="8"/></g><g class="rooms"><text x="{x:.0f}" y="{y - 3:.0f}" '
            f'text-anchor="middle">{room}</text></g><text x="{x:.0f}" y="{y + 14:.0f}" '
            f'text-anchor="middle" class="small">{SAYS[room]}</text>'
        )
    return (
        f'<figure class="diagram"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="The packages of the library and their imports">{"".join(parts)}</svg>'
        "<figcaption>A package imports those that its arrows lead to, and what these import."
        "</figcaption></figure>"
    )
