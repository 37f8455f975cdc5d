"""Lists of the rules, from their classes: the navigation, the index and the table of settings."""

import importlib
import inspect
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
MODULES = DOCS / "modules"
TITLES = {
    "clipping": "Clipping",
    "adaptive": "Adaptive",
    "descent": "Descent",
    "torch": "Of torch.optim",
    "directions": "Relatives of Adam",
    "matrices": "Matrices and averages",
    "averages": "Matrices and averages",
    "flow": "Flow and guards",
}
BASES = (
    "AdaptiveRule",
    "Criterion",
    "Factored",
    "Heads",
)  # of which rules are made, or what they are told
SETTINGS = [
    "eager",
    "`torch.compile`",
    "`compile=True`",
    "DDP",
    "FSDP2",
    "TP",
    "AMP",
    "DCP",
    "bf16",
    "guards",
    "release",
    "attach",
    "small state",
]


def navigation():
    """The pages by section; criteria of AdaptiveClip, and the parts of descent, stand apart."""
    for title in dict.fromkeys(TITLES.values()):
        folders = [folder for folder, named in TITLES.items() if named == title]
        yield {title: [{name: link(name)} for folder in folders for name in rules(folder)]}
        if "adaptive" in folders:
            yield {"Criteria of AdaptiveClip": [{name: link(name)} for name in criteria()]}


def table(folder):
    """A table of the rules of a folder, or of the criteria."""
    names = criteria() if folder == "criteria" else rules(folder)
    return "\n".join(["| | |", "|---|---|", *(row(name) for name in names)])


def row(name):
    """Return the name, which leads to the page, and the formula in the docstring."""
    line = importlib.import_module("torchzero_clip.core.formula").formula_of(public(name))
    line = f"`` {line} ``" if "←" in line else line
    return f"| [`{name}`]({link(name).removeprefix('modules/')}) | {line} |"


def rules(folder):
    """The rules of a folder of modules, by name; of descent in three parts."""
    if folder in ("descent", "torch", "directions"):
        return [name for name in classes("descent") if part(name) == folder]
    criterion = public("Criterion")
    return [name for name in classes(folder) if not issubclass(public(name), criterion)]


def part(name):
    """The part of descent: what torch.optim has, what sets a size as those do, and the rest."""
    if hasattr(importlib.import_module("torch.optim"), name):
        return "torch"
    return "directions" if public(name).leaves in ("ones", "own") else "descent"


def criteria():
    return [name for name in classes("adaptive") if issubclass(public(name), public("Criterion"))]


def classes(folder):
    names = importlib.import_module(f"torchzero_clip.modules.{folder}").__all__
    found = [name for name in names if inspect.isclass(public(name)) and name not in BASES]
    return sorted(found, key=str.lower)


def released(entry):
    """Whether the constructions of a row look at no more than a tensor: all, some or none."""
    transform = public("Transform")
    rules = [[x for x in make().walk() if isinstance(x, transform)] for make in entry.good.values()]
    near = [all(x.reach == "tensor" for x in some) for some in rules]
    return "✓" if all(near) else "✓ ²" if any(near) else "no ²"


def public(name):
    return getattr(importlib.import_module("torchzero_clip"), name)


def link(name):
    """The page of a rule, from the root of the documentation; its name is that of the class."""
    pages = {page.stem.replace("_", ""): page for page in MODULES.glob("*/*.md")}
    if name.lower() not in pages:
        folder = public(name).__module__.split(".")[2]
        raise FileNotFoundError(f"{name} has no page: write one in docs/modules/{folder}/")
    return pages[name.lower()].relative_to(DOCS).as_posix()


def settings():
    """What holds for each rule, which the row of the contract table says; each by a test."""
    table = importlib.import_module("tests.table")
    lines = ["| | " + " | ".join(SETTINGS) + " |", "|---|" + ":-:|" * len(SETTINGS)]
    last = {entry.cls.__name__: entry for entry in table.ROWS}
    keeps = {entry.cls: entry.keeps for entry in table.ROWS}
    for name, entry in sorted(last.items()):
        cells = dict.fromkeys(SETTINGS, "✓")
        if not entry.traces:
            cells["`torch.compile`"] = "no"
        elif entry.graphs > 1:
            cells["`torch.compile`"] = "✓ ¹"
        cells["release"] = released(entry)
        cells["attach"] = "✓" if entry.attaches else "no"
        made = [make() for make in entry.good.values()]
        if all(x.place == "first" for x in made):
            cells["guards"] = "–"
        if not any(keeps.get(type(tfm)) for x in made for tfm in x.walk()):
            cells["small state"] = "–"
        shown = name if name == "Chain" else f"[{name}]({link(name)})"
        lines.append(f"| {shown} | " + " | ".join(cells.values()) + " |")
    return "\n".join(lines)
