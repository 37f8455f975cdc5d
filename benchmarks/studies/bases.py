"""SOAP, KL-SOAP, Shampoo and Kron beside their authors' code: a step of GPT-2 small's matrices.

    python -m benchmarks.studies.bases checkouts                 # all of them, two of twelve layers
    python -m benchmarks.studies.bases checkouts --only soap --rounds 10

`checkouts/owner/repository` are the repositories at the commits below, or a folder that a package
was unpacked into. Both sides step in turn on
the same gradients, in one process and in single precision, and a ratio is that of two steps that
follow each other; steps that renew bases are told apart from those between. A bar is from the
first to the third quarter of the ratios. First steps, which decompose matrices, do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn import Parameter

from benchmarks.circumstances import watched
from benchmarks.studies.muon import BLOCK, Shapes, parameters
from torchzero_clip import Modular, named

EVERY = 4  # steps from one renewal to the next
Make = Callable[[list[Parameter]], Any]


class Race(NamedTuple):
    """A method of ours and its authors' code.

    Attributes:
        source: The repository, and the commit.
        theirs: Makes their optimizer, from the folder of the checkout.
        ours: Makes ours.
        renews: Whether their n-th step, from 1 on, renews bases.
        ours_renews: The same of ours.
    """

    source: str
    theirs: Callable[[Path, list[Parameter]], Any]
    ours: Make
    renews: Callable[[int], bool]
    ours_renews: Callable[[int], bool]


def module_at(file: Path, name: str) -> Any:
    """A file as a module."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def uncompiled() -> Any:
    """A block in which torch.compile leaves functions as they are, as `compile=False` has ours."""

    def compiled(function: Any = None, **options: Any) -> Any:
        return (lambda f: f) if function is None else function

    return mock.patch.object(torch, "compile", compiled)


def official_soap(folder: Path, params: list[Parameter]) -> Any:
    soap = module_at(folder / "soap.py", "official_soap").SOAP
    return soap(params, weight_decay=0.01, precondition_frequency=EVERY)


def official_klsoap(folder: Path, params: list[Parameter]) -> Any:
    with uncompiled():
        code = module_at(folder / "optim" / "kl_opt.py", "official_kl")
    options = {"using_klsoap": True, "cast_dtype": torch.float32}
    return code.KLOpt(params, precondition_frequency=EVERY, **options)


def official_shampoo(folder: Path, params: list[Parameter]) -> Any:
    sys.path.insert(0, str(folder))
    code = importlib.import_module("distributed_shampoo")
    sys.path.remove(str(folder))
    qr = code.QREigendecompositionConfig(max_iterations=1, tolerance=0.0)
    return code.DistributedShampoo(
        params,
        lr=1e-2,
        betas=(0.9, 0.999),
        max_preconditioner_dim=10000,
        precondition_frequency=EVERY,
        start_preconditioning_step=EVERY,
        grafting_config=code.AdamPreconditionerConfig(beta2=0.999, epsilon=1e-8),
        preconditioner_config=code.EigendecomposedShampooPreconditionerConfig(
            amortized_computation_config=qr
        ),
        distributed_config=code.SingleDeviceDistributedConfig(target_parameter_dimensionality=2),
    )


def official_kron(folder: Path, params: list[Parameter]) -> Any:
    if not torch.backends.opt_einsum.is_available():
        raise ImportError(
            "kron_torch multiplies in the order that opt_einsum finds: install it too"
        )
    sys.path.insert(0, str(folder))
    with uncompiled():
        code = importlib.import_module("kron_torch.kron")
    sys.path.remove(str(folder))
    seldom = lambda n: 1.0 if int(n) % EVERY == 0 else 1e-9  # noqa: E731
    return code.Kron(params, lr=3e-4, preconditioner_update_probability=seldom)


def of_name(name: str, **options: Any) -> Make:
    return lambda params: Modular(params, named(name, **options))


RACES = {
    "soap": Race(
        "nikhilvyas/SOAP a1e5535",
        official_soap,
        of_name("soap", precondition_frequency=EVERY),
        lambda n: n > 1 and (n - 1) % EVERY == 0,
        lambda n: (n - 1) % EVERY == 0,
    ),
    "klsoap": Race(
        "yorkerlin/KL-Methods a02e622",
        official_klsoap,
        of_name("klsoap", precondition_frequency=EVERY),
        lambda n: n > 1 and (n - 1) % EVERY == 0,
        lambda n: (n - 1) % EVERY == 0,
    ),
    "shampoo": Race(
        "facebookresearch/optimizers f606606",
        official_shampoo,
        of_name("shampoo", precondition_frequency=EVERY),
        lambda n: n % EVERY == 0,
        lambda n: (n - 1) % EVERY == 0,
    ),
    "kron": Race(
        "evanatyourservice/kron_torch 0.3.3",
        official_kron,
        of_name("kron", every=EVERY),
        lambda n: (n - 1) % EVERY == 0,
        lambda n: (n - 1) % EVERY == 0,
    ),
}


def timed(opt: Any) -> float:
    """The seconds of a step."""
    begin = time.perf_counter()
    opt.step()
    return time.perf_counter() - begin


def seconds(opt: Any, renews: Callable[[int], bool], steps: int) -> Iterator[tuple[bool, float]]:
    """Whether each step renews bases, and its seconds, from the second renewal on."""
    for n in range(1, steps + 1):
        took = timed(opt)
        if n > EVERY:
            yield renews(n), took


def race(name: str, checkouts: Path, shapes: Shapes, rounds: int) -> list[str]:
    """A line for steps between renewals, and one for renewals."""
    one, steps = RACES[name], EVERY * (rounds + 1) + 1
    repository, _ = one.source.split()
    ours = one.ours(parameters(shapes, "cpu"))
    with contextlib.redirect_stdout(sys.stderr):  # some authors print their options
        theirs = one.theirs(checkouts / repository, parameters(shapes, "cpu"))
    both = seconds(ours, one.ours_renews, steps), seconds(theirs, one.renews, steps)
    found: dict[bool, tuple[list[float], list[float]]] = {}
    for rows in zip(*both, strict=True):
        for side, (renews, took) in enumerate(rows):
            found.setdefault(renews, ([], []))[side].append(took)
    return [line(name, one.source, *pair) for pair in found.items()]


def line(name: str, source: str, renews: bool, times: tuple[list[float], list[float]]) -> str:
    """The medians, and that of the ratios with its quarters."""
    ours, theirs = times
    ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    what = "a renewal" if renews else "between"
    medians = f"{statistics.median(ours):.3f} | {statistics.median(theirs):.3f}"
    return f"| {name} | {source} | {what} | {medians} | {middle:.2f} ({low:.2f} to {high:.2f}) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="*", choices=RACES, default=list(RACES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=768, help="768 is GPT-2 small's")
    parser.add_argument("--rounds", type=int, default=3, help="renewals")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.layers} layers, {options.threads} threads, torch {torch.__version__}")
    print("| | beside | step | ours, s | theirs, s | ours takes |\n|---|---|---|--:|--:|--:|")
    block = [(a * options.width // 768, b * options.width // 768) for a, b in BLOCK]
    for name in options.only:
        print(
            *race(name, options.checkouts, block * options.layers, options.rounds),
            sep="\n",
            flush=True,
        )


if __name__ == "__main__":
    with watched("benchmarks.studies.bases"):
        main()
