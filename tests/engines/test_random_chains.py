"""Random chains, every way of running them, against a reference in numpy that shares no code.

A seed makes a model, a chain and some steps in which gradients come and go, live values change,
tensors leave channels_last or begin to share memory. After each step parameters, gradients and
weights for evaluation are compared. `check(Case(seed), way)` is one such run; a failure prints a
smaller one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import torchzero_clip
from tests.engines import reference
from tests.engines.reference import Parameter, Reference
from tests.processes.launch import python
from torchzero_clip import TensorList, TensorwiseTransform

EAGER = ("plain", "default", "recorded")
WAYS = (*EAGER, "native")
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}  # of the largest entry
ROUNDING = {"float64": 8 * 2.0**-52, "float32": 8 * 2.0**-23}  # the noise of the noisy run
SLACK = 30  # how much further than the noisy run a result may be
DRAWS = 5  # noisy runs, each with noise of its own, before a difference counts
LOST = 1e6  # a run in which parameters grow beyond this says nothing any more


def optimizer(way: str, groups: Any, chain: Any) -> torchzero_clip.Modular:
    """The library's optimizer, run in one of the ways."""
    options = {"plain": {"fused": False}, "default": {}}.get(way, {"compile": True})
    opt = torchzero_clip.Modular(groups, chain, **options)
    if way == "recorded":
        opt.engine = opt.engine.twin()  # what is recorded is run by torch, not compiled
    return opt


# ---------------------------------------------------------------------- what a seed makes


@dataclass(frozen=True)
class Case:
    """A seed, and what is left of its run: which top links, steps and tensors; None for all.

    With `nests` the chain is short, and most of its links are in combinators.
    """

    seed: int
    dtype: str = "float64"
    nests: bool = False
    links: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    tensors: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        kept = [f for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default]
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in kept]
        return f"Case({', '.join([str(self.seed), *shown])})"


@dataclass(frozen=True)
class Number:
    """A live value that the library gets as a tensor, 0-dim or of one element."""

    value: float
    shape: tuple[int, ...]


@dataclass
class Link:
    """A link: the class of this name in the library and in the reference, and its arguments.

    `inner` are the chains inside it by label; "" where there is one without a label.
    """

    kind: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    inner: dict[str, list[Link]] = field(default_factory=dict)

    def walk(self, path: str = "") -> Iterator[tuple[str, Link]]:
        """All links with their paths."""
        yield path + self.name, self
        for label, chain in self.inner.items():
            for link in chain:
                yield from link.walk(f"{path}{self.name}/{label + '/' if label else ''}")


@dataclass
class Step:
    """What happens before a step, and its gradients."""

    gradients: dict[str, np.ndarray]
    layouts: dict[str, str]  # of the gradients
    changes: list[tuple[int, str, str, Any]]  # group, path, live value, what it becomes
    moved: dict[str, torch.memory_format]  # parameters that change their layout
    shared: tuple[str, str, int] | None  # one becomes part of another's memory, from an entry on


@dataclass
class Scenario:
    shapes: dict[str, tuple[int, ...]]
    layouts: dict[str, str]
    values: dict[str, np.ndarray]
    groups: dict[str, int]
    overrides: list[tuple[int, str, str, Any]]
    chain: list[Link]
    steps: list[Step]


TENSORS = {  # shape, layout
    "a.weight": ((4, 3), "plain"),
    "a.bias": ((3,), "plain"),
    "b.weight": ((2, 3, 2, 2), "channels_last"),
    "b.bias": ((), "plain"),
    "c.weight": ((3, 5), "transposed"),
    "c.empty": ((0, 3), "plain"),
    "c.bias": ((1,), "plain"),
    "d.weight": ((4, 3), "plain"),
    "d.bias": ((3,), "plain"),
    "d.kernel": ((2, 3, 2, 2), "plain"),
}
SHARES = (("d.weight", "a.weight", 0), ("d.bias", "a.bias", 0), ("d.bias", "a.weight", 2))

SCOPES = (None, "layer", "group", "global")
SLICES: tuple[Any, ...] = (*SCOPES, 0, 1, -1, (0, -1))
ORDERS = (2, 2, 1, 3, math.inf, "mad", "std", "var")
GROWTH = {
    "add": (None, 0.1, 1.0),
    "mul": (1.5, 1.1, 2.0),
    "min_value": (1e-4, 0.01),
    "max_decay": (2.0, 1.2, None),
}
# For each kind its live values and its other arguments, each with what it may be.
CLIPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ClipNorm": ({"max_norm": (0.1, 0.5, 1.0, 3.0)}, {"ord": ORDERS, "dim": SLICES}),
    "Normalize": ({"norm_value": (0.5, 1.0, 2.0)}, {"ord": ORDERS, "dim": SLICES}),
    "Centralize": ({}, {"dim": SLICES}),
    "Standardize": ({"eps": (1e-8, 1e-3)}, {"dim": SLICES}),
    "ClipValue": ({"value": (0.05, 0.5, 1.0)}, {}),
    "ClipNormGrowth": (GROWTH, {"ord": (2, 1, math.inf), "dim": SCOPES}),
    "ClipValueGrowth": (GROWTH, {}),
    "ClipNormByEMA": (
        {"beta": (0.5, 0.9, 0.99), "eps": (1e-6, 0.1), "max_ema_growth": (1.5, 1.1, None)},
        {"ord": (2, 1, math.inf), "dim": SCOPES, "ema_init": ("zeros", "update")},
    ),
    "NormalizeByEMA": (
        {"beta": (0.5, 0.9), "eps": (1e-6, 0.1), "max_ema_growth": (1.5, None)},
        {"dim": SCOPES, "ema_init": ("zeros", "update")},
    ),
    "ClipValueByEMA": ({"beta": (0.5, 0.9, 0.99)}, {"ema_init": ("zeros", "update")}),
    "AdaptiveClip": (
        {"EMARatio/alpha": (0.5, 0.9), "EMARatio/r_thresh": (1.05, 1.5)},
        {"dim": SCOPES, "warmup_steps": (1, 2)},
    ),
    "ZClip": (
        {"alpha": (0.5, 0.9), "z_thresh": (1.0, 2.5), "max_norm": (1.0, 5.0, None)},
        {"dim": SCOPES, "warmup_steps": (2, 3), "mode": ("adaptive", "mean", "percentile")},
    ),
    "AdaGC": (
        {"rel": (1.05, 1.5), "abs": (1.0, 0.3), "beta": (0.5, 0.98)},
        {"dim": SCOPES, "warmup_steps": (0, 1, 3)},
    ),
}
DESCENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Adam": (
        {"betas": ((0.9, 0.999), (0.5, 0.9)), "eps": (1e-8, 1e-2)},
        {"amsgrad": (False, True)},
    ),
    "Momentum": ({"momentum": (0.9, 0.5), "dampening": (0.0, 0.3)}, {"nesterov": (False, True)}),
    "RMSprop": (
        {"alpha": (0.99, 0.5), "eps": (1e-8, 1e-2)},
        {"momentum": (0.0, 0.5), "centered": (False, True)},
    ),
    "Adagrad": (
        {"lr_decay": (0.0, 0.1), "eps": (1e-10, 1e-3)},
        {"initial_accumulator_value": (0.0, 0.5)},
    ),
    "EMA": ({"beta": (0.9, 0.5)}, {"debias": (False, True), "nesterov": (False, True)}),
}
SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Scale": ({"factor": (0.5, -1.0, 2.0)}, {}),
    "Warmup": ({"steps": (1, 2, 4)}, {}),
    "WeightDecay": ({"weight_decay": (0.01, 0.1, 0.5)}, {}),
}
LEAVES = ("ClipNorm", "ClipValue", "Centralize", "EMA", "Momentum", "Adam", "Scale")
LEAVES += ("Written", "Written", "Written")
"""Links in combinators that are nested."""
NESTS: dict[str, tuple[str, ...]] = {
    "Graft": ("norm_of", "direction_of"),
    "Steepest": ("",),
    "Chain": ("",),
    "Masked": ("",),
    "When": ("",),
    "Partition": ("matrix", "other"),
}
"""Combinators besides Parallel, and the labels of the chains in them."""
AVERAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ScheduleFree": (
        {"beta": (0.9, 0.5), "r": (0.0, 1.0), "weight_lr_power": (2.0, 1.0, 0.0)},
        {"rectified": (False, True)},
    ),
    "Lookahead": ({"alpha": (0.5, 0.8, 1.0)}, {"k": (1, 2, 3), "start": ("weights", "sync")}),
    "WeightEMA": ({"decay": (0.5, 0.9, 0.0)}, {"every": (1, 2, 3), "warmup": (False, True)}),
    "WeightAverage": ({}, {"start": (0, 1, 3), "every": (1, 2)}),
}
LRS = (0.1, 0.02, Number(0.05, ()), Number(0.05, (1,)))
KINDS = {**CLIPS, **DESCENT, **SMALL, **AVERAGES, "LR": ({"lr": LRS}, {})}
KINDS["Written"] = (
    {},
    {"fn": ("half, written", "sine, written", "a view", "a view of the last row")},
)
MEMORYLESS_OR_SAFE = {"ClipNorm", "ClipNormGrowth", "ClipNormByEMA", "ClipValueGrowth", "LR"}

WHERE: dict[str, Callable[[str, Any], bool]] = {
    "weights": lambda name, p: name.endswith("weight"),
    "layer a": lambda name, p: name.startswith("a."),
    "vectors": lambda name, p: p.ndim <= 1,
}
LABELS: Callable[[str, Any], str] = lambda name, p: "matrix" if p.ndim > 1 else "other"  # noqa: E731
CONDITIONS: dict[str, Callable[[int], bool]] = {
    "odd": lambda step: step % 2 == 1,
    "even": lambda step: step % 2 == 0,
    "late": lambda step: step > 2,
}


def last_row(t: Any) -> Any:
    """A view of the last row in the place of every row."""
    return t[-1:].expand_as(t) if t.dim() and t.numel() else t


# For each name a function of a tensor in the library, and of an array in the reference.
FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Any], Any]]] = {
    "half, written": (lambda t: t.mul_(0.5), lambda u: u * 0.5),
    "sine, written": (lambda t: t.sin_(), np.sin),
    "a view": (lambda t: t[...], lambda u: u),
    "a view of the last row": (
        last_row,
        lambda u: np.broadcast_to(u[-1:], u.shape).copy() if u.ndim else u,
    ),
}


class Written(TensorwiseTransform):
    """u ← fn(u), which writes the memory of its update or returns a view of it"""

    fn: str

    pure = True

    def update_tensor(self, u: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        return FUNCTIONS[self.fn][0](u)


# For each name a merge of lists in the library, and of arrays in the reference.
MERGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an input": (lambda u: u["a"], lambda u: u["a"]),
    "a view": (lambda u: TensorList([t[...] for t in u["b"]]), lambda u: u["b"]),
    "a view of the last row": (
        lambda u: TensorList([last_row(t) for t in u["a"]]),
        lambda u: np.broadcast_to(u["a"][-1:], u["a"].shape).copy() if u["a"].ndim else u["a"],
    ),
    "a sum": (lambda u: u["a"].add(u["b"]), lambda u: u["a"] + u["b"]),
    "a sum in place": (lambda u: u["a"].add_(u["b"]), lambda u: u["a"] + u["b"]),
    "a mean": (lambda u: u["b"].add_(u["a"]).mul_(0.5), lambda u: (u["a"] + u["b"]) * 0.5),
    "a borrowed input": (lambda u: u["b"].borrow().mul_(0.5), lambda u: u["b"] * 0.5),
}


class Draw:
    """The random choices of one seed that make a chain."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.count, self.produced, self.ruled = rng, 0, False, False

    def chain(self) -> list[Link]:
        """A guard perhaps, clips, descent, and small links in any order, some of them wrapped."""
        guard = self.rng.choice(["skip", "zero"]) if self.rng.random() < 0.2 else None
        links = [self.link("Guard", on_nonfinite=guard)] if guard else []
        self.produced = guard == "zero"  # what it makes is no gradient any more
        kinds = [*self.some(CLIPS, 0, 3), *self.some(DESCENT, 0, 2)]
        kinds += [*self.some(SMALL, 0, 2), *self.some(CLIPS, 0, 1)]
        if self.rng.random() < 0.3:
            self.rng.shuffle(kinds)
        if self.rng.random() < 0.8:
            kinds.insert(self.rng.randint(len(kinds) // 2, len(kinds)), "LR")
        if self.rng.random() < 0.15:
            kinds.append("WeightDecay")
            kinds.insert(self.rng.randint(0, len(kinds)), "WeightDecay")
        while kinds:
            links.append(self.wrapped(kinds))
        return links or [self.rule("ClipNorm")]

    def some(self, table: dict[str, Any], least: int, most: int) -> list[str]:
        return self.rng.choices(list(table), k=self.rng.randint(least, most))

    def wrapped(self, kinds: list[str]) -> Link:
        """The next rule, or a combinator with the next one or two in it."""
        what = self.rng.random()
        if what < 0.7 or kinds[0] == "LR":
            return self.rule(kinds.pop(0))
        if what < 0.82:
            kind = self.rng.choice(["Identity", "Freeze", "Accumulate"])
            if kind == "Identity":
                return self.link(kind)
            if kind == "Freeze":
                return self.link(kind, where=self.rng.choice(list(WHERE)))
            return self.link(kind, steps=self.rng.choice([1, 2, 3]))
        kind = self.rng.choice(["Masked", "When", "Partition", "Chain"])
        before, inner = self.produced, [self.rule(kinds.pop(0))]
        if kinds and kinds[0] != "LR" and self.rng.random() < 0.4:
            inner.append(self.rule(kinds.pop(0)))
        if kind in ("Masked", "When"):
            choices = {"Masked": ("where", WHERE), "When": ("condition", CONDITIONS)}
            key, functions = choices[kind]
            made = self.link(kind, **{key: self.rng.choice(list(functions))})
            made.inner = {"": inner}
        elif kind == "Partition":
            after, self.produced = self.produced, before
            other = self.rng.choice([*CLIPS, *DESCENT, "Identity"])
            second = self.link(other) if other == "Identity" else self.rule(other)
            made = self.link(kind, labels="dims")
            made.inner = {"matrix": inner, "other": [second]}
            self.produced = self.produced or after
        else:
            made = self.link(kind)
            made.inner = {"": inner}
        return made

    def nested(self, depth: int) -> Link:
        """A combinator with combinators in it; `depth` of them, one inside the other."""
        if depth == 0:
            kind = self.rng.choice(["Identity", *LEAVES])
            return self.link(kind) if kind == "Identity" else self.rule(kind)
        kind = self.rng.choice([*["Parallel"] * 6, *NESTS])
        scope = {"dim": self.rng.choice(SCOPES)} if kind in ("Graft", "Steepest") else {}
        made = self.link(kind, **scope)
        if kind == "Parallel":
            made.arguments["merge"] = self.rng.choice(list(MERGES))
        elif kind == "Masked":
            made.arguments["where"] = self.rng.choice(list(WHERE))
        elif kind == "When":
            made.arguments["condition"] = self.rng.choice(list(CONDITIONS))
        elif kind == "Partition":
            made.arguments["labels"] = "dims"
        labels = NESTS.get(kind, ("a", "b"))
        deep = self.rng.choice(labels)
        for label in labels:
            inner = [self.nested(depth - 1 if label == deep else 0)]
            if self.rng.random() < 0.3:
                inner.insert(self.rng.randint(0, 1), self.rule(self.rng.choice(LEAVES)))
            made.inner[label] = inner
        return made

    def link(self, kind: str, **arguments: Any) -> Link:
        self.count += 1
        return Link(kind, f"{kind.lower()}{self.count}", arguments)

    def rule(self, kind: str) -> Link:
        """A rule with random arguments, aimed at the gradient now and then."""
        if kind == "ZClip" and self.ruled:
            kind = "AdaptiveClip"  # norms that another rule made equal deviate by rounding alone
        self.ruled = True
        live, fixed = KINDS[kind]
        arguments: dict[str, Any] = {}
        for key, choices in {**live, **fixed}.items():
            required = key in ("max_norm", "value", "factor", "steps", "weight_decay", "lr", "fn")
            if required or key == "dim" or self.rng.random() < 0.5:
                arguments[key] = self.rng.choice(choices)
        if isinstance(arguments.get("dim"), (int, tuple)) and self.rng.random() < 0.5:
            arguments["inverse_dims"] = True
        if "norm_value" in live or kind in ("ClipNorm", "Standardize", "Centralize"):
            arguments.update({"min_size": 3} if self.rng.random() < 0.2 else {})
        if kind in ("ClipNormGrowth", "ClipValueGrowth") and self.rng.random() < 0.2:
            arguments.update(mul=None, add=0.5)
        if arguments.get("debias"):
            arguments.pop("nesterov", None)
        if kind == "AdaptiveClip":
            arguments["criterion"] = self.rng.choice(["max", "mean", "reciprocal"])
        made = self.link(kind, **arguments)
        if kind == "ClipValueByEMA" and self.rng.random() < 0.5:
            made.inner = {"": [self.link("Scale", factor=self.rng.choice([0.5, 2.0]))]}
        if kind in CLIPS and not self.produced and self.rng.random() < 0.3:
            made.arguments["target"] = "grad"
        else:
            self.produced = True
        return made


def nest(rng: random.Random, chain: list[Link]) -> None:
    """Put a combinator, three deep, into half of all chains: behind what is aimed at gradients."""
    if rng.random() < 0.5:
        return
    draw = Draw(rng)
    draw.count, draw.produced, draw.ruled = 100, True, True  # names of its own, and no ZClip
    before = ("Guard", "ZClip", "Accumulate")

    def stays(link: Link) -> bool:
        return link.kind in before or link.arguments.get("target") == "grad"

    first = [i + 1 for i, top in enumerate(chain) if any(stays(link) for _, link in top.walk())]
    chain.insert(rng.randint(max(first, default=0), len(chain)), draw.nested(3))


def of_nests(seed: int) -> Scenario:
    """Two links whose results wait on a tape, two combinators three deep, and a learning rate."""
    rng = random.Random(f"nests {seed}")
    draw = Draw(rng)
    draw.produced, draw.ruled = True, True  # no rule is aimed at the gradients
    waits = ("ClipValue", "Scale", "EMA", "Momentum")
    chain = [draw.rule(rng.choice(waits)), draw.nested(3)]
    chain += [draw.rule(rng.choice(waits)), draw.nested(3), draw.rule("LR")]
    names = rng.sample(["a.weight", "a.bias", "b.bias", "c.weight", "d.weight"], 3)
    shapes = {name: TENSORS[name][0] for name in names}
    return Scenario(
        shapes=shapes,
        layouts={name: TENSORS[name][1] for name in names},
        values={name: gaussian(rng, shape, 0.5) for name, shape in shapes.items()},
        groups={name: min(i, 1) for i, name in enumerate(names)},
        overrides=[],
        chain=chain,
        steps=[
            Step(
                gradients={name: gaussian(rng, shape, 1.0) for name, shape in shapes.items()},
                layouts=dict.fromkeys(names, "plain"),
                changes=[],
                moved={},
                shared=None,
            )
            for _ in range(5)
        ],
    )


def averages(rng: random.Random, chain: Sequence[Link]) -> list[Link]:
    """Averages of weights behind two chains of three: one that may change the step, and others."""
    kinds = [link.kind for top in chain for _, link in top.walk()]
    if rng.random() < 0.33:
        return []
    changing = [None, "Lookahead", *["ScheduleFree" if "LR" in kinds else "Lookahead"] * 2]
    first, rest = rng.choice(changing), rng.choices(["WeightEMA", "WeightAverage"], k=2)
    drawn = ([] if first is None else [first]) + rest[: rng.randint(first is None, 2)]
    made: list[Link] = []
    for i, kind in enumerate(drawn):
        live, fixed = AVERAGES[kind]
        some = {key: rng.choice(x) for key, x in {**live, **fixed}.items() if rng.random() < 0.6}
        if kinds.count("Adam") != 1:
            some.pop("rectified", None)
        one = Link(kind, f"average{i}", some)
        if rng.random() < 0.25:
            one = Link("Masked", f"some{i}", {"where": rng.choice(list(WHERE))}, {"": [one]})
        made.append(one)
    return made


def readable(chain: Sequence[Link]) -> list[Link]:
    """The links but for those that read a rate, or betas, which no link has any more."""
    kinds = {link.kind for top in chain for _, link in top.walk()}

    def reads(link: Link) -> set[str]:
        free, rectified = link.kind == "ScheduleFree", link.arguments.get("rectified", False)
        return {"LR", *["Adam"] * rectified} if free else set()

    return [top for top in chain if all(reads(link) <= kinds for _, link in top.walk())]


def scenario(case: Case) -> Scenario:
    """Everything that a case does, from its seed alone."""
    if case.nests:
        return cut(of_nests(case.seed), case)
    rng = random.Random(case.seed)
    chain = Draw(rng).chain()
    names = sorted(rng.sample(list(TENSORS), rng.randint(3, 7)))
    shares = [row for row in SHARES if row[0] in names and row[1] in names]
    sharing = rng.choice(shares) if shares and rng.random() < 0.7 else None
    nest(random.Random(f"nested {case.seed}"), chain)
    if sharing is not None:
        without_decay(chain)
    else:  # the average of a weight that another one moves is for nobody to say either
        chain += averages(random.Random(f"averages {case.seed}"), chain)
    kinds = {link.kind for top in chain for _, link in top.walk()}
    shapes = {name: TENSORS[name][0] for name in names}
    values = {name: gaussian(rng, shape, 0.5) for name, shape in shapes.items()}
    count = rng.randint(1, 3)
    groups = {name: min(i * count // len(names), count - 1) for i, name in enumerate(names)}
    settable = [
        (path, key, choices)
        for top in chain
        for path, link in top.walk()
        for key, choices in KINDS.get(link.kind, ({}, {}))[0].items()
        if not (key == "mul" and link.arguments.get("mul", 1) is None)
        and not (key == "weight_decay" and sharing is not None)
    ]

    def changes(chance: float) -> list[tuple[int, str, str, Any]]:
        if not settable or rng.random() > chance:
            return []
        made = []
        for _ in range(rng.randint(1, 3)):
            path, key, choices = rng.choice(settable)
            numbers = [x for x in choices if x is not None]
            made.append((rng.randrange(count), path, key, rng.choice(numbers)))
        return made

    overrides = changes(0.5)
    broken = "Guard" in kinds or (kinds <= MEMORYLESS_OR_SAFE and rng.random() < 0.3)
    share_at = rng.choice([0, 0, 2, 99])
    steps = []
    for i in range(rng.randint(6, 9)):
        size = rng.choice([1.0, 1.0, 0.1, 3.0, 30.0])
        here = [name for name in names if rng.random() < 0.75] or [rng.choice(names)]
        moved = {}
        for name in names:
            if len(shapes[name]) == 4 and rng.random() < 0.25:
                moved[name] = rng.choice([torch.contiguous_format, torch.channels_last])
        steps.append(
            Step(
                {name: gradient(rng, shapes[name], size) for name in here},
                {name: rng.choice(["plain", "plain", TENSORS[name][1]]) for name in here},
                changes(0.4),
                moved,
                sharing if i == share_at else None,
            )
        )
        if broken and rng.random() < 0.25:
            flat = steps[-1].gradients[rng.choice(here)].reshape(-1)
            if flat.size:
                flat[rng.randrange(flat.size)] = rng.choice([math.nan, math.inf, -math.inf])
    layouts = {name: TENSORS[name][1] for name in names}
    whole = Scenario(shapes, layouts, values, groups, overrides, chain, steps)
    return cut(whole, case)


def without_decay(chain: Sequence[Link]) -> None:
    """Make every decay zero, where parameters share memory.

    Whether the second of two decays sees what the first has left is for nobody to say, and torch's
    own optimizers differ. What does not read parameters has a meaning: one update after the other.
    """
    for top in chain:
        for _, link in top.walk():
            if link.kind == "WeightDecay":
                link.arguments["weight_decay"] = 0.0


def gaussian(rng: random.Random, shape: tuple[int, ...], size: float) -> np.ndarray:
    """Normal numbers that float32 holds, so that both dtypes begin with the same."""
    numbers = [rng.gauss(0, size) for _ in range(math.prod(shape))]
    return np.array(numbers, np.float32).astype(np.float64).reshape(shape)


def gradient(rng: random.Random, shape: tuple[int, ...], size: float) -> np.ndarray:
    """Normal numbers; sometimes zeros, or with a spike."""
    made, what = gaussian(rng, shape, size), rng.random()
    if what < 0.1:
        made = np.zeros(shape)
    elif what < 0.2 and made.size:
        made.reshape(-1)[rng.randrange(made.size)] *= 64
    return made


def cut(whole: Scenario, case: Case) -> Scenario:
    """What a case keeps of its run."""
    if case.tensors is not None:
        for name in set(whole.shapes) - set(case.tensors):
            for held in (whole.shapes, whole.layouts, whole.values, whole.groups):
                held.pop(name)
        for step in whole.steps:
            for held in (step.gradients, step.layouts, step.moved):
                for name in set(held) - set(case.tensors):
                    held.pop(name)
            if step.shared and not set(step.shared[:2]) <= set(case.tensors):
                step.shared = None
        used = sorted(set(whole.groups.values()))
        whole.groups = {name: used.index(g) for name, g in whole.groups.items()}
        for i, rows in enumerate([whole.overrides, *(step.changes for step in whole.steps)]):
            kept = [(used.index(g), *rest) for g, *rest in rows if g in used]
            if i == 0:
                whole.overrides = kept
            else:
                whole.steps[i - 1].changes = kept
    if case.links is not None:
        if whole.chain[0].kind == "Guard" and 0 not in case.links:
            for step in whole.steps:  # what the guard let nobody see
                for name, g in step.gradients.items():
                    step.gradients[name] = np.where(np.isfinite(g), g, 0.0)
        kept = [link for i, link in enumerate(whole.chain) if i in case.links]
        whole.chain = readable(kept)
        tops = {link.name for link in whole.chain}
        whole.overrides = [row for row in whole.overrides if row[1].split("/")[0] in tops]
        for step in whole.steps:
            step.changes = [row for row in step.changes if row[1].split("/")[0] in tops]
    if case.steps is not None:
        whole.steps = [step for i, step in enumerate(whole.steps) if i in case.steps]
    return whole


# ---------------------------------------------------------------------- both sides of it


def build(module: Any, chain: Sequence[Link], **options: Any) -> Any:
    """A chain of the library's classes, or of the reference's."""
    return module.Chain(*[build_link(module, link) for link in chain], **options)


def build_link(module: Any, link: Link) -> Any:
    number = as_tensor if module is torchzero_clip else as_number
    arguments = {key: number(value) for key, value in link.arguments.items()}
    cls, inner = getattr(module, link.kind, Written), link.inner
    if link.kind == "Written" and module is reference:
        arguments["fn"] = FUNCTIONS[arguments["fn"]][1]
    for key, functions in (("where", WHERE), ("condition", CONDITIONS), ("labels", None)):
        if key in arguments:
            arguments[key] = functions[arguments[key]] if functions else LABELS
    if "merge" in arguments:
        arguments["merge"] = MERGES[arguments["merge"]][module is reference]
    if link.kind == "Chain":
        return build(module, inner[""], name=link.name)
    if link.kind == "Graft":
        arguments |= {label: build(module, some) for label, some in inner.items()}
    elif link.kind in ("Partition", "Parallel"):
        arguments["transforms"] = {label: build(module, some) for label, some in inner.items()}
    elif link.kind == "ClipValueByEMA":
        arguments["ema_tfm"] = build(module, inner[""]) if inner else None
    elif inner:
        arguments["tfm"] = build(module, inner[""])
    if link.kind == "AdaptiveClip":
        own = {key: arguments.pop(key) for key in list(arguments) if "/" in key}
        own = {key.split("/")[1]: value for key, value in own.items()}
        arguments["criterion"] = module.EMARatio(clipping=arguments["criterion"], **own)
    return cls(name=link.name, **arguments)


def as_tensor(value: Any) -> Any:
    if isinstance(value, Number):
        return torch.full(value.shape, value.value, dtype=torch.float64)
    return value


def as_number(value: Any) -> Any:
    return value.value if isinstance(value, Number) else value


class Simulated:
    """The numpy side of a run."""

    def __init__(self, plan: Scenario, dtype: str, noise: float = 0.0, draw: int = 0) -> None:
        self.parameters = {
            name: Parameter(name, plan.groups[name], value.copy())
            for name, value in plan.values.items()
        }
        chain = build(reference, plan.chain)
        self.reference = Reference(list(self.parameters.values()), chain, noise, draw, dtype)
        paths = [path for top in plan.chain for path, _ in top.walk()]
        rules: dict[str, Any] = {}
        for path in paths:
            rules[path] = find(chain, path)
        self.rules = rules
        self.change(plan.overrides)

    def change(self, rows: Sequence[tuple[int, str, str, Any]]) -> None:
        for group, path, key, value in rows:
            held = self.rules[path].overrides.setdefault(group, {})
            held[key.split("/")[-1]] = as_number(value)

    def step(self, step: Step) -> None:
        self.change(step.changes)
        if step.shared is not None:
            new, old, start = step.shared
            shape = self.parameters[new].value.shape
            flat = self.parameters[old].value.reshape(-1)  # a view, so that both see a write
            self.parameters[new].value = flat[start : start + math.prod(shape)].reshape(shape)
        for name, p in self.parameters.items():
            p.grad = step.gradients[name].copy() if name in step.gradients else None
        self.reference.step()


def find(chain: Any, path: str) -> Any:
    """The reference's rule at a path, by the names of the links, which are unique."""
    name = path.rsplit("/", 1)[-1]
    return next(rule for rule in chain.walk() if rule.name == name)


class Real:
    """The library's side of a run."""

    def __init__(self, plan: Scenario, dtype: torch.dtype, way: str) -> None:
        self.dtype = dtype
        self.parameters = {
            name: torch.nn.Parameter(laid_out(value, plan.layouts[name], dtype))
            for name, value in plan.values.items()
        }
        groups: list[dict[str, Any]] = [
            {"params": []} for _ in range(max(plan.groups.values()) + 1)
        ]
        for name, p in self.parameters.items():
            groups[plan.groups[name]]["params"].append((name, p))
        for group, path, key, value in plan.overrides:
            groups[group][f"{path}/{key}"] = as_tensor(value)
        self.opt = optimizer(way, groups, build(torchzero_clip, plan.chain))

    def step(self, step: Step) -> None:
        for group, path, key, value in step.changes:
            self.opt.param_groups[group][f"{path}/{key}"] = as_tensor(value)
        for name, memory_format in step.moved.items():
            p = self.parameters[name]
            p.data = p.data.contiguous(memory_format=memory_format)
        if step.shared is not None:
            new, old, start = step.shared
            p, flat = self.parameters[new], self.parameters[old].data.view(-1)
            p.data = flat[start : start + p.numel()].view(p.shape)
        for name, p in self.parameters.items():
            p.grad = None
            if name in step.gradients:
                p.grad = laid_out(step.gradients[name], step.layouts[name], self.dtype)
        self.opt.step()

    def averaged(self) -> dict[str, torch.Tensor]:
        """The weights for evaluation."""
        with self.opt.averaged():
            return {name: p.detach().clone() for name, p in self.parameters.items()}


def laid_out(value: np.ndarray, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of these values that lies in memory as told."""
    made = torch.tensor(value, dtype=dtype)
    if layout == "channels_last":
        return made.contiguous(memory_format=torch.channels_last)
    return made.t().contiguous().t() if layout == "transposed" else made


# ---------------------------------------------------------------------- comparison


class Difference(AssertionError):
    """The library and the reference came to different numbers."""


def check(case: Case, way: str) -> tuple[int, int]:
    """Run a case in one way; returns how many tensors were compared, and how many sharply.

    A tensor is compared sharply where rounding alone, as the noisy run has it, does not move it.
    Where a norm lies at its limit, rounding decides, and one noisy run may decide as none had.
    """
    for draw in range(DRAWS - 1):
        with contextlib.suppress(Difference):
            return follow(scenario(case), case.dtype, way, draw)
    return follow(scenario(case), case.dtype, way, DRAWS - 1)


@np.errstate(all="ignore")
def follow(plan: Scenario, dtype: str, way: str, draw: int = 0) -> tuple[int, int]:
    """Do what a scenario says on both sides, and compare after every step."""
    plain, noisy = Simulated(plan, dtype), Simulated(plan, dtype, ROUNDING[dtype], draw)
    real = Real(plan, getattr(torch, dtype), way)
    compared = sharp = 0
    for i, step in enumerate(plan.steps):
        for side in (plain, noisy):
            side.step(step)
        real.step(step)
        if plain.reference.overflows:
            break
        shown = real.averaged() if plain.reference.averages else {}
        for name, p in real.parameters.items():
            ours, theirs = plain.parameters[name], noisy.parameters[name]
            pairs = [("value", p.detach(), ours.value, theirs.value)]
            if ours.grad is None:
                assert p.grad is None
            elif not undecided(plan, step):
                pairs.append(("gradient", p.grad, ours.grad, theirs.grad))
            if name in shown:
                means = [side.reference.averaged(p) for side, p in ((plain, ours), (noisy, theirs))]
                pairs.append(("average", shown[name], *means))
            for what, got, wanted, near in pairs:
                slack = compare(got, wanted, near, dtype, f"step {i}, {what} of {name}")
                compared, sharp = compared + 1, sharp + slack
        if any(np.abs(p.value).max(initial=0) > LOST for p in plain.parameters.values()):
            break
    return compared, sharp


def undecided(plan: Scenario, step: Step) -> bool:
    """Whether it is open what p.grad holds: Guard("zero") may or may not write its zeros there."""
    zero = any(link.arguments.get("on_nonfinite") == "zero" for link in plan.chain)
    return zero and not all(np.isfinite(g).all() for g in step.gradients.values())


def compare(got: torch.Tensor, wanted: np.ndarray, near: np.ndarray, dtype: str, what: str) -> bool:
    """Raise unless two arrays agree; returns whether rounding leaves them as they are."""
    found = got.double().numpy()
    finite = np.isfinite(wanted)
    tolerance = TOLERANCE[dtype] * np.abs(wanted[finite]).max(initial=0)
    moved = np.abs(wanted - near)[finite & np.isfinite(near)].max(initial=0)
    off = np.abs(found - wanted)[finite]
    same = np.array_equal(found[~finite], wanted[~finite], equal_nan=True)
    if not same or not (off <= tolerance + SLACK * moved).all():
        raise Difference(f"{what}: got\n{found}\nand the reference has\n{wanted}")
    return bool(SLACK * moved <= 1000 * tolerance)


def fails(case: Case, way: str) -> Exception | None:
    """What goes wrong in a case, or None."""
    try:
        check(case, way)
    except Exception as error:
        return error
    return None


def smaller(case: Case) -> Iterator[Case]:
    """The case without one of its links, steps or tensors."""
    plan = scenario(case)
    links = case.links or tuple(range(len(plan.chain)))
    steps = case.steps or tuple(range(len(plan.steps)))
    tensors = case.tensors or tuple(plan.shapes)
    for key, kept in (("links", links), ("steps", steps), ("tensors", tensors)):
        for one in kept if len(kept) > 1 else ():
            yield dataclasses.replace(case, **{key: tuple(x for x in kept if x != one)})


def shrunk(case: Case, way: str, tries: int = 200) -> Case:
    """A smaller case that fails as well."""
    going = True
    while going:
        going = False
        for candidate in smaller(case):
            tries -= 1
            if tries < 0:
                return case
            if fails(candidate, way) is not None:
                case, going = candidate, True
                break
    return case


def story(case: Case, way: str) -> str:
    """A failure in words, with the line that runs it again."""
    small = shrunk(case, way, tries=20 if way == "native" else 200)
    plan = scenario(small)
    lines = [f"{case} in the way {way!r} fails, and so does {small}:"]
    lines += [f"  {link!r}" for link in build(torchzero_clip, plan.chain)]
    lines += [f"  group {g}: {path}/{key} = {value}" for g, path, key, value in plan.overrides]
    lines += [f"  tensors {plan.shapes}, their groups {plan.groups}"]
    for i, step in enumerate(plan.steps):
        lines.append(f"  step {i}: {step}".replace("\n", " "))
    error = fails(small, way)
    run = f"from tests.engines.test_random_chains import *; check({small}, {way!r})"
    return "\n".join([*lines, f"  {type(error).__name__}: {error}", f'python -c "{run}"'])


# ---------------------------------------------------------------------- random chains

SEEDS = {
    "float64": dict.fromkeys(EAGER, 10) | {"native": 2},
    "float32": dict.fromkeys(EAGER, 5) | {"native": 1},
}
NESTED_SEEDS = 9


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("way", WAYS)
def test_random_chains_do_what_the_reference_does(way: str, dtype: str) -> None:
    """Each dtype has chains of its own: float32 takes the formulas of float64."""
    compared = sharp = 0
    first = SEEDS["float64"][way] if dtype == "float32" else 0
    for seed in range(first, first + SEEDS[dtype][way]):
        case = Case(seed, dtype)
        try:
            more, sharper = check(case, way)
        except Exception:
            pytest.fail(story(case, way), pytrace=False)
        compared, sharp = compared + more, sharp + sharper
    assert sharp > 0.9 * compared


@pytest.mark.parametrize("way", EAGER)
def test_random_nests_of_combinators_do_what_the_reference_does(way: str) -> None:
    for seed in range(NESTED_SEEDS):
        case = Case(seed, nests=True)
        try:
            check(case, way)
        except Exception:
            pytest.fail(story(case, way), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_many_random_chains_do_what_the_reference_does(way: str) -> None:
    """RANDOM_CHAINS_SECONDS is for all ways together, RANDOM_CHAINS_SEED the first seed; without it
    each day of `make test-slow` has others."""
    end = time.monotonic() + float(os.environ.get("RANDOM_CHAINS_SECONDS", "600")) / len(WAYS)
    days = zlib.crc32(os.environ.get("SLOW_DAY", "").encode()) % 10**5
    seed, stories = int(os.environ.get("RANDOM_CHAINS_SEED", 1000 + 10**5 * days)), []
    while time.monotonic() < end and len(stories) < 10:
        for dtype, nests in itertools.product(TOLERANCE, (False, True)):
            case = Case(seed, dtype, nests)
            if fails(case, way) is not None:
                stories.append(story(case, way))
        seed += 1
    if stories:
        pytest.fail("\n\n".join(stories), pytrace=False)


# ---------------------------------------------------------------------- one at a time


def one_chain(shape: tuple[int, ...], names: Sequence[str], layout: str) -> Scenario:
    """Three steps of a chain whose update lies in memory that an engine may keep."""
    numbers = np.random.default_rng(0)
    links = [Link("ClipValue", "clip", {"value": 0.5}), Link("RMSprop", "mean", {"alpha": 0.9})]
    return Scenario(
        shapes=dict.fromkeys(names, shape),
        layouts=dict.fromkeys(names, layout),
        values={name: numbers.standard_normal(shape) for name in names},
        groups=dict.fromkeys(names, 0),
        overrides=[],
        chain=[*links, Link("LR", "lr", {"lr": 0.1})],
        steps=[
            Step(
                gradients={name: numbers.standard_normal(shape) for name in names},
                layouts=dict.fromkeys(names, "plain"),
                changes=[],
                moved={},
                shared=None,
            )
            for _ in range(3)
        ],
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_large_parameter_may_leave_channels_last(way: str) -> None:
    plan = one_chain((256, 256, 3, 3), ["a.weight"], "channels_last")
    plan.steps[2].moved["a.weight"] = torch.contiguous_format
    follow(plan, "float64", way)


@pytest.mark.parametrize("way", WAYS)
def test_large_parameters_that_share_memory_lose_no_update_to_a_second_thread(way: str) -> None:
    plan = one_chain((1000, 300), ["a.weight", "b.weight"], "plain")
    plan.steps[0].shared = ("b.weight", "a.weight", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        follow(plan, "float64", way)
    finally:
        torch.set_num_threads(threads)


RULES = ("Adam", "Momentum", "ClipValueGrowth", "ClipNormByEMA")
RESHAPED = f"""
import itertools, sys, torch, torchzero_clip
from tests.engines.test_random_chains import optimizer

for way, rule in itertools.product(sys.argv[1:], {RULES}):
    for shape in ((3, 2), (2, 4), (3,)):
        p = torch.nn.Parameter(torch.zeros(2, 3))
        groups = [{{"params": [("layer.weight", p)]}}]
        opt = optimizer(way, groups, getattr(torchzero_clip, rule)())
        p.grad = torch.ones(2, 3)
        opt.step()
        p.data, p.grad = torch.zeros(shape), None
        p.grad = torch.ones(shape)
        try:
            opt.step()
            print(way, rule, shape, "stepped on")
        except ValueError as error:
            said = all(text in str(error) for text in ("layer.weight", "(2, 3)", str(shape)))
            print(way, rule, shape, "well said" if said else error)
        except Exception as error:
            print(way, rule, shape, type(error).__name__, error)
"""


def test_a_parameter_that_changed_its_shape_is_refused() -> None:
    """The sentence names the parameter and both shapes. A process of its own: it may crash."""
    ran = python("-c", RESHAPED, *WAYS)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = ran.stdout.splitlines()
    assert len(said) == 3 * len(RULES) * len(WAYS)
    assert [line for line in said if not line.endswith("well said")] == []
