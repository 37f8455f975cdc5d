"""The time of a step, measured next to torch's clipping and fused AdamW."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from torchzero_clip.checking.check_cases import HEADLINE, ModelShapes
from torchzero_clip.checking.device_report import OK, REFERENCE, SLOW, CheckResult, not_run
from torchzero_clip.checking.training_runs import optimizer_for, synchronize

SLOW_RATIO = 2.0
"""A step is slow if it takes more than this multiple of the time of torch's step."""
WARM_UP = 6
"""Steps before the measurement. They create state, compile kernels, and capture a CUDA graph."""
TURN = 0.02
"""The number of seconds for which one optimizer runs, before it is the turn of the next."""
FEWEST_ROUNDS = 3
MOST_ROUNDS = 100
COPY_BYTES = 2**30


@dataclass(frozen=True)
class SpeedModel:
    """A model whose steps are timed."""

    name: str
    shapes: ModelShapes

    @property
    def elements(self) -> int:
        """The number of elements of all parameters."""
        return sum(map(math.prod, self.shapes))


def transformer(layers: int, width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Return the shapes of a language model like GPT-2."""
    layer: list[tuple[int, ...]] = [
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
        *[(width,)] * 5,
    ]
    return [(vocabulary, width), (1024, width), *layer * layers, (width,), (width,)]


ON_GPU = [
    SpeedModel("1000 tensors of 2048", [(2048,)] * 1000),
    SpeedModel("GPT-2, 124M", transformer(12, 768, 50257)),
]
ON_CPU = [
    SpeedModel("100 tensors of 1024", [(1024,)] * 100),
    SpeedModel("small transformer, 2M", transformer(2, 256, 1000)),
]


def speed_checks(
    model: SpeedModel,
    modes: Sequence[str],
    device: torch.device,
    seconds: float,
    dtype: torch.dtype = torch.float32,
) -> Iterator[CheckResult]:
    """Yield the time of a step in torch and in each mode.

    Args:
        model: The model.
        modes: The modes of the headline chain. They run in turn with torch.
        device: The device.
        seconds: How long to measure.
        dtype: The dtype of the parameters.
    """
    check = f"speed: {model.name}"
    if dtype != torch.float32:
        check += f", {str(dtype).removeprefix('torch.')}"
    contestants = ["torch", *modes]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # parameters, gradients, and Adam's two averages in float32, with room for temporary memory
        needed = 2 * len(contestants) * model.elements * (2 * dtype.itemsize + 8)
        if needed > free:
            why = f"needs {needed / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} GiB are free"
            yield not_run(check, "", HEADLINE.name, why)
            return
    times = race(model, contestants, device, seconds, dtype)
    by_torch = times.pop("torch")
    copied = copy_speed(device) if device.type == "cuda" else None
    figure = spoken_time(by_torch)
    yield CheckResult(check, "torch", HEADLINE.name, figure, REFERENCE, by_torch)
    for mode, seconds_of_step in times.items():
        ratio = seconds_of_step / by_torch
        figure = f"{spoken_time(seconds_of_step)}, {ratio:.2f} × torch"
        if copied is not None:
            share = least_bytes(model, dtype) / seconds_of_step / copied
            figure += f", {share:.0%} of copy speed"
        verdict = OK if ratio <= SLOW_RATIO else SLOW
        yield CheckResult(check, mode, HEADLINE.name, figure, verdict, ratio, SLOW_RATIO)


def race(
    model: SpeedModel,
    contestants: Sequence[str],
    device: torch.device,
    seconds: float,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return the median time of a step in seconds, for each contestant.

    The contestants run in turn, so that a change of the clock speed affects all of them.
    """
    steps = {mode: stepper(model, mode, device, dtype) for mode in contestants}
    counts = {}
    for mode, step in steps.items():
        timed(step, WARM_UP, device)
        counts[mode] = max(1, round(TURN / timed(step, 2, device)))
    times: dict[str, list[float]] = {mode: [] for mode in contestants}
    order = list(contestants)
    end = time.monotonic() + seconds
    for done in range(MOST_ROUNDS):
        if done >= FEWEST_ROUNDS and time.monotonic() > end:
            break
        order = [*order[1:], order[0]]
        for mode in order:
            times[mode].append(timed(steps[mode], counts[mode], device))
    return {mode: statistics.median(rounds) for mode, rounds in times.items()}


def stepper(
    model: SpeedModel, mode: str, device: torch.device, dtype: torch.dtype
) -> Callable[[], Any]:
    """Return a function that does a step of the headline chain. Each step clips the gradients."""
    params = []
    for shape in model.shapes:
        p = Parameter(torch.randn(shape, device=device).mul_(0.02).to(dtype))
        p.grad = torch.randn_like(p)
        params.append(p)
    return optimizer_for(HEADLINE, params, mode).step


def timed(step: Callable[[], Any], count: int, device: torch.device) -> float:
    """Return the time of a step in seconds, on average over several steps."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count


def copy_speed(device: torch.device) -> float:
    """Return how many bytes per second a copy inside the memory of a GPU reads and writes."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed(lambda: target.copy_(source), 3, device)
    return 2 * source.numel() / timed(lambda: target.copy_(source), 20, device)


def least_bytes(model: SpeedModel, dtype: torch.dtype) -> int:
    """Return how many bytes a step must read and write at least.

    A step reads the gradients twice, because the norm must be known before the first element can be
    scaled. It reads and writes the parameters and the two averages of Adam.
    """
    return model.elements * (4 * dtype.itemsize + 4 * torch.float32.itemsize)


def spoken_time(seconds: float) -> str:
    """Return a time as text, in microseconds, milliseconds or seconds."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s"
