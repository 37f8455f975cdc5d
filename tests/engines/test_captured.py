"""captured(opt): when a CUDA graph is captured again, what it reads, and what cannot be captured.

There are no CUDA graphs without a GPU. Here a capture notes the launches, and a replay runs them
again with the same arguments. On fake tensors launches are counted; in Triton's interpreter they
compute.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    LR,
    Accumulate,
    AdaGC,
    Adam,
    AutoClip,
    ClipNorm,
    Guard,
    Modular,
    SkipLarge,
    SkipSpike,
    Transform,
    WeightDecay,
    WeightEMA,
    When,
    ZClip,
    captured,
    named,
)
from torchzero_clip.audit import fake_cuda, ledgers, same, twin
from torchzero_clip.engines import Compiled
from torchzero_clip.engines.compiled.printers import backends, launches, pointer_tables
from torchzero_clip.engines.compiled.replay import captures, compiled_step

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and bool(importlib.util.find_spec("triton"))
COMPILED = {"compile": True}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of launches in each capture."""
    counts: list[int] = []

    def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
        found: list[tuple[Any, ...]] = []
        with pytest.MonkeyPatch.context() as patch:
            for page in ("printers.triton", "replay.device_step"):
                name = f"torchzero_clip.engines.compiled.{page}.launch"
                patch.setattr(name, lambda *args, **constants: found.append((args, constants)))
            step()
        counts.append(len(found))

        def replay() -> None:
            for args, constants in found:
                launches.launch(*args, **constants)

        return replay

    monkeypatch.setattr(captures, "capture", capture)
    return counts


# ---------------------------------------------------------------------- on an imagined GPU


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    monkeypatch.setattr(backends.triton, "here", lambda: True)
    with fake_cuda():
        yield twin([torch.empty(8, 4), torch.empty(4)])


def with_grads(params: Sequence[Tensor]) -> None:
    for p in params:
        p.grad = torch.zeros_like(p)


def headline() -> list[Transform]:
    return [ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.01), LR(1e-3)]


def test_the_third_step_is_captured_and_later_ones_are_replayed(
    imagined: list[Tensor], made: list[int]
) -> None:
    opt = captured(Modular(imagined, *headline(), compile=True))
    with_grads(imagined)
    seen = []
    for i in range(6):
        for group in opt.param_groups:
            group["lr"] = 1e-3 * i
        before = sum(launches.LAUNCHES.values())
        opt.step()
        seen.append(sum(launches.LAUNCHES.values()) - before)
    assert made == [3]
    assert seen[-1] == 3


def change_gradient(opt: Modular, params: list[Tensor]) -> None:
    params[0].grad = torch.zeros_like(params[0])


def lose_gradient(opt: Modular, params: list[Tensor]) -> None:
    params[1].grad = None


def load_state(opt: Modular, params: list[Tensor]) -> None:
    """Replace all state by other tensors, as loading a checkpoint does."""
    for state in opt.state.values():
        state.update({name: x.clone() for name, x in state.items() if isinstance(x, Tensor)})


def set_weight(opt: Modular, params: list[Tensor]) -> None:
    params[0].data = torch.zeros_like(params[0])


def regroup(opt: Modular, params: list[Tensor]) -> None:
    more = twin([torch.empty(3)])
    opt.add_param_group({"params": more, "lr": 0.5})
    with_grads(more)


@pytest.mark.parametrize(
    "change", [change_gradient, lose_gradient, load_state, set_weight, regroup]
)
def test_a_change_of_captured_tensors_leads_to_another_capture(
    change: Callable[[Modular, list[Tensor]], None], imagined: list[Tensor], made: list[int]
) -> None:
    opt = captured(Modular(imagined, *headline(), compile=True))
    with_grads(imagined)
    for _ in range(5):
        opt.step()
    assert len(made) == 1
    change(opt, imagined)
    for _ in range(8):
        opt.step()
    assert len(made) == 2


@pytest.mark.parametrize(
    "chain",
    [
        headline,
        pytest.param(lambda: [Guard(), *headline()], marks=pytest.mark.slow),
        lambda: [SkipSpike(), *headline()],
        lambda: [ZClip(), *headline()],
        lambda: [AdaGC(), *headline()],
        lambda: [AutoClip(), *headline()],
        pytest.param(lambda: [named("lamb")], marks=pytest.mark.slow),
    ],
)
def test_no_python_number_differs_between_two_steps(
    chain: Callable[[], list[Transform]], imagined: list[Tensor]
) -> None:
    """Learning rates, step counts and bias corrections are tensors: a graph would keep numbers."""

    def make(params: Sequence[Tensor]) -> Callable[[], Any]:
        opt = Modular(params, *chain(), compile=True)

        def step() -> None:
            for group in opt.param_groups:
                group["lr"] *= 0.9
            opt.step()

        return step

    *_, before, last = ledgers(make, imagined, 6)
    assert (len(last.copies), last.reads) == (1, [])  # hyperparameters, before the graph
    for ledger in (before, last):
        ledger.requests = [request for request in ledger.requests if request.kind != "copy"]
    assert same(before, last) is None


@pytest.mark.parametrize("of", [float, torch.tensor], ids=["number", "tensor of the host"])
def test_a_loss_on_the_host_is_sent_with_the_hyperparameters(
    of: Callable[[float], Any], imagined: list[Tensor]
) -> None:
    """A graph would keep the loss of its capture, or read its old address."""
    losses = iter(range(1, 9))

    def make(params: Sequence[Tensor]) -> Callable[[], Any]:
        opt = Modular(params, SkipSpike(), *headline(), compile=True)

        def step() -> None:
            opt.report(loss=of(1.5 * next(losses)))
            opt.step()

        return step

    *_, before, last = ledgers(make, imagined, 6)
    assert (len(last.copies), last.reads) == (1, [])
    assert last.requests[0].kind == "copy"  # before the graph
    for ledger in (before, last):
        ledger.requests = [request for request in ledger.requests if request.kind != "copy"]
    assert same(before, last) is None


def test_gradients_that_move_in_every_step_give_a_warning(
    imagined: list[Tensor], made: list[int]
) -> None:
    opt = captured(Modular(imagined, *headline(), compile=True))

    def train() -> None:
        for _ in range(8):
            with_grads(imagined)
            opt.step()

    with pytest.warns(UserWarning, match=r"zero_grad\(set_to_none=False\)"):
        train()
    assert made == []


def test_a_loss_that_moves_in_every_step_gives_a_warning(
    imagined: list[Tensor], made: list[int]
) -> None:
    """The gradients do not move, so the warning does not name them."""
    opt = captured(Modular(imagined, SkipSpike(), *headline(), compile=True))
    with_grads(imagined)
    losses = [torch.ones((), device="cuda:0") for _ in range(8)]

    def train() -> None:
        for loss in losses:
            opt.report(loss=loss)
            opt.step()

    said = (
        r"captured: no CUDA graph is used, because losses have a new memory address in each "
        r"step: copy each"
    )
    with pytest.warns(UserWarning, match=said) as seen:
        train()
    assert len(seen) == 1
    assert "gradients" not in str(seen[0].message)
    assert made == []


class Captured:
    """A CUDA graph that captures nothing: launches run at once."""

    def replay(self) -> None: ...


def test_tables_live_as_long_as_the_graph_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a user's own graph is not known, so the tables that it reads are kept."""
    known, like = pointer_tables.DeviceTables(), torch.zeros(1)
    monkeypatch.setattr(captures, "TABLES", known)
    monkeypatch.setattr(pointer_tables, "capturing", lambda device: True)
    for name, value in {
        "CUDAGraph": Captured,
        "Stream": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "graph": lambda graph, **options: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    theirs = known.numbers([0.5], like)
    found = list[Any]()

    def step() -> None:
        found.append(weakref.ref(known.numbers([0.25], like)))

    replay = captures.capture(step, torch.device("cpu"))
    assert found[0]() is not None
    assert len(known.captured) == 1
    assert known.captured[0] is theirs
    del replay
    gc.collect()
    assert found[0]() is None


def test_chains_that_cannot_be_captured_raise_an_error(imagined: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="must be constructed with compile=True"):
        captured(Modular(imagined, *headline()))
    with pytest.raises(TypeError, match="must be a Modular, got AdamW"):
        captured(torch.optim.AdamW([Parameter(torch.zeros(2))]))  # type: ignore[type-var]
    for odd in (When(lambda step: step % 2 == 0, ClipNorm(1.0)), Accumulate(2)):
        with pytest.raises(ValueError, match=f"into a CUDA graph: .*{type(odd).__name__}"):
            captured(Modular(imagined, odd, Adam(), LR(0.1), compile=True))


def test_parameters_on_cpu_raise_an_error() -> None:
    with pytest.raises(ValueError, match=r"must be on one GPU, .* got parameters on cpu"):
        captured(Modular([Parameter(torch.zeros(2))], *headline(), compile=True))


def test_a_step_that_is_too_long_raises_an_error_each_time(
    imagined: list[Tensor], made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_step, "MAX_NODES", 0)
    opt = captured(Modular(imagined, *headline(), compile=True))
    with_grads(imagined)
    opt.step()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="into a CUDA graph: it has too many operations"):
            opt.step()
    assert made == []


def test_a_guard_that_reads_a_flag_raises_an_error_before_anything_changes(
    imagined: list[Tensor], made: list[int]
) -> None:
    opt = captured(Modular(imagined, SkipLarge(5.0), Adam(), LR(0.1), compile=True, fused=False))
    with_grads(imagined)
    try:
        for _ in range(4):
            opt.step()
    except RuntimeError as error:
        assert "cannot be put into a CUDA graph: " in str(error)  # noqa: PT017
    else:
        assert made, "it reads nothing"


# ---------------------------------------------------------------------- in the interpreter

interpreted = [
    pytest.mark.triton,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


class TestNumbers:
    pytestmark = interpreted

    @pytest.mark.parametrize(
        "chain",
        [
            headline,
            lambda: [Guard(), ZClip(warmup_steps=2), Adam(), LR(1e-2)],
            lambda: [AdaGC(), Adam(), LR(0.1)],
            lambda: [SkipSpike(window=8, least=2), Adam(), LR(0.1)],
            lambda: [ClipNorm(1.0), Adam(), LR(0.1), WeightEMA(0.5)],
        ],
    )
    def test_captured_steps_equal_steps_without_compile(
        self,
        chain: Callable[[], list[Transform]],
        made: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Learning rates, losses and gradients change, and one gradient is NaN."""
        monkeypatch.setattr(Compiled, "backend", "triton")
        rows = [[Parameter(torch.ones(4, 3)), Parameter(torch.zeros(5))] for _ in range(2)]
        fast = captured(Modular(rows[0], *chain(), compile=True))
        plain = Modular(rows[1], *chain())
        for p in (*rows[0], *rows[1]):
            p.grad = torch.zeros_like(p)
        generator = torch.Generator().manual_seed(0)
        for i in range(9):
            for group in (*fast.param_groups, *plain.param_groups):
                group["lr"] = 0.01 * (i + 1)
            for ours, theirs in zip(*rows, strict=True):
                drawn = torch.randn(ours.shape, generator=generator) * (30 if i == 5 else 1)
                ours.grad.copy_(drawn)  # type: ignore[union-attr]
                theirs.grad.copy_(drawn)  # type: ignore[union-attr]
            if i == 6 and isinstance(fast.links[0].transform, Guard):
                for row in rows:
                    row[0].grad[0, 0] = torch.nan  # type: ignore[index]
            for opt in (fast, plain):
                opt.report(loss=1.0 + 0.1 * (i % 3) + 100 * (i == 7))
                opt.step()
            for ours, theirs in zip(*rows, strict=True):
                torch.testing.assert_close(ours, theirs)
        assert len(made) == 1
        if any(isinstance(link.transform, WeightEMA) for link in plain.links):
            with fast.averaged(), plain.averaged():
                for ours, theirs in zip(*rows, strict=True):
                    torch.testing.assert_close(ours, theirs)
        for name, value in plain.metrics().items():
            assert fast.metrics()[name] == pytest.approx(value, rel=1e-5, nan_ok=True)
