"""Audit a step: report whether the step synchronizes with the GPU, and which lines do so.

The audit needs no GPU and computes nothing. It runs three steps on a fake GPU and compares the last
two steps.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchzero_clip.attach import Attached
from torchzero_clip.audit.fake_gpu import fake_cuda, twin
from torchzero_clip.audit.findings import Finding, changes, loops, memory, refusals, short, waits
from torchzero_clip.audit.ledger import Ledger, NeedsValues, run_step
from torchzero_clip.audit.lost_updates import Lost, lost_in
from torchzero_clip.core.plurals import counted

STEPS = 3
BASELINE = "clip_grad_norm_ and AdamW(fused=True)"
LINES_SHOWN = 8
"""The largest number of lines of one kind in the text of a report. `findings` has all lines."""
SCALER = (
    'PyTorch disables GradScaler("cuda") on a machine without CUDA, but an enabled GradScaler may '
    "synchronize in each step"
)
SYNCHRONIZES = "synchronizing CUDA operation"  # from the warning of torch's sync debug mode


@dataclass(frozen=True)
class StepReport:
    """The result of `audit`. `print(report)` shows it as text.

    Attributes:
        name: The name of the optimizer or of the function.
        tensors: The number of parameters that have a gradient.
        calls: The number of kernels that a step starts.
        fresh: The peak of the memory that a step allocates, in bytes.
        collectives: The number of collectives in a step, such as all-reduces.
        findings: The lines of code with a problem.
        ended: The reason why the step could not be completed, or "" if it was completed. An
            incomplete report covers only the first part of the step.
        on_gpu: The lines that synchronized on the GPU of this machine, according to
            `torch.cuda.set_sync_debug_mode`. None if this machine has no GPU.
        beside: A baseline: the report of `torch.nn.utils.clip_grad_norm_` with a fused AdamW. None
            in the report of the baseline itself.
        lost: The updates that are lost in rounding, measured on the CPU. None if no parameter is in
            half precision, or if a parameter has no values.
    """

    name: str
    tensors: int
    calls: int
    fresh: int
    collectives: int
    findings: list[Finding]
    ended: str = ""
    on_gpu: list[str] | None = None
    beside: StepReport | None = None
    lost: Lost | None = None

    def of(self, *kinds: str) -> list[Finding]:
        """Return the findings of the given kinds. `Finding` lists all kinds."""
        return [x for x in self.findings if x.kind in kinds]

    @property
    def waits(self) -> list[Finding]:
        """The lines where the host waits for the device."""
        return self.of("read", "copy", "wait")

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture the step.

        The step must never synchronize, and every step must make the same calls.
        """
        return not self.ended and not self.of("read", "copy", "wait", "change", "refusal")

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for example for JSON."""
        return {**asdict(self), "capturable": self.capturable}

    def __str__(self) -> str:
        lines = [self._line()]
        if self.capturable:
            lines.append("The step never synchronizes. A CUDA graph can capture it.")
        lines += _section("Lines that synchronize with the GPU:", self.waits)
        lines += _section("Lines that prevent a CUDA graph:", self.of("change", "refusal"))
        lines += _section("Lines that cost time or memory:", self.of("loop", "memory"))
        if self.ended:
            lines.append(f"The audit is incomplete: {self.ended}.")
        if self.lost is not None:
            lines.append(str(self.lost))
        if self.on_gpu is not None:
            lines += _section("Lines that synchronized on the GPU of this machine:", self.on_gpu)
        if self.beside is not None:
            lines.append(f"For comparison: {self.beside._line()}")
        return "\n".join(lines)

    def _line(self) -> str:
        often = sum([x.times for x in self.waits])
        return (
            f"{self.name}: {counted(self.calls, 'kernel')} for "
            f"{counted(self.tensors, 'parameter')}, {counted(often, 'synchronization')}, "
            f"{_size(self.fresh)} of new memory, {counted(self.collectives, 'collective')}"
        )


def _section(head: str, findings: Sequence[object]) -> Iterator[str]:
    """Yield a heading and a line for each finding, or nothing if there are none."""
    if findings:
        yield head
    yield from [f"  {finding}" for finding in findings[:LINES_SHOWN]]
    if len(findings) > LINES_SHOWN:
        yield f"  and {counted(len(findings) - LINES_SHOWN, 'more line')}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def audit(make: Callable[[Any], Any], params: Any) -> StepReport:
    """Run a step on a fake GPU, and report where the step synchronizes with the GPU.

    The report also lists the lines that prevent a CUDA graph. It lists the lines that start a
    kernel for each tensor or allocate much memory, too. If parameters are in half precision, the
    report includes the share of the updates that are lost in rounding.

    `audit` needs no GPU. It needs torch 2.9 or newer.

    Args:
        make: A function that receives fake copies of the parameters. The copies have gradients. The
            function returns an optimizer, or a function that does a step. An optimizer can be a
            `torch.optim.Optimizer`, a `Modular` or a `Clipper`. An optimizer that already exists
            cannot be audited, because its state and its closures hold other tensors.
        params: Parameters on any device, or pairs of a name and a parameter. `make` receives copies
            in the same form.

    Returns:
        A `StepReport`. `print(report)` shows it as text.

    Example:
        >>> import torch
        >>> from torchzero_clip.audit import audit
        >>> model = torch.nn.Linear(8, 4)
        >>> audit(torch.optim.AdamW, model.parameters()).capturable
        False
    """
    if isinstance(make, Optimizer):
        name = type(make).__name__
        raise TypeError(
            "audit: the argument make= must be a function that returns an optimizer, such as "
            f"lambda params: {name}(params), got an existing {name}"
        )
    params = list(params)
    if not params:
        raise ValueError("audit: params= must contain at least one parameter")
    lines_on_gpu = on_gpu(make, params) if torch.cuda.is_available() else None
    baseline = replace(trial(by_hand, params), name=BASELINE)
    report = trial(make, params)
    return replace(report, on_gpu=lines_on_gpu, beside=baseline, lost=lost_in(make, params))


def assert_no_waits(make: Callable[[Any], Any], params: Any) -> None:
    """Raise an `AssertionError` if a step synchronizes with the GPU. The error lists the lines.

    Use this function in a test. It needs no GPU.

    Args:
        make: A function that returns an optimizer, as for `audit`.
        params: The parameters, as for `audit`.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular
        >>> from torchzero_clip.audit import assert_no_waits
        >>> model = torch.nn.Linear(8, 4)
        >>> def make(params):
        ...     return Modular(params, ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))
        >>> assert_no_waits(make, model.parameters())
    """
    report = audit(make, params)
    if report.waits or report.ended:
        raise AssertionError(f"the step synchronizes with the GPU\n{report}")


def by_hand(params: Any) -> Callable[[], None]:
    """Return the step of the baseline: clipping by norm and a fused AdamW, both from torch."""
    tensors = _tensors(params)
    opt = torch.optim.AdamW(tensors, fused=True, capturable=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(tensors, 1.0)
        opt.step()

    return step


# ---------------------------------------------------------------------- a trial


def trial(make: Callable[[Any], Any], params: Sequence[Any]) -> StepReport:
    """Return the report of a step on the fake GPU alone, without a baseline."""
    optimizers: dict[int, Optimizer] = {}
    with fake_cuda(), _scalers() as disabled_scalers:
        twins = _twins(params)
        grads = [p.grad for p in _tensors(twins) if p.grad is not None]
        with Ledger():  # without a ledger, reading a value of a fake tensor is an error
            stepper = make(twins)
            step = _step_of(stepper)
        hook = register_optimizer_step_pre_hook(lambda opt, *_: optimizers.update({id(opt): opt}))
        try:
            with _uncompiled():
                ledgers, ended = _ledgers_of(step, _tensors(twins))
        finally:
            hook.remove()
        size = sum([t.numel() * t.element_size() for t in grads])
    last = ledgers[-1]
    if not last.requests:
        raise RuntimeError(
            "audit: the step used none of the parameters that audit passed to the function "
            "make(params): construct the optimizer from these parameters, not from the "
            "parameters of an existing model"
        )
    findings = waits(last)
    if not ended:
        findings += changes(*ledgers[-2:])
    findings += refusals(optimizers.values())
    findings += loops(last, len(grads))
    findings += memory(last, size)
    if disabled_scalers and not ended:
        ended = SCALER
    return StepReport(
        _name(make, stepper),
        tensors=len(grads),
        calls=last.calls,
        fresh=last.peak,
        collectives=len(last.collectives),
        findings=findings,
        ended=ended,
    )


def _ledgers_of(step: Callable[[], Any], params: Sequence[Any]) -> tuple[list[Ledger], str]:
    """Return the ledgers of all steps, and the reason if a step could not be completed, or ""."""
    ledgers: list[Ledger] = []
    grads = [p.grad for p in params]
    for _ in range(STEPS):
        ledgers.append(Ledger())
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad  # the step before may have set it to None
        try:
            run_step(step, ledgers[-1])
        except NeedsValues as error:
            return ledgers, str(error)
    return ledgers, ""


def _step_of(stepper: Any) -> Callable[[], Any]:
    """Return the step function of an optimizer or a clipper, or a function itself."""
    if isinstance(stepper, Attached):
        raise TypeError(
            "audit: the function make(params) must return the optimizer, not the handle that "
            "attach returned"
        )
    step: Callable[[], Any] = getattr(stepper, "step", stepper)
    if callable(step):
        return step
    raise TypeError(
        "audit: the function make(params) must return an optimizer or a step function, got "
        f"{stepper!r}"
    )


@contextmanager
def _scalers() -> Iterator[list[GradScaler]]:
    """Collect the scalers that torch disables inside the block because CUDA is missing."""
    init = GradScaler.__init__
    disabled: list[GradScaler] = []

    @functools.wraps(init)
    def watched(self: GradScaler, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        wanted = inspect.signature(init).bind(self, *args, **kwargs).arguments.get("enabled", True)
        if wanted and not self.is_enabled():
            disabled.append(self)

    GradScaler.__init__ = watched  # type: ignore[method-assign]
    try:
        yield disabled
    finally:
        GradScaler.__init__ = init  # type: ignore[method-assign]


def _name(make: Any, stepper: Any) -> str:
    """Return the name for a report: the class of the optimizer, or the name of the function."""
    if hasattr(stepper, "step"):
        return type(stepper).__name__
    return str(getattr(make, "__name__", type(make).__name__))


def _tensors(params: Sequence[Any]) -> list[Any]:
    return [x[1] if isinstance(x, tuple) else x for x in params]


def _twins(params: Sequence[Any], device: str = "cuda:0") -> list[Any]:
    """Return fake copies of the parameters. Parameters with names become pairs again."""
    pairs = zip(params, twin(_tensors(params), device), strict=True)
    return [(x[0], copied) if isinstance(x, tuple) else copied for x, copied in pairs]


def _uncompiled() -> AbstractContextManager[Any]:
    """Return a context manager in which torch.compile does not compile functions."""
    # If nobody has imported torch._dynamo, nothing is compiled, and importing it takes long.
    is_imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_imported else nullcontext()


def on_gpu(make: Callable[[Any], Any], params: Sequence[Any]) -> list[str]:
    """Return the lines that synchronize when a step runs on the GPU of this machine."""
    twins = _twins(params, "cuda")
    for t in _tensors(twins):
        t.data.normal_()
        if t.grad is not None:
            t.grad.normal_()
    step = _step_of(make(twins))
    step()  # the first step allocates state
    return synchronizing_lines(step)


def synchronizing_lines(step: Callable[[], Any]) -> list[str]:
    """Run a step, and return the lines that synchronize with the GPU of this machine."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    lines = [short(f"{x.filename}:{x.lineno}") for x in caught if SYNCHRONIZES in str(x.message)]
    return list(dict.fromkeys(lines))
