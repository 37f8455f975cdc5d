"""Numbers that a link keeps once: for the model, for a group, and as a skipped step leaves them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import LR, Guard, Live, Modular, Transform


class Counts(Transform):
    """Scales by the sum of the rates that it has seen, and keeps a product for each group."""

    rate: Live[float] = 0.5
    reads = ("step",)

    def init_model(self) -> dict[str, float]:
        return {"sum": 0.0}

    def init_group(self) -> dict[str, float]:
        return {"product": 1.0}

    def advance_model(self, numbers: Any, group: Any) -> dict[str, Any]:
        return {"sum": numbers["sum"] + group["rate"]}

    def advance_group(self, numbers: Any, group: Any) -> dict[str, Any]:
        return {"product": numbers["product"] * group["rate"]}

    def update(self, u: Any, state: Any, group: Any) -> Any:
        return u.mul_(group["sum"]).mul_(group["product"])


def made(*links: Transform, **options: Any) -> tuple[Modular, list[Parameter]]:
    """Two groups of one number each, of which the first group's rate is the one of the model."""
    params = [Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [params[0]]}, {"params": [params[1]], "rate": 0.25}]
    return Modular(groups, *links, Counts(), LR(1.0), **options), params


def step(opt: Modular, params: list[Parameter], *grads: float | None) -> list[float]:
    for p, grad in zip(params, grads, strict=True):
        p.grad = None if grad is None else torch.tensor([grad])
    opt.step()
    return [p.item() for p in params]


def numbers(opt: Modular, index: int = 0) -> dict[str, float]:
    chain = opt.param_groups[index]["chain"]
    names = ("sum", "product", "step")
    return {name: float(chain[f"Counts/{name}"]) for name in names if f"Counts/{name}" in chain}


@pytest.mark.parametrize("compile", [False, True])
def test_the_model_has_one_number_and_every_group_its_own(compile: bool) -> None:
    opt, params = made(compile=compile)
    assert step(opt, params, 1.0, 1.0) == [-0.5 * 0.5, -0.5 * 0.25]
    assert step(opt, params, 1.0, 1.0) == [-0.25 - 1.0 * 0.25, -0.125 - 1.0 * 0.0625]
    assert numbers(opt) == {"sum": 1.0, "product": 0.25, "step": 2.0}
    assert numbers(opt, 1) == {"sum": 1.0, "product": 0.0625, "step": 2.0}
    held = [group["chain"]["Counts/sum"] for group in opt.param_groups]
    assert held[0] is held[1]
    assert held[0].dtype == torch.float64
    assert held[0].dim() == 0


def test_a_group_without_a_gradient_keeps_its_own_number_and_shares_that_of_the_model() -> None:
    opt, params = made()
    step(opt, params, 1.0, 1.0)
    step(opt, params, 1.0, None)
    assert numbers(opt) == {"sum": 1.0, "product": 0.25, "step": 2.0}
    assert numbers(opt, 1) == {"sum": 1.0, "product": 0.25, "step": 2.0}


def test_a_step_that_is_skipped_leaves_them() -> None:
    opt, params = made(Guard())
    step(opt, params, 1.0, 1.0)
    before = numbers(opt), [p.item() for p in params]
    assert step(opt, params, float("nan"), 1.0) == before[1]
    assert numbers(opt) == before[0]
    step(opt, params, 1.0, 1.0)
    assert numbers(opt)["sum"] == 1.0


def test_they_are_in_checkpoints() -> None:
    opt, params = made()
    step(opt, params, 1.0, 1.0)
    saved, kept = opt.state_dict(), [p.item() for p in params]
    again, others = made()
    again.load_state_dict(saved)
    for p, value in zip(others, kept, strict=True):
        p.data.fill_(value)
    assert step(again, others, 1.0, 1.0) == step(opt, params, 1.0, 1.0)
    assert numbers(again) == numbers(opt)


def test_names_that_were_not_made_are_a_sentence() -> None:
    class Wrong(Counts):
        def advance_model(self, numbers: Any, group: Any) -> dict[str, Tensor]:
            return {"total": numbers["sum"]}

    p = Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    with pytest.raises(KeyError, match=r"Wrong: the returned values.*'sum'.*'total'"):
        Modular([p], Wrong(), LR(1.0)).step()
