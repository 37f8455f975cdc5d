"""The modules compute what spec says, on whatever hypothesis can think of."""

import math
from itertools import islice

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from torchzero_clip import (
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipPercentile,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    DeltaClip,
    Modular,
    NanToNum,
    Normalize,
    NormalizeByEMA,
    Scale,
    Sign,
    SoftClip,
    Standardize,
    spec,
)

inf, nan = math.inf, math.nan

ORDERS = [0, 0.5, 1, 2, 3, 7, inf, "l4", "mad", "std", "var", "sum"]

eighths = st.integers(-512, 512).map(lambda k: k / 8)  # their sums are exact
odd = st.sampled_from([nan, inf, -inf])
wide = st.floats(-1e150, 1e150).filter(lambda x: x == 0 or abs(x) > 1e-150)
limits = st.one_of(st.sampled_from([0.0, inf, 1.0]), st.floats(1e-6, 1e6))
orders = st.sampled_from(ORDERS)


def vectors(entries, least=0):
    return st.lists(entries, min_size=least, max_size=6)


def mostly(entries, strange):
    """Entries with something strange among them now and then."""
    return st.one_of(entries, entries, entries, entries, entries, entries, entries, strange)


def close(expected, slack=0.0):
    return pytest.approx(list(expected), rel=1e-12, abs=slack, nan_ok=True)


def grads_to_updates(opt, params, grads):
    for p, grad in zip(params, grads, strict=True):
        p.data.zero_()
        p.grad = torch.tensor(grad, dtype=torch.float64).view(p.shape)
    opt.step()
    return [(0 - p.detach()).flatten().tolist() for p in params]


def kernel(rule, *grads, shape=None):
    """The updates of one step over tensors of float64, flattened."""
    params = [torch.zeros(shape or len(g), dtype=torch.float64) for g in grads]
    return grads_to_updates(Modular(params, rule), params, grads)


def steps(rule, rows):
    """The updates of several steps; a row has one gradient for each tensor."""
    params = [torch.zeros(len(g), dtype=torch.float64) for g in rows[0]]
    opt = Modular(params, rule)
    return [grads_to_updates(opt, params, row) for row in rows]


def cut(flat, *parts):
    """A flat list in pieces as long as the parts."""
    rest = iter(flat)
    return [list(islice(rest, len(part))) for part in parts]


# --- stateless rules: (the module, the spec, its tolerance)


NORM_RULES = {
    "ClipNorm": (ClipNorm, spec.clip_by),
    "Normalize": (Normalize, spec.normalize),
    "SoftClip": (SoftClip, spec.soft_clip),
    "DeltaClip": (
        lambda limit, order, **kw: DeltaClip(limit, 0.3, order, **kw),
        lambda xs, limit, order: spec.delta_clip(xs, limit, 0.3, order),
    ),
}
each_norm_rule = pytest.mark.parametrize("name", NORM_RULES)


@each_norm_rule
@given(xs=vectors(mostly(eighths, odd)), limit=limits, order=orders)
def test_a_norm_rule_on_one_tensor(name, xs, limit, order):
    make, rule = NORM_RULES[name]
    assume(not (name != "ClipNorm" and limit == inf))  # a rule of the module alone, see below
    assert kernel(make(limit, order), xs)[0] == close(rule(xs, limit, order))


@each_norm_rule
@given(xs=vectors(wide), limit=limits, order=st.sampled_from([1, 2, 3, inf]))
def test_a_norm_rule_on_entries_of_any_size(name, xs, limit, order):
    make, rule = NORM_RULES[name]
    assume(limit != inf)
    out, expected = kernel(make(limit, order), xs)[0], rule(xs, limit, order)
    assert out == close(expected, slack=1e-300)


@each_norm_rule
@given(xs=vectors(mostly(eighths, odd)), ys=vectors(eighths, least=1), limit=limits, order=orders)
def test_a_norm_rule_over_two_tensors_is_that_of_their_concatenation(name, xs, ys, limit, order):
    make, rule = NORM_RULES[name]
    assume(limit != inf)
    expected = cut(rule([*xs, *ys], limit, order), xs, ys)
    for out, row in zip(kernel(make(limit, order, dim="global"), xs, ys), expected, strict=True):
        assert out == close(row)


@each_norm_rule
@given(
    rows=st.lists(vectors(eighths, least=3).map(lambda xs: xs[:3]), min_size=1, max_size=4),
    limit=limits,
    order=orders,
    along=st.sampled_from([0, 1]),
)
def test_a_norm_rule_on_slices_is_that_of_each_slice(name, rows, limit, order, along):
    make, rule = NORM_RULES[name]
    assume(limit != inf)
    shape = (len(rows), 3)
    flat = kernel(make(limit, order, dim=along), [x for xs in rows for x in xs], shape=shape)[0]
    out = torch.tensor(flat, dtype=torch.float64)
    slices = rows if along == 1 else [list(column) for column in zip(*rows, strict=True)]
    for got, xs in zip(out.view(shape) if along == 1 else out.view(shape).T, slices, strict=True):
        assert got.tolist() == close(rule(xs, limit, order))


@given(xs=vectors(mostly(eighths, odd)), order=orders)
def test_an_infinite_limit_leaves_clipping_rules_idle(xs, order):
    for rule in (ClipNorm(inf, order), SoftClip(inf, order)):
        assert kernel(rule, xs)[0] == close(xs)


@given(xs=vectors(mostly(eighths, odd)), value=limits)
def test_clip_value(xs, value):
    assert kernel(ClipValue(value), xs)[0] == close(spec.clip_value(xs, -value, value))


@given(xs=vectors(eighths))
def test_centralize(xs):
    assert kernel(Centralize(), xs)[0] == close(spec.centralize(xs), slack=1e-12)


@given(xs=vectors(eighths), ys=vectors(eighths, least=1))
def test_centralize_over_two_tensors(xs, ys):
    expected = cut(spec.centralize([*xs, *ys]), xs, ys)
    for out, row in zip(kernel(Centralize("global"), xs, ys), expected, strict=True):
        assert out == close(row, slack=1e-12)


@given(xs=vectors(eighths), eps=st.sampled_from([0.0, 1e-8, 1.0]))
def test_standardize(xs, eps):
    assert kernel(Standardize(eps), xs)[0] == close(spec.standardize(xs, eps), slack=1e-11)


@given(xs=vectors(eighths), ys=vectors(eighths, least=1), eps=st.sampled_from([0.0, 1e-8, 1.0]))
def test_standardize_over_two_tensors(xs, ys, eps):
    expected = cut(spec.standardize([*xs, *ys], eps), xs, ys)
    for out, row in zip(kernel(Standardize(eps, "global"), xs, ys), expected, strict=True):
        assert out == close(row, slack=1e-11)


@given(mean=st.floats(0.1, 1e6), size=st.integers(2, 6), ulps=st.integers(0, 3))
def test_what_is_constant_up_to_rounding_becomes_zeros(mean, size, ulps):
    other = mean
    for _ in range(ulps):
        other = math.nextafter(other, inf)
    xs = [mean] * (size - 1) + [other]
    expected = spec.standardize(xs)
    assume(expected == [0] * size)
    assert kernel(Standardize(), xs)[0] == [0] * size


percentiles = st.one_of(st.sampled_from([0, 25, 50, 75, 90, 99, 100]), st.floats(0, 100))


@pytest.mark.filterwarnings("ignore:.*less than one percent")
@given(xs=vectors(mostly(wide, odd)), percentile=percentiles)
def test_clip_percentile(xs, percentile):
    out, expected = kernel(ClipPercentile(percentile), xs)[0], spec.clip_percentile(xs, percentile)
    assert out == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@pytest.mark.filterwarnings("ignore:.*less than one percent")
@given(xs=vectors(wide), ys=vectors(mostly(wide, odd)), percentile=percentiles)
def test_clip_percentile_over_two_tensors(xs, ys, percentile):
    expected = cut(spec.clip_percentile([*xs, *ys], percentile), xs, ys)
    for out, row in zip(
        kernel(ClipPercentile(percentile, "global"), xs, ys), expected, strict=True
    ):
        assert out == pytest.approx(row, rel=0, abs=0, nan_ok=True)


@pytest.mark.filterwarnings("ignore:.*less than one percent")
@given(xs=vectors(mostly(wide, odd)), percentile=percentiles)
def test_a_percentile_given_as_a_tensor_is_the_same(xs, percentile):
    number, tensor = ClipPercentile(percentile), ClipPercentile(torch.tensor(percentile).double())
    assert kernel(tensor, xs)[0] == pytest.approx(kernel(number, xs)[0], rel=0, nan_ok=True)


@given(xs=vectors(mostly(eighths, odd)), limit=limits)
def test_clip_rms(xs, limit):
    assert kernel(ClipRMS(limit), xs)[0] == close(spec.clip_rms(xs, limit))


@given(xs=vectors(mostly(eighths, odd)))
def test_sign(xs):
    assert kernel(Sign(), xs)[0] == pytest.approx(spec.sign(xs), nan_ok=True)


@given(xs=vectors(mostly(eighths, odd)), values=st.tuples(eighths, eighths, eighths))
def test_nan_to_num(xs, values):
    assert kernel(NanToNum(*values), xs)[0] == spec.nan_to_num(xs, *values)


# --- rules with memory


def sequences(entries, size=3):
    """Steps of two tensors; sizes stay the same from step to step."""
    row = st.tuples(
        st.lists(entries, min_size=size, max_size=size), st.lists(entries, min_size=2, max_size=2)
    )
    return st.lists(row, min_size=1, max_size=7)


sizes = st.one_of(eighths, st.sampled_from([0.0, 0.0, 1e-6, 1e-3, 1e4]))
strange_sequences = sequences(mostly(sizes, odd))
some_orders = st.sampled_from([1, 2, inf, "mad", "std", "var"])


@st.composite
def growths(draw):
    """Arguments of the growth rules, with None where the module takes it and the spec does not."""
    add = draw(st.one_of(st.none(), st.floats(0, 10)))
    mul = draw(st.floats(1, 4)) if add is None else draw(st.one_of(st.none(), st.floats(1, 4)))
    return {
        "add": add,
        "mul": mul,
        "min_value": draw(st.one_of(st.none(), st.floats(0, 1))),
        "max_decay": draw(st.one_of(st.none(), st.floats(1, 4))),
    }


def plain(growth):
    """The same arguments as the spec takes them."""
    floor, decay = growth["min_value"], growth["max_decay"]
    return growth | {
        "min_value": 0 if floor is None else floor,
        "max_decay": inf if decay is None else decay,
    }


def follow_growth(rows, growth, order):
    """What `spec` makes of one unit, step by step."""
    keys = plain(growth)
    limits_only = {k: keys[k] for k in ("add", "mul", "min_value")}
    state = spec.Growth()
    for xs in rows:
        yield spec.clip_by(xs, spec.growth_limit(state, **limits_only), order)
        _, state = spec.clip_norm_growth(spec.norm(xs, order), state, **keys)


@given(
    rows=strange_sequences,
    growth=growths(),
    order=st.sampled_from([1, 2, inf, "mad", "std", "var"]),
)
def test_clip_norm_growth_of_each_tensor(rows, growth, order):
    out = steps(ClipNormGrowth(**growth, ord=order), rows)
    for i in (0, 1):
        expected = follow_growth([row[i] for row in rows], growth, order)
        for got, want in zip(out, expected, strict=True):
            assert got[i] == close(want, slack=1e-290)


@pytest.mark.slow
@given(
    rows=strange_sequences,
    growth=growths(),
    order=st.sampled_from([1, 2, inf, "mad", "std", "var"]),
)
def test_clip_norm_growth_over_all_tensors(rows, growth, order):
    out = steps(ClipNormGrowth(**growth, ord=order, dim="global"), rows)
    expected = follow_growth([[*a, *b] for a, b in rows], growth, order)
    for got, want in zip(out, expected, strict=True):
        assert got[0] + got[1] == close(want, slack=1e-290)


@given(rows=strange_sequences, growth=growths())
def test_clip_value_growth_of_each_entry(rows, growth):
    out = steps(ClipValueGrowth(**growth), rows)
    flat_in, flat_out = ([a + b for a, b in table] for table in (rows, out))
    for i in range(5):
        inputs = [row[i] for row in flat_in]
        expected, _ = spec.run(spec.clip_value_growth, inputs, spec.Growth(), **plain(growth))
        assert [row[i] for row in flat_out] == close(expected, slack=1e-290)


averages = st.fixed_dictionaries(
    {
        "beta": st.sampled_from([0.0, 0.5, 0.9, 0.99]),
        "ord": st.sampled_from([1, 2, inf, "mad"]),
        "eps": st.sampled_from([0.0, 1e-6, 1.0]),
        "max_ema_growth": st.sampled_from([None, 1.0, 1.5, 10.0]),
        "ema_init": st.sampled_from(["zeros", "update"]),
    }
)


SLOW = pytest.mark.slow  # of two rules that share their code, each scope tests one quickly


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        pytest.param(ClipNormByEMA, spec.clip_norm_by_ema, id="ClipNormByEMA", marks=SLOW),
        pytest.param(NormalizeByEMA, spec.normalize_by_ema, id="NormalizeByEMA"),
    ],
)
@given(rows=strange_sequences, keys=averages)
def test_a_norm_by_ema_of_each_tensor(module, rule, rows, keys):
    out = steps(module(**keys), rows)
    for i in (0, 1):
        expected, _ = spec.run(rule, [row[i] for row in rows], spec.Average(), **keys)
        for got, want in zip(out, expected, strict=True):
            assert got[i] == close(want, slack=1e-11)


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        pytest.param(ClipNormByEMA, spec.clip_norm_by_ema, id="ClipNormByEMA"),
        pytest.param(NormalizeByEMA, spec.normalize_by_ema, id="NormalizeByEMA", marks=SLOW),
    ],
)
@given(rows=strange_sequences, keys=averages)
def test_a_norm_by_ema_over_all_tensors(module, rule, rows, keys):
    out = steps(module(**keys, dim="global"), rows)
    expected, _ = spec.run(rule, [[*a, *b] for a, b in rows], spec.Average(), **keys)
    for got, want in zip(out, expected, strict=True):
        assert got[0] + got[1] == close(want, slack=1e-11)


@given(
    rows=strange_sequences,
    beta=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    init=st.sampled_from(["zeros", "update"]),
    factor=st.sampled_from([None, 0.5, -2.0]),
)
def test_clip_value_by_ema_of_each_entry(rows, beta, init, factor):
    tfm = None if factor is None else Scale(factor)
    out = steps(ClipValueByEMA(beta, init, tfm), rows)
    expected, _ = spec.run(
        spec.clip_value_by_ema,
        [[*a, *b] for a, b in rows],
        (),
        beta=beta,
        ema_init=init,
        ema_tfm=None if factor is None else lambda ms: [factor * m for m in ms],
    )
    for got, want in zip(out, expected, strict=True):
        assert got[0] + got[1] == close(want, slack=1e-11)


# --- float32 and half precision: the spec on the numbers themselves, to the rounding of one entry


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(xs=vectors(eighths, least=1), limit=st.floats(0.1, 100), order=st.sampled_from([1, 2, inf]))
def test_other_dtypes_round_once(dtype, xs, limit, order):
    p = torch.zeros(len(xs), dtype=dtype)
    p.grad = torch.tensor(xs).to(dtype)
    given_ = p.grad.double().tolist()
    Modular([p], ClipNorm(limit, order)).step()
    expected = torch.tensor(spec.clip_by(given_, limit, order), dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(-p.double(), expected, rtol=2 * eps, atol=1e-7)
