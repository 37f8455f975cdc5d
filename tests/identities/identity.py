"""Identities: a chain of ours, the official code of a method, and how the two are compared.

A file in `methods/` has functions that build the official optimizer, each under a decorator:

    @optimizer("lamb", "`Adam`, `WeightDecay`, `TrustRatio`, `LR` is LAMB", source="optax 0.2.8")

`test_identities.py` runs each of them; `record.py` writes down what the official code gives where
it is not torch's own; and the documentation may link to it: `identities.md#lamb`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.identities.follow import Trajectory, by_optax, judged, moved, rewritten
from tests.identities.inputs import PLAIN, STEPS, Inputs
from torchzero_clip import Chain, Clipper, Modular, Transform, named
from torchzero_clip.core.chain import bind
from torchzero_clip.optimizer.keys import GroupKeys

HERE = Path(__file__).parent
RECORDINGS = HERE / "recordings"
FLOAT32 = {torch.float32: 1e-6}
INPUTS = Inputs()
BOTH = {**FLOAT32, torch.float64: 1e-12}

Options = Mapping[str, Any]
Source = str | tuple[str | int, ...]
COUNTS = (
    "wait", "warmup", "warmup_steps", "steps", "window", "window_size", "every", "alpha_warmup",
    "beta3_warmup", "k", "start",
)  # fmt: skip
"""Fields that say after how many steps a rule does something else."""

IDENTITIES: dict[str, Identity] = {}
"""Every identity by its name."""


@dataclass(frozen=True, eq=False)
class Identity:
    """A sentence of the form "A then B is X", and all that its test needs.

    Args:
        name: The anchor of its section in `docs/identities.md`.
        claim: The sentence, in markdown.
        source: What holds the official code, with its version.
        theirs: Builds the official optimizer, transformation or rule of gradients.
        follow: Runs what `theirs` builds over the inputs.
        ours: Makes our chain of the options of the first group.
        groups: The options of the two groups, by the names of the official code; what the second
            lacks it has of the first. Our chain is made with those of the first.
        keys: Where a live value of ours comes from that has not the name of its option: an option,
            several as a tuple, or an entry, as in ("betas", 0).
        constant: Live values of ours, and counts, that no schedule changes and no run passes, each
            with the reason.
        compare: The "parameters" of an optimizer, what becomes of "gradients", or "thresholds".
        each_step: What our optimizer needs before every step, whose number it gets; counted from 1.
        inputs: What both are given.
        within: Stands around each step of an optimizer, theirs and ours.
        evaluates: Both have weights for evaluation, by `eval()`, which are compared as well.
        rtol: How far the two may be apart in each dtype, over the largest entry of the tensor.
        runs_here: The other side is part of torch, or formulas that the test writes out. It runs in
            every test. The results of other code are recorded.
    """

    name: str
    claim: str
    source: str
    theirs: Callable[..., Any]
    follow: Callable[[Identity, torch.dtype], Trajectory]
    ours: Callable[..., Transform]
    groups: tuple[Options, Options]
    keys: Mapping[str, Source]
    constant: Mapping[str, str]
    compare: str
    each_step: Callable[[Modular, int], None] | None
    inputs: Inputs
    within: Callable[[], AbstractContextManager[Any]]
    evaluates: bool
    rtol: Mapping[torch.dtype, float]
    runs_here: bool

    def chain(self) -> Chain:
        return Chain(self.ours(**self.groups[0]))

    @property
    def tested(self) -> str:
        """What the documentation says after a claim: whose code or formulas test it."""
        owner, *rest = self.source.replace(",", "").split()
        if owner == "arXiv":
            return f"tested against the formulas of arXiv {rest[0]}"
        return f"tested against {'torch' if owner.startswith('torch.') else owner}"

    @functools.cached_property
    def live(self) -> tuple[str, ...]:
        """The keys of our live values in `param_groups`."""
        return tuple(GroupKeys(bind(self.chain())).defaults)

    @functools.cached_property
    def scheduled(self) -> dict[str, Source]:
        """Where each live value that changes comes from."""
        sources = {key: self.keys.get(key, key) for key in self.live if key not in self.constant}
        given = self.groups[0]
        return {k: source for k, source in sources.items() if given.keys() >= {*_names(source)}}

    @functools.cached_property
    def changes(self) -> set[str]:
        """The options that a schedule changes."""
        return {name for source in self.scheduled.values() for name in _names(source)}

    def options(self, letter: str, step: int | None = None) -> dict[str, Any]:
        """The options of a group, in a step or as both sides are made with."""
        own = {**self.groups[0], **(self.groups[1] if letter == "b" else {})}
        if step is None:
            return own
        vary = self.inputs.varied
        return {k: vary(k, step, v) if k in self.changes else v for k, v in own.items()}

    def theirs_in(self, letter: str, step: int) -> dict[str, Any]:
        """The live values of theirs in a step."""
        now = self.options(letter, step)
        return {name: now[name] for name in self.changes}

    def ours_in(self, letter: str, step: int) -> dict[str, Any]:
        """Our live values in a step, where they are not those of the chain."""
        if letter == "a" and step < PLAIN:
            return {}
        now = self.options(letter, step)
        held = {key: now[key] for key in self.constant if key in self.live and key in now}
        return held | {key: _drawn_from(now, source) for key, source in self.scheduled.items()}

    def official(self, dtype: torch.dtype) -> Trajectory:
        """What the official code gives now."""
        return self.follow(self, dtype)

    def expected(self, dtype: torch.dtype) -> Trajectory:
        """What the official code gives, or gave when it was recorded."""
        if self.runs_here:
            return self.official(dtype)
        recording = self.recording()
        digest = self.inputs.digest()
        assert recording["inputs"] == digest, f"{self.name}: the inputs changed, record it again"
        return recording[str(dtype)]

    @property
    def file(self) -> Path:
        return RECORDINGS / f"{self.name}.pt"

    def recording(self) -> Any:
        if not self.file.exists():
            command = f"python -m tests.identities.record {self.name}"
            raise FileNotFoundError(f"{self.name} has no recording: write it with {command}")
        return torch.load(self.file, weights_only=True)

    def got(self, dtype: torch.dtype, resumes: bool = False, **options: Any) -> Trajectory:
        """What our chain gives, with the options of Modular; whether it is resumed on its way."""
        if self.compare == "gradients":
            return rewritten(self, dtype, self._clipper, self.ours_in)
        if self.compare == "thresholds":
            seen = judged(self, dtype, self._limits, self.ours_in)
            return {name: numbers[1:] for name, numbers in seen.items()}  # those of the past
        make = lambda groups: Modular(own(groups), self.chain(), **options)  # noqa: E731
        return moved(self, dtype, make, self.ours_in, self.each_step, resumes)

    def _clipper(self, groups: list[dict[str, Any]]) -> tuple[Callable[[], Any], Any]:
        clipper = Clipper(own(groups), self.chain())
        return clipper.step, clipper.param_groups

    def _limits(self, groups: list[dict[str, Any]]) -> tuple[Callable[[], float], Any]:
        clipper = Clipper(own(groups), self.chain())
        return limits(clipper), clipper.param_groups

    def distance(self, dtype: torch.dtype, **options: Any) -> float:
        """How far ours is from theirs, over what is allowed: at most 1 where the claim is true."""
        return apart(self.got(dtype, **options), self.expected(dtype)) / self.rtol[dtype]

    @property
    def where(self) -> str:
        """The lines of the test, for its reader: file and function."""
        file = Path(inspect.getsourcefile(self.theirs) or "").relative_to(HERE.parents[1])
        return f"{file.as_posix()}::{self.theirs.__name__}"


def own(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups for a chain, whose options come from the schedule."""
    return [{"params": group["params"]} for group in groups]


def _names(source: Source) -> list[str]:
    """The options that a live value is."""
    return [source] if isinstance(source, str) else [x for x in source if isinstance(x, str)]


def _drawn_from(options: Options, source: Source) -> Any:
    """A live value of ours from the options."""
    if isinstance(source, str):
        return options[source]
    if isinstance(source[-1], int):
        return options[str(source[0])][source[-1]]
    return tuple(options[str(name)] for name in source)


def counts_of(identity: Identity) -> list[tuple[str, int]]:
    """The counts of the chain, and those that the second group has of its own."""
    chain, second = identity.chain(), identity.groups[1]
    fields = [(name, getattr(tfm, name, None)) for tfm in chain.walk() for name in COUNTS]
    fields += [(name, second[name]) for name in COUNTS if name in second]
    return [(name, value) for name, value in fields if type(value) is int and value > 1]


def boundaries_of(identity: Identity) -> tuple[int, ...]:
    """The steps at which a rule begins to do something else, those of later periods too."""
    counts = counts_of(identity)
    every = min([value for name, value in counts if name == "every"], default=STEPS + 1)
    starts, within = range(0, STEPS + 1, every), [v for name, v in counts if name != "every"]
    steps = {start + count for start in starts for count in (0, *within)}
    return tuple(sorted(step for step in steps if 0 < step <= STEPS))


def limits(clipper: Clipper) -> Callable[[], float]:
    """Steps, each of which gives the limit that it had."""

    def step() -> float:
        clipper.step()
        (limit,) = [value for key, value in clipper.metrics().items() if key.endswith("/limit")]
        return float(limit.flatten()[0])  # each group has one, and here they are equal

    return step


def apart(ours: Trajectory, theirs: Trajectory) -> float:
    """The largest difference in any step, over the largest entry of its tensor in that step."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, expected in theirs.items():
        a, b = ours[name].double().flatten(1), expected.double().flatten(1)
        assert b.isfinite().all(), f"{name}: the official numbers are not finite"
        size = b.abs().amax(1)
        off = ((a - b).abs().amax(1) / size.where(size > 0, 1.0)).amax()
        worst = max(worst, torch.inf if off.isnan() else float(off))
    return worst


# ---------------------------------------------------------------------- adding one


def identity_by(follow: Callable[[Identity, torch.dtype], Trajectory], compare: str) -> Any:
    def decorator(
        name: str,
        claim: str,
        *,
        source: str,
        ours: Callable[..., Transform] | None = None,
        groups: tuple[Options, Options] = ({}, {}),
        keys: Mapping[str, Source] | None = None,
        constant: Mapping[str, str] | None = None,
        each_step: Callable[[Modular, int], None] | None = None,
        inputs: Inputs = INPUTS,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        evaluates: bool = False,
        rtol: Mapping[torch.dtype, float] = BOTH,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(theirs: Callable[..., Any]) -> Callable[..., Any]:
            assert name not in IDENTITIES, f"there are two identities {name!r}"
            made = Identity(
                name=name,
                claim=claim,
                source=source,
                theirs=theirs,
                follow=follow,
                ours=ours or (lambda **options: named(name, **options)),
                groups=groups,
                keys=keys or {},
                constant=constant or {},
                compare=compare,
                each_step=each_step,
                inputs=inputs,
                within=within,
                evaluates=evaluates,
                rtol=rtol,
                runs_here=source.startswith(("torch.", "arXiv ")),
            )
            steps = boundaries_of(made)
            IDENTITIES[name] = replace(made, inputs=replace(inputs, boundaries=steps))
            return theirs

        return add

    return decorator


optimizer = identity_by(lambda it, dtype: moved(it, dtype, it.theirs, it.theirs_in), "parameters")
"""theirs(groups) is an optimizer of torch's kind."""

rewriter = identity_by(
    lambda it, dtype: rewritten(it, dtype, lambda gs: (it.theirs(gs), gs), it.theirs_in),
    "gradients",
)
"""theirs(groups) is a function that rewrites the gradients in place, and looks into the groups."""


def _before(identity: Identity, dtype: torch.dtype) -> Trajectory:
    seen = judged(identity, dtype, lambda gs: (identity.theirs(gs), gs), identity.theirs_in)
    return {name: numbers[:-1] for name, numbers in seen.items()}


judge = identity_by(_before, "thresholds")
"""theirs(groups) is a function that observes a step and gives the threshold from then on."""

transformation = identity_by(by_optax, "parameters")
"""theirs(**options of a group) is a transformation of optax, with the values of a step."""

gradient_transformation = identity_by(by_optax, "gradients")
"""theirs(**options of a group) is a transformation of optax whose updates are compared."""


def load() -> dict[str, Identity]:
    """Import all files of methods; what they add is in `IDENTITIES`."""
    for file in sorted((HERE / "methods").glob("*.py")):
        importlib.import_module(f"tests.identities.methods.{file.stem}")
    return IDENTITIES
