"""Muon: the time of a step beside other implementations, and what each rank computes and sends.

    python -m benchmarks.studies.muon time --set gpt2 # GPT-2 small's 48 matrices
    python -m benchmarks.studies.muon time --set equal  # 74 matrices of 256 x 256
    python -m benchmarks.studies.muon time --set block  # the four matrices of one block of GPT-2
    python -m benchmarks.studies.muon batches --set equal  # one call for a shape beside parts of it
    python -m benchmarks.studies.muon ranks --ranks 4  # GPT-2 small's matrices under FSDP2

On CPU torch.optim.Muon iterates in bfloat16, which takes minutes where processors have no
instructions for it; "in float32" is the same optimizer with its iteration in single precision, and
the one to compare with. Contestants take turns, and the first step of each does not count.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.circumstances import watched
from benchmarks.step.bars import quartiles
from torchzero_clip import EMA, LR, Modular, Orthogonalize, WeightDecay
from torchzero_clip.modules.matrices import batches

Shapes = list[tuple[int, int]]
Step = Callable[[], Any]
Make = Callable[[list[Parameter]], Step]
Clock = Callable[[], float]

BLOCK: Shapes = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
SETS: dict[str, Shapes] = {
    "gpt2": BLOCK * 12,
    "equal": [(256, 256)] * 74,
    "block": BLOCK,
    "quick": [(8, 8)] * 3 + [(4, 12)],
}
LR_, DECAY = 0.02, 0.1
OURS = "ours"


def parameters(shapes: Shapes, device: str) -> list[Parameter]:
    """Matrices with gradients, the same at every call."""
    torch.manual_seed(0)
    params = [Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def ours(params: Any, **options: Any) -> Modular:
    """Muon as torch.optim's, whose momentum is an average."""
    muon = EMA(0.95, nesterov=True), Orthogonalize(scale="original")
    return Modular(params, *muon, WeightDecay(DECAY), LR(LR_), **options)


def torch_muon(params: list[Parameter]) -> Step:
    step: Step = torch.optim.Muon(params, lr=LR_, weight_decay=DECAY).step
    return step


def pytorch_optimizer_muon(params: list[Parameter]) -> Step:
    module = importlib.import_module("pytorch_optimizer")
    groups = [{"params": params, "use_muon": True, "weight_decay": DECAY}]
    step: Step = module.Muon(groups, lr=LR_).step
    return step


def heavyball_muon(params: list[Parameter]) -> Step:
    """heavyball's, which drops gradients: each step has them again."""
    module = importlib.import_module("heavyball")
    opt, grads = module.Muon(params, lr=LR_, weight_decay=DECAY), [p.grad for p in params]

    def step() -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        opt.step()

    return step


def heavyball_eager(params: list[Parameter]) -> Step:
    """heavyball without its torch.compile."""
    utils = importlib.import_module("heavyball.utils")
    return swapped(utils, "compile_mode", None, heavyball_muon(params))


def compiled(make: Make) -> Make:
    return lambda params: torch.compile(make(params))


def swapped(module: Any, name: str, value: Any, step: Step) -> Step:
    """A step during which a module has another value under a name."""

    def run() -> None:
        known = getattr(module, name)
        setattr(module, name, value)
        try:
            step()
        finally:
            setattr(module, name, known)

    return run


def in_float32(make: Make, place: str, name: str, narrow: str, single: str) -> Make:
    """With the iteration in single precision: a word of the source of a function is another."""

    def build(params: list[Parameter]) -> Step:
        module = importlib.import_module(place)
        function = inspect.unwrap(getattr(module, name))
        space = dict(function.__globals__)
        exec(inspect.getsource(function).replace(narrow, single), space)
        return swapped(module, name, space[name], make(params))

    return build


TORCH = "torch.optim._muon", "_zeropower_via_newtonschulz", "bfloat16()", "clone()"
PYTORCH_OPTIMIZER = (
    "pytorch_optimizer.optimizer.muon.base",
    "zero_power_via_newton_schulz_5",
    "torch.bfloat16",
    "torch.float32",
)
HEAVYBALL = "heavyball.utils", "zeropower_via_newtonschulz5", "stochastic_round_(G)", "G.clone()"
CONTESTANTS: dict[str, Make] = {
    OURS: lambda params: ours(params).step,
    "ours, compile=True": lambda params: ours(params, compile=True).step,
    "torch.optim.Muon in float32": in_float32(torch_muon, *TORCH),
    "torch.optim.Muon in float32, compiled": in_float32(compiled(torch_muon), *TORCH),
    "pytorch_optimizer Muon in float32": in_float32(pytorch_optimizer_muon, *PYTORCH_OPTIMIZER),
    "heavyball Muon in float32": in_float32(heavyball_eager, *HEAVYBALL),
    "heavyball Muon in float32, compiled": in_float32(heavyball_muon, *HEAVYBALL),
    "torch.optim.Muon": torch_muon,
    "pytorch_optimizer Muon": pytorch_optimizer_muon,
    "heavyball Muon": heavyball_eager,
}
PEERS = "pytorch_optimizer", "heavyball"


def installed(name: str) -> bool:
    package = name.split(maxsplit=1)[0]
    return package not in PEERS or importlib.util.find_spec(package) is not None


def race(
    steps: dict[str, Step], rounds: int, device: str, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """The seconds of each step, by contestant."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            _wait(device)
            start = clock()
            step()
            _wait(device)
            if turn:
                times[name].append(clock() - start)
    return times


def contestants(shapes: Shapes, names: list[str], device: str) -> dict[str, Step]:
    return {name: CONTESTANTS[name](parameters(shapes, device)) for name in names}


def in_parts(shapes: Shapes, device: str) -> dict[str, Step]:
    """Ours, with batches as they are and with others of at most so many entries."""
    most = batches.MOST_ON_CPU
    sizes = {f"at most {n} entries": n for n in (most // 8, most, 8 * most)}
    found = {OURS: most, **sizes, "one call for a shape": batches.BATCH_ELEMENTS}
    make = CONTESTANTS[OURS]
    return {
        name: swapped(batches, "MOST_ON_CPU", n, make(parameters(shapes, device)))
        for name, n in found.items()
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def report(times: dict[str, list[float]]) -> list[str]:
    """Return a row for each contestant: its median, and ours over it, turn by turn."""
    lines = ["| | seconds a step | ours takes |", "|---|--:|--:|"]
    for name, own in times.items():
        ratios = [a / b for a, b in zip(times[OURS], own, strict=True)]
        lines.append(f"| {name} | {statistics.median(own):.4g} | {quartiles(ratios)} |")
    return lines


# ---------------------------------------------------------------------- ranks


def count(shapes: Shapes, gather: bool) -> dict[str, float]:
    """What this rank computes, calls and sends in a step with sharded matrices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    whole = parameters(shapes, "cpu")
    params = [Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole]
    for p, source in zip(params, whole, strict=True):
        p.grad = distribute_tensor(source.grad, mesh, [Shard(0)])
    found = {"calls": 0, "bytes": 0.0}
    exchange, reduce = dist.all_to_all_single, dist.all_reduce

    def exchanged(out: Tensor, data: Tensor, come: Any, sent: list[int], group: Any) -> Any:
        found["calls"] += 1
        away = data.numel() - sent[dist.get_rank(group)]
        found["bytes"] += away * data.element_size()
        return exchange(out, data, come, sent, group=group)

    def reduced(data: Tensor, group: Any = None) -> Any:
        found["calls"] += 1  # in a ring each rank sends all but its own part, twice
        found["bytes"] += 2 * (ranks - 1) / ranks * data.numel() * data.element_size()
        return reduce(data, group=group)

    opt = ours(params)
    if gather:
        opt.chain[1].__class__.operations = lambda self, rows, columns: 0.0  # type: ignore[method-assign]
    dist.all_to_all_single, dist.all_reduce = exchanged, reduced
    with FlopCounterMode(display=False) as counter:
        opt.step()
    dist.all_to_all_single, dist.all_reduce = exchange, reduce
    return {**found, "operations": float(counter.get_total_flops())}


def _rank(rank: int, ranks: int, port: int, shapes: Shapes, gather: bool, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.save(count(shapes, gather), Path(folder) / str(rank))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


def on_ranks(ranks: int, shapes: Shapes, gather: bool) -> list[dict[str, float]]:
    """The counts of every rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, port, shapes, gather, folder)
        torch.multiprocessing.spawn(_rank, args, nprocs=ranks)
        return [torch.load(Path(folder) / str(rank)) for rank in range(ranks)]


def ranks_report(ranks: int, shapes: Shapes) -> list[str]:
    """Owners beside gathering, the rank with the most of each."""
    with FlopCounterMode(display=False) as counter:
        ours(parameters(shapes, "cpu")).step()
    whole = counter.get_total_flops()
    lines = ["| | operations a rank | of the whole | megabytes sent a rank | collectives |"]
    lines.append("|---|--:|--:|--:|--:|")
    for name, gather in (("owners", False), ("gathered by every rank", True)):
        found = on_ranks(ranks, shapes, gather)
        most = {key: max(row[key] for row in found) for key in found[0]}
        lines.append(
            f"| {name} | {most['operations'] / 1e9:.4g}e9 | {most['operations'] / whole:.3f} | "
            f"{most['bytes'] / 1e6:.4g} | {most['calls']:.0f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["time", "batches", "ranks"])
    parser.add_argument("--set", default="gpt2", choices=SETS)
    parser.add_argument("--only", nargs="*", help="contestants beside ours", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of one thread, for a busy machine"
    )
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    shapes = SETS[options.set]
    if options.what == "ranks":
        print(*ranks_report(options.ranks, shapes), sep="\n")
        return
    if options.cpu:
        torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.what == "batches":
        steps = in_parts(shapes, device)
    else:
        only = options.only or CONTESTANTS
        names = [name for name in CONTESTANTS if name == OURS or (name in only and installed(name))]
        steps = contestants(shapes, names, device)
    clock = time.process_time if options.cpu else time.perf_counter
    print(
        f"{options.set} on {device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(*report(race(steps, options.rounds, device, clock)), sep="\n")


if __name__ == "__main__":
    with watched("benchmarks.studies.muon"):
        main()
