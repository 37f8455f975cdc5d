"""Checks of a chain: its numbers, synchronizations, kernels and CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchzero_clip.audit.step_audit import trial
from torchzero_clip.checking.check_cases import HEADLINE, CheckCase
from torchzero_clip.checking.device_report import REFERENCE, CheckResult, measured
from torchzero_clip.checking.training_runs import (
    STEPS,
    WATCHED_STEPS,
    RunResult,
    RunSetting,
    optimizer_for,
    report_loss,
    train,
)
from torchzero_clip.core.plurals import counted

CPU = torch.device("cpu")
LARGEST = 1e-3
"""The largest distance that is ever allowed in float32 and float64."""
LARGEST_INEXACT = 0.1
"""The same for bfloat16, float16 and published methods. Some methods amplify rounding errors."""


@dataclass(eq=False)
class Yardstick:
    """The weights of a run in float64 on the CPU, with which other runs are compared.

    torch computes the weights of the headline chain. For other chains, each link computes its own
    formula.

    Attributes:
        case: The chain.
        dtype: The dtype of the runs that are compared.
        steps: The number of steps.
    """

    case: CheckCase
    dtype: torch.dtype = torch.float32
    steps: int = STEPS

    @cached_property
    def weights(self) -> list[Tensor]:
        """The weights in float64."""
        mode = "torch" if self.case.name == HEADLINE.name else "plain"
        setting = RunSetting(mode, CPU, torch.float64, self.dtype, self.steps)
        return train(self.case, setting).weights

    @cached_property
    def limit(self) -> float:
        """The largest allowed distance, which is larger if float32 on the CPU is less accurate."""
        setting = RunSetting("plain", CPU, self.dtype, self.dtype, self.steps)
        on_cpu = distance(train(self.case, setting).weights, self.weights)
        is_inexact = is_half(self.dtype) or self.case.is_optional
        return min(allowed(on_cpu, self.dtype), LARGEST_INEXACT if is_inexact else LARGEST)

    def compare(self, check: str, setting: RunSetting) -> tuple[CheckResult, RunResult]:
        """Train with a setting, and compare the weights."""
        run = train(self.case, setting)
        error = distance(run.weights, self.weights)
        figure = f"{error:.1e} relative error"
        if setting.mode == "torch":
            result = CheckResult(check, "torch", self.case.name, figure, REFERENCE, error)
        else:
            result = measured(check, setting.mode, self.case.name, error, self.limit, figure)
        return result, run


def distance(weights: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest weight of the tensor.

    If a weight is not finite, the distance is infinite.
    """
    largest = 0.0
    for found, right in zip(weights, expected, strict=True):
        if not found.isfinite().all():
            return math.inf
        difference = float((found - right).abs().max())
        largest = max(largest, difference / (float(right.abs().max()) + 1e-12))
    return largest


def is_half(dtype: torch.dtype) -> bool:
    """Return whether a dtype is bfloat16 or float16."""
    return dtype.itemsize < torch.float32.itemsize


def allowed(on_cpu: float, dtype: torch.dtype) -> float:
    """Return the largest allowed distance from float64.

    Args:
        on_cpu: The distance of a run on the CPU with the same dtype.
        dtype: The dtype of the parameters.
    """
    eps = torch.finfo(dtype).eps
    if is_half(dtype):  # the rounding of weights dominates, and is the same on every device
        return 4 * max(on_cpu, eps)
    return max(30 * on_cpu, 300 * eps)


def chain_checks(yardstick: Yardstick, mode: str, device: torch.device) -> Iterator[CheckResult]:
    """Train a chain in a mode, and yield the results about the run."""
    is_gpu = device.type == "cuda"
    name = yardstick.case.name
    setting = RunSetting(mode, device, is_watched=is_gpu)
    result, run = yardstick.compare("numbers", setting)
    yield result
    if mode == "torch":
        return
    if is_gpu:
        yield synchronization_result(mode, name, run.synchronizing)
    if mode != "default":
        count = len(run.warnings)
        why = "; ".join(run.warnings)
        yield measured("warnings about kernels", mode, name, count, 0, str(count), why)
    if mode == "captured":
        without = WATCHED_STEPS - run.graphs
        figure = f"{without} of {WATCHED_STEPS} steps without a graph"
        yield measured("CUDA graph", mode, name, without, 0, figure)


def synchronization_result(mode: str, case: str, lines: Sequence[str]) -> CheckResult:
    """Return the result for the lines of a step that synchronize with the GPU."""
    figure = counted(len(lines), "line")
    return measured("synchronizations", mode, case, len(lines), 0, figure, ", ".join(lines))


def simulated_checks(case: CheckCase) -> Iterator[CheckResult]:
    """Yield the synchronizations of a step in the default engine, on a simulated GPU."""

    def make(params: Sequence[Tensor]) -> Callable[[], None]:
        opt = optimizer_for(case, params, "default")

        def step() -> None:
            report_loss(case, opt, 0)
            opt.step()

        return step

    report = trial(make, [torch.empty(shape) for shape in case.shapes])
    lines = [str(finding) for finding in report.waits]
    if report.ended:
        lines.append(report.ended)
    yield synchronization_result("simulated GPU", case.name, lines)
