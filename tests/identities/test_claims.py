"""What the documentation claims of other people's methods says whose code it is tested against."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

import pytest
import torch

import torchzero_clip
from tests.helpers import KERNELS, ROOT
from tests.identities.identity import Identity, load
from tests.identities.inputs import STEPS
from torchzero_clip.published import NAMES, links_of

LINK = re.compile(r"\[(tested against [^\]]+)\]\((?:\S*/)?identities\.md#(\w+)\)")
"""What a page says after a claim, and the identity that it leads to."""
PHRASE = re.compile(r"\((tested against\s[^)]+)\)")
"""What a docstring says after a claim."""
BACKED = {
    "DAdaptAdam": ["dadapt_adam"],
    "Adafactor": ["adafactor"],
    "Adam": ["adamw"],
    "Centralize": ["centralize"],
    "ClipNorm": ["clip_grad_norm"],
    "KLBasis": ["klsoap"],
    "Kron": ["kron"],
    "Momentum": ["sgd_dampening"],
    "Orthogonalize": ["muon"],
    "Prodigy": ["prodigy"],
    "Shampoo": ["shampoo"],
    "Sign": ["signum"],
    "TrustRatio": ["lamb", "lars"],
    "WeightDecay": ["adam", "adamw"],
    "lamb": ["lamb_timm"],
}
"""The identities behind what docstrings say, in their order."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def docstrings() -> Iterator[tuple[str, str]]:
    """Where a docstring stands, and its text, for everything in the package."""
    for info in pkgutil.walk_packages(torchzero_clip.__path__, "torchzero_clip."):
        if info.name.endswith("__main__") or info.name == KERNELS:
            continue
        module = importlib.import_module(info.name)
        yield info.name, module.__doc__ or ""
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", None) == info.name:
                yield f"{info.name}.{name}", inspect.getdoc(thing) or ""


def page_texts() -> list[tuple[str, str]]:
    """Return each page with its name, without the lists of names and of identities."""
    lists = re.compile(r"<!-- (names|identities) -->.*?<!-- /\1 -->", re.DOTALL)
    return [(p.relative_to(ROOT).as_posix(), lists.sub("", p.read_text())) for p in PAGES]


def texts() -> list[tuple[str, str]]:
    return [*page_texts(), *docstrings()]


def test_the_page_of_names_has_every_name_with_its_links_and_its_identity() -> None:
    page = (ROOT / "docs" / "named.md").read_text()
    listed = page.partition("<!-- names -->")[2]
    parts = {part.partition("\n")[0]: part for part in listed.split("\n## ")[1:]}
    assert parts.keys() == NAMES.keys()
    for name, part in parts.items():
        assert f"It is [{load()[name].tested}](identities.md#{name})." in part
        for link, formula in links_of(NAMES[name]()):
            assert f"| `{link!r}` | `` {formula} `` |" in part


def test_the_table_of_methods_has_a_row_for_every_name() -> None:
    """Its links, its bytes of state, whose code it is tested against, and in how many ways."""
    page = (ROOT / "docs" / "named.md").read_text()
    rows = re.findall(
        r"^\| \[(\w+)\]\(#\w+\) \| (.+) \| (\S+) \| (.+) \| (.+) \(\[identity\]\(.*$", page, re.M
    )
    table = {name: rest for name, *rest in rows}
    assert table.keys() == NAMES.keys()
    for name, (links, _, about, held) in table.items():
        assert links == ", ".join(f"`{type(link).__name__}`" for link, _ in links_of(NAMES[name]()))
        assert about in " ".join((inspect.getdoc(NAMES[name]) or "").split())
        identity = load()[name]
        source, _, scheduled = held.partition("; ")
        assert identity.source.startswith(source)
        versioned = re.search(r" (\d+(\.\w+)+|[0-9a-f]{7})(,|$)", source)
        assert identity.runs_here or versioned, f"{source} has no version"
        assert scheduled == f"{len(moving(identity))} options scheduled"
    scheduled = {"adamw": 4, "lion": 3, "adafactor": 5, "schedule_free_adamw": 6}
    assert {name: len(moving(load()[name])) for name in scheduled} == scheduled
    numbers = {"sgd": "0", "lion": "4", "adamw": "8", "ademamix": "12", "adan": "16"}
    assert {name: table[name][1] for name in numbers} == numbers


def moving(identity: Identity) -> set[str]:
    """The options of the official code that are not the same in all steps of a group."""
    groups = [[identity.options(x, step) for step in range(STEPS)] for x in "ab"]
    return {name for rows in groups for name in rows[0] if len({str(x[name]) for x in rows}) > 1}


def test_the_page_of_identities_has_every_claim_with_its_test() -> None:
    page = (ROOT / "docs" / "identities.md").read_text()
    parts = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    assert parts.keys() == load().keys()
    for name, identity in load().items():
        assert identity.claim in parts[name]
        assert identity.source in parts[name]
        file, _, function = identity.where.partition("::")
        assert f"`{identity.where}`" in parts[name]
        assert f"def {function}(" in (ROOT / file).read_text()


def test_every_link_to_an_identity_says_whose_code_it_is() -> None:
    known = load()
    found = [(where, *link) for where, text in page_texts() for link in LINK.findall(text)]
    assert len(found) > 100
    assert [x for x in found if x[2] not in known or known[x[2]].tested != x[1]] == []


def test_every_claim_of_a_docstring_has_its_identity() -> None:
    """`BACKED` names the identity of each phrase, and the phrase says whose code that follows."""
    said = {
        where.rpartition(".")[2]: [" ".join(phrase.split()) for phrase in PHRASE.findall(text)]
        for where, text in docstrings()
        if PHRASE.search(text)
    }
    known = load()
    assert said == {name: [known[x].tested for x in held] for name, held in BACKED.items()}


def test_every_optimizer_of_torch_has_its_row_and_its_identity() -> None:
    """LBFGS and SparseAdam have a row that says what to do."""
    theirs = {name for name, cls in vars(torch.optim).items() if inspect.isclass(cls)}
    theirs -= {"Optimizer"}
    page = (ROOT / "docs" / "coming_from.md").read_text()
    assert theirs <= set(re.findall(r"`torch\.optim\.(\w+)", page))
    held = {it.source.removeprefix("torch.optim.") for it in load().values() if it.runs_here}
    assert theirs - held == {"LBFGS", "SparseAdam"}


METHODS = "AdamW|LAMB|LARS|Lion|Signum|C-AdamW|Adafactor|StableAdamW|SPAM|AMSGrad|Nesterov"
SAYS = r"\b(?:is|as in|that of|makes|gives|are)(?: \S+)? `?"
THEIRS = rf"torch\.optim\.(?!Opt)\w+|torch\.nn\.utils\.\w+|(?:{METHODS})\b"
CLAIM = re.compile(rf"{SAYS}(?:{THEIRS})|gradient centralization of|rule of the paper|paper's rule")


def unmarked(text: str) -> Iterator[str]:
    """Yield the sentences that equate something with a method, and name no test."""
    prose = re.sub(r"^ *```.*?^ *```|^:::.*?$|^ +>>> .*$", "", text, flags=re.M | re.S)
    for sentence in re.split(r"(?<=[.:;|])\s|\n\n", PHRASE.sub("✓", LINK.sub("✓", prose))):
        plain = " ".join(sentence.split())
        if CLAIM.search(plain) and not re.search(r"✓|\bnot\b|\(tests/", plain):
            yield plain


@pytest.mark.parametrize(
    "sentence",
    [
        "After Adam it is LAMB.",
        "The running sum, exactly as in `torch.optim.SGD`.",
        "Between the two it is decoupled, as in AdamW.",
        "`dim` is that of torch. It is what\n`torch.nn.utils.clip_grad_norm_` does.",
    ],
)
def test_a_claim_without_a_test_is_found(sentence: str) -> None:
    assert list(unmarked(sentence))
    plain = sentence.rstrip(".")
    assert not list(unmarked(f"{plain} (tested against it)."))
    assert not list(unmarked(f"{plain} ([tested against it](../identities.md#it))."))


def test_every_claim_names_its_test() -> None:
    found = {(where, claim) for where, text in texts() for claim in unmarked(text)}
    assert found == set()
