"""Rules about whole matrices: by hand, beside exact decompositions, and in batches."""

import importlib
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.helpers import close, flat, same, stacks
from tests.modules.contract.common import Count
from torchzero_clip import (
    LR,
    Adam,
    ClipSpectral,
    EqualRows,
    InBasis,
    KLBasis,
    Kron,
    Modular,
    Momentum,
    NeuronNorm,
    Normalize,
    Orthogonalize,
    Rows,
    ScaleByShape,
    Shampoo,
    SOAPBasis,
    WeightDecay,
)
from torchzero_clip.core.description import Description
from torchzero_clip.core.sharding.owners import by_owners
from torchzero_clip.modules.matrices.batches import in_batches
from torchzero_clip.modules.matrices.newton_schulz import (
    SCHEDULES,
    by_products,
    newton_schulz,
    normalized,
    schedule_of,
)

NAN, INF = math.nan, math.inf


def out(rule, *grads):
    """What the rule makes of gradients, a parameter for each, in one step."""
    params = [(f"p{i}", Parameter(torch.zeros_like(grad))) for i, grad in enumerate(grads)]
    for (_, p), grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    Modular(params, rule, LR(1.0)).step()
    found = [-p.detach() for _, p in params]
    return found[0] if len(found) == 1 else found


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- Muon


MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it since 2.9")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def exactly(grad, coefficients, steps):
    """In float64, without a rounding."""
    a, b, c = coefficients
    x = grad.double() / grad.double().norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


@MUON
@pytest.mark.parametrize("shape", [(8, 8), (16, 5), (5, 16), (1, 7), (64, 128)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_orthogonalize_is_the_newton_schulz_of_torch(shape, size):
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * size
    p = torch.zeros(shape, requires_grad=True)
    p.grad = grad.clone()
    Modular([p], Orthogonalize()).step()
    torch.testing.assert_close(-p.detach(), exactly(grad, COEFFICIENTS, 5), **CLOSE)
    in_bfloat16 = importlib.import_module("torch.optim._muon")._zeropower_via_newtonschulz
    rounded = in_bfloat16(grad, COEFFICIENTS, 5, 1e-7).float()
    assert (-p.detach() - rounded).norm() < 0.05 * rounded.norm()


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_orthogonalize_takes_the_steps_and_coefficients_it_is_given(steps):
    grad = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    p = torch.zeros(6, 9, requires_grad=True)
    p.grad = grad.clone()
    coefficients = (2.0, -1.5, 0.5)
    Modular([p], Orthogonalize(steps, coefficients)).step()
    torch.testing.assert_close(-p.detach(), exactly(grad, coefficients, steps), **CLOSE)


def test_the_singular_values_come_near_one_and_the_vectors_stay():
    grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(4))
    p = torch.zeros(12, 20, requires_grad=True)
    p.grad = grad.clone()
    Modular([p], Orthogonalize()).step()
    u, s, v = torch.linalg.svd(-p.detach(), full_matrices=False)
    assert s.min() > 0.6
    assert s.max() < 1.3
    u0, _, v0 = torch.linalg.svd(grad, full_matrices=False)
    turned = (u0.T @ u @ torch.diag(s) @ v @ v0.T).diagonal()
    assert turned.min() > 0.6  # every singular direction is kept, with its sign


@pytest.mark.parametrize(
    ("scale", "factor"), [(None, 1.0), ("original", 2.0), ("match_rms_adamw", 0.2 * math.sqrt(16))]
)
def test_scale_depends_on_the_shape(scale, factor):
    grad = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    plain, scaled = torch.zeros(2, 16, 4).unbind()
    for p, link in ((plain, Orthogonalize()), (scaled, Orthogonalize(scale=scale))):
        p.grad = grad.clone()
        Modular([p], link).step()
    torch.testing.assert_close(scaled, plain * factor, rtol=1e-2, atol=1e-2)


def test_more_dims_count_as_first_by_rest():
    grad = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    conv, matrix = torch.zeros(6, 3, 2, 2), torch.zeros(6, 12)
    conv.grad, matrix.grad = grad, grad.view(6, 12).clone()
    for p in (conv, matrix):
        Modular([p], Orthogonalize(scale="original")).step()
    assert torch.equal(conv.view(6, 12), matrix)


def test_a_vector_is_an_error_that_names_its_shape():
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"Orthogonalize.*matrices.*\(3,\)"):
        Modular([p], Orthogonalize()).step()


def muon(grads, weights, lr, decay, nesterov, adjust):
    """Muon in float64, without a rounding: the trajectory of one matrix."""
    w, b = weights.double(), torch.zeros_like(weights, dtype=torch.float64)
    rows, columns = w.shape
    if adjust == "original":
        size = math.sqrt(max(1, rows / columns))
    else:
        size = 0.2 * math.sqrt(max(rows, columns))
    for grad in grads:
        b = 0.95 * b + grad.double()
        x = grad.double() + 0.95 * b if nesterov else b
        w = w - lr * decay * w - lr * size * exactly(x, COEFFICIENTS, 5)
        yield w


@MUON
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_momentum_and_orthogonalize_are_muon(adjust, nesterov, decay):
    """Nearer to Muon without rounding than torch's own Muon, whose errors are bfloat16's."""
    shapes = [(8, 8), (16, 6), (5, 12)]
    source = torch.Generator().manual_seed(1)
    first = [torch.randn(shape, generator=source) for shape in shapes]
    ours, theirs = [w.clone() for w in first], [w.clone() for w in first]
    links = Momentum(0.95, nesterov=nesterov), Orthogonalize(scale=adjust), WeightDecay(decay)
    a = Modular(ours, *links, LR(0.02))
    b = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.95, nesterov=nesterov, weight_decay=decay, adjust_lr_fn=adjust
    )
    gen = torch.Generator().manual_seed(0)
    grads = [[torch.randn(s, generator=gen) for s in shapes] for _ in range(30)]
    exact = zip(
        *[
            muon([row[i] for row in grads], w, 0.02, decay, nesterov, adjust)
            for i, w in enumerate(first)
        ],
        strict=True,
    )
    for row, expected in zip(grads, exact, strict=True):
        for p, q, g in zip(ours, theirs, row, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        a.step(), b.step()
        for p, q, w, w0 in zip(ours, theirs, expected, first, strict=True):
            rounding = (q - w).norm().item()
            assert rounding < 0.05 * (w - w0).norm().item()
            assert (p - w).norm().item() < 1e-3 * (w - w0).norm().item()


# --- Orthogonalize: the size of what comes in


SIZES = [1e-41, 1e-30, 1e-19, 1e-8, 1e8, 1e19, 1e30]


@pytest.mark.parametrize("shape", [(8, 8), (16, 5), (4, 64)])
def test_the_size_of_the_input_does_not_matter(shape):
    grad = drawn(*shape)
    expected = out(Orthogonalize(), grad)
    for size in SIZES:
        tolerance = 1e-3 if size > 1e-38 else 1e-2  # denormals have few digits
        close(out(Orthogonalize(), grad * size), expected, rtol=0, atol=tolerance)


def test_a_matrix_of_zeros_stays_zero_among_others():
    zero, other = out(Orthogonalize(), torch.zeros(3, 4), drawn(3, 4))
    assert not zero.any()
    same(other, out(Orthogonalize(), drawn(3, 4)))


def test_eps_is_the_smallest_norm_to_divide_by_as_in_torch():
    grad = drawn(4, 6) * 1e-9
    floored = out(Orthogonalize(1, eps=1e-7), grad)
    close(floored, 3.4445 * grad / 1e-7, rtol=2e-2)  # of what is small the linear term is left
    close(out(Orthogonalize(eps=1e-30), grad), out(Orthogonalize(), grad), rtol=0, atol=1e-5)


# --- Orthogonalize: accuracy


def spectra(short=48, long=192):
    """Matrices whose singular values are random, fall to 1e-8, and are all but five zero."""
    left = torch.linalg.qr(drawn(short, short, seed=1, dtype=torch.float64))[0]
    right = torch.linalg.qr(drawn(long, short, seed=2, dtype=torch.float64))[0]
    falling = left @ torch.diag(torch.logspace(0, -8, short, dtype=torch.float64)) @ right.T
    low = drawn(short, 5, seed=3, dtype=torch.float64) @ drawn(5, long, seed=4, dtype=torch.float64)
    return {"random": drawn(short, long, dtype=torch.float64), "falling": falling, "low": low}


@pytest.mark.parametrize("kind", spectra())
@pytest.mark.parametrize(("name", "bound"), [("quintic", 5e-4), ("polar_express", 2e-3)])
def test_float32_is_the_iteration_without_rounding_by_products_and_by_gram(name, bound, kind):
    x = normalized(spectra()[kind].unsqueeze(0))
    exact = by_products(x, SCHEDULES[name])
    for way in (by_products, newton_schulz):
        made = way(x.float(), SCHEDULES[name]).double()
        assert (made - exact).norm() < bound * exact.norm()


def test_a_long_schedule_does_not_diverge_by_gram():
    for x in spectra().values():
        made = newton_schulz(normalized(x.float().unsqueeze(0)), SCHEDULES["deepseek"])
        assert torch.linalg.svdvals(made).max() < 1.01


def test_bfloat16_moves_singular_values_by_less_than_2_percent():
    x = normalized(spectra()["random"].unsqueeze(0))
    exact = torch.linalg.svdvals(by_products(x, SCHEDULES["quintic"]))
    rounded = torch.linalg.svdvals(by_products(x.bfloat16(), SCHEDULES["quintic"]).double())
    assert (rounded - exact).abs().max() < 0.02


@pytest.mark.parametrize(
    ("name", "low", "high"), [("quintic", 0.68, 1.14), ("polar_express", 0.99, 1.01)]
)
def test_singular_values_come_into_the_published_band(name, low, high):
    """From 1e-2 of the norm on for five quintic steps, from 1e-3 on for Polar Express."""
    x = torch.logspace(-2 if name == "quintic" else -3, 0, 2000, dtype=torch.float64)
    for a, b, c in SCHEDULES[name]:
        x = a * x + b * x**3 + c * x**5
    assert low < x.min()
    assert x.max() < high


def test_smaller_singular_values_end_below_1_21_and_grow_485_times_at_most():
    x = small = torch.logspace(-12, 0, 20000, dtype=torch.float64)
    for a, b, c in SCHEDULES["quintic"]:
        x = a * x + b * x**3 + c * x**5
    assert 1.2 < x.max() < 1.21
    assert 484 < (x / small).max() < 486


def test_deepseeks_schedule_brings_singular_values_to_one():
    made = out(Orthogonalize(coefficients="deepseek"), drawn(12, 20))
    close(torch.linalg.svdvals(made), torch.ones(12), rtol=2e-3)


def test_polar_express_is_its_papers_code():
    """The safety factor of 1.01 divides the matrix, and x in every polynomial but the last."""
    x = drawn(5, 9, dtype=torch.float64)
    expected = x / (x.norm() * 1.01)
    raw = importlib.import_module("torchzero_clip.modules.matrices.newton_schulz").POLAR
    for a, b, c in [*[(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in raw[:-1]], raw[-1]]:
        gram = expected @ expected.T
        expected = a * expected + (b * gram + c * gram @ gram) @ expected
    close(out(Orthogonalize(coefficients="polar_express"), x), expected, rtol=1e-9, atol=1e-9)


def test_triples_are_taken_one_a_step_and_the_last_repeats():
    a, b = (2.0, -1.5, 0.5), (1.5, -0.5, 0.0)
    assert schedule_of((a, b), None) == [a, b]
    assert schedule_of((a, b), 4) == [a, b, b, b]
    assert schedule_of((a, b), 1) == [a]
    assert schedule_of(a, None) == [a] * 5
    assert len(schedule_of("quintic", None)) == 5
    assert len(schedule_of("deepseek", None)) == 10


def test_double_precision_is_used_for_double_parameters():
    grad = drawn(6, 9, dtype=torch.float64)
    exact = by_products(normalized(grad.unsqueeze(0)), SCHEDULES["quintic"])[0]
    close(out(Orthogonalize(), grad), exact, rtol=1e-12, atol=1e-12)


# --- Orthogonalize: batches, stacks, blocks


def products(*grads, rule=None):
    """The calls of matrix products in a step."""
    params = [Parameter(torch.zeros_like(grad)) for grad in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    opt = Modular(params, rule or Orthogonalize())
    opt.step()
    with Count() as counter:
        opt.step()
    return {name: n for name, n in counter.calls.items() if "mm" in name}


def test_74_equal_matrices_are_one_chain_of_products():
    one, many = products(drawn(8, 12)), products(*drawn(74, 8, 12).unbind())
    assert many == one
    assert sum(one.values()) == 15  # five steps of three


@pytest.mark.parametrize(("device", "calls"), [("meta", [74]), ("cpu", [8] * 9 + [2])])
def test_large_equal_matrices_are_one_call_too_but_on_cpu_as_many_as_fit_into_the_cache(
    device, calls
):
    found = []

    def function(x):
        found.append(len(x))
        return x

    in_batches([torch.empty(1, 256, 256, device=device)] * 74, function)
    assert found == calls


def test_a_tall_matrix_goes_with_those_that_lie():
    assert products(drawn(8, 12), drawn(12, 8), drawn(8, 3, 2, 2)) == products(drawn(8, 12))


def test_a_batch_gives_what_each_matrix_gives_alone():
    grads = [drawn(5, 7, seed=1), drawn(7, 5, seed=2), drawn(5, 7, seed=3), drawn(2, 40, seed=4)]
    for made, grad in zip(out(Orthogonalize(), *grads), grads, strict=True):
        close(made, out(Orthogonalize(), grad), rtol=0, atol=1e-6)


def test_a_nan_stays_in_its_matrix():
    grads = drawn(3, 4, 6)
    grads[1, 0, 0] = NAN
    first, sick, last = out(Orthogonalize(), *grads.unbind())
    assert sick.isnan().all()
    same([first, last], [out(Orthogonalize(), grads[0]), out(Orthogonalize(), grads[2])])


def test_a_tensor_of_three_dims_must_be_declared():
    grad = drawn(3, 4, 5)
    stacked = out(Orthogonalize(scale="original", layout=stacks), grad)
    close(list(stacked), [out(Orthogonalize(scale="original"), g) for g in grad], atol=1e-6)
    one = out(Orthogonalize(layout=flat), grad)
    close(one, out(Orthogonalize(), grad.flatten(1)).view(3, 4, 5), atol=1e-6)


RULES = [
    Orthogonalize(),
    ClipSpectral(1.0),
    EqualRows(),
    NeuronNorm(),
    ScaleByShape(),
    Rows(0.5, Orthogonalize()),
    Kron(),
    Shampoo(),
    InBasis(SOAPBasis(), Adam()),
    InBasis(KLBasis(), Adam()),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(list(rule.walk())[-1]).__name__)
def test_three_dims_without_a_layout_are_an_error_that_tells_how_to_declare_them(rule):
    p = Parameter(torch.zeros(3, 4, 5))
    p.grad = drawn(3, 4, 5)
    words = r"experts of shape \(3, 4, 5\) may be a stack of matrices or one matrix: write layout="
    for engine in ({"fused": False}, {}, {"compile": True}):
        with pytest.raises(ValueError, match=words):
            Modular([("experts", p)], rule, LR(1.0), **engine).step()
    assert not p.any()


def test_every_rule_with_a_layout_is_tested_without_one():
    inside = {type(one) for rule in RULES for one in rule.walk()}
    known = {c for c in Description.registry.values() if "layout" in c.__dataclass_fields__}
    assert {c for c in known if c.__module__.startswith("torchzero_clip.")} == {
        c for c in inside if "layout" in c.__dataclass_fields__
    }


# --- EqualRows


def test_equal_rows_by_hand():
    made = out(EqualRows(), torch.tensor([[3.0, 4.0], [0.0, 0.5]]))
    close(made, torch.tensor([[2.131901, 2.842534], [0.0, 3.553168]]))


def test_equal_rows_keeps_the_norm_and_leaves_rows_of_zeros():
    grad = drawn(5, 3, 2, 2)
    grad[2] = 0
    made = out(EqualRows(), grad)
    assert not made[2].any()
    close(made.flatten(1).norm(dim=1)[[0, 1, 3, 4]], (grad.norm() / 5**0.5).expand(4))


def test_equal_rows_of_a_stack_are_those_of_each_matrix():
    grad = drawn(3, 4, 5)
    made = out(EqualRows(layout=stacks), grad)
    close(list(made), [out(EqualRows(), g) for g in grad])
    close(out(EqualRows(layout=flat), grad), out(EqualRows(), grad.flatten(1)).view(3, 4, 5))


# --- NeuronNorm


def test_neuron_norm_by_hand():
    made = out(NeuronNorm(), torch.diag(torch.tensor([1.0, 0.5])))
    close(made, torch.eye(2) * 0.790569)


def neuron_norm(grads, beta, along):
    """In float64, from the formula."""
    v = torch.zeros(())
    for grad in grads:
        u = grad.double()
        v = beta * v + (1 - beta) * u.square().mean(dim=along, keepdim=True)
        n = u / (v.sqrt() + 1e-8)
        yield n * u.norm() / n.norm()


@pytest.mark.parametrize(
    ("neurons", "shape", "along"), [("rows", (4, 7), 1), ("longer", (4, 7), 0)]
)
def test_neuron_norm_is_its_formula(neurons, shape, along):
    p = Parameter(torch.zeros(shape))
    opt = Modular([p], NeuronNorm(0.8, neurons=neurons), LR(1.0))
    grads = [drawn(*shape, seed=i) * (i + 1) for i in range(5)]
    for grad, expected in zip(grads, neuron_norm(grads, 0.8, along), strict=True):
        p.data.zero_()
        p.grad = grad
        opt.step()
        close(-p.detach(), expected.float(), rtol=1e-5)


def test_neuron_norm_of_a_stack_is_that_of_each_matrix():
    grad = drawn(3, 4, 5)
    made = out(NeuronNorm(layout=stacks), grad)
    close(list(made), [out(NeuronNorm(), g) for g in grad])


def test_neuron_norm_keeps_a_number_a_neuron():
    p = Parameter(torch.zeros(4, 7))
    p.grad = drawn(4, 7)
    opt = Modular([p], NeuronNorm(), LR(1.0))
    opt.step()
    (rms,) = opt.state[p].values()
    assert rms.shape == (4, 1)
    close(rms, (0.05 * p.grad.square().mean(dim=1, keepdim=True)).sqrt())


# --- ClipSpectral


def clipped(grad, limit):
    """The definition, in float64."""
    u, s, v = torch.linalg.svd(grad.double(), full_matrices=False)
    return u @ torch.diag(s.clamp(max=limit)) @ v


def test_clip_spectral_by_hand():
    close(
        out(ClipSpectral(1.0), torch.diag(torch.tensor([3.0, 0.5]))),
        torch.diag(torch.tensor([1.0, 0.5])),
    )


@pytest.mark.parametrize("kind", spectra())
@pytest.mark.parametrize("share", [1e-6, 1e-3, 0.1, 0.7])
def test_clip_spectral_is_the_singular_value_decomposition_to_2e_6_of_the_largest(kind, share):
    for x in (spectra()[kind], spectra()[kind].T):
        largest = torch.linalg.svdvals(x).max().item()
        made = out(ClipSpectral(share * largest), x.float())
        exact = clipped(x.float(), share * largest)
        assert torch.linalg.matrix_norm(made.double() - exact, 2) < 2e-6 * largest
        again = out(ClipSpectral(share * largest), x)  # in float64
        assert torch.linalg.matrix_norm(again - clipped(x, share * largest), 2) < 1e-9 * largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clip_spectral_holds_its_limit_however_large_a_matrix_is(dtype):
    """Also where it is far below the rounding of the largest singular value."""
    u, _, v = torch.linalg.svd(drawn(8, 12).double(), full_matrices=False)
    values = {
        "alike": torch.linspace(1, 2, 8),
        "graded": torch.logspace(0, -11, 8),
        "one": torch.tensor([1.0] + [0.0] * 7),
    }
    for kind, size in itertools.product(values, (1e3, 4e6, 6e10, 1e20, 1e30)):
        x = (u @ torch.diag(values[kind].double() * size) @ v).to(dtype)
        for grad in (x, x.mT):
            made = out(ClipSpectral(1.0), grad)
            assert torch.linalg.svdvals(made.double()).max() < 1 + 1e-6
            if kind != "one" or dtype == torch.float32:  # else they come from rounding
                assert torch.linalg.matrix_norm(made - clipped(grad, 1.0), 2) < 1e-5


def test_clip_spectral_leaves_what_is_within_the_limit_bit_for_bit():
    grads = [drawn(6, 4), torch.zeros(3, 3), drawn(5, 5) * 1e-30]
    for limit in (100.0, INF):
        same(out(ClipSpectral(limit), *grads), grads)


@pytest.mark.parametrize("size", [1e-30, 1e20])
def test_clip_spectral_of_tiny_and_huge_matrices(size):
    grad = drawn(5, 8)
    close(out(ClipSpectral(2.0 * size), grad * size) / size, clipped(grad, 2.0).float(), rtol=1e-5)


def test_clip_spectral_with_a_limit_of_zero_gives_zeros():
    assert out(ClipSpectral(0.0), drawn(4, 6)).count_nonzero() == 0


def test_clip_spectral_does_not_hide_nan_and_infinity_and_keeps_them_in_their_matrix():
    for bad in (NAN, INF):
        grads = drawn(2, 3, 4)
        grads[0, 0, 0] = bad
        sick, other = out(ClipSpectral(0.5), *grads.unbind())
        assert sick.isnan().any()
        same(other, out(ClipSpectral(0.5), grads[1]))


# --- Normalize(per_shape=...)


def test_muon_plus_by_hand():
    made = out(Normalize(per_shape="sqrt_min"), torch.diag(torch.tensor([0.8, 1.1])))
    close(made, torch.diag(torch.tensor([0.831800, 1.143726])))


@pytest.mark.parametrize(
    ("shape", "dim", "least", "rows"),
    [
        ((6, 4), None, 4, 6),
        ((4, 6), None, 4, 4),
        ((5, 2, 2, 2), None, 5, 5),
        ((7,), None, 1, 7),
        ((), None, 1, 1),
        ((6, 4), (-2, -1), 4, 6),
    ],
)
def test_the_norm_follows_the_shape(shape, dim, least, rows):
    for per_shape, n in (("sqrt_min", least), ("sqrt_rows", rows)):
        made = out(Normalize(2.0, dim=dim, per_shape=per_shape), drawn(*shape))
        close(made.norm(), torch.tensor(2.0 * n**0.5))


def test_each_matrix_of_a_stack_has_its_own_norm():
    made = out(Normalize(dim=(-2, -1), per_shape="sqrt_min"), drawn(3, 4, 5), drawn(2, 9))
    close(made[0].norm(dim=(1, 2)), torch.full((3,), 2.0))
    close(made[1].norm(), torch.tensor(2.0**0.5))


# --- the rules together


def test_matrix_rules_agree_with_a_network_in_channels_last():
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    grad = drawn(8, 3, 3, 3)
    model.weight.grad = grad.contiguous(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    Modular([model.weight], EqualRows(), Orthogonalize(), NeuronNorm(), LR(1.0)).step()
    p = Parameter(torch.zeros(8, 27))
    p.grad = grad.flatten(1)
    Modular([p], EqualRows(), Orthogonalize(), NeuronNorm(), LR(1.0)).step()
    close((model.weight - before).detach().flatten(1), p.detach(), rtol=1e-4, atol=1e-5)


def test_a_whole_matrix_beside_sharded_ones_is_not_written_to() -> None:
    gradient = torch.ones(2, 2)
    (made,) = by_owners([[gradient]], [None], [None], lambda _, whole: [t.mul_(2) for t in whole])
    assert made.tolist() == [[2, 2], [2, 2]]
    assert gradient.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("rows", [(6, 2), (4, 4)])
def test_scale_by_shape_scales_each_matrix_of_a_fused_weight(rows: tuple[int, int]) -> None:
    """Also if a second parameter has a single matrix."""
    gradient = torch.randn(8, 3)
    fused = torch.nn.Parameter(torch.zeros(8, 3))
    plain = torch.nn.Parameter(torch.zeros(5, 3))
    fused.grad = gradient.clone()
    plain.grad = torch.ones(5, 3)
    rule = ScaleByShape(layout={"fused": list(rows)})
    Modular([("fused", fused), ("plain", plain)], rule, LR(1.0)).step()
    factors = [math.sqrt(n / 3) for n in rows]
    scaled = [x * part for x, part in zip(factors, gradient.split(list(rows)), strict=True)]
    torch.testing.assert_close(fused.detach(), -torch.cat(scaled))
    torch.testing.assert_close(plain.detach(), -math.sqrt(5 / 3) * torch.ones(5, 3))
