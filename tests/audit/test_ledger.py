"""The ledger of a step on an imagined GPU: what it sees, with the line that asked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.helpers import at_once
from torchzero_clip import TensorList
from torchzero_clip.audit import Ledger, fake_cuda, ledgers, lines, same, twin
from torchzero_clip.core.tensor_kinds import addresses, shared_memory


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with fake_cuda():
        yield


def seen(function: Callable[..., object], *args: object) -> Ledger:
    with Ledger() as ledger:
        function(*args)
    return ledger


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape or (4, 4), dtype=dtype, device="cuda:0")


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "list": lambda x: x[0, :1].tolist(),
    "text": lambda x: f"{x.sum():.3f}",
    "entries of a mask": lambda x: x.__setitem__(x > 0, x[0]),
    "equal": lambda x: torch.equal(x, x + 1),
}


@at_once("name", READS)
def test_a_read_of_the_host_is_told_with_its_line(name: str) -> None:
    (read,) = seen(READS[name], matrix()).reads
    assert read.where == f"{__file__}:{inspect.getsourcelines(READS[name])[1]}"


COPIES: dict[str, Callable[[Tensor], object]] = {
    "to the host": lambda x: x.cpu(),
    "to the device": lambda x: torch.ones(3).to(x.device),
    "a new number": lambda x: torch.tensor(1.0, device=x.device),
    "new numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "words": lambda x: (x.shape, str(x)),
    "into memory that is there": lambda x: x.copy_(torch.ones(4, 4)),
    "a number as an entry": lambda x: x[0, 0].copy_(torch.ones(())),
}


@at_once("name", COPIES)
def test_a_copy_between_devices_is_told_with_its_line(name: str) -> None:
    ledger = seen(COPIES[name], matrix())
    line = inspect.getsourcelines(COPIES[name])[1]
    assert [copy.where for copy in ledger.copies] == [f"{__file__}:{line}"]
    assert ledger.reads == []


@at_once("use", [lambda x: x[x > 0], lambda x: (x > 0).nonzero(), lambda x: x.unique()])
def test_a_shape_that_depends_on_values_is_an_error_that_names_the_line(
    use: Callable[[Tensor], object],
) -> None:
    line = inspect.getsourcelines(use)[1]
    words = f"test_ledger.py:{line} calls .* does not depend on values"
    with pytest.raises(RuntimeError, match=words):
        seen(use, matrix())


@at_once("function", [torch.linalg.eigh, torch.linalg.cholesky, torch.linalg.inv])
def test_operators_that_wait_inside_are_named(function: Callable[[Tensor], object]) -> None:
    (wait,) = seen(lambda x: (x @ x, function(x)), matrix()).waits
    assert wait.name.startswith("aten.")
    assert wait.where.startswith(__file__)


NEITHER: dict[str, Callable[[Tensor], object]] = {
    "a number of the host": lambda x: x * torch.ones(()),
    "entries by their numbers": lambda x: x[torch.zeros(2, dtype=torch.int64, device=x.device)],
    "another precision": lambda x: x.double(),
    "a full tensor": lambda x: torch.full((3,), 2.0, device=x.device),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "a form": lambda x: (x.shape, x.dtype, x.is_contiguous(), len(x)),
}


@at_once("name", NEITHER)
def test_what_waits_for_nothing_is_neither_a_read_nor_a_copy(name: str) -> None:
    ledger = seen(NEITHER[name], matrix())
    assert ledger.of("read", "copy") == []


def test_reads_of_the_host_have_values_to_go_on_with() -> None:
    x = matrix()
    with Ledger() as ledger:
        assert (x.sum().item(), bool(x.any()), int(x.argmax())) == (1.0, False, 1)
    assert len(ledger.reads) == 3


def test_views_and_memory_are_no_calls() -> None:
    ledger = seen(lambda x: (x[0], x.view(-1), x.t(), x.detach(), torch.empty_like(x)), matrix())
    assert (ledger.calls, len(ledger.of("memory"))) == (0, 1)
    assert len(ledger.of("view")) >= 4


def test_what_the_host_does_alone_is_not_seen() -> None:
    assert seen(torch.ones(3).sum).requests == []


# --- operators on many tensors


def many(n: int = 5, **options: torch.dtype) -> list[Tensor]:
    return [matrix(4, 2, **options) for _ in range(n)]


ROUTES: dict[str, tuple[int, Callable[[], object]]] = {
    "numbers": (1, lambda: torch._foreach_mul_(many(), 2.0)),
    "lists": (1, lambda: torch._foreach_add_(many(), many())),
    "numbers of the device": (1, lambda: torch._foreach_mul_(many(), matrix(1)[0])),
    "those of another precision": (
        5,
        lambda: torch._foreach_mul_(many(), matrix(1, dtype=torch.float64)[0]),
    ),
    "a number each": (5, lambda: torch._foreach_mul_(many(), list(matrix(5).unbind()))),
    "two precisions": (5, lambda: torch._foreach_add_(many(), many(dtype=torch.bfloat16))),
    "copies of another precision": (
        1,
        lambda: torch._foreach_copy_(many(), many(dtype=torch.bfloat16)),
    ),
    "other strides": (5, lambda: torch._foreach_add_(many(), [matrix(2, 4).t()] * 5)),
    "gaps": (5, lambda: torch._foreach_mul_([t[:, :1] for t in many()], 2.0)),
    "norms": (1, lambda: torch._foreach_norm(many(), 2)),
    "the largest entries": (1, lambda: torch._foreach_norm(many(), math.inf)),
    "another norm": (5, lambda: torch._foreach_norm(many(), 3)),
    "whole numbers": (1, lambda: torch._foreach_add_(many(dtype=torch.int64), 1)),
}


@at_once("name", ROUTES)
def test_foreach_off_its_fast_route_is_a_call_for_each_tensor(name: str) -> None:
    calls, run = ROUTES[name]
    with Ledger() as ledger:
        run()
    assert sum([e.calls for e in ledger.requests if "_foreach_" in e.name]) == calls


def test_the_line_that_calls_a_list_of_ours_is_told_and_no_line_inside_of_the_list() -> None:
    ledger = seen(lambda: TensorList(many()).mul_(2.0).add_(1.0).abs())
    assert [x.name for x in ledger.of("call") if "_foreach_mul" in x.name]
    assert {x.where.rpartition(":")[0] for x in ledger.requests} == {__file__}


# --- memory


def test_memory_is_counted_when_it_is_made_and_when_it_is_freed() -> None:
    def step(x: Tensor) -> None:
        for _ in range(3):
            x.mul_((x + 1).sum())

    ledger = seen(step, matrix(256, 256))
    assert 3 * 2**18 <= ledger.fresh < 3 * 2**18 + 4096
    assert 2**18 <= ledger.peak < 2**18 + 4096


def test_fake_memory_has_addresses() -> None:
    x, y = matrix(), matrix()
    numbers = matrix(3)
    entries = list(numbers.unbind())
    assert addresses([x[1]]) == [addresses([x])[0] + 16]  # type: ignore[index]
    assert addresses([x]) != addresses([y])
    assert shared_memory(entries) is numbers
    assert shared_memory([x[0, 0], y[0, 0]]) is None


# --- steps


class Steps:
    """Three steps, of which each multiplies by the number that it gets."""

    def __init__(self, params: list[Tensor], numbers: list[float]) -> None:
        self.params, self.numbers = params, iter(numbers)

    def step(self) -> None:
        torch._foreach_mul_([p.detach() for p in self.params], next(self.numbers))


def steps(*numbers: float) -> list[Ledger]:
    params = twin([torch.empty(2, 3), torch.empty(4)])
    return ledgers(lambda some: Steps(some, list(numbers)), params)


def test_two_steps_are_the_same_where_no_number_changes() -> None:
    one, other, _ = steps(0.5, 0.5, 0.5)
    assert same(one, other) is None
    one, other, _ = steps(math.nan, math.nan, math.nan)
    assert same(one, other) is None


def test_the_first_number_that_changes_is_told_with_its_line() -> None:
    one, other, _ = steps(0.5, 0.25, 0.25)
    line = inspect.getsourcelines(Steps.step)[1] + 1
    assert (same(one, other) or "").startswith(f"{__file__}:{line}: aten._foreach_mul_.Scalar")
    assert "0.25" in (same(one, other) or "")


def test_a_step_with_an_operator_more_is_another() -> None:
    x = matrix()
    one, other = seen(lambda: x.mul_(2)), seen(lambda: x.mul_(2).add_(1))
    assert "aten.add_" in (same(one, other) or "")
    assert "aten.add_" in (same(other, one) or "")


def test_torch_with_its_state_on_the_device_waits_for_nothing() -> None:
    def hand(params: list[Tensor]) -> Callable[[], None]:
        opt = torch.optim.AdamW(params, fused=True, capturable=True)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            opt.step()

        return step

    few, many = [
        ledgers(hand, twin([torch.empty(8, 8, device="cpu") for _ in range(n)]))[-1]
        for n in (3, 50)
    ]
    assert few.of("read", "copy") == many.of("read", "copy") == []
    assert few.calls == many.calls == 10


def test_the_line_in_torch_is_told_where_torch_asks() -> None:
    def make(params: list[Tensor]) -> Callable[[], object]:
        return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)

    *_, last = ledgers(make, twin([torch.empty(8, 8)]))
    (place,) = lines(last.reads)
    assert "torch/nn/utils/clip_grad.py:" in place


def test_collectives_are_seen() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        ledger = seen(torch.distributed.all_reduce, matrix())
    finally:
        torch.distributed.destroy_process_group()
    assert [entry.name for entry in ledger.collectives] == ["c10d.allreduce_.default"]
