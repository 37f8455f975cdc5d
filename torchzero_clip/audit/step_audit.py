"""Does a step wait? An optimizer on an imagined GPU, and the lines that stand in its way.

No GPU is needed, and nothing is computed. A step is done three times; the last two are compared.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchzero_clip.attach import Attached
from torchzero_clip.audit.fake_gpu import fake_cuda, twin
from torchzero_clip.audit.findings import Finding, changes, loops, memory, refusals, short, waits
from torchzero_clip.audit.ledger import Ledger, NeedsValues
from torchzero_clip.audit.lost_updates import Lost, lost_in

STEPS = 3
HAND = "clip_grad_norm_ and AdamW(fused=True)"
MOST = 8  # lines of one kind in a text; `findings` has all
SCALER = (
    'torch disables GradScaler("cuda") where it has no CUDA, and an enabled one may read in each '
    "step whether a gradient is infinite"
)
SYNCHRONIZES = "synchronizing CUDA operation"  # as torch's own mode warns


@dataclass(frozen=True)
class StepReport:
    """What an audit of a step found; `str` of it is the text.

    Attributes:
        name: The optimizer or the function.
        tensors: How many have a gradient.
        calls: The kernels that a step starts.
        fresh: The bytes of memory that it takes at once.
        collectives: The times that it asks other processes.
        findings: The lines where something is the matter.
        ended: Why the step could not go on, where it could not: what follows was not seen.
        on_gpu: The lines that waited on the GPU that is here, by torch's own mode for that; None
            where there is none.
        beside: The same of `clip_grad_norm_` and a fused AdamW.
        lost: What rounding loses of a step, done on the CPU by twins in float32 too; None where no
            parameter is in half precision, or has values.
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
        """The findings of these kinds."""
        return [x for x in self.findings if x.kind in kinds]

    @property
    def waits(self) -> list[Finding]:
        """Where the host waits for the device."""
        return self.of("read", "copy", "wait")

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may capture it: it waits for nothing, and steps ask the same."""
        return not self.ended and not self.of("read", "copy", "wait", "change", "refusal")

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "capturable": self.capturable}

    def __str__(self) -> str:
        told = [self._line()]
        if self.capturable:
            told.append("It waits for nothing, and a CUDA graph may capture it.")
        told += _section("It waits for the device:", self.waits)
        told += _section("No CUDA graph can be had of it:", self.of("change", "refusal"))
        told += _section("It costs:", self.of("loop", "memory"))
        if self.ended:
            told.append(f"Nothing more was seen: {self.ended}.")
        if self.lost is not None:
            told.append(str(self.lost))
        if self.on_gpu is not None:
            told += _section("On the GPU here torch saw it wait:", self.on_gpu)
        return "\n".join(told if self.beside is None else [*told, f"Beside: {self.beside._line()}"])

    def _line(self) -> str:
        often = sum([x.times for x in self.waits])
        return (
            f"{self.name}: {self.calls} calls for {self.tensors} tensors, {often} waits, "
            f"{_size(self.fresh)} of fresh memory, {self.collectives} collectives"
        )


def _section(head: str, rows: Sequence[object]) -> Iterator[str]:
    if rows:
        yield head
    yield from [f"  {row}" for row in rows[:MOST]]
    if len(rows) > MOST:
        yield f"  and {len(rows) - MOST} lines more"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def audit(make: Callable[[Any], Any], params: Any) -> StepReport:
    """What a step asks of a GPU: where it waits, and what keeps it from a CUDA graph. Of parameters
    in half precision also the share of updates that rounding loses.

    Args:
        make: Called with fake twins of the parameters, which have gradients; returns an optimizer,
            a handle with a `step`, or a function that does a step. An optimizer that is there
            already cannot be tried: its state and its closures hold other tensors.
        params: Parameters on any device, or pairs of their names and them; `make` gets the same.

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
            f"audit: takes what makes an optimizer, such as lambda params: {name}(params), got an "
            f"{name} that is made: its state and its closures hold tensors of their own"
        )
    rows = list(params)
    if not rows:
        raise ValueError("audit: there are no parameters to make twins of")
    seen = on_gpu(make, rows) if torch.cuda.is_available() else None
    hand = replace(trial(by_hand, rows), name=HAND)
    return replace(trial(make, rows), on_gpu=seen, beside=hand, lost=lost_in(make, rows))


def assert_no_waits(make: Callable[[Any], Any], params: Any) -> None:
    """Raise an `AssertionError` with the lines where a step waits for the device, if there are any.

    Args:
        make: As for `audit`.
        params: As for `audit`.
    """
    report = audit(make, params)
    if report.waits or report.ended:
        raise AssertionError(f"the step waits for the device\n{report}")


def by_hand(params: Any) -> Callable[[], None]:
    """What a step is held against: torch's clip, and its AdamW in one pass."""
    tensors = _tensors(params)
    opt = torch.optim.AdamW(tensors, fused=True, capturable=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(tensors, 1.0)
        opt.step()

    return step


# ---------------------------------------------------------------------- a trial


def trial(make: Callable[[Any], Any], params: Sequence[Any]) -> StepReport:
    """The report of a step, with nothing beside it."""
    stepped: dict[int, Optimizer] = {}
    with fake_cuda(), _scalers() as disabled:
        twins = _twins(params)
        grads = [p.grad for p in _tensors(twins) if p.grad is not None]
        with Ledger():  # so that reads have values
            made = make(twins)
            step = _step_of(made)
        hook = register_optimizer_step_pre_hook(lambda opt, *_: stepped.update({id(opt): opt}))
        try:
            with _uncompiled():
                ledgers, ended = _steps(step, _tensors(twins))
        finally:
            hook.remove()
        size = sum([t.numel() * t.element_size() for t in grads])
    last = ledgers[-1]
    if not last.requests:
        raise RuntimeError(
            "audit: the step asked nothing of the device: `make` has to take the parameters that "
            "it is given, not those of a model that is there already"
        )
    findings = [*waits(last), *([] if ended else changes(*ledgers[-2:]))]
    findings += [*refusals(stepped.values()), *loops(last, len(grads)), *memory(last, size)]
    ended = ended or (SCALER if disabled else "")
    told = len(grads), last.calls, last.peak, len(last.collectives)
    return StepReport(_name(make, made), *told, findings, ended)


def _steps(step: Callable[[], Any], params: Sequence[Any]) -> tuple[list[Ledger], str]:
    """The ledgers of some steps, and why one of them could not go on."""
    ledgers, grads = [], [p.grad for p in params]
    for _ in range(STEPS):
        ledgers.append(Ledger())
        for p, grad in zip(params, grads, strict=True):  # which a step may have freed
            p.grad = grad
        try:
            with ledgers[-1]:
                step()
        except NeedsValues as error:
            return ledgers, str(error)
    return ledgers, ""


def _step_of(made: Any) -> Callable[[], Any]:
    """The function that does a step."""
    if isinstance(made, Attached):
        raise TypeError("audit: `make` returns the optimizer with a handle, not the handle")
    step: Callable[[], Any] = getattr(made, "step", made)
    if callable(step):
        return step
    raise TypeError(
        f"audit: `make` returns an optimizer or a function that does a step, got {made!r}"
    )


@contextmanager
def _scalers() -> Iterator[list[Any]]:
    """The scalers that were to be enabled in the block, and are not, since torch has no CUDA."""
    init, disabled = GradScaler.__init__, list[Any]()

    @functools.wraps(init)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        wanted = inspect.signature(init).bind(self, *args, **kwargs).arguments.get("enabled", True)
        if wanted and not self.is_enabled():
            disabled.append(self)

    GradScaler.__init__ = watched  # type: ignore[method-assign]
    try:
        yield disabled
    finally:
        GradScaler.__init__ = init  # type: ignore[method-assign]


def _name(make: Any, made: Any) -> str:
    """What a report is called: the class of an optimizer, or the function."""
    if hasattr(made, "step"):
        return type(made).__name__
    return str(getattr(make, "__name__", type(make).__name__))


def _tensors(params: Sequence[Any]) -> list[Any]:
    return [x[1] if isinstance(x, tuple) else x for x in params]


def _twins(params: Sequence[Any], device: str = "cuda:0") -> list[Any]:
    twins = twin(_tensors(params), device)
    pairs = zip(params, twins, strict=True)
    return [(x[0], made) if isinstance(x, tuple) else made for x, made in pairs]


def _uncompiled() -> Any:
    """A block in which functions under torch.compile run as they are written."""
    compiles = "torch._dynamo" in sys.modules  # which takes long to import
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


def on_gpu(make: Callable[[Any], Any], params: Sequence[Any]) -> list[str]:
    """The lines that wait on the GPU that is here, as torch's own mode for that sees them."""
    twins = _twins(params, "cuda")
    for t in _tensors(twins):
        t.data.normal_()
        if t.grad is not None:
            t.grad.normal_()
    step = _step_of(make(twins))
    step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    seen = [short(f"{x.filename}:{x.lineno}") for x in told if SYNCHRONIZES in str(x.message)]
    return list(dict.fromkeys(seen))
