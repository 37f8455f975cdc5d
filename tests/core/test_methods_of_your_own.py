"""The classes of docs/methods_of_your_own.md are the methods whose names they bear."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.helpers import ROOT
from tests.identities.identity import FLOAT32, Identity, apart, load
from tests.identities.methods.matrices import EPS
from tests.project.test_docs import blocks, interpreter, run
from torchzero_clip import LR, Adam, Chain, Partition, Transform, WeightDecay
from torchzero_clip.testing import check_pure

PAGE = ROOT / "docs" / "methods_of_your_own.md"
LINES = {"MyAdan": 17, "MyScheduleFree": 26, "MyProdigy": 26, "MySOAP": 27, "MyAdafactor": 28}
FAR = {**FLOAT32, torch.float64: 1e-10}

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*from the checkpoint replaces:UserWarning"
    ),  # live values are scheduled
    pytest.mark.filterwarnings("ignore:the chain has no learning rate:UserWarning"),
]


@pytest.fixture(scope="module")
def methods() -> Iterator[dict[str, Any]]:
    """The classes as they stand on the page."""
    with interpreter("methods_of_your_own") as namespace:
        for block in blocks(PAGE):
            run(block.code, str(PAGE), namespace)
        yield {name: namespace[name] for name in LINES}


class Prodigy(torch.optim.Optimizer):
    """Prodigy, the Adam version, line by line as in arXiv 2306.06101, with r and s over d₀."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})
        params = [p for group in self.param_groups for p in group["params"]]
        self.start = [p.detach().clone() for p in params]
        self.m, self.v, self.s = [[torch.zeros_like(p) for p in params] for _ in range(3)]
        self.d, self.r = self.param_groups[0]["d0"], 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first = self.param_groups[0]
        kept, lr, d, moved, size = first["betas"][1] ** 0.5, first["lr"], self.d, 0.0, 0.0
        each = [(group, p) for group in self.param_groups for p in group["params"]]
        for i, (group, p) in enumerate(each):
            if p.grad is None:
                continue
            beta1, beta2 = group["betas"]
            self.m[i] = beta1 * self.m[i] + (1 - beta1) * d * p.grad
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * d**2 * p.grad**2
            self.s[i] = kept * self.s[i] + d**2 / first["d0"] * lr * p.grad
            moved += (p.grad * (self.start[i] - p)).sum().item()
            size += self.s[i].abs().sum().item()
        self.r = kept * self.r + d**2 / first["d0"] * lr * moved
        self.d = max(d, self.r / size)
        for i, (group, p) in enumerate(each):
            if p.grad is not None:
                p -= group["lr"] * d * self.m[i] / (self.v[i].sqrt() + d * group["eps"])


def adan(made: Any) -> Identity:
    def ours(lr: float, betas: Any, eps: float, weight_decay: float) -> Transform:
        return Chain(made(betas, eps), WeightDecay(weight_decay, proximal=True), LR(lr))

    return dataclasses.replace(load()["adan"], ours=ours)


def schedule_free(made: Any) -> Identity:
    def ours(lr: float, weight_decay: float, momentum: float, **options: Any) -> Transform:
        return Chain(WeightDecay(weight_decay), LR(lr), made(momentum, **options))

    return dataclasses.replace(load()["schedule_free_sgd"], ours=ours)


def prodigy(made: Any) -> Identity:
    def ours(lr: float, **options: Any) -> Transform:
        return Chain(made(**options), LR(lr))

    first = {"lr": 1.0, "betas": (0.9, 0.99), "eps": 1e-3, "d0": 1e-3}
    return dataclasses.replace(
        load()["adan"],
        name="prodigy",
        theirs=Prodigy,
        ours=ours,
        groups=(first, {**first, "betas": (0.8, 0.99), "eps": 1e-2}),
        runs_here=True,  # it runs now, as torch's own do
    )


def soap(made: Any) -> Identity:
    def ours(
        lr: float, weight_decay: float, precondition_frequency: int, **options: Any
    ) -> Transform:
        adam = Adam(options["betas"], options["eps"])
        branches = {"matrices": made(every=precondition_frequency, **options), "rest": adam}
        two = Partition(branches, lambda name, p: "matrices" if p.dim() > 1 else "rest")
        return Chain(two, WeightDecay(weight_decay), LR(lr))

    def each_step(opt: Any, step: int) -> None:
        """Theirs adds eps before the second average is corrected."""
        for group in opt.param_groups:
            for branch in ("Partition/matrices", "Partition/rest"):
                beta2 = group[f"{branch}/betas"][1]
                group[f"{branch}/eps"] = EPS / (1 - beta2**step) ** 0.5

    held = load()["soap_from_first_step"]
    pairs = [(f"Partition/{x}/{y}", y) for x in ("matrices", "rest") for y in ("betas", "eps")]
    return dataclasses.replace(
        held,
        ours=ours,
        keys={key: name for key, name in pairs if name == "betas"},
        constant={
            **{key: held.constant["eps"] for key, name in pairs if name == "eps"},
            "Partition/matrices/shampoo_beta": held.constant["beta"],
            "shampoo_beta": held.constant["beta"],
        },
        each_step=each_step,
    )


def adafactor(made: Any) -> Identity:
    def ours(lr: float, weight_decay: float, **options: Any) -> Transform:
        mine = {name: options[name] for name in ("beta2_decay", "eps", "d")}
        return Chain(made(**mine), WeightDecay(weight_decay), LR(lr))

    return dataclasses.replace(load()["adafactor"], ours=ours)


each = pytest.mark.parametrize(
    ("name", "held"),
    list(zip(LINES, (adan, schedule_free, prodigy, soap, adafactor), strict=True)),
    ids=LINES,
)
some = pytest.mark.parametrize(
    ("name", "held"),
    [
        ("MyProdigy", prodigy),  # state, and scalars of the whole model
        pytest.param("MyAdan", adan, marks=pytest.mark.slow),
        pytest.param("MyScheduleFree", schedule_free, marks=pytest.mark.slow),
        pytest.param("MySOAP", soap, marks=pytest.mark.slow),
        pytest.param("MyAdafactor", adafactor, marks=pytest.mark.slow),
    ],
)
"""One class for compiled steps, which take seconds to build. The others are slow."""
Held = Callable[[Any], Identity]


@each
@pytest.mark.parametrize("how", [{}, {"fused": False}], ids=str)
def test_a_class_of_the_page_is_the_method(
    methods: dict[str, Any], name: str, held: Held, how: dict[str, Any]
) -> None:
    """In every step of an identity, where every live value changes, rows have gaps, and spikes."""
    check_method(held(methods[name]), how)


@some
def test_a_class_of_the_page_is_the_method_in_compiled_steps(
    methods: dict[str, Any], name: str, held: Held
) -> None:
    check_method(held(methods[name]), {"compile": True})


def check_method(identity: Identity, how: dict[str, Any]) -> None:
    expected = identity.expected(torch.float64)
    assert apart(identity.got(torch.float64, **how), expected) <= FAR[torch.float64]
    moves = set(identity.live) - identity.scheduled.keys() - identity.constant.keys()
    assert not moves, f"no schedule changes {moves}"


@each
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=() if dtype is torch.float32 else pytest.mark.slow)
        for dtype in FAR
    ],
)
def test_a_class_of_the_page_goes_on_from_a_state_dict_bit_for_bit(
    methods: dict[str, Any], name: str, held: Held, dtype: torch.dtype
) -> None:
    check_resumed(held(methods[name]), dtype, compile=False)


@some
def test_a_class_of_the_page_goes_on_from_a_state_dict_in_compiled_steps(
    methods: dict[str, Any], name: str, held: Held
) -> None:
    for dtype in FAR:
        check_resumed(held(methods[name]), dtype, compile=True)


def check_resumed(identity: Identity, dtype: torch.dtype, compile: bool) -> None:
    whole = identity.got(dtype, compile=compile)
    resumed = identity.got(dtype, resumes=True, compile=compile)
    assert all(torch.equal(whole[row], resumed[row]) for row in whole)


@some
def test_a_class_of_the_page_works_in_every_precision(
    methods: dict[str, Any], name: str, held: Held
) -> None:
    """What is kept of parameters in bfloat16 is in float32, and both engines do the same."""
    identity = held(methods[name])
    assert identity.got(torch.float32).keys() == identity.got(torch.float64).keys()
    for dtype in (torch.float32, torch.bfloat16):
        plain, compiled = identity.got(dtype), identity.got(dtype, compile=True)
        assert apart(compiled, plain) <= (1e-5 if dtype == torch.float32 else 1e-2)


def test_prodigy_finds_a_larger_step() -> None:
    """Or what holds the class would hold nothing of its estimate."""
    w = torch.nn.Parameter(torch.ones(3))
    opt = Prodigy([{"params": [w], "lr": 1.0, "betas": (0.9, 0.99), "eps": 1e-3, "d0": 1e-3}])
    for _ in range(24):
        w.grad = w.detach().clone()
        opt.step()
    assert opt.d > 10 * 1e-3


@pytest.mark.parametrize("name", ["MyAdan", "MyScheduleFree", "MyProdigy"])
def test_a_class_of_the_page_that_says_so_is_repeated(methods: dict[str, Any], name: str) -> None:
    made = methods[name]()
    check_pure(*([LR(0.1), made] if name == "MyScheduleFree" else [made, LR(0.1)]))


def code_lines(source: str, node: ast.ClassDef) -> int:
    """The lines of a class that are neither its docstring nor empty."""
    doc, lines = node.body[0], source.splitlines()
    assert ast.get_docstring(node)
    said = range(doc.lineno, (doc.end_lineno or 0) + 1)
    rows = range(node.lineno, (node.end_lineno or 0) + 1)
    return sum(1 for i in rows if i not in said and lines[i - 1].strip())


def test_the_classes_are_as_short_as_the_page_says() -> None:
    counted = {
        node.name: code_lines(block.code, node)
        for block in blocks(PAGE)
        for node in ast.parse(block.code).body
        if isinstance(node, ast.ClassDef)
    }
    assert counted.keys() == LINES.keys()
    assert {name: n for name, n in counted.items() if n > LINES[name]} == {}
    rows = re.findall(r"^\| \[([\w-]+)\]\(#[\w-]+\) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert {f"My{name.replace('-', '')}": int(n) for name, n in rows} == counted


def test_the_classes_ask_for_public_names_alone() -> None:
    for block in blocks(PAGE):
        for line in ast.walk(ast.parse(block.code)):
            if isinstance(line, ast.ImportFrom):
                assert line.module in ("torch", "torchzero_clip")
            names = (x.attr for x in ast.walk(line) if isinstance(x, ast.Attribute))
            assert not any(name.startswith("_") for name in names)
