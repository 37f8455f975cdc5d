"""Kron; that it is PSGD Kron is held by the official package, in `identities`."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.core.test_authors import both_engines, drawn, saved
from tests.helpers import stacks
from torchzero_clip import (
    LR,
    ClipNorm,
    ClipRMS,
    Guard,
    Kron,
    Modular,
    WeightDecay,
    attach,
    named,
    release,
)
from torchzero_clip.audit import Ledger, fake_cuda, twin
from torchzero_clip.modules.matrices import whitening
from torchzero_clip.source import SourceError

SHAPES = {
    "wide": (3, 5),
    "tall": (6, 2),
    "square": (4, 4),
    "row": (1, 5),
    "column": (5, 1),
    "bias": (4,),
    "number": (),
    "no": (0, 3),
}


def model(dtype=torch.float64, shapes=SHAPES) -> dict[str, Parameter]:
    return {n: Parameter(drawn(shape, i, dtype)) for i, (n, shape) in enumerate(shapes.items())}


def give(params, step: int) -> None:
    for i, p in enumerate(params.values()):
        p.grad = drawn(p.shape, 100 * (step + 1) + i, p.dtype)


def held(opt, p) -> dict[str, Tensor]:
    return {k.removeprefix("Kron/"): t for k, t in opt.state[p].items() if k.startswith("Kron/")}


def steps(opt, params, *numbers: int) -> None:
    for step in numbers:
        give(params, step)
        opt.step()


# ---------------------------------------------------------------------- the formula


def test_a_vector_by_hand(monkeypatch):
    """m̂ = g, a = q g, b = 1 / q for noise of ones; q ← q - 0.5 q (a² - b²) / max(a² + b²)"""
    monkeypatch.setattr(whitening, "normal", lambda like, count: torch.ones_like(like))
    monkeypatch.setattr(whitening, "DAMPING", 0.0)
    p = Parameter(torch.zeros(2, dtype=torch.float64))
    opt = Modular([p], Kron(precond_lr=0.5, eps=0.0), LR(1.0))
    p.grad = torch.tensor([3.0, 1.0], dtype=torch.float64)
    opt.step()  # a² = 9, 1 and b² = 1, 1, at most 10 together
    q = [1 - 0.5 * 8 / 10, 1.0]
    torch.testing.assert_close(held(opt, p)["left"].tolist(), q)
    torch.testing.assert_close((-p).tolist(), [0.36 * 3, 1.0])
    p.grad = torch.tensor([0.0, 5.0], dtype=torch.float64)
    opt.step()
    m = [0.9 * 0.3 / 0.19, (0.9 * 0.1 + 0.5) / 0.19]
    a, b = [q[0] * m[0], m[1]], [1 / q[0], 1.0]
    most = max(x * x + y * y for x, y in zip(a, b, strict=True))
    q = [z - 0.5 * z * (x * x - y * y) / most for x, y, z in zip(a, b, q, strict=True)]
    torch.testing.assert_close(held(opt, p)["left"].tolist(), q)


@pytest.mark.parametrize("diagonal", [None, "longer", "all"])
def test_it_multiplies_by_a_kronecker_product(diagonal):
    """vec(u) ← (Qₗᵀ Qₗ ⊗ Qᵣᵀ Qᵣ) vec(m̂)"""
    rule, g = Kron(0.0, diagonal=diagonal, precond_lr=0.5), drawn((3, 4), 0, torch.float64)
    p = Parameter(torch.zeros(3, 4, dtype=torch.float64))
    opt = Modular([p], rule, LR(1.0))
    for step in range(4):
        p.grad = drawn((3, 4), step, torch.float64)
        before = p.detach().clone()
        opt.step()
    g = p.grad
    left, right = [torch.diag(q) if q.dim() == 1 else q for q in factors(opt, p)]
    product = torch.kron(left.T @ left, right.T @ right)
    torch.testing.assert_close((before - p).flatten(), product @ g.flatten())


def factors(opt, p) -> list[Tensor]:
    return [held(opt, p)["left"], held(opt, p)["right"]]


@pytest.mark.parametrize(("shape", "full"), [((4, 3), None), ((6,), "vector")])
def test_what_comes_out_is_white(shape, full):
    """Gradients L z R of white z leave with a covariance near one, whatever L and R are."""
    rows, columns = shape if full is None else (*shape, 1)
    left = drawn((rows, rows), 1, torch.float64) * 3
    right = drawn((columns, columns), 2, torch.float64)
    left = left if full is None else left.diagonal().diag()  # a diagonal factor knows no other
    p = Parameter(torch.zeros(shape, dtype=torch.float64))
    opt, seen = Modular([p], Kron(0.0, every=1), LR(1.0)), []
    for step in range(350):
        opt.param_groups[0]["precond_lr"] = 0.3 if step < 100 else 0.03
        p.grad = (left @ drawn((rows, columns), step + 10, torch.float64) @ right).view(shape)
        opt.step()
        if step >= 150:
            seen.append(-p.detach().flatten())
        p.data.zero_()
    made = torch.stack(seen)
    covariance = made.T @ made / len(seen)
    off = torch.linalg.matrix_norm(covariance - torch.eye(rows * columns), 2)
    before = torch.kron(left @ left.T, right.T @ right)
    assert torch.linalg.cond(before) > 20
    assert off < 1


def test_factors_are_triangles_with_one_largest_entry():
    params = model()
    opt = Modular(params.values(), Kron(every=1, initial=5.0), LR(0.01))
    steps(opt, params, *range(20))
    for name in ("wide", "tall", "square"):
        left, right = factors(opt, params[name])
        assert torch.equal(left, left.triu())
        assert torch.equal(right, right.triu())
        torch.testing.assert_close(left.abs().max(), right.abs().max())


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({}, [((3, 3), (5, 5)), ((6, 6), (2, 2)), ((4, 4), (4, 4)), ((1,), (5, 5))]),
        ({"diagonal": "longer"}, [((3, 3), (5,)), ((6,), (2, 2)), ((4, 4), (4, 4)), ((1,), (5,))]),
        ({"diagonal": "one"}, [((3, 3), (5,)), ((6,), (2, 2)), ((4, 4), (4,)), ((1,), (5,))]),
        ({"diagonal": "all"}, [((3,), (5,)), ((6,), (2,)), ((4,), (4,)), ((1,), (5,))]),
        ({"max_dim": 4}, [((3, 3), (5,)), ((6,), (2, 2)), ((4, 4), (4, 4)), ((1,), (5,))]),
    ],
)
def test_long_sides_and_those_that_are_chosen_have_diagonals(options, shapes):
    params = model()
    opt = Modular(params.values(), Kron(**options, initial=4.0), LR(0.01))
    opt.init_state()
    for name, wanted in zip(("wide", "tall", "square", "row"), shapes, strict=True):
        found = factors(opt, params[name])
        assert tuple(tuple(q.shape) for q in found) == wanted
        assert all(q.max() == 2 for q in found)
    assert held(opt, params["bias"])["left"].tolist() == [4.0] * 4
    assert "right" not in held(opt, params["bias"])
    assert not held(opt, params["no"])


# ---------------------------------------------------------------------- the noise and the steps


def test_noise_is_normal_and_another_in_every_step():
    like = torch.zeros(200, 300)
    one, other = [whitening.normal(like, torch.tensor([float(n)])) for n in (3, 4)]
    assert abs(one.mean()) < 0.02
    assert abs(one.var() - 1) < 0.03
    assert abs(one.pow(4).mean() - 3) < 0.1
    for a, b in ((one, other), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1])):
        assert abs((a * b).mean()) < 0.02
    assert torch.equal(one, whitening.normal(like, torch.tensor([3.0])))
    steps_of_one = torch.stack(
        [whitening.normal(like[:1, :2], torch.ones(1) * n) for n in range(999)]
    )
    assert abs(steps_of_one.mean()) < 0.1
    assert abs(steps_of_one.var() - 1) < 0.1


def test_factors_learn_as_often_as_in_the_official_code():
    """Its counter begins anew in a step at whose share of steps it has arrived."""
    counter, wanted = 0, []
    for n in range(9000):
        share = min(max(math.exp(-0.001 * (n - 500)), 0.03), 1.0)
        counter += 1
        wanted.append(counter >= 1 / share)
        counter = 0 if wanted[-1] else counter
    assert [Kron().is_due(n) for n in range(9000)] == wanted
    assert all(wanted[:501])
    assert sum(wanted[501:4100]) == 760
    assert [Kron(every=3).is_due(n) for n in range(4)] == [True, False, False, True]


def test_between_two_lessons_factors_stay_and_the_average_moves():
    params = model()
    opt, p = Modular(params.values(), Kron(every=3, stagger=False), LR(0.01)), params["wide"]
    for step in range(7):
        before = copy.deepcopy(held(opt, p)) if step else {}
        steps(opt, params, step)
        if step:
            moved = [not torch.equal(before[n], held(opt, p)[n]) for n in ("left", "exp_avg")]
            assert moved == [step % 3 == 0, True]


def test_a_stack_of_matrices_learns_as_each_of_them():
    """The functions take leading dims, so that equal matrices may learn in one call."""
    rule = Kron(diagonal="longer")
    states, group = [], {"beta": 0.5, "precond_lr": 0.3, "eps": 1e-6}
    for i in range(3):
        state = rule.init_matrix(3, 5)
        state |= rule.observe_matrix(drawn((3, 5), i), state, group)
        states.append(state)
    stack = {name: torch.stack([s[name] for s in states]) for name in states[0]}
    for _ in range(3):
        new, every = rule.refresh_matrix(stack, group), torch.zeros(3, 3, 5)
        for i, state in enumerate(states):
            state |= rule.refresh_matrix(state, group)
            torch.testing.assert_close(new["left"][i], state["left"])
            torch.testing.assert_close(new["right"][i], state["right"])
            every[i] = rule.update_tensor(torch.zeros(3, 5), state, group)
        stack |= new
        torch.testing.assert_close(rule.update_tensor(torch.zeros(3, 3, 5), stack, group), every)


# ---------------------------------------------------------------------- what is a matrix


def test_blocks_are_matrices_of_their_own():
    options = {"layout": {"w": [2, 4], "b": [3, 3]}}
    whole = model(shapes={"w": (6, 4), "b": (6,)})
    parts = model(shapes={"w0": (2, 4), "w1": (4, 4), "b0": (3,), "b1": (3,)})
    pieces = lambda get: [*get(whole["w"]).split([2, 4]), *get(whole["b"]).split(3)]  # noqa: E731
    for p, piece in zip(parts.values(), pieces(lambda p: p.data), strict=True):
        p.data.copy_(piece)
    opt = Modular(whole.items(), Kron(every=2, **options), LR(0.01))
    other = Modular(parts.values(), Kron(every=2), LR(0.01))
    for step in range(10):
        give(whole, step)
        for p, piece in zip(parts.values(), pieces(lambda p: p.grad), strict=True):
            p.grad = piece
        opt.step()
        other.step()
    for p, piece in zip(parts.values(), pieces(lambda p: p.data), strict=True):
        torch.testing.assert_close(p.data, piece)
    again = Modular(whole.items(), Kron(every=2, **options), LR(0.01))
    again.load_state_dict(saved(opt))
    again.step()


def test_a_stack_is_many_matrices_and_more_dims_are_first_by_rest():
    stack = {"w": Parameter(drawn((3, 2, 4), 0, torch.float64))}
    parts = {f"w{i}": Parameter(t.clone()) for i, t in enumerate(stack["w"].detach())}
    opt = Modular(stack.values(), Kron(every=2, layout=stacks), LR(0.01))
    other = Modular(parts.values(), Kron(every=2), LR(0.01))
    for step in range(8):
        give(stack, step)
        for p, grad in zip(parts.values(), stack["w"].grad, strict=True):
            p.grad = grad
        opt.step()
        other.step()
    torch.testing.assert_close(stack["w"].detach(), torch.stack([*parts.values()]).detach())
    kernel = Parameter(torch.ones(2, 3, 2, 2))
    opt = Modular([kernel], Kron(), LR(0.01))
    opt.init_state()
    assert [tuple(q.shape) for q in factors(opt, kernel)] == [(2, 2), (12, 12)]
    with pytest.raises(ValueError, match=r"Kron: .*layout=.* for 3 matrices of 2 x 4"):
        Modular(stack.values(), Kron(), LR(0.01)).init_state()


def test_a_column_is_a_row():
    column, row = [Parameter(drawn((5,), 0, torch.float64).view(s)) for s in ((5, 1), (1, 5))]
    opt, other = [Modular([p], Kron(every=2), LR(0.01)) for p in (column, row)]
    for step in range(6):
        row.grad = drawn((1, 5), step, torch.float64)
        column.grad = row.grad.T.contiguous()
        opt.step()
        other.step()
    assert torch.equal(column.T, row)
    assert [tuple(q.shape) for q in factors(opt, column)] == [(1,), (5, 5)]
    opt = Modular([("w", column)], Kron(layout={"w": [2, 3]}), LR(0.01))
    opt.init_state()
    kept = {name: tuple(q.shape) for name, q in held(opt, column).items() if "ight" in name}
    assert kept == {"right": (2, 2), "right_2": (3, 3)}


# ---------------------------------------------------------------------- troubles


@pytest.mark.parametrize("kind", ["zero", "rank one"])
def test_zero_and_rank_one_matrices(kind):
    p = Parameter(drawn((4, 6), 0))
    opt, column, row = (
        Modular([p], Kron(), ClipRMS(1.1), LR(0.01)),
        drawn((4, 1), 1),
        drawn((1, 6), 2),
    )
    for step in range(60):
        p.grad = column @ row * (step + 1) if kind == "rank one" else torch.zeros(4, 6)
        before = p.detach().clone()
        opt.step()
        moved = p - before
        assert moved.isfinite().all()
        assert bool(moved.any()) is (kind != "zero")
        if kind == "rank one":
            assert (moved * p.grad).sum() < 0
    assert opt.metrics()["Kron/kept"] == 0


def test_where_no_gradient_came_for_long_factors_stop_at_eps():
    """Without it they would grow by half in each step until they are infinite."""
    p = Parameter(torch.ones(3, 4))
    opt = Modular([p], Kron(precond_lr=0.5, every=1, eps=1e-6), ClipRMS(1.1), LR(0.01))
    for step in range(150):
        p.grad = torch.zeros(3, 4)
        opt.step()
        if step in (74, 149):
            left, right = factors(opt, p)
            product = left.square().max() * right.square().max()
            assert 1e5 < product < 1e8
    before = p.detach().clone()
    p.grad = drawn((3, 4), 0)
    opt.step()
    assert (p - before).abs().max() < 0.1
    assert opt.metrics()["Kron/kept"] == 0


@both_engines
def test_nothing_learns_from_a_nan(compile):
    params = model(torch.float32)
    opt = Modular(params.values(), Kron(every=2), LR(0.01), compile=compile)
    for step in range(6):
        give(params, step)
        if step == 3:
            params["wide"].grad[1, 2] = torch.nan
            before = {n: copy.deepcopy(held(opt, params[n])) for n in ("wide", "tall")}
        opt.step()
        if step == 3:
            for name in ("step", "exp_avg", "left"):
                assert torch.equal(before["wide"][name], held(opt, params["wide"])[name])
            assert not torch.equal(before["tall"]["exp_avg"], held(opt, params["tall"])["exp_avg"])
            assert opt.metrics()["Kron/kept"] == 1
    assert all(p.isfinite().all() for p in params.values())


@both_engines
def test_behind_a_guard_a_bad_step_is_none(compile):
    params, others = model(torch.float32), model(torch.float32)
    chain = Guard(), ClipNorm(1.0, dim="global"), Kron(every=2), WeightDecay(0.1), LR(0.01)
    opt, other = [Modular(some.values(), *chain, compile=compile) for some in (params, others)]
    for step in range(8):
        give(params, step)
        if step in (0, 3, 4):
            params["tall"].grad[0] = torch.nan
        opt.step()
        if step not in (0, 3, 4):
            give(others, step)
            other.step()
    for name, p in params.items():
        assert torch.equal(p, others[name])


def test_a_lesson_that_fails_leaves_the_factors(monkeypatch):
    params = model(torch.float32)
    opt, p = Modular(params.values(), Kron(every=1), LR(0.01)), params["square"]
    steps(opt, params, 0, 1)
    before = copy.deepcopy(held(opt, p))
    broken = lambda a, b, **options: b * torch.nan  # noqa: E731
    monkeypatch.setattr(torch.linalg, "solve_triangular", broken)
    steps(opt, params, 2)
    monkeypatch.undo()
    assert opt.metrics()["Kron/kept"] == 5
    assert torch.equal(before["left"], held(opt, p)["left"])
    assert not torch.equal(before["exp_avg"], held(opt, p)["exp_avg"])
    steps(opt, params, 3)
    assert all(p.isfinite().all() for p in params.values())


def test_small_parameters_are_whitened_in_float32():
    """Rounding of the parameter apart, it is the step of the same numbers in float32."""
    small, large = [
        Parameter(drawn((4, 6), 0).bfloat16().to(t)) for t in (torch.bfloat16, torch.float)
    ]
    opts = [Modular([p], named("kron", lr=1e-2)) for p in (small, large)]
    for step in range(9):
        grad = drawn((4, 6), step + 1).bfloat16()
        for p, opt in zip((small, large), opts, strict=True):
            p.grad = grad.to(p.dtype)
            opt.step()
    for a, b in zip(factors_of(opts[0], small), factors_of(opts[1], large), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def factors_of(opt, p) -> list[Tensor]:
    return [t for k, t in opt.state[p].items() if k.endswith(("/left", "/right", "/exp_avg"))]


# ---------------------------------------------------------------------- around it


def test_release_steps_as_the_optimizer_does_and_attach_takes_it():
    net, other, plain = [
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)) for _ in "abc"
    ]
    other.load_state_dict(net.state_dict())
    plain.load_state_dict(net.state_dict())
    chain = Kron(every=2), LR(0.01)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.01)
    attach(sgd, Kron(every=2))
    opts = Modular(net.parameters(), *chain), release(other, *chain), sgd
    for step in range(8):
        x = drawn((8, 4), step)
        for m, opt in zip((net, other, plain), opts, strict=True):
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()
    for p, q, r in zip(net.parameters(), other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, r)


def test_a_resumed_run_goes_on_to_the_bit():
    params = model(torch.float32)
    opt = Modular(params.values(), Kron(every=2), LR(0.01))
    steps(opt, params, *range(5))
    others = {n: Parameter(p.detach().clone()) for n, p in params.items()}
    other = Modular(others.values(), Kron(every=2), LR(0.01))
    other.load_state_dict(saved(opt))
    for some, one in ((params, opt), (others, other)):
        steps(one, some, *range(5, 11))
    assert all(torch.equal(p, others[n]) for n, p in params.items())


def test_a_count_that_is_no_tensor_is_refused_in_a_sentence():
    params = model(torch.float32)
    opt = Modular(params.values(), Kron(), LR(0.01))
    steps(opt, params, 0)
    checkpoint = saved(opt)
    checkpoint["state"][0]["Kron/step"] = 3.0
    words = "the checkpoint has 3.0 for 'Kron/step' of parameter 0, .*a tensor of shape .1,."
    with pytest.raises(ValueError, match=words):
        opt.load_state_dict(checkpoint)


@both_engines
def test_engines_agree(compile):
    params, others = model(torch.float32), model(torch.float32)
    opt = Modular(params.values(), named("kron", lr=0.01, weight_decay=0.1), compile=compile)
    other = Modular(others.values(), named("kron", lr=0.01, weight_decay=0.1), fused=False)
    steps(opt, params, *range(6))
    steps(other, others, *range(6))
    for name, p in params.items():
        torch.testing.assert_close(p, others[name])


@pytest.mark.skipif(torch.__version__ < "2.9", reason="fake CUDA tensors need torch 2.9")
def test_nothing_waits():
    few = {name: SHAPES[name] for name in ("wide", "column", "bias")}
    with fake_cuda():
        params = twin(model(torch.float32, few).values())
        opt = Modular(params, ClipNorm(1.0), Kron(every=2), WeightDecay(0.1), LR(0.01))
        for _ in range(3):
            with Ledger() as ledger:
                opt.step()
            assert (ledger.reads, ledger.copies, ledger.waits) == ([], [], [])


def test_the_plan_and_the_file():
    opt = Modular(model(torch.float32).values(), named("kron"))
    first = (
        "Kron: each matrix is refreshed in each of the first 501 steps, then less and less often"
    )
    assert f"{first}, and finally every 34 steps, in a separate computation" in opt.explain()
    rare = Modular(model(torch.float32).values(), Kron(every=9, stagger=True), LR(0.1))
    assert "refreshed in the first step and every 9 steps, at different steps" in rare.explain()
    with pytest.raises(SourceError, match="Kron"):
        opt.to_source()


def test_the_default_dtype_does_not_round_the_first_factors():
    factors = []
    for dtype in (torch.float32, torch.bfloat16):
        params = model(torch.float32, {"matrix": (4, 3), "bias": (5,)})
        opt = Modular(params.values(), Kron(initial=0.3), LR(0.1))
        give(params, 0)
        torch.set_default_dtype(dtype)
        try:
            opt.init_state()
        finally:
            torch.set_default_dtype(torch.float32)
        factors.append([held(opt, p) for p in params.values()])
    torch.testing.assert_close(factors[1], factors[0], rtol=0, atol=0)
