"""The function `check_device`: run all checks on a device, until the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TypeAlias

import torch
from torch.nn import Parameter

from torchzero_clip import __version__
from torchzero_clip.checking.chain_checks import (
    Yardstick,
    chain_checks,
    simulated_checks,
)
from torchzero_clip.checking.check_cases import (
    CASES,
    DTYPE_CASES,
    HEADLINE,
    MANY_TENSORS,
    MORE_CASES,
    CheckCase,
    published_cases,
)
from torchzero_clip.checking.device_report import (
    CheckResult,
    DeviceReport,
    machine,
    not_run,
    raised,
)
from torchzero_clip.checking.gpu_checks import (
    MANY_ELEMENTS_BYTES,
    many_elements_check,
    own_graph_check,
    pinned_memory_check,
)
from torchzero_clip.checking.speed_checks import ON_CPU, ON_GPU, speed_checks
from torchzero_clip.checking.training_runs import RunSetting, optimizer_for, synchronize

MODES = ("default", "compiled", "captured")
CHAINS_SHARE = 0.6
"""The share of the time after which no further chain is checked, so that other checks can run."""
OTHERS_SHARE = 0.8
"""The share of the time after which only the speed is measured."""
SPEED_SECONDS = 5.0
"""The longest time for the speed of one model, without compilation."""
LATE_STEPS = 24
"""Steps of a run in which the host is ahead of the GPU."""
NO_TIME = "no time was left: allow more with --minutes"
NEEDS_GPU = "needs a CUDA GPU"
ShowProgress: TypeAlias = "Callable[[str], None]"
"""A function that shows the name of the next check."""
Checks: TypeAlias = "Callable[[], Iterable[CheckResult]]"
"""A function that runs some checks and returns their results."""


def check_device(
    device: str | torch.device | None = None,
    *,
    minutes: float = 2.0,
    everything: bool = False,
    progress: ShowProgress | None = None,
) -> DeviceReport:
    """Check the numbers, synchronizations, CUDA graphs and speed of this library on a device.

    The checks compare a few steps of each chain with the same steps in float64 on the CPU. On a
    GPU, they also count the lines that synchronize, replay steps as CUDA graphs, and run steps
    while the host is ahead of the GPU. On a CPU, they count synchronizations on a simulated GPU.

    Args:
        device: The device, such as "cuda:1". By default, the current GPU, or the CPU if torch finds
            no GPU.
        minutes: The time for all checks. Checks that do not fit are reported as not run.
        everything: Whether to check all published methods and very large tensors, too.
        progress: A function that receives the name of each check before it runs.
    """
    chosen = chosen_device(device)
    plan = CheckPlan(chosen, 60 * minutes, everything, progress)
    with torch.cuda.device(chosen) if plan.is_gpu else nullcontext():
        results = list(plan.results())
    return DeviceReport(machine(chosen, __version__), results, plan.spent(), plan.is_gpu)


def chosen_device(device: str | torch.device | None) -> torch.device:
    """Return the device to check, or raise ValueError if it cannot be checked."""
    has_gpu = torch.cuda.is_available()
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a name such as cuda:0, got {device!r}") from error
    if chosen.type == "cpu":
        return chosen
    if chosen.type != "cuda":
        raise ValueError(f"device must be a CUDA GPU or the CPU, got {chosen}")
    if not has_gpu:
        raise ValueError(f"torch finds no CUDA GPU for --device {chosen}: pass --device cpu")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device {chosen} does not exist, because this machine has {count} GPUs")
    return torch.device("cuda", index)


class CheckPlan:
    """All checks of one call of `check_device`, in their order.

    Args:
        device: The device.
        seconds: The time for all checks.
        everything: As for `check_device`.
        progress: As for `check_device`.
    """

    def __init__(
        self,
        device: torch.device,
        seconds: float,
        everything: bool = False,
        progress: ShowProgress | None = None,
    ) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self._everything = everything
        self._progress = progress
        self._seconds = seconds
        self._share = 1.0  # of the time, after which no check starts
        self._start = time.monotonic()
        self._modes: list[str] = []  # the modes that work on the device

    def spent(self) -> float:
        """Return the time since the start of the plan, in seconds."""
        return time.monotonic() - self._start

    def results(self) -> Iterator[CheckResult]:
        """Yield the results of all checks. The most important checks come first."""
        try:
            yield from self._all()
        except Exception as error:  # a GPU that has failed raises an error in every later call
            yield raised("device", "", "", error)

    def _all(self) -> Iterator[CheckResult]:
        for mode in MODES:
            if why := self._why_not(mode):
                yield not_run("all checks", mode, "", why)
            else:
                self._modes.append(mode)
        self._share = CHAINS_SHARE
        for case in CASES:
            yield from self._chain(case)
        self._share = OTHERS_SHARE
        yield from self._dtypes()
        yield from self._memory()
        if self.is_gpu:
            yield from self._on_gpu()
        self._share = 1.0
        yield from self._speed()
        if self._everything:
            yield from self._more()

    def _why_not(self, mode: str) -> str:
        """Return why steps of a mode cannot run on the device, or "" if they can."""
        if mode == "captured" and not self.is_gpu:
            return NEEDS_GPU
        try:
            optimizer_for(HEADLINE, [Parameter(torch.zeros(2, device=self.device))], mode)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    def _attempt(
        self, check: str, mode: str, case: CheckCase, checks: Checks
    ) -> Iterator[CheckResult]:
        """Yield the results of some checks. An error becomes a failed result.

        If no time is left, the checks do not run.
        """
        if self.spent() >= self._share * self._seconds:
            yield not_run(check, mode, case.name, NO_TIME)
            return
        if self._progress is not None:
            self._progress(", ".join([part for part in (check, mode, case.name) if part]))
        try:
            yield from checks()
        except Exception as error:
            if case.is_optional and str(error).startswith("captured"):
                yield not_run(check, mode, case.name, str(error))
            else:
                yield raised(check, mode, case.name, error)
            synchronize(self.device)  # raises an error if the GPU has failed

    def _chain(self, case: CheckCase) -> Iterator[CheckResult]:
        """Yield the checks of a chain in each mode."""
        yardstick = Yardstick(case)
        modes = ["torch", *self._modes] if case is HEADLINE else self._modes
        for mode in modes:
            checks = partial(chain_checks, yardstick, mode, self.device)
            yield from self._attempt("numbers", mode, case, checks)
        if not self.is_gpu:
            simulated = partial(simulated_checks, case)
            yield from self._attempt("synchronizations", "simulated GPU", case, simulated)

    def _dtypes(self) -> Iterator[CheckResult]:
        """Yield the checks of parameters in other dtypes."""
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            check = f"numbers, {str(dtype).removeprefix('torch.')}"
            for case in DTYPE_CASES:
                yardstick = Yardstick(case, dtype)
                for mode in self._modes:
                    setting = RunSetting(mode, self.device, dtype)
                    yield from self._compare(check, yardstick, setting)

    def _compare(
        self, check: str, yardstick: Yardstick, setting: RunSetting
    ) -> Iterator[CheckResult]:
        """Yield the distance of one run from a yardstick."""

        def checks() -> Iterator[CheckResult]:
            yield yardstick.compare(check, setting)[0]

        return self._attempt(check, setting.mode, yardstick.case, checks)

    def _memory(self) -> Iterator[CheckResult]:
        """Yield the checks of tensors at unusual addresses."""
        yardstick = Yardstick(HEADLINE)
        for mode in self._modes:
            unaligned = RunSetting(mode, self.device, offset=1)
            yield from self._compare("unaligned addresses", yardstick, unaligned)
        for mode in self._modes:
            if mode != "captured":  # a CUDA graph needs gradients that keep their memory
                moving = RunSetting(mode, self.device, new_gradients=True)
                yield from self._compare("new gradients in each step", yardstick, moving)

    def _on_gpu(self) -> Iterator[CheckResult]:
        """Yield the checks that need a GPU, other than the checks of chains."""
        late = Yardstick(MANY_TENSORS, steps=LATE_STEPS)
        for mode in self._modes:
            setting = RunSetting(mode, self.device, steps=LATE_STEPS, is_late=True)
            yield from self._compare("host ahead of the GPU", late, setting)
        yardstick = Yardstick(HEADLINE)
        for mode in self._modes:
            if mode != "captured":
                setting = RunSetting(mode, self.device, is_late=True, streams=2)
                yield from self._compare("two CUDA streams in turn", yardstick, setting)
                checks = partial(own_graph_check, mode, self.device)
                yield from self._attempt("your own CUDA graph", mode, HEADLINE, checks)
            else:
                checks = partial(pinned_memory_check, yardstick, self.device)
                check = "capture while a thread pins memory"
                yield from self._attempt(check, mode, HEADLINE, checks)
        if torch.cuda.device_count() > 1:
            with torch.cuda.device(self._other_gpu()):
                for mode in self._modes:
                    setting = RunSetting(mode, self.device)
                    yield from self._compare("another GPU is current", yardstick, setting)
        else:
            yield not_run("another GPU is current", "", "", "needs two GPUs")

    def _other_gpu(self) -> int:
        """Return the index of a GPU that is not the device of the checks."""
        return 1 if self.device.index == 0 else 0

    def _speed(self) -> Iterator[CheckResult]:
        """Yield the time of steps of each model."""
        models = ON_GPU if self.is_gpu else ON_CPU
        dtypes = [torch.float32]
        if self._everything:
            dtypes.append(torch.bfloat16)
        for i, model in enumerate(models):
            for dtype in dtypes:
                left = (self._seconds - self.spent()) / (len(models) - i)
                seconds = min(SPEED_SECONDS, left / 2)
                checks = partial(speed_checks, model, self._modes, self.device, seconds, dtype)
                yield from self._attempt(f"speed: {model.name}", "", HEADLINE, checks)

    def _more(self) -> Iterator[CheckResult]:
        """Yield the checks that run only with `everything`."""
        for case in [*MORE_CASES, *published_cases()]:
            yield from self._chain(case)
        check = "more than 2^31 elements"
        free = torch.cuda.mem_get_info(self.device)[0] if self.is_gpu else 0
        if free < MANY_ELEMENTS_BYTES:
            why = f"needs a GPU with {MANY_ELEMENTS_BYTES >> 30} GiB of free memory"
            yield not_run(check, "", HEADLINE.name, why)
            return
        for mode in self._modes:
            if mode != "captured":
                checks = partial(many_elements_check, mode, self.device)
                yield from self._attempt(check, mode, HEADLINE, checks)
