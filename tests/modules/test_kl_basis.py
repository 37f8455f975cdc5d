"""KLBasis; that it is KL-SOAP is held by its authors' code, in `identities`."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.core.test_authors import drawn
from torchzero_clip import LR, Adam, InBasis, KLBasis, Modular, named

ROWS, COLUMNS, BETA = 3, 5, 0.75


def begun(rule: KLBasis, seed: int) -> dict[str, Tensor]:
    """State of a matrix whose bases are orthonormal and whose λ are what they may be."""
    state = {n: t.double() for n, t in rule.init_matrix(ROWS, COLUMNS).items()}
    for i, name in enumerate(state):
        shape, begin = state[name].shape, seed + 10 * i
        if name.endswith("_basis"):
            state[name] = torch.linalg.qr(drawn(shape, begin, torch.float64)).Q
        elif name.endswith("_values"):
            state[name] = drawn(shape, begin, torch.float64).abs() + 0.5
        else:
            x = drawn(shape, begin, torch.float64)
            state[name] = x @ x.mT
    return state


def inverse(state: dict[str, Tensor], side: str, n: int) -> Tensor:
    """Q diag(1 / λ) Qᵀ, or the identity where a side has no basis."""
    if f"{side}_basis" not in state:
        return torch.eye(n, dtype=torch.float64)
    q = state[f"{side}_basis"]
    return q @ torch.diag(1 / state[f"{side}_values"]) @ q.mT


@pytest.mark.parametrize("max_dim", [9, 4])
def test_each_side_learns_what_the_other_has_whitened(max_dim):
    """L ← β L + (1-β) u R⁻¹ uᵀ / n; λ ← β λ + (1-β) diag(Qₗᵀ u R⁻¹ uᵀ Qₗ) / n, and the same of R"""
    rule = KLBasis(BETA, max_dim=max_dim)
    state, u = begun(rule, 1), drawn((ROWS, COLUMNS), 2, torch.float64)
    whitened = {
        "left": u @ inverse(state, "right", COLUMNS) @ u.mT / COLUMNS,
        "right": u.mT @ inverse(state, "left", ROWS) @ u / ROWS,
    }
    sides = ["left"] if max_dim < COLUMNS else ["left", "right"]
    wanted = {}
    for side in sides:
        q, seen = state[f"{side}_basis"], whitened[side]
        wanted[side] = BETA * state[side] + (1 - BETA) * seen
        now = (q.mT @ seen @ q).diagonal()
        wanted[f"{side}_values"] = BETA * state[f"{side}_values"] + (1 - BETA) * now
    made = rule.observe_matrix(u, state, {"beta": BETA})
    assert made.keys() == wanted.keys()
    for name, t in wanted.items():
        torch.testing.assert_close(made[name], t, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_dim", [9, 4])
def test_a_stack_learns_as_each_of_its_matrices(max_dim):
    rule = KLBasis(BETA, max_dim=max_dim)
    states = [begun(rule, 100 * i) for i in range(3)]
    u = drawn((3, ROWS, COLUMNS), 7, torch.float64)
    stack = {n: torch.stack([s[n] for s in states]) for n in states[0]}
    group = {"beta": BETA, "first": False}
    for _ in range(3):
        stack |= rule.observe_matrix(u, stack, group)
        stack |= rule.refresh_matrix(stack, group)
        for one, state in zip(u, states, strict=True):
            state |= rule.observe_matrix(one, state, group)
            state |= rule.refresh_matrix(state, group)
    for i, state in enumerate(states):
        for name, t in state.items():
            torch.testing.assert_close(stack[name][i], t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("rows", "most", "least"), [(3, 4000, 10), (12, 4000, 12), (12, 11, 11)])
def test_eigenvalues_stop_at_one_over_a_square(rows, most, least):
    """Of the rows, of which at least 10 and at most `most` are counted."""
    rule = KLBasis(0.0, most=most)
    state = rule.init_matrix(rows, 2)
    made = rule.observe_matrix(torch.zeros(rows, 2), state, {"beta": 0.0})["left_values"]
    torch.testing.assert_close(made, torch.full((rows,), float(least) ** -2), rtol=1e-6, atol=0)


def test_the_first_gradient_makes_bases_and_eigenvalues_begin_at_a_number():
    p = Parameter(torch.zeros(3, 5, dtype=torch.float64))
    opt = Modular([p], InBasis(KLBasis(initial=0.3), Adam()), LR(0.1))
    p.grad = drawn((3, 5), 0, torch.float64)
    opt.step()
    state = {n.rpartition("/")[2]: t for n, t in opt.state[p].items()}
    assert state["left_values"].tolist() == [0.3] * 3
    assert state["right_values"].tolist() == [0.3] * 5
    q = state["left_basis"]
    off = q.mT @ p.grad @ p.grad.mT @ q
    torch.testing.assert_close(off, off.diagonal().diag())
    assert not p.any()


def test_kl_soap_decays_by_the_learning_rate_before_the_step_is_taken():
    """Its authors' code decays after the step, so that it holds no decay; the first gradient, which
    makes the bases, moves nothing."""
    rate, decay = 0.1, 0.5
    plain, decayed = [Parameter(drawn((ROWS, COLUMNS), 3, torch.float64)) for _ in range(2)]
    options = {"lr": rate, "precondition_frequency": 2}
    first = Modular([plain], named("klsoap", weight_decay=0.0, **options))
    second = Modular([decayed], named("klsoap", weight_decay=decay, **options))
    for i in range(5):
        before = plain.detach().clone()
        plain.grad = drawn((ROWS, COLUMNS), 10 + i, torch.float64)
        decayed.grad = plain.grad.clone()
        first.step()
        left = 1 - rate * decay if i else 1
        wanted = decayed.detach() * left + (plain.detach() - before)
        second.step()
        torch.testing.assert_close(decayed.detach(), wanted, rtol=1e-12, atol=1e-12)
