"""Lists of the names that `named` has, and of the identities that are tested."""

import importlib
import inspect
import re
import textwrap

ARXIV = re.compile(r"\barXiv (\d{4}\.\d{4,5})")


def link(name):
    """A link to an identity, which says whose code a claim is tested against."""
    return f"[{identities()[name].tested}](identities.md#{name})"


def identities():
    return importlib.import_module("tests.identities.identity").load()


def methods():
    """A table that a script sorts, with a row for each name."""
    published = importlib.import_module("torchzero_clip.published")
    heads = ["method", "links", "bytes of state", "in a line", "tested against"]
    rows = [heads, ["---", "---", "--:", "---", "---"]]
    for name, recipe in sorted(published.NAMES.items()):
        links = [type(link).__name__ for link, _ in published.links_of(recipe())]
        about = inspect.getdoc(recipe).partition("\n\n")[0].replace("\n", " ").removesuffix(".")
        chain = ", ".join(f"`{link}`" for link in links)
        held = f"{held_by(identities()[name])} ([identity](identities.md#{name}))"
        rows.append([f"[{name}](#{name})", chain, state_of(recipe()), about, held])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f'<div class="sortable" markdown>\n\n{table}\n\n</div>'


def held_by(it):
    """Whose code of which version, and how many of its options change while it is followed."""
    source = re.sub(r",? ?`.*", "", it.source)
    steps = range(importlib.import_module("tests.identities.inputs").STEPS)
    changed = set()
    for letter in "ab":
        first, *later = [it.options(letter, step) for step in steps]
        changed |= {name for now in later for name in now if now[name] != first[name]}
    return f"{source}; {len(changed)} options scheduled"


def state_of(chain):
    """The bytes of state for each number of a large matrix in float32."""
    torch, tz = importlib.import_module("torch"), importlib.import_module("torchzero_clip")
    matrix = torch.zeros(256, 256, requires_grad=True)
    opt = tz.Modular([("matrix", matrix)], chain)
    opt.init_state()
    held = [t for t in opt.state[matrix].values() if isinstance(t, torch.Tensor)]
    return f"{round(sum(t.nbytes for t in held) / matrix.numel(), 1):g}"


def names():
    """A section for each name: what it is, the links, the reference."""
    published = importlib.import_module("torchzero_clip.published")
    return "\n\n".join(section(name, recipe) for name, recipe in sorted(published.NAMES.items()))


def section(name, recipe):
    about, _, reference = inspect.getdoc(recipe).partition("\n\nReference:\n")
    signature = inspect.signature(recipe)
    bare = signature.replace(
        parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    links = importlib.import_module("torchzero_clip.published").links_of(recipe())
    rows = [f"| `{link!r}` | `` {formula} `` |" for link, formula in links]
    reference = ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", textwrap.dedent(reference))
    table = "\n".join(["| link | |", "|---|---|", *rows])
    call = f"```text\n{name}{bare}\n```"
    reference = f"{reference.strip()}\n\nIt is {link(name)}."
    return "\n\n".join([f"## {name}", call, about, table, reference])


def listed():
    """A section for each identity: the claim, whose code it is tested against, and the test."""
    parts = []
    for name, it in sorted(identities().items()):
        tolerance = ", ".join(f"{bound:g} in {kind(dtype)}" for dtype, bound in it.rtol.items())
        held = "runs in every test" if it.runs_here else "recorded steps"
        facts = [
            f"reference: {it.source} ({held})",
            f"largest relative difference: {tolerance}",
            *excused(it),
            f"test: `{it.where}`",
        ]
        parts.append("\n".join([f"## {name}\n\n{it.claim}.\n", *[f"- {fact}" for fact in facts]]))
    return "\n\n".join(parts)


def excused(it):
    """Yield what no schedule changes, and whether each row always has a gradient."""
    if it.constant:
        constant = "; ".join(f"`{key}`, because {why}" for key, why in it.constant.items())
        yield f"constant in this test: {constant}"
    if not it.inputs.gaps:
        yield "every row has a gradient in every step"


def kind(dtype):
    return str(dtype).removeprefix("torch.")
