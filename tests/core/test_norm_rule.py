"""A rule about norms: its limit, its memory, and which mistakes are sentences."""

import math
import re

import pytest
import torch

from tests.helpers import one, run_once
from torchzero_clip import (
    LR,
    Live,
    Modular,
    NormRule,
    Scope,
)


def test_a_norm_rule_of_ones_own_works_at_every_scope():
    class Halve(NormRule):
        """At most half of the norm before."""

        share: Live[float] = 0.5
        dim: "object" = None

        def init_unit(self):
            return {"previous": math.inf}

        def limit(self, norm, state, group):
            return state["previous"] * group["share"]

        def observe(self, norm, clipped, state, group):
            return {"previous": clipped}

    for dim in (None, "layer", "group", "global"):
        p = one(0.0, grad=8.0)
        opt = Modular([("a.w", p)], Halve(dim=dim))
        updates = []
        for _ in range(3):
            p.data.zero_()
            opt.step()
            updates.append(-p.item())
        assert updates == [8.0, 4.0, 2.0]
    with pytest.raises(ValueError, match=r"Halve: dim must be None.*keeps state"):
        Halve(dim=0)


def test_a_norm_rule_may_measure_the_parameters_at_its_scope():
    class Trust(NormRule):
        dim: "object" = None
        sets_norm = True

        def limit(self, norm, state, group):
            return self.measure(group["params"])

    a, b = one(3.0, grad=10.0), one(4.0, grad=10.0)
    Modular([a, b], Trust()).step()
    assert (a.item(), b.item()) == pytest.approx((0.0, 0.0))
    a, b = one(3.0, grad=10.0), one(4.0, grad=10.0)
    Modular([a, b], Trust(dim="global")).step()
    step = 5 / math.sqrt(2)
    assert (a.item(), b.item()) == pytest.approx((3 - step, 4 - step))


def test_observing_what_init_unit_does_not_make_is_an_error():
    class Wrong(NormRule):
        def init_unit(self):
            return {"a": 0.0}

        def limit(self, norm, state, group):
            return math.inf

        def observe(self, norm, clipped, state, group):
            return {"b": norm}

    words = r"Wrong\.observe returned the keys \['b'\], but init_unit has only the keys \['a'\]"
    with pytest.raises(KeyError, match=words):
        run_once(Wrong())


def test_a_key_that_observe_leaves_out_keeps_its_value_in_that_group():
    class Partly(NormRule):
        dim: Scope = None
        watched: Live[float] = 1.0

        def init_unit(self):
            return {"last": 7.0, "never": 8.0}

        def limit(self, norm, state, group):
            return torch.full_like(norm, math.inf)

        def observe(self, norm, clipped, state, group):
            return {"last": norm} if group["watched"] > 0 else {}

    for order in ((1.0, 0.0), (0.0, 1.0)):
        params = [one(0.0, grad=3.0), one(0.0, grad=3.0)]
        made = [{"params": [p], "watched": x} for p, x in zip(params, order, strict=True)]
        opt = Modular(made, Partly(), LR(1.0))
        opt.step()
        for p, watched in zip(params, order, strict=True):
            assert opt.state[p]["Partly/last"] == (3.0 if watched else 7.0)
            assert opt.state[p]["Partly/never"] == 8.0


def test_a_norm_rule_without_limit_says_what_to_write():
    class Nothing(NormRule):
        pass

    with pytest.raises(NotImplementedError, match="Nothing must define limit"):
        run_once(Nothing())


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 1), (1, 1), (0,)])
def test_a_limit_has_a_number_per_unit(compile, shape):
    class Wrong(NormRule):
        dim: "object" = None

        def limit(self, norm, state, group):
            return torch.ones(shape)

    opt = Modular([one(grad=1.0), one(grad=2.0)], Wrong(), compile=compile)
    words = f"Wrong.limit must return a number or 2 numbers, one per unit, got .* shape {shape}"
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        opt.step()


class Observer(NormRule):
    """A rule whose `observe` returns ones of this shape."""

    shape: tuple[int, ...]
    dim: Scope = None

    def init_unit(self):
        return {"seen": 0.0}

    def limit(self, norm, state, group):
        return torch.full_like(norm, math.inf)

    def observe(self, norm, clipped, state, group):
        return {"seen": torch.ones(self.shape, dtype=norm.dtype)}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("shape", [(3,), (2, 1), (1, 1), (0,)])
def test_observed_state_has_a_number_per_unit(compile, shape):
    params = [one(grad=1.0), one(grad=2.0)]
    opt = Modular(params, Observer(shape), LR(1.0), compile=compile)
    words = (
        "Observer.observe must return one number or a tensor with shape (2,) for 'seen', got a "
        f"tensor with shape {shape}"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        opt.step()
    assert [p.item() for p in params] == [1.0, 1.0]  # the step changes nothing


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("shape", [(2,), (1,), ()])
def test_one_observed_number_is_for_all_units(compile, shape):
    params = [one(grad=1.0), one(grad=2.0)]
    opt = Modular(params, Observer(shape), LR(1.0), compile=compile)
    opt.step()
    assert [opt.state[p]["Observer/seen"].item() for p in params] == [1.0, 1.0]
