"""A step: the loss that was reported, what users are asked, draws that count once, early ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import Parameter

from tests.helpers import at_once
from torchzero_clip.core.formats.stochastic import DRAWS
from torchzero_clip.core.skip import Skipped
from torchzero_clip.core.step import Notes, Step, one_number
from torchzero_clip.engines import Eager
from torchzero_clip.recovering.arguments import loss_of
from torchzero_clip.study.recorder import number

CPU = torch.device("cpu")


def step_of(**options: Any) -> Step:
    """A step of two groups, each with a parameter and the draws of its rounding."""
    groups = [
        {
            "params": [Parameter(torch.ones(2))],
            "param_names": [name],
            "chain": {DRAWS[0]: number, DRAWS[1]: torch.zeros((), dtype=torch.int64)},
        }
        for number, name in enumerate("ab")
    ]
    return Step(groups, {}, {}, Eager(), **options).__enter__()


def test_a_loss_that_was_not_reported_is_a_sentence_with_the_path() -> None:
    with pytest.raises(RuntimeError, match=r"Polyak needs the loss of each step: call opt\.report"):
        step_of().mean_loss("Polyak", CPU)


@pytest.mark.parametrize("loss", [0.25, torch.tensor(0.25, dtype=torch.bfloat16)])
def test_a_loss_is_one_tensor_in_double_precision(loss: Any) -> None:
    step = step_of(loss=loss)
    made = step.mean_loss("here", CPU)
    assert (made.item(), made.dtype) == (0.25, torch.float64)
    assert step.mean_loss("there", CPU) is made


def test_what_a_user_is_asked_is_noted_where_somebody_listens() -> None:
    class Heard(Notes):
        def ask(self, function: Any, *args: Any) -> Any:
            heard.append((function, args))
            return super().ask(function, *args)

    heard: list[Any] = []
    step = step_of()
    listened = step.again(step.groups, None, Heard())
    assert listened.notes.ask(max, 1, 2) == step.notes.ask(max, 1, 2) == 2
    assert heard == [(max, (1, 2))]


def test_a_step_that_rounds_is_counted_once_in_every_group() -> None:
    step = step_of()
    assert [step.draw(i, DRAWS) for i in (0, 1, 0)] == [(0, 1), (1, 1), (0, 1)]
    assert [group["chain"][DRAWS[1]].item() for group in step.groups] == [1, 1]


def test_only_parameters_with_a_gradient_take_part() -> None:
    step = step_of()
    held = step.groups[1]["params"][0]
    held.grad = torch.ones(2)
    ((part, grads),) = step.cohorts()
    assert part.index == 1
    assert list(part.places) == [0]
    assert grads[0] is held.grad


def test_a_skipped_step_ends_early_and_other_errors_are_seen() -> None:
    with step_of():
        raise Skipped
    with pytest.raises(ValueError, match="mine"), step_of():
        raise ValueError("mine")


@at_once("plain", [one_number, loss_of, partial(number, "loss")])
def test_a_loss_may_be_a_dtensor(plain: Callable[[Tensor], Tensor]) -> None:
    """A model with tensor parallelism may return one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Replicate(), Partial()):
            loss = DTensor.from_local(torch.full((1,), 2.0), mesh, [placement], run_check=False)
            found = plain(loss)
            assert type(found) is Tensor
            assert found.equal(torch.tensor(2.0))
    finally:
        dist.destroy_process_group()
