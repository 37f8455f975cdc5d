"""What `state_dtype="bfloat16"` does to training: the demo's language model, and a regression.

python -m benchmarks.studies.state_dtype --task language_model [--steps 200] [--seeds 3]
python -m benchmarks.studies.state_dtype --task regression
python -m benchmarks.studies.state_dtype --time

Both tasks train with clip + Adam, with state in float32, in bfloat16, and with the 8-bit state of
torchao if it is installed. A seed has the same weights and batches in each of them. With --time
steps of 34 million parameters alternate, with state in bfloat16 and in float32: the ratio of their
times.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.circumstances import watched
from torchzero_clip import LR, Adam, ClipNorm, Lion, Modular, Momentum, Transform

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from race.data import Data
from race.model import LanguageModel

RATE, CLIP = 2e-3, 1.0
Task = tuple[nn.Module, Callable[[], Tensor], Callable[[], float]]
"""A model, the loss of its next batch, and its loss on what it has not seen."""
Step = Callable[[], Any]
Clock = Callable[[], float]
BUSY = "CPU time of one thread, for a busy machine"


class Optimizer:
    """Clip + Adam with state of some kind."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self.params = list(model.parameters())
        if kind == "torchao, 8 bits":
            from torchao.optim import AdamW8bit

            self.opt: Any = AdamW8bit(self.params, lr=RATE, weight_decay=0.0)
            self.clip = True
        else:
            chain = ClipNorm(CLIP, dim="global"), Adam(), LR(RATE)
            self.opt = Modular(self.params, *chain, state_dtype=kind)
            self.clip = False

    def step(self, loss: Tensor) -> None:
        self.opt.zero_grad()
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.params, CLIP)
        self.opt.step()

    @property
    def bytes(self) -> float:
        """The bytes of state that a parameter takes, on average."""
        held = [x for state in self.opt.state.values() for x in state.values()]
        return sum(map(size, held)) / sum([p.numel() for p in self.params])


def size(x: Any) -> int:
    """The bytes of a tensor; torchao's are made of several."""
    if not isinstance(x, Tensor):
        return 0
    parts = getattr(x, "tensor_attrs", ())
    return sum([size(getattr(x, name)) for name in parts]) if parts else x.nbytes


def language_model(seed: int) -> Task:
    """The model of the demo, on its text, without the corrupted batches."""
    data = Data(torch.device("cpu"), seed)
    torch.manual_seed(seed)
    model = LanguageModel(len(data.letters))
    return model, lambda: model.loss(data.batch(0).windows), lambda: model.loss(data.test).item()


def regression(seed: int) -> Task:
    """A smooth function of eight numbers, with noise in what is seen of it."""
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)]
    model, generator = nn.Sequential(*layers), torch.Generator().manual_seed(seed)

    def batch(count: int, generator: torch.Generator, noise: float) -> Tensor:
        x = torch.rand(count, 8, generator=generator) * 2 - 1
        y = torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:4].square().sum(1, keepdim=True)
        y += noise * torch.randn(count, 1, generator=generator)
        return nn.functional.mse_loss(model(x), y)

    test = torch.Generator().manual_seed(1)
    start = test.get_state()
    return (
        model,
        lambda: batch(64, generator, 0.1),
        lambda: batch(2000, test.set_state(start), 0.0).item(),
    )


def train(
    task: Callable[[int], Task], kind: str, seed: int, marks: Sequence[int]
) -> tuple[list[float], Tensor, float]:
    """The losses at some steps, the weights at the end, and the bytes of state a parameter."""
    model, loss, test = task(seed)
    opt, losses = Optimizer(kind, model), []
    for step in range(1, max(marks) + 1):
        opt.step(loss())
        if step in marks:
            with torch.no_grad():
                losses.append(test())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, weights, opt.bytes


def kinds() -> list[str]:
    """The kinds of state that can be had here."""
    extra = ["torchao, 8 bits"] if importlib.util.find_spec("torchao") else []
    return ["float32", "bfloat16", *extra]


TASKS: dict[str, Callable[[int], Task]] = {
    "language_model": language_model,
    "regression": regression,
}


def table(task: Callable[[int], Task], steps: int, seeds: int) -> Iterator[str]:
    """A row for each kind of state: losses on the way, mean and range of the seeds.

    The last row is training with another seed. It only has the distance of the weights.
    """
    marks = [steps // 8, steps // 4, steps // 2, steps]
    heads = " | ".join([f"loss after {mark}" for mark in marks])
    yield f"| state | bytes per parameter | {heads} | distance of the weights from float32 |"
    yield "|---|" + "---|" * (len(marks) + 2)
    first: list[Tensor] = []
    for kind in kinds():
        runs = [train(task, kind, seed, marks) for seed in range(seeds)]
        first = first or [weights for _, weights, _ in runs]
        columns = zip(*[losses for losses, _, _ in runs], strict=True)
        cells = [f"{statistics.mean(c):.4f} ({min(c):.4f} to {max(c):.4f})" for c in columns]
        pairs = zip(runs, first, strict=True)
        apart = statistics.mean([float((w - f).norm() / f.norm()) for (_, w, _), f in pairs])
        away = f"{apart:.1%}" if kind != "float32" else ""
        yield f"| {kind} | {runs[0][2]:.2f} | {' | '.join(cells)} | {away} |"
    others = [
        float((a - b).norm() / a.norm()) for a, b in zip(first, first[1:] + first[:1], strict=True)
    ]
    yield f"| float32, another seed |{'  |' * (len(marks) + 1)} {statistics.mean(others):.0%} |"


CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "ClipNorm, Adam": lambda: [ClipNorm(CLIP, dim="global"), Adam(), LR(RATE)],
    "ClipNorm, Momentum": lambda: [ClipNorm(CLIP, dim="global"), Momentum(), LR(RATE)],
    "Lion": lambda: [Lion(), LR(RATE)],
}


def optimizer(
    chain: str, *before: Transform, after: Sequence[Transform] = (), **options: Any
) -> Modular:
    """The optimizer of a model of 34 million parameters, four layers as wide as GPT-2's."""
    d, generator = 768, torch.Generator().manual_seed(0)
    layer = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d), (3 * d,), (4 * d,), (d,), (d,)]
    params = [
        nn.Parameter(torch.randn(shape, generator=generator) / 50)
        for shape in [(8000, d), *layer * 4]
    ]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return Modular(params, *before, *CHAINS[chain](), *after, **options)


def times(chain: str, rounds: int, clock: Clock, **options: Any) -> str:
    """The ratio of the time of a step to that with state in float32."""
    opts = [optimizer(chain, state_dtype=d, **options) for d in ("bfloat16", "float32")]
    return ratio(opts[0].step, opts[1].step, rounds, clock)


def ratio(one: Step, other: Step, rounds: int, clock: Clock = time.perf_counter) -> str:
    """The time of a step over that of another, which it alternates with: median and quartiles."""
    steps = one, other
    for step in steps * 3:
        step()
    ratios = []
    for i in range(rounds):
        taken = {}
        for which in (0, 1) if i % 2 else (1, 0):
            begin = clock()
            steps[which]()
            taken[which] = clock() - begin
        ratios.append(taken[0] / taken[1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def clock_of(cpu: bool) -> Clock:
    """The clock on the wall, or the CPU time of this process, which has one thread then."""
    if cpu:
        torch.set_num_threads(1)
    return time.process_time if cpu else time.perf_counter


def print_times(chains: Sequence[str], rounds: int, clock: Clock) -> None:
    print("| | `compile=True` | eager |\n|---|---|---|")
    for chain in chains:
        compiled = times(chain, rounds, clock, compile=True)
        eager = times(chain, rounds // 3, clock)
        print(f"| {chain} | {compiled} | {eager} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument("--task", choices=TASKS, help="prints the losses of this task")
    measured.add_argument("--time", action="store_true", help="prints the times of steps")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30, help="of steps that are timed")
    parser.add_argument("--chain", choices=CHAINS, nargs="+", default=list(CHAINS))
    parser.add_argument("--cpu", action="store_true", help=BUSY)
    args = parser.parse_args()
    with watched("benchmarks.studies.state_dtype", counts=not args.time):
        if args.time:
            print_times(args.chain, args.rounds, clock_of(args.cpu))
            return
        for line in table(TASKS[args.task], args.steps, args.seeds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
