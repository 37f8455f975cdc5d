"""Where the numbers of units lie between steps: with a parameter, a group, or in all groups."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from torchzero_clip import LR, Modular, NormRule, Scope


class Remembers(NormRule):
    """Keeps the last norm, the sum of all, and a small table."""

    dim: Scope = None

    def init_unit(self) -> dict[str, Any]:
        return {"last": 0.0, "sum": 0.0, "seen": torch.zeros(2)}

    def limit(self, norm: Any, state: Any, group: Any) -> Any:
        return torch.full_like(norm, torch.inf)

    def observe(self, norm: Any, clipped: Any, state: Any, group: Any) -> Any:
        seen = torch.stack([state["seen"][:, 1], norm], dim=1)
        return {"last": norm, "sum": state["sum"] + norm, "seen": seen}


def made(dim: Any) -> tuple[Modular, list[Parameter]]:
    """Three tensors in two groups, two of them of one layer."""
    names, params = ["a.weight", "a.bias", "b.weight"], [Parameter(torch.zeros(2)) for _ in "abc"]
    rows = list(zip(names, params, strict=True))
    return Modular(
        [{"params": rows[:2]}, {"params": rows[2:]}], Remembers(dim=dim), LR(1.0)
    ), params


def step(opt: Modular, params: list[Parameter], *sizes: float | None) -> None:
    """Gradients of these norms."""
    for p, size in zip(params, sizes, strict=True):
        p.grad = None if size is None else torch.tensor([0.6, 0.8]) * size
    opt.step()


def held(opt: Modular, params: list[Parameter], name: str) -> list[Any]:
    """What lies with each parameter, then with each group, as lists."""
    places = [*[opt.state[p] for p in params], *[g["chain"] for g in opt.param_groups]]
    cells = [place.get(f"Remembers/{name}") for place in places]
    return [None if cell is None else cell.tolist() for cell in cells]


def close(found: list[Any], wanted: list[Any]) -> None:
    assert [x is None for x in found] == [x is None for x in wanted]
    pairs = zip(found, wanted, strict=True)
    assert all([a is None or torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in pairs])


@pytest.mark.parametrize(
    ("dim", "last"),
    [
        (None, [3.0, 4.0, 5.0, None, None]),
        ("layer", [5.0, 5.0, 5.0, None, None]),
        ("group", [None, None, None, 5.0, 5.0]),
        ("global", [None, None, None, 50**0.5, 50**0.5]),
    ],
)
def test_a_number_lies_where_its_unit_belongs(dim: Any, last: list[Any]) -> None:
    opt, params = made(dim)
    step(opt, params, 3.0, 4.0, 5.0)
    step(opt, params, 3.0, 4.0, 5.0)
    close(held(opt, params, "last"), last)
    close(held(opt, params, "sum"), [None if x is None else 2 * x for x in last])
    close(held(opt, params, "seen"), [None if x is None else [x, x] for x in last])


def test_numbers_of_tensors_are_entries_of_one_vector_and_those_of_a_unit_one_tensor() -> None:
    opt, params = made(None)
    step(opt, params, 3.0, 4.0, 5.0)
    cells = [opt.state[p]["Remembers/last"] for p in params]
    assert len({cell.untyped_storage().data_ptr() for cell in cells}) == 1
    opt, params = made("layer")
    step(opt, params, 3.0, 4.0, 5.0)
    assert opt.state[params[0]]["Remembers/last"] is opt.state[params[1]]["Remembers/last"]


def test_a_member_of_a_layer_that_has_no_gradient_now_has_the_number_of_its_layer() -> None:
    opt, params = made("layer")
    step(opt, params, 3.0, 4.0, 5.0)
    step(opt, params, 6.0, None, None)
    close(held(opt, params, "last"), [6.0, 6.0, 5.0, None, None])


def test_a_unit_that_comes_later_begins_as_others_did() -> None:
    opt, params = made(None)
    step(opt, params, 3.0, None, 5.0)
    step(opt, params, 3.0, 4.0, 5.0)
    close(held(opt, params, "sum"), [6.0, 4.0, 10.0, None, None])


@pytest.mark.parametrize("dim", [None, "layer", "group", "global"])
def test_numbers_outlive_a_checkpoint_at_every_scope(dim: Any) -> None:
    opt, params = made(dim)
    step(opt, params, 3.0, 4.0, 5.0)
    again, others = made(dim)
    again.load_state_dict(opt.state_dict())
    for one, some in ((opt, params), (again, others)):
        step(one, some, 1.0, 2.0, 2.0)
    for name in ("last", "sum", "seen"):
        assert held(again, others, name) == held(opt, params, name)
