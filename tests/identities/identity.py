"""Identities: a chain of ours, the official code of a method, and how the two are compared.

A file in `methods/` has functions that build the official optimizer, each under a decorator:

    @optimizer("lamb", "`Adam`, `WeightDecay`, `TrustRatio`, `LR` is LAMB", source="optax 0.2.8")

`test_identities.py` runs each of them; `record.py` writes down what the official code gives where
it is not torch's own; and the documentation may say `{identity: lamb}`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.identities.follow import Trajectory, by_optax, judged, moved, rewritten
from tests.identities.inputs import Inputs
from torchzero_clip import Chain, Clipper, Modular, Transform, named

HERE = Path(__file__).parent
RECORDINGS = HERE / "recordings"
FLOAT32 = {torch.float32: 1e-6}
INPUTS = Inputs()
BOTH = {**FLOAT32, torch.float64: 1e-12}

Options = Mapping[str, Any]

IDENTITIES: dict[str, Identity] = {}
"""Every identity by its name."""


@dataclass(frozen=True, eq=False)
class Identity:
    """A sentence of the form "A then B is X", and all that its test needs.

    Args:
        name: What the documentation writes in `{identity: …}`.
        claim: The sentence, in markdown.
        source: What holds the official code, with its version.
        theirs: Builds the official optimizer, transformation or rule of gradients.
        follow: Runs what `theirs` builds over the inputs.
        ours: Makes our chain of the options of the first group.
        groups: The options of the two groups, by the names that both sides use. Our chain is made
            with those of the first; those of the second are live values.
        compare: The "parameters" of an optimizer, what becomes of "gradients", or "thresholds".
        each_step: What our optimizer needs before every step, whose number it gets; counted from 1.
        inputs: What both are given.
        rtol: How far the two may be apart in each dtype, over the largest entry of the tensor.
        live: The official code is part of torch, and runs in every test; others are recorded.
    """

    name: str
    claim: str
    source: str
    theirs: Callable[..., Any]
    follow: Callable[[Identity, torch.dtype], Trajectory]
    ours: Callable[..., Transform]
    groups: tuple[Options, Options]
    compare: str
    each_step: Callable[[Modular, int], None] | None
    inputs: Inputs
    rtol: Mapping[torch.dtype, float]
    live: bool

    def chain(self) -> Chain:
        return Chain(self.ours(**self.groups[0]))

    def official(self, dtype: torch.dtype) -> Trajectory:
        """What the official code gives now."""
        return self.follow(self, dtype)

    def expected(self, dtype: torch.dtype) -> Trajectory:
        """What the official code gives, or gave when it was recorded."""
        if self.live:
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

    def got(self, dtype: torch.dtype, **options: Any) -> Trajectory:
        """What our chain gives, with the options of Modular."""
        if self.compare == "gradients":
            return rewritten(self, dtype, lambda groups: Clipper(own(groups), self.chain()).step)
        if self.compare == "thresholds":
            seen = judged(self, dtype, lambda groups: limits(Clipper(own(groups), self.chain())))
            return {name: numbers[1:] for name, numbers in seen.items()}  # those of the past
        make = lambda groups: Modular(own(groups), self.chain(), **options)  # noqa: E731
        return moved(self, dtype, make, self.each_step)

    def distance(self, dtype: torch.dtype, **options: Any) -> float:
        """How far ours is from theirs, over what is allowed: at most 1 where the claim is true."""
        return apart(self.got(dtype, **options), self.expected(dtype)) / self.rtol[dtype]

    @property
    def where(self) -> str:
        """The lines of the test, for its reader: file and function."""
        file = Path(inspect.getsourcefile(self.theirs) or "").relative_to(HERE.parents[1])
        return f"{file.as_posix()}::{self.theirs.__name__}"


def own(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups for a chain that was made with the options of the first."""
    first, second = groups
    return [{"params": first["params"]}, second]


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
        each_step: Callable[[Modular, int], None] | None = None,
        inputs: Inputs = INPUTS,
        rtol: Mapping[torch.dtype, float] = BOTH,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(theirs: Callable[..., Any]) -> Callable[..., Any]:
            assert name not in IDENTITIES, f"there are two identities {name!r}"
            IDENTITIES[name] = Identity(
                name=name,
                claim=claim,
                source=source,
                theirs=theirs,
                follow=follow,
                ours=ours or (lambda **options: named(name, **options)),
                groups=groups,
                compare=compare,
                each_step=each_step,
                inputs=inputs,
                rtol=rtol,
                live=source.startswith("torch."),
            )
            return theirs

        return add

    return decorator


optimizer = identity_by(lambda it, dtype: moved(it, dtype, it.theirs), "parameters")
"""theirs(groups) is an optimizer of torch's kind."""

rewriter = identity_by(lambda it, dtype: rewritten(it, dtype, it.theirs), "gradients")
"""theirs(groups) is a function that rewrites the gradients in place."""


def _before(identity: Identity, dtype: torch.dtype) -> Trajectory:
    seen = judged(identity, dtype, identity.theirs)
    return {name: numbers[:-1] for name, numbers in seen.items()}


judge = identity_by(_before, "thresholds")
"""theirs(groups) is a function that observes a step and gives the threshold from then on."""

transformation = identity_by(by_optax, "parameters")
"""theirs(**options of a group) is a transformation of optax; its `lr` is a schedule."""

gradient_transformation = identity_by(by_optax, "gradients")
"""theirs(**options of a group) is a transformation of optax whose updates are compared."""


def load() -> dict[str, Identity]:
    """Import all files of methods; what they add is in `IDENTITIES`."""
    for file in sorted((HERE / "methods").glob("*.py")):
        importlib.import_module(f"tests.identities.methods.{file.stem}")
    return IDENTITIES
