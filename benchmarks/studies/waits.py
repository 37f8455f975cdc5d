"""What optimizers ask of a GPU in a step, without one: python -m benchmarks.studies.waits.

Each is made as its documentation says, for the tensors of a small transformer, and tried behind
`clip_grad_norm_`. Those that are installed get their rows of results/waits.csv anew; the page "Does
your step wait?" shows it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import rows
from torchzero_clip import LR, Adam, AutoClip, ClipNorm, Guard, Modular, WeightDecay, ZClip
from torchzero_clip import __version__ as own_version
from torchzero_clip.audit import StepReport
from torchzero_clip.audit.findings import short
from torchzero_clip.audit.step_audit import trial

RESULTS = Path(__file__).parents[1] / "results" / "waits.csv"
LAYERS = 4
BLOCK = [(384, 128), (384,), (128, 128), (128,), (512, 128), (512,), (128, 512), (128,)]
SHAPES = BLOCK * LAYERS


@dataclass
class Line:
    """A step of an optimizer of a library; `fresh` is in gradients."""

    library: str
    version: str
    name: str
    calls: int
    waits: int
    copies: int
    fresh: float
    captured: int
    line: str
    what: str


def clipped(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What makes a step of torch's clip and of an optimizer."""

    def both(params: Any) -> Callable[[], None]:
        opt = make(params)
        if hasattr(opt, "train"):  # those with weights for evaluation
            opt.train()

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()

        return step

    return both


def by_name(module: str, name: str, **options: Any) -> Callable[[Any], Any]:
    """A class of a library."""

    def make(params: Any) -> Any:
        return getattr(importlib.import_module(module), name)(params, **options)

    return clipped(make)


def ours(*links: Any) -> Callable[[Any], Any]:
    tail = Adam(), WeightDecay(0.01), LR(1e-3)
    return lambda params: Modular(params, *links, *tail)


def timms(name: str) -> Callable[[Any], Any]:
    def make(params: Any) -> Any:
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(params, name, lr=1e-3)

    return clipped(make)


def torchzeros(params: Any) -> Any:
    import torchzero

    module = torch.nn.Module()
    for i, p in enumerate(params):
        module.register_parameter(f"p{i}", p)
    chain = torchzero.m.ClipNorm(1.0), torchzero.m.Adam(), torchzero.m.LR(1e-3)
    return torchzero.Optimizer(module, *chain)


def adamw(**options: Any) -> Callable[[Any], Any]:
    return clipped(partial(torch.optim.AdamW, **options))


OURS = "torchzero_clip"
HEADLINE = ClipNorm(1.0, dim="global")
STEPS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "torch": {
        "AdamW": adamw(),
        "AdamW(capturable)": adamw(capturable=True),
        "AdamW(fused)": adamw(fused=True),
        "AdamW(fused, capturable)": adamw(fused=True, capturable=True),
        "SGD(momentum)": clipped(partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        "Muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2]),
    },
    OURS: {
        "ClipNorm, Adam, WeightDecay, LR": ours(HEADLINE),
        "Guard in front": ours(Guard(), HEADLINE),
        "ZClip in front": ours(ZClip()),
        "AutoClip in front": ours(AutoClip()),
    },
    "timm": {x: timms(x) for x in ("nadamw", "lamb", "lion", "adopt", "laprop", "mars", "muon")},
    "pytorch-optimizer": {
        name: by_name("pytorch_optimizer", name)
        for name in ("Lion", "AdaBelief", "Adan", "CAME", "StableAdamW", "AdamP", "SOAP", "Prodigy")
    },
    "heavyball": {name: by_name("heavyball", name) for name in ("AdamW", "SOAP")},
    "schedulefree": {"AdamWScheduleFree": by_name("schedulefree", "AdamWScheduleFree")},
    "prodigyopt": {"Prodigy": by_name("prodigyopt", "Prodigy")},
    "torchzero": {"ClipNorm, Adam, LR": torchzeros},
}


def version(library: str) -> str:
    """What is installed; nothing where nothing is."""
    if library == OURS:
        return own_version
    try:
        return importlib.metadata.version(library).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def line(library: str, name: str, report: StepReport) -> Line:
    reads, copies = [sum([x.times for x in report.of(*k)]) for k in (("read", "wait"), ("copy",))]
    size = sum([torch.Size(shape).numel() for shape in SHAPES]) * 4
    way = [*report.waits, *report.of("change", "refusal")]
    first, what = (short(way[0].where), way[0].what) if way else ("", "")
    numbers = report.calls, reads, copies, rows.digits(report.fresh / size)
    return Line(library, version(library), name, *numbers, int(report.capturable), first, what)


def tried(library: str, name: str) -> Line:
    """The row of an optimizer; one that cannot be imagined says why."""
    params = [torch.empty(shape) for shape in SHAPES]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = line(library, name, trial(STEPS[library][name], params))
    except Exception as error:
        why = f"not seen: {type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
        found = Line(library, version(library), name, 0, 0, 0, 0.0, 0, "", why)
    return found


def table() -> str:
    """A row for each optimizer."""
    out = ["| | calls | waits | copies | fresh memory | a graph | first line in its way |"]
    out.append("|---|--:|--:|--:|--:|:-:|---|")
    for x in rows.read(RESULTS, Line):
        name = f"{x.library} {x.version}: {x.name}"
        if x.what.startswith("not seen"):
            out.append(f"| {name} | | | | | | {x.what} |")
            continue
        graph, place = "✗✓"[x.captured], f"`{x.line}`" if x.line else ""
        out.append(
            f"| {name} | {x.calls} | {x.waits} | {x.copies} | {x.fresh:.2f} | {graph} | {place} |"
        )
    return "\n".join(out)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.studies.waits", description=__doc__)
    parser.add_argument("libraries", nargs="*", help="all that are installed, unless given")
    asked = parser.parse_args(given).libraries or [name for name in STEPS if version(name)]
    made = []
    for library in asked:
        for name in STEPS[library]:
            made.append(tried(library, name))
            print(made[-1], flush=True)
    others = [x for x in rows.read(RESULTS, Line) if x.library not in asked]
    order = list(STEPS)
    rows.write(RESULTS, Line, sorted([*others, *made], key=lambda x: order.index(x.library)))


if __name__ == "__main__":
    main()
