"""Units and their verbs by hand: two groups, two dtypes, three tensors with norms 5, 10 and 13."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from torchzero_clip import Live, Modular, NormRule, TensorList, Transform, zeros_like_state
from torchzero_clip.core import Units, norms

NAN, INF = math.nan, math.inf
GRADS = [[3.0, 4.0], [6.0, 8.0], [5.0, 12.0]]
SUMS = {
    None: [25, 100, 169],
    "layer": [25 + 169, 100],
    "group": [125, 169],
    "global": [294],
    0: [25, 100, 169],
}


class UsesVerbs(Transform):
    """Keeps what a function makes of the units, and lets the update flow on."""

    body: Callable
    scope: object = None
    order: object = 2
    rate: Live[float] = 0.5
    seen: object = None

    def init(self, param):
        return {"m": zeros_like_state(param) + 2}

    def step(self, buckets):
        dims = lambda t: (0,)  # noqa: E731
        units = Units(buckets, self.scope, norms.measure(self.order), dims, "UsesVerbs")
        self.seen.append(self.body(units))
        return buckets


def groups(grads=GRADS):
    """One group with a tensor in float32 and one in bfloat16, and one group in float32."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    params = [Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]
    for p, grad in zip(params, grads, strict=True):
        p.grad = torch.tensor(grad, dtype=p.dtype)
    a, b, c = params
    first = {"params": [("one.weight", a), ("two.weight", b)]}
    return params, [first, {"params": [("one.bias", c)], "rate": 0.25}]


def after(body, scope=None, grads=GRADS, order=2):
    """What the function returned, the state m of every tensor, and how far each has moved."""
    params, given = groups(grads)
    seen = []
    opt = Modular(given, UsesVerbs(body, scope, order, seen=seen))
    opt.step()
    state = [opt.state[p]["UsesVerbs/m"].tolist() for p in params]
    assert {opt.state[p]["UsesVerbs/m"].dtype for p in params} == {torch.float32}
    moved = [(1 - p.detach().float()).tolist() for p in params]
    return seen[0], state, moved


UNTOUCHED = [[2.0, 2.0]] * 3


@pytest.mark.parametrize("scope", SUMS)
def test_norm_is_of_what_flows_or_of_a_state(scope):
    (flowing, kept), state, moved = after(lambda units: (units.norm(), units.norm("m")), scope)
    assert flowing.tolist() == pytest.approx([math.sqrt(x) for x in SUMS[scope]])
    tensors = {"layer": [2, 1], "group": [2, 1], "global": [3]}.get(scope, [1, 1, 1])
    assert kept.tolist() == pytest.approx([math.sqrt(8 * n) for n in tensors])
    assert (state, moved) == (UNTOUCHED, GRADS)


@pytest.mark.parametrize(("order", "norm"), [(1, [7, 14, 17]), (INF, [4, 8, 12])])
def test_norm_is_of_the_order_of_the_measure(order, norm):
    (flowing, kept), *_ = after(lambda units: (units.norm(), units.norm("m")), order=order)
    assert flowing.tolist() == pytest.approx(norm)
    assert kept.tolist() == pytest.approx([4 if order == 1 else 2] * 3)


@pytest.mark.parametrize("scope", SUMS)
def test_each_is_the_value_of_every_group(scope):
    assert after(lambda units: units.each("rate"), scope)[0] == [0.5, 0.25]


def test_values_of_groups_become_those_of_their_units():
    def body(units):
        return units.of_first_group([torch.full((units.count,), x) for x in units.each("rate")])

    assert after(body)[0].tolist() == [0.5, 0.5, 0.25]
    assert after(body, "layer")[0].tolist() == [0.5, 0.5]
    assert after(body, "group")[0].tolist() == [0.5, 0.25]
    assert after(body, "global")[0].tolist() == [0.5]


def half(units):
    """A weight of one half for every group."""
    return [torch.full((units.count,), 0.5) for _ in units.groups]


def test_lerp_moves_a_state_towards_what_flows_where_a_flag_is_set():
    def body(units):
        where = torch.tensor([True, False, True])
        units.lerp_("m", [torch.tensor([0.5, 0.5, 0.25])] * len(units.groups), where=where)

    _, state, moved = after(body)
    assert state == [[2.5, 3.0], [2.0, 2.0], [2.75, 4.5]]
    assert moved == GRADS


def test_lerp_takes_the_weight_of_the_unit_that_a_tensor_is_in():
    flag = torch.tensor([True])
    _, state, _ = after(lambda units: units.lerp_("m", half(units), where=flag), "global")
    assert state == [[2.5, 3.0], [4.0, 5.0], [3.5, 7.0]]
    weights = [torch.tensor([0.5, 0.25])] * 2
    flags = torch.tensor([False, True])
    _, state, _ = after(lambda units: units.lerp_("m", weights, where=flags), "group")
    assert state == [[2.0, 2.0], [2.0, 2.0], [2.75, 4.5]]


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_units_without_a_finite_norm_keep_their_state(wrong):
    def body(units):
        seen = units.finite(units.norm())
        units.lerp_("m", half(units), where=seen)
        return seen.tolist()

    grads = [GRADS[0], [6.0, wrong], GRADS[2]]
    seen, state, _ = after(body, None, grads)
    assert seen == [True, False, True]
    assert state == [[2.5, 3.0], [2.0, 2.0], [3.5, 7.0]]
    seen, state, _ = after(body, "layer", grads)
    assert seen == [True, False]
    assert state == [[2.5, 3.0], [2.0, 2.0], [3.5, 7.0]]
    seen, state, _ = after(body, "group", grads)
    assert seen == [False, True]
    assert state == [[2.0, 2.0], [2.0, 2.0], [3.5, 7.0]]
    assert after(body, "global", grads)[:2] == ([False], UNTOUCHED)


@pytest.mark.parametrize(
    ("scope", "ratio", "state"),
    [
        (None, [2.0, 1.0, 4.0], [[1.0, 1.0], [2.0, 2.0], [0.5, 0.5]]),
        ("layer", [4.0, 1.0], [[0.5, 0.5], [2.0, 2.0], [0.5, 0.5]]),
        ("group", [4.0, 0.5], [[0.5, 0.5], [0.5, 0.5], [4.0, 4.0]]),
        ("global", [4.0], [[0.5, 0.5]] * 3),
        (0, [2.0, 1.0, 4.0], [[1.0, 1.0], [2.0, 2.0], [0.5, 0.5]]),
        (None, [1.0, 1.0, 1.0], UNTOUCHED),
    ],
)
def test_div_brings_a_state_down_and_leaves_what_flows(scope, ratio, state):
    _, found, moved = after(lambda units: units.div_("m", torch.tensor(ratio)), scope)
    assert (found, moved) == (state, GRADS)


@pytest.mark.parametrize(
    ("scope", "ratios", "expected"),
    [
        (None, [[2.0, 4.0, 9.0], [9.0, 9.0, 0.5]], [[1.5, 2.0], [1.5, 2.0], [10.0, 24.0]]),
        ("group", [[2.0, 9.0], [9.0, 4.0]], [[1.5, 2.0], [3.0, 4.0], [1.25, 3.0]]),
        ("global", [[2.0], [4.0]], [[1.5, 2.0], [3.0, 4.0], [1.25, 3.0]]),
        (None, [[1.0] * 3, [1.0] * 3], GRADS),
    ],
)
def test_divide_takes_the_ratios_of_the_groups_own_vector(scope, ratios, expected):
    def body(units):
        for members, ratio in zip(units.groups, ratios, strict=True):
            for bucket in members:
                u = bucket.u.to(bucket.state_dtype)
                bucket.u = units.divide(bucket, u, torch.tensor(ratio))
        return [u.tolist() for members in units.groups for bucket in members for u in bucket.u]

    flowing, state, _ = after(body, scope)
    assert (flowing, state) == (expected, UNTOUCHED)


def test_divide_returns_the_update_itself_where_every_ratio_is_one():
    def body(units):
        lists = [(bucket, bucket.u) for bucket in units.buckets]
        one = torch.ones(units.count)
        return [units.divide(bucket, u, one) is u for bucket, u in lists]

    assert after(body)[0] == [True] * 3


def test_a_ratio_of_variances_is_that_of_their_roots():
    norm, limit = torch.tensor([8.0, 2.0]), torch.tensor([2.0, 8.0])
    assert after(lambda units: units.ratio(norm, limit).tolist())[0] == [4.0, 0.25]
    assert after(lambda units: units.ratio(norm, limit).tolist(), order="var")[0] == [2.0, 0.5]


class MeasuresComputed(NormRule):
    """Keeps what it measures of a list that it has computed, and clips nothing."""

    make: Callable
    seen: object
    dim: object = None

    def limit(self, norm, state, group):
        self.seen.append(self.measure(self.make(group)))
        return math.inf


@pytest.mark.parametrize(
    ("make", "each"),
    [
        (lambda group: group["params"], [2, 2, 2]),
        (lambda group: group["grads"], [25, 100, 169]),
        (lambda group: group["params"].mul(3.0), [18, 18, 18]),
        (lambda group: group["grads"].add(group["params"]), [16 + 25, 49 + 81, 36 + 169]),
        (lambda group: group["grads"].clamp(0.0, 6.0), [25, 72, 25 + 36]),
    ],
    ids=["params", "grads", "scaled", "added", "clamped"],
)
def test_a_limit_may_measure_what_it_computes_at_its_scope(make, each):
    """Lists of several buckets, of two dtypes, are one list for the rule."""
    a, b, c = each
    sums = {None: each, "layer": [a + c, b], "group": [a + b, c], "global": [a + b + c]}
    for dim, squares in sums.items():
        seen = []
        params, given = groups()
        del given[1]["rate"]
        Modular(given, MeasuresComputed(make, seen, dim=dim)).step()
        assert len(seen) == 2  # once for each group, of the units of both
        for found in seen:
            assert found.tolist() == pytest.approx([math.sqrt(x) for x in squares])
        assert [(1 - p.detach().float()).tolist() for p in params] == GRADS


def test_a_list_that_is_not_of_the_parameters_cannot_be_measured():
    def shorter(units):
        params = units.live()[0]["params"]
        return units.measure(TensorList(params.tensors[:2]))

    with pytest.raises(
        ValueError, match=r"UsesVerbs\.measure needs TensorLists .* per parameter: 3 tensors, got 2"
    ):
        after(shorter)
