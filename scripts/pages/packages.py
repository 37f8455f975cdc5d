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
    "helpers": "functions to call",
    "study": "recorded runs",
    "audit": "what a step asks",
    "checking": "on your own GPU",
    "recovering": "runs that go back",
    "spec": "plain numbers",
}


def way():
    """The functions that a step of the headline chain enters, by file."""
    from scripts import package_sizes

    rows = package_sizes.entered(package_sizes.headline()).items()
    lines = [f"| `{file}` | {', '.join([f'`{name}`' for name in names])} |" for file, names in rows]
    return "\n".join(["| in | |", "|---|---|", *lines])


def imports():
    """Return for each package those that its files import from."""
    from scripts import package_sizes

    if lacks := package_sizes.PACKAGES.keys() - SAYS.keys() - {"top"}:
        raise KeyError(f"scripts/pages/packages.py must say in SAYS what {sorted(lacks)} are")
    known = {name: set() for name in SAYS}
    for path, others in package_sizes.arrows().items():
        mine = package_sizes.package_of(path)
        if mine in known:
            known[mine] |= {package_sizes.package_of(other) for other in others} & known.keys() - {
                mine
            }
    return known


def drawn():
    """Draw each package above all that it imports."""
    known = imports()

    @cache
    def level(package):
        return max([level(other) + 1 for other in known[package]], default=0)

    @cache
    def reached(package):
        return known[package].union(*map(reached, known[package]))

    levels = [[package for package in known if level(package) == i] for i in range(len(known))]
    levels = [row for row in levels if row]
    height = ROW * len(levels)
    places = {
        package: (WIDTH * (2 * i + 1) / (2 * len(row)), height - ROW * n - ROW / 2)
        for n, row in enumerate(levels)
        for i, package in enumerate(row)
    }
    parts = []
    for package, others in known.items():
        x, y = places[package]
        for other in sorted(others):
            # an import through another package needs no line of its own
            if not any(other in reached(via) for via in others):
                to, low = places[other]
                line = f"M{x:.0f} {y + HEIGHT / 2:.0f} L{to:.0f} {low - HEIGHT / 2 - 9:.0f}"
                parts.append(f'<g class="flow"><path d="{line}"/></g>')
                head = f"M{to:.0f} {low - HEIGHT / 2:.0f} l-5.5 -10 h11 z"
                parts.append(f'<g class="heads"><path d="{head}"/></g>')
    for package, (x, y) in places.items():
        parts.append(
            f'<g class="stores"><rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" '
            f'height="{HEIGHT}" rx="8"/></g><g class="packages"><text x="{x:.0f}" y="{y - 3:.0f}" '
            f'text-anchor="middle">{package}</text></g><text x="{x:.0f}" y="{y + 14:.0f}" '
            f'text-anchor="middle" class="small">{SAYS[package]}</text>'
        )
    return (
        f'<figure class="diagram"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="The packages of the library and their imports">{"".join(parts)}</svg>'
        "<figcaption>A package imports those that its arrows lead to, and what these import."
        "</figcaption></figure>"
    )
