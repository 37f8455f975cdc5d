"""What a class says by an older name is what it says by the name of now, and it is warned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import at_once
from torchzero_clip import (
    LR,
    Adam,
    InBasis,
    Live,
    Modular,
    Scale,
    SOAPBasis,
    TensorwiseTransform,
    Transform,
    zeros_like_state,
)
from torchzero_clip.core.older_names import OLDER

WARNED = pytest.warns(UserWarning, match="^Said says [a-z_]+, which is now [a-z_]+, with '")


def saying(*bases: type, **body: Any) -> type[Transform]:
    """A class whose body says this by older names."""
    with WARNED:
        return type("Said", bases or (Transform,), {"__module__": __name__, **body})


@at_once(
    "old, said, new, now",
    [
        ("separable", False, "reach", "model"),
        ("separable", True, "reach", "tensor"),
        ("goes_first", True, "place", "first"),
        ("goes_first", False, "place", "any"),
        ("about_step", True, "place", "step"),
        ("passes_gradient", True, "leaves", "gradient"),
        ("update_size", "ones", "leaves", "ones"),
        ("update_size", "follows", "leaves", "update"),
        ("starts_with_state", True, "drops", "first"),
        ("counts_steps", True, "reads", ("step",)),
        ("reads_loss", True, "reads", ("loss",)),
        ("reads_grads", True, "reads", ("grads",)),
        ("reads_grads", False, "reads", ()),
        ("reads_params", True, "reads", ("param",)),
        ("turns", ("m",), "state_kinds", {"m": "linear"}),
        ("permutes", ("v",), "state_kinds", {"v": "squares"}),
        ("exact_state", ("w",), "state_kinds", {"w": "weights"}),
    ],
)
def test_each_older_name_is_one_of_now(old: str, said: Any, new: str, now: Any) -> None:
    rule = saying(**{old: said})
    assert getattr(rule(), new) == now
    assert getattr(type("Heir", (rule,), {"__module__": __name__})(), new) == now


def test_several_older_names_are_said_together() -> None:
    rule = saying(
        about_step=True,
        update_size="set",
        passes_gradient=False,
        reads=("lr",),
        counts_steps=True,
        reads_loss=True,
        turns=("m",),
        exact_state=("w",),
    )()
    assert (rule.place, rule.leaves, rule.reads) == ("step", "set", ("lr", "step", "loss"))
    assert rule.state_kinds == {"m": "linear", "w": "weights"}


def test_what_a_base_says_is_undone_or_added_to() -> None:
    assert saying(saying(goes_first=True), goes_first=False)().place == "any"
    assert saying(saying(reads_loss=True), reads_loss=False, counts_steps=True)().reads == ("step",)
    assert saying(Adam, exact_state=("w",))().state_kinds == {**Adam.state_kinds, "w": "weights"}
    assert set(saying(Adam, turns=())().state_kinds.values()) == {"squares"}


def test_a_mixin_may_say_it_once_for_its_heirs() -> None:
    mixin = type("First", (), {"goes_first": True})
    rule = saying(mixin, Transform)
    assert rule().place == "first"
    assert type("Heir", (rule,), {"__module__": __name__, "place": "any"})().place == "any"


def test_an_older_name_may_be_a_property_that_hangs_on_an_argument() -> None:
    first = property(lambda self: self.target == "grad")
    rule = saying(goes_first=first)
    assert (rule().place, rule(target="grad").place) == ("any", "first")


def test_a_field_of_that_name_is_an_argument_and_says_nothing() -> None:
    hints = {"turns": int, "goes_first": bool}
    body = {"__module__": __name__, "__annotations__": hints, "turns": 3, "goes_first": True}
    rule = type("Said", (Transform,), body)
    assert (rule(turns=4).turns, rule().place, rule().state_kinds) == (4, "any", {})


def test_every_older_name_is_free_and_no_name_of_now() -> None:
    older = {old for words in OLDER.values() for old in words}
    assert older.isdisjoint({*vars(Transform), *vars(TensorwiseTransform)})
    assert OLDER.keys() <= vars(Transform).keys()


# --- and it acts


def test_a_guard_must_still_come_first() -> None:
    guard = saying(goes_first=True, step=lambda self, buckets: buckets)
    with pytest.raises(ValueError, match="Said must come first in the chain"):
        Modular([torch.nn.Parameter(torch.ones(2))], Scale(2.0), guard(), LR(0.1))


def test_a_parameter_still_begins_with_state_alone_and_steps_are_counted() -> None:
    def update(self: Any, u: Any, state: Any, group: Any) -> Any:
        return u.mul_(group["step"])

    rule = saying(update=update, starts_with_state=True, counts_steps=True)
    p = torch.nn.Parameter(torch.zeros(2))
    opt = Modular([p], rule(), LR(1.0))
    for _ in range(2):
        p.grad = torch.ones(2)
        opt.step()
    assert p.tolist() == [-2.0, -2.0]


def test_state_still_follows_a_basis() -> None:
    def init(self: Any, param: Any) -> Any:
        return {"m": zeros_like_state(param)}

    rule = saying(init=init, turns=("m",))
    assert InBasis(SOAPBasis(), rule()).links[1].state_kinds == {"m": "linear"}
    with pytest.raises(TypeError, match=r"Said keeps \['m'\], .* says in state_kinds = "):
        InBasis(SOAPBasis(), saying(init=init, exact_state=("m",))())


def test_a_class_that_reads_more_borrows_still() -> None:
    class Borrows(Transform):
        beta: Live[float | None] = None

        borrows = (("beta", "betas", 0),)
        reads = ("step",)

        def update(self, u: Any, state: Any, group: Any) -> Any:
            return u.mul_(group["beta"] * group["step"])

    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    Modular([p], Borrows(), Adam((0.25, 0.5), eps=1e3), LR(1e3)).step()
    torch.testing.assert_close(p.detach(), torch.full((2,), -0.25), rtol=1e-3, atol=0.0)
