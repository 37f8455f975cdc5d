"""Names of values in a file: those that the rule gives them, whatever its functions look like."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor

from tests.helpers import SHAPES, parameters
from tests.source.test_source import compare
from torchzero_clip import LR, Group, Live, Modular, State, TensorList, Transform
from torchzero_clip.core import norms


def body(rule: Transform) -> str:
    return Modular(list(parameters().items()), rule, LR(0.1)).to_source()


def halved(u: TensorList, /, *, by: float = 2.0) -> TensorList:
    half = u.div(by)
    return half.add(0.0)


class Base(Transform):
    """u ← u / 2"""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return self.__half(u)

    def __half(self, u: TensorList) -> TensorList:
        return halved(u)


def captured(most: float) -> type[Transform]:
    class Inner(Base):
        """u ← min(|u / 2|, most) + pull · |w|"""

        pull: Live[float] = 0.1

        def update(self, u: TensorList, state: State, group: Group) -> TensorList:
            sizes = super().update(u, state, group).abs()
            (pull, _), (held, *_) = (group["pull"], 0), (group["params"].abs(), 1)

            def bounded(x: Tensor, limit: NotThere = most) -> Tensor:  # type: ignore[name-defined]  # noqa: F821
                return x.clamp(max=limit)

            for small in [sizes.map(bounded)]:
                total = small.add(held.mul(pull))
            return total

    return Inner


def test_names_come_from_assignments_and_loops_of_all_functions_of_a_rule() -> None:
    text = body(captured(0.5)())
    for name in ("half", "held", "small"):
        assert f"{name} = " in text
    assert "total" in text


def test_a_rule_with_private_names_super_and_captured_values_does_the_same() -> None:
    compare([captured(0.5)(), LR(0.1)], SHAPES, torch.float64)


def test_a_rule_whose_text_cannot_be_read_is_written_without_its_names() -> None:
    space: dict[str, Any] = {"Transform": Transform, "__name__": __name__}
    update = (
        "def update(self, u, state, group):\n        wide = u.mul(2.0)\n        return wide.abs()"
    )
    exec(f"class Unread(Transform):\n    '''u ← |2 u|'''\n    {update}", space)
    text = body(space["Unread"]())
    assert "torch._foreach_mul(grads, 2.0)" in text
    assert "wide" not in text


def test_a_profiler_of_the_user_goes_on_undisturbed_and_no_other_is_set() -> None:
    seen: list[Any] = []

    def watch(*_: Any) -> None:
        seen.append(sys.getprofile())

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        body(Base())
    finally:
        sys.setprofile(before)
    assert set(seen) == {watch}
    assert threading.getprofile() is None


def test_others_may_use_torch_and_our_norms_while_a_chain_is_watched() -> None:
    seen: list[Any] = []

    class Watching(Transform):
        """u ← u"""

        def update(self, u: TensorList, state: State, group: Group) -> TensorList:
            def other() -> None:
                seen.append(torch.finfo(torch.float32).eps)
                seen.append(norms.readable(torch.ones(2)))
                seen.append(norms.statistics([torch.ones(4)], norms.measure(2)).item())

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return u.mul(1.5)

    body(Watching())
    assert seen == [2.0**-23, True, 2.0] * 2
