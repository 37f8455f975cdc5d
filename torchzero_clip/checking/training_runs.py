"""Short training runs: a few steps of a chain, in one of several modes, on a CPU or a GPU.

A mode is the way in which a step runs:

- "default": the default engine.
- "compiled": with `compile=True`.
- "captured": with `compile=True`, as a CUDA graph.
- "plain": with `fused=False`, where every link runs its own formula.
- "torch": `clip_grad_norm_` and AdamW of torch, for the headline chain.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from torchzero_clip.audit.step_audit import synchronizing_lines
from torchzero_clip.checking.check_cases import CheckCase, ModelShapes
from torchzero_clip.optimizer import Modular, captured

STEPS = 8
WATCHED_STEPS = 3
"""The last steps of a run, in which synchronizations and replays of CUDA graphs are counted.

By then, state exists, kernels are compiled, and the step is captured.
"""
SPIKE_STEP = 4  # the gradients of this step are 30 times larger
NAN_STEP = 6  # one of the watched steps
KERNEL_WARNINGS = ("kernel", "captured:")
"""Parts of warnings that report an unused kernel, or a step that runs without its CUDA graph."""


@dataclass(frozen=True)
class RunSetting:
    """How a chain is trained.

    Attributes:
        mode: The mode of the steps. The docstring of this module lists the modes.
        device: The device of the parameters.
        dtype: The dtype of the parameters and gradients.
        gradient_dtype: Gradients are first rounded to this dtype.
        steps: The number of steps.
        new_gradients: Whether gradients are new tensors in each step. Otherwise, they keep their
            memory.
        offset: The number of elements between the start of the memory and each parameter. With
            another number than 0, addresses are not multiples of 16 bytes.
        is_late: Whether the GPU has other work to do before each step. Then the host is many steps
            ahead of the GPU.
        streams: The number of CUDA streams that take turns.
        is_watched: Whether to count synchronizations and replays of CUDA graphs in the last steps.
            This needs a GPU.
    """

    mode: str
    device: torch.device
    dtype: torch.dtype = torch.float32
    gradient_dtype: torch.dtype = torch.float32
    steps: int = STEPS
    new_gradients: bool = False
    offset: int = 0
    is_late: bool = False
    streams: int = 1
    is_watched: bool = False


@dataclass
class RunResult:
    """The result of a short training run.

    Attributes:
        weights: The weights after the last step, as float64 tensors on the CPU.
        synchronizing: The lines that synchronized with the GPU in the watched steps.
        graphs: The number of watched steps that replayed a CUDA graph.
        warnings: The warnings about kernels and CUDA graphs.
    """

    weights: list[Tensor] = field(default_factory=list)
    synchronizing: list[str] = field(default_factory=list)
    graphs: int = 0
    warnings: list[str] = field(default_factory=list)


class ClippedAdamW(torch.optim.AdamW):
    """torch's clipping by the global norm, followed by torch's AdamW."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        super().step(closure)


def optimizer_for(case: CheckCase, params: Sequence[Tensor], mode: str) -> Optimizer:
    """Return an optimizer whose steps run in a mode."""
    if mode == "torch":
        return ClippedAdamW(params, lr=1e-3, weight_decay=0.01, fused=True)
    opt = Modular(
        params,
        *case.make(),
        fused=mode != "plain",
        compile=mode in ("compiled", "captured"),
        rounding="nearest",
    )
    return captured(opt) if mode == "captured" else opt


def train(case: CheckCase, setting: RunSetting) -> RunResult:
    """Train the parameters of a case for a few steps with random gradients.

    The learning rate and the loss change in each step.
    """
    device = setting.device
    result = RunResult()
    params = parameters(case.shapes, setting)
    # copied before the first step, because such a copy would synchronize
    all_gradients = [
        [g.to(setting.gradient_dtype).to(device, setting.dtype) for g in grads]
        for grads in gradients(case, setting.steps)
    ]
    busy = BusyGpu(device) if setting.is_late else None
    streams = Streams(device, setting.streams)
    with (
        warnings.catch_warnings(record=True) as caught,
        counted_graph_replays() as replays,
        torch.random.fork_rng(devices=[]),
    ):
        warnings.simplefilter("always")
        torch.manual_seed(0)
        opt = optimizer_for(case, params, setting.mode)
        rates = [group.get("lr") for group in opt.param_groups]
        for i, grads in enumerate(all_gradients):
            with streams.next():
                give(params, grads, setting.new_gradients)
                for group, rate in zip(opt.param_groups, rates, strict=True):
                    if rate is not None:
                        group["lr"] = rate * (1 + 0.5 * (i % 5))
                report_loss(case, opt, i)
                if busy is not None:
                    busy()
                if setting.is_watched and i >= setting.steps - WATCHED_STEPS:
                    before = len(replays)
                    result.synchronizing += synchronizing_lines(opt.step)
                    if len(replays) > before:
                        result.graphs += 1
                else:
                    opt.step()
        streams.join()
    messages = dict.fromkeys([str(warning.message) for warning in caught])
    result.warnings = [x for x in messages if any([part in x for part in KERNEL_WARNINGS])]
    result.weights = [p.detach().to("cpu", torch.float64) for p in params]
    return result


def parameters(shapes: ModelShapes, setting: RunSetting) -> list[Parameter]:
    """Return the same random parameters at every call."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        values = 0.5 * torch.randn(shape, generator=generator)
        size = setting.offset + values.numel()
        memory = torch.zeros(size, dtype=setting.dtype, device=setting.device)
        memory[setting.offset :] = values.flatten().to(memory)
        params.append(Parameter(memory[setting.offset :].view(shape)))
    return params


def gradients(case: CheckCase, steps: int) -> Iterator[list[Tensor]]:
    """Yield the same random gradients for each step at every call, on the CPU."""
    generator = torch.Generator().manual_seed(7)
    for i in range(steps):
        scale = 30.0 if i == SPIKE_STEP else 1.0
        grads = [scale * torch.randn(shape, generator=generator) for shape in case.shapes]
        if case.has_nan and i == NAN_STEP:
            grads[0].view(-1)[0] = torch.nan
        yield grads


def give(params: Sequence[Tensor], grads: Sequence[Tensor], new: bool) -> None:
    """Give each parameter its gradient, in new memory or in the memory of the last gradient."""
    for p, g in zip(params, grads, strict=True):
        if new or p.grad is None:
            p.grad = g.clone()
        else:
            p.grad.copy_(g)


def report_loss(case: CheckCase, opt: Optimizer, step: int) -> None:
    """Pass the loss of a step to an optimizer whose guard checks the loss."""
    if case.reports_loss and isinstance(opt, Modular):
        opt.report(loss=1.0 + 0.1 * (step % 7))


@contextmanager
def counted_graph_replays() -> Iterator[list[torch.cuda.CUDAGraph]]:
    """Collect the CUDA graphs that are captured and replayed inside the block.

    A graph is in the list once for each replay.
    """
    original = torch.cuda.CUDAGraph.replay
    replayed: list[torch.cuda.CUDAGraph] = []

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        replayed.append(graph)
        original(graph)

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[assignment, method-assign]
    try:
        yield replayed
    finally:
        torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]


class BusyGpu:
    """Work for a GPU that takes some milliseconds. The host does not wait for the work."""

    SIZE = 2048
    PRODUCTS = 20

    def __init__(self, device: torch.device) -> None:
        self.matrix = torch.randn(self.SIZE, self.SIZE, device=device)
        self.product = torch.empty_like(self.matrix)

    def __call__(self) -> None:
        for _ in range(self.PRODUCTS):
            torch.mm(self.matrix, self.matrix, out=self.product)


class Streams:
    """CUDA streams that take turns. Each stream waits for the stream before it.

    Args:
        device: The device. On a CPU there are no streams.
        count: The number of streams. With 1, all steps run on the current stream.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams: list[Any] = []
        self._first: Any = None
        if count > 1 and device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(count)]
            self._first = torch.cuda.current_stream(device)
            self._last = self._first
        self._turns = 0

    def next(self) -> AbstractContextManager[Any]:
        """Return a context manager in which the next stream is the current stream."""
        if not self._streams:
            return nullcontext()
        stream = self._streams[self._turns % len(self._streams)]
        self._turns += 1
        stream.wait_stream(self._last)
        self._last = stream
        return torch.cuda.stream(stream)

    def join(self) -> None:
        """Let the first stream wait for the last step."""
        if self._streams:
            self._first.wait_stream(self._last)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all its work. On a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
