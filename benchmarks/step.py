"""Time one step of a chain against the fastest spelling of it in torch.

    python -m benchmarks.step [--shapes gpt2 resnet50 tiny one] [--chains …] [--rounds 30]

All contenders run in one process, in turns; a figure is the median of the ratios of neighbours in
time, with the quartiles. The machine should do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    LR,
    AdaGC,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Modular,
    Momentum,
    Normalize,
    Transform,
    WeightDecay,
    ZClip,
    clip_grad_norm_,
    clip_grad_value_,
)

Step = Callable[[], object]


def gpt2() -> list[tuple[int, ...]]:
    """GPT-2 small: 148 tensors, 124 million numbers."""
    block = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)]
    block += [(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
    return [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]


def resnet50() -> list[tuple[int, ...]]:
    """ResNet-50: 161 tensors, 25.6 million numbers."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            out = 4 * width
            shapes += [(width, before, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(out, width, 1, 1), (out,), (out,)]
            shapes += [(out, before, 1, 1), (out,), (out,)] if i == 0 else []
            before = out
    return [*shapes, (1000, 2048), (1000,)]


SHAPES: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "gpt2": gpt2,
    "resnet50": resnet50,
    "tiny": lambda: [(32, 32)] * 1000,
    "one": lambda: [(100_000_000,)],
}


def ours(*transforms: Transform) -> Callable[[list[Parameter]], Step]:
    return lambda params: Modular(params, *transforms).step


def clipped(make: Callable[[list[Parameter]], torch.optim.Optimizer]) -> Callable[..., Step]:
    """torch's clipping, then an optimizer of torch's."""

    def build(params: list[Parameter]) -> Step:
        opt = make(params)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()

        return step

    return build


def adam(**kwargs: bool) -> Callable[[list[Parameter]], torch.optim.Optimizer]:
    return lambda params: torch.optim.Adam(params, lr=1e-3, **kwargs)


def per_tensor(params: list[Parameter]) -> Step:
    """Every tensor clipped by itself, as foreach calls, then fused AdamW."""
    opt = torch.optim.AdamW(params, lr=1e-3, fused=True)

    def step() -> None:
        grads = [p.grad for p in params]
        norms = torch._foreach_norm(grads)
        torch._foreach_mul_(grads, [(1.0 / (n + 1e-6)).clamp(max=1.0) for n in norms])
        opt.step()

    return step


def value_momentum(params: list[Parameter]) -> Step:
    opt = torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_value_(params, 0.01)
        opt.step()

    return step


CHAINS: dict[str, dict[str, Callable[[list[Parameter]], Step]]] = {
    "clip + Adam": {
        "ours": ours(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3)),
        "torch": clipped(adam(fused=True)),
        "torch foreach": clipped(adam(foreach=True)),
    },
    "clip + Adam, loose limit": {
        "ours": ours(ClipNorm(1e9, dim="global"), Adam(), LR(1e-3)),
        "torch": clipped(adam(fused=True)),
    },
    'clip + Adam, target="grad"': {
        "ours": ours(ClipNorm(1.0, dim="global", target="grad"), Adam(), LR(1e-3)),
        "torch": clipped(adam(fused=True)),
    },
    "clip each tensor + AdamW": {
        "ours": ours(ClipNorm(1.0), Adam(), WeightDecay(0.01), LR(1e-3)),
        "torch": per_tensor,
    },
    "ClipValue + Momentum": {
        "ours": ours(ClipValue(0.01), Momentum(0.9), LR(1e-3)),
        "torch": value_momentum,
    },
    "AdaGC + AdamW": {
        "ours": ours(AdaGC(), Adam(), WeightDecay(0.01), LR(1e-3)),
        "torch": per_tensor,
    },
    "ZClip + Adam + growth": {
        "ours": ours(ZClip(), Adam(), ClipNormGrowth(dim="global"), LR(1e-3)),
        "torch": clipped(adam(fused=True)),
    },
    "Normalize": {
        "ours": ours(Normalize(dim="global"), LR(1e-3)),
        "torch": clipped(lambda params: torch.optim.SGD(params, lr=1e-3, fused=True)),
    },
    "clip_grad_norm_": {
        "ours": lambda params: lambda: clip_grad_norm_(params, 1.0, dim="global"),
        "torch": lambda params: lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
    },
    "clip_grad_value_": {
        "ours": lambda params: lambda: clip_grad_value_(params, 0.01),
        "torch": lambda params: lambda: torch.nn.utils.clip_grad_value_(params, 0.01),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step against torch.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["resnet50", "tiny"])
    parser.add_argument("--chains", nargs="+", choices=CHAINS, default=list(CHAINS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the figures as CSV")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads")
    rows = [("shapes", "chain", "against", "ratio", "quartile 1", "quartile 3", "ms")]
    print("{:10} {:28} {:14} {:>6}  {:>13} {:>8}".format(*rows[0][:4], "quartiles", "ms, ours"))
    for shapes in args.shapes:
        for chain in args.chains:
            times = race(SHAPES[shapes](), CHAINS[chain], args.rounds, args.device)
            for name in [name for name in times if name != "ours"]:
                ratios = [a / b for a, b in zip(times["ours"], times[name], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                ms = 1000 * statistics.median(times["ours"])
                rows.append((shapes, chain, name, middle, low, high, ms))
                spread = f"{low:.2f}–{high:.2f}"
                print(f"{shapes:10} {chain:28} {name:14} {middle:6.2f}  {spread:>13} {ms:8.2f}")
                sys.stdout.flush()
    if args.out:
        with args.out.open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def race(
    shapes: list[tuple[int, ...]],
    contenders: dict[str, Callable[[list[Parameter]], Step]],
    rounds: int,
    device: str,
) -> dict[str, list[float]]:
    """The times of each contender, in turns."""
    steps: dict[str, tuple[list[Parameter], Step]] = {}
    for name, build in contenders.items():
        torch.manual_seed(0)
        params = [Parameter(0.02 * torch.randn(s, device=device)) for s in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        steps[name] = params, build(params)
    grads = {name: [p.grad for p in params] for name, (params, _) in steps.items()}
    fresh = [torch.randn_like(p) for p in next(iter(steps.values()))[0]]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 3):
        for name, (_, step) in steps.items():
            refill(grads[name], fresh)
            elapsed = timed(step, device)
            if i >= 3:  # the first rounds make state
                times[name].append(elapsed)
    return times


def refill(grads: list[Tensor | None], fresh: list[Tensor]) -> None:
    """The same gradients for every step, whoever has clipped them."""
    torch._foreach_copy_([g for g in grads if g is not None], fresh)


def timed(step: Step, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    step()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1000


if __name__ == "__main__":
    main()
