"""Clip functions of other libraries and known gradients: python -m benchmarks.studies.clips.

Each is called as its documentation says. Those that are installed are tried, and get their column
of results/clips.csv anew; the page "Is your norm right?" shows it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import rows
from torchzero_clip import __version__ as torchzero_clip_version
from torchzero_clip.audit.clip_audit import audits
from torchzero_clip.audit.clip_report import ClipRow

RESULTS = Path(__file__).parents[1] / "results" / "clips.csv"


@dataclass
class Line:
    """A case of a library."""

    library: str
    version: str
    case: str
    right: int
    expected: float
    found: str
    why: str


def torchzero_clip(params: Any, max_norm: float, case: Any) -> Any:
    from torchzero_clip import ClipNorm, Clipper, clip_grad_norm_

    if case.group is None:
        return clip_grad_norm_(params, max_norm, dim="global")
    return Clipper(params, ClipNorm(max_norm, dim="global"), process_group=case.group).step()


def torchs(params: Any, max_norm: float) -> Any:
    return torch.nn.utils.clip_grad_norm_(params, max_norm)


def torchtitan(params: Any, max_norm: float, case: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torchtitan.distributed.utils import clip_grad_norm_

    pipeline = None if case.group is None else DeviceMesh.from_group(case.group, "cpu")
    return clip_grad_norm_(params, max_norm, pp_mesh=pipeline)


def accelerate(params: Any, max_norm: float) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).clip_grad_norm_(params, max_norm)


def lightning(params: Any, max_norm: float, case: Any) -> Any:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    optimizer = torch.optim.SGD(dict.fromkeys(params), lr=0.1)
    model = torch.nn.Module() if case.model is None else case.model
    return fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)


def deepspeed(params: Any, max_norm: float) -> Any:
    import torch.distributed as dist

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.comm
    from deepspeed.runtime.utils import clip_grad_norm_
    from deepspeed.utils import groups

    groups._WORLD_GROUP = None  # it keeps a group of the first world that it has seen
    alone = not dist.is_initialized()  # it asks for its neighbours, even then
    if alone:
        file = Path(tempfile.mkdtemp(), "store").as_uri()
        dist.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    try:
        deepspeed.comm.init_distributed("gloo", dist_init_required=False, verbose=False)
        return clip_grad_norm_(params, max_norm)
    finally:
        if alone:
            dist.destroy_process_group()


OURS = "torchzero_clip"
LIBRARIES: dict[str, Callable[..., Any]] = {
    "torchzero_clip": torchzero_clip,
    "torch": torchs,
    "torchtitan": torchtitan,
    "accelerate": accelerate,
    "lightning": lightning,
    "deepspeed": deepspeed,
}


def version(library: str) -> str:
    """What is installed; nothing where nothing is."""
    if library == OURS:
        return torchzero_clip_version
    try:
        return importlib.metadata.version(library.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""


def line(library: str, row: ClipRow) -> Line:
    found = "nothing" if row.found is None else f"{row.found:.5g}"
    expected = rows.digits(row.expected)
    return Line(library, version(library), row.case, int(row.right), expected, found, row.why)


def table() -> str:
    """Libraries beside each other, and what is wrong below."""
    lines = rows.read(RESULTS, Line)
    names = list(dict.fromkeys([x.library for x in lines]))
    told = {(x.case, x.library): x for x in lines}
    heads = [
        f"{x.library} {x.version}"
        for x in (next(x for x in lines if x.library == n) for n in names)
    ]
    out = [f"| | {' | '.join(heads)} |", "|---|" + ":-:|" * len(names)]
    for case in dict.fromkeys([x.case for x in lines]):
        marks = ["✓" if told[case, name].right else "✗" for name in names]
        out.append(f"| {case} | {' | '.join(marks)} |")
    return "\n".join(out)


def causes() -> str:
    """Return a table with a row for each cause of a ✗."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for x in rows.read(RESULTS, Line):
        if not x.right:
            wrong.setdefault((x.case, x.why), []).append(x.library)
    lines = [
        f"| {case} | {', '.join(names)} | {why.replace('|', '/')} |"
        for (case, why), names in wrong.items()
    ]
    return "\n".join(["| case | libraries | error |", "|---|---|---|", *lines])


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.studies.clips", description=__doc__)
    parser.add_argument("libraries", nargs="*", help="all that are installed, unless given")
    asked = parser.parse_args(given).libraries or [
        name for name in LIBRARIES if name == OURS or version(name)
    ]
    home = "benchmarks.studies.clips"
    reports = audits([f"{home}:{LIBRARIES[x].__name__}" for x in asked])
    made = []
    for library, report in zip(asked, reports, strict=True):
        print(report, end="\n\n", flush=True)
        made += [line(library, row) for row in report.rows]
    others = [x for x in rows.read(RESULTS, Line) if x.library not in asked]
    order = list(LIBRARIES)
    rows.write(RESULTS, Line, sorted([*others, *made], key=lambda x: order.index(x.library)))


if __name__ == "__main__":
    main()
