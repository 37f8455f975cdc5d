"""The report of `check_device`: a table for an issue, or plain data."""

from __future__ import annotations

import math
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

OK = "ok"
FAILED = "FAILED"
SLOW = "slow"
NOT_RUN = "not run"
REFERENCE = "to compare"
TRITON_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")
"""The names under which Triton is distributed."""
LINES_SHOWN = 20
"""The largest number of failures that the text of a report lists."""
NO_GPU = (
    "**No GPU was found.** The checks ran on the CPU with small models. They prove nothing about "
    "CUDA."
)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        check: The property that was checked, such as "numbers".
        mode: How the step ran: "default", "compiled", "captured", "torch" or "simulated GPU".
        case: The chain or the model.
        figure: The measured value with its unit.
        verdict: "ok", "FAILED", "slow", "not run", or "to compare" if torch was measured.
        value: The measured value. None if nothing was measured.
        limit: The largest allowed value. None if there is no limit.
        why: The reason if the verdict is "FAILED" or "not run". Otherwise "".
    """

    check: str
    mode: str
    case: str
    figure: str
    verdict: str
    value: float | None = None
    limit: float | None = None
    why: str = ""

    @property
    def severity(self) -> tuple[bool, float]:
        """A sort key: failures come last, other results are sorted by their share of the limit."""
        value = 0.0 if self.value is None else self.value
        return self.verdict == FAILED, value / self.limit if self.limit else value

    def __str__(self) -> str:
        name = ", ".join([part for part in (self.check, self.mode, self.case) if part])
        return f"{name}: {self.why or self.figure}"


def measured(
    check: str, mode: str, case: str, value: float, limit: float, figure: str, why: str = ""
) -> CheckResult:
    """Return a result that is "ok" if a value is within its limit, and "FAILED" otherwise.

    A value that is NaN is not within the limit.
    """
    finite = value if math.isfinite(value) else None  # JSON has no number for infinity
    if value <= limit:
        return CheckResult(check, mode, case, figure, OK, finite, limit)
    why = why or f"{figure}, allowed {limit:.2g}"
    return CheckResult(check, mode, case, figure, FAILED, finite, limit, why)


def raised(check: str, mode: str, case: str, error: Exception) -> CheckResult:
    """Return the result of a check that raised an error."""
    text = " ".join(str(error).split())[:300]
    return CheckResult(check, mode, case, "error", FAILED, why=f"{type(error).__name__}: {text}")


def not_run(check: str, mode: str, case: str, why: str) -> CheckResult:
    """Return the result of a check that did not run."""
    return CheckResult(check, mode, case, "", NOT_RUN, why=why)


@dataclass(frozen=True)
class DeviceReport:
    """The result of `check_device`. `print(report)` shows it as a Markdown table for an issue.

    Attributes:
        machine: Names and versions: the device, the driver, CUDA, torch, and this library.
        results: The result of each check.
        seconds: The time that the checks needed.
        has_gpu: Whether the checks ran on a GPU.
    """

    machine: dict[str, str]
    results: list[CheckResult]
    seconds: float
    has_gpu: bool

    def of(self, verdict: str) -> list[CheckResult]:
        """Return the results with a verdict."""
        return [result for result in self.results if result.verdict == verdict]

    @property
    def failed(self) -> list[CheckResult]:
        """The checks that failed. A slow step is not a failure."""
        return self.of(FAILED)

    @property
    def passed(self) -> bool:
        """Whether no check failed, and at least one check ran."""
        return not self.failed and bool(self.of(OK))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for example for JSON."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"### torchzero_clip check-device: {self._summary()}", ""]
        if not self.has_gpu:
            lines += [NO_GPU, ""]
        lines += _table([("machine", ""), *self.machine.items()])
        lines.append("")
        header = ("check", "step", "cases", "worst figure", "allowed", "verdict")
        lines += _table([header, *[_row(results) for results in self._groups()]])
        lines += _section("Failed:", [str(result) for result in self.failed])
        lines += _section("Not run:", _by_reason(self.of(NOT_RUN)))
        return "\n".join(lines)

    def _summary(self) -> str:
        count = len(self.of(OK)) + len(self.failed)
        text = f"{len(self.failed)} of {count} checks failed"
        if skipped := len(self.of(NOT_RUN)):
            text += f", {skipped} did not run"
        return f"{text} ({self.seconds:.0f} s)"

    def _groups(self) -> list[list[CheckResult]]:
        """Return the results that ran, grouped by check and mode."""
        groups: dict[tuple[str, str], list[CheckResult]] = {}
        for result in self.results:
            if result.verdict != NOT_RUN:
                groups.setdefault((result.check, result.mode), []).append(result)
        return list(groups.values())


def _row(results: Sequence[CheckResult]) -> tuple[str, ...]:
    """Return the row of a group of results: the worst result stands for the group."""
    worst = max(results, key=lambda result: result.severity)
    failed = len([result for result in results if result.verdict == FAILED])
    figure = worst.figure
    if len(results) > 1 and (worst.value or worst.verdict == FAILED):
        figure += f" ({worst.case})"
    return (
        worst.check,
        worst.mode,
        str(len(results)),
        figure,
        "" if worst.limit is None else f"{worst.limit:.2g}",
        f"{failed} {FAILED}" if failed > 1 else worst.verdict,
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table with aligned columns. The first row is the header."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*escaped, strict=True)]
    escaped.insert(1, ["-" * max(width, 3) for width in widths])
    for row in escaped:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield f"| {' | '.join(cells)} |"


def _section(head: str, rows: Sequence[str]) -> Iterator[str]:
    """Yield a heading and a line for each row, or nothing if there are no rows."""
    if not rows:
        return
    yield from ("", head, "")
    yield from [f"- {row}" for row in rows[:LINES_SHOWN]]
    if len(rows) > LINES_SHOWN:
        yield f"- and {len(rows) - LINES_SHOWN} more"


def _by_reason(results: Sequence[CheckResult]) -> list[str]:
    """Return a line for each reason why checks did not run. A single check has its own line."""
    reasons: dict[str, list[CheckResult]] = {}
    for result in results:
        reasons.setdefault(result.why, []).append(result)
    lines = []
    for why, alike in reasons.items():
        lines.append(str(alike[0]) if len(alike) == 1 else f"{len(alike)} checks: {why}")
    return lines


# ---------------------------------------------------------------------- the machine


def machine(device: torch.device, library: str) -> dict[str, str]:
    """Return the names and versions that a reader of an issue needs.

    Args:
        device: The device on which the checks run.
        library: The version of this library.
    """
    found = {"device": device_name(device)}
    if device.type == "cuda":
        found["driver"] = driver() or "unknown"
    if torch.version.hip is not None:
        found["ROCm"] = torch.version.hip
    else:
        found["CUDA of torch"] = torch.version.cuda or "none"
    found["torch"] = str(torch.__version__)
    found["Triton"] = triton_version() or "none"
    found["torchzero_clip"] = library
    found["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return found


def device_name(device: torch.device) -> str:
    """Return the name of a GPU with its size, or the number of threads on a CPU."""
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads"
    card = torch.cuda.get_device_properties(device)
    return (
        f"{card.name}, sm_{card.major}{card.minor}, {card.multi_processor_count} SMs, "
        f"{card.total_memory / 2**30:.0f} GiB, {torch.cuda.device_count()} in this machine"
    )


def driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if nvidia-smi does not report one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def triton_version() -> str | None:
    """Return the version of Triton, or None if Triton is not installed."""
    for name in TRITON_PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
