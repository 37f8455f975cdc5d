"""InBasis and SOAPBasis; that they are SOAP is held by its authors' code, in `identities`."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.core.test_authors import both_engines, drawn, saved
from tests.helpers import flat, stacks
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Freeze,
    Guard,
    InBasis,
    Mars,
    Masked,
    Modular,
    Momentum,
    Orthogonalize,
    SOAPBasis,
    Transform,
    WeightDecay,
    attach,
    named,
    release,
)
from torchzero_clip.audit import Ledger, fake_cuda, twin
from torchzero_clip.modules.matrices.eigenbases import ROWS_TO_MIRROR, gram, ordered, orthonormal
from torchzero_clip.source import SourceError

SHAPES = {
    "wide": (3, 5),
    "tall": (6, 2),
    "square": (4, 4),
    "row": (1, 5),
    "bias": (4,),
    "no": (0, 3),
}
FORMS = pytest.mark.parametrize("first", ["skip", "step", "use"])


def model(dtype=torch.float64, shapes=SHAPES) -> dict[str, Parameter]:
    return {n: Parameter(drawn(shape, i, dtype)) for i, (n, shape) in enumerate(shapes.items())}


def give(params, step: int) -> None:
    for i, p in enumerate(params.values()):
        p.grad = drawn(p.shape, 100 * (step + 1) + i, p.dtype)


def soap(first="skip", every=3, **options):
    return InBasis(SOAPBasis(0.9, every, first, **options), Adam((0.9, 0.95), eps=1e-4))


def bases(opt, p) -> dict[str, Tensor]:
    path = "InBasis/SOAPBasis/"
    return {k.removeprefix(path): t for k, t in opt.state[p].items() if k.startswith(path)}


def averages(opt, p) -> Tensor:
    """The average of gradients, out of the bases."""
    held = bases(opt, p)
    return held["left_basis"] @ opt.state[p]["InBasis/Adam/exp_avg"] @ held["right_basis"].mT


@FORMS
@both_engines
def test_an_average_is_that_of_the_gradients_in_whatever_basis_it_is_kept(first, compile):
    params = model(torch.float32)
    opt, p = Modular(params.values(), soap(first), LR(0.01), compile=compile), params["wide"]
    average = torch.zeros_like(p)
    for step in range(10):
        give(params, step)
        if step or first != "skip":
            average = average * 0.9 + p.grad * 0.1
        opt.step()
        if step:
            torch.testing.assert_close(averages(opt, p), average)
    for name in ("left_basis", "right_basis"):
        q = bases(opt, p)[name]
        torch.testing.assert_close(q.mT @ q, torch.eye(len(q)))


@FORMS
def test_blocks_are_matrices_of_their_own(first):
    whole, parts = model(shapes={"w": (6, 4)}), model(shapes={"a": (2, 4), "b": (4, 4)})
    with torch.no_grad():
        for p, piece in zip(parts.values(), whole["w"].split([2, 4]), strict=True):
            p.copy_(piece)
    opt = Modular(whole.items(), soap(first, layout={"w": [2, 4]}), LR(0.01))
    other = Modular(parts.values(), soap(first), LR(0.01))
    for step in range(30):
        give(whole, step)
        for p, piece in zip(parts.values(), whole["w"].grad.split([2, 4]), strict=True):
            p.grad = piece
        opt.step()
        other.step()
    torch.testing.assert_close(whole["w"].detach(), torch.cat([*parts.values()]).detach())
    again = Modular(whole.items(), soap(first, layout={"w": [2, 4]}), LR(0.01))
    again.load_state_dict(saved(opt))
    again.step()


def test_a_stack_is_many_matrices_and_a_long_side_has_no_basis():
    stack = {"w": Parameter(drawn((3, 2, 4), 0, torch.float64))}
    parts = {f"w{i}": Parameter(t.clone()) for i, t in enumerate(stack["w"].detach())}
    opt = Modular(stack.values(), soap(layout=stacks, max_dim=3), LR(0.01))
    other = Modular(parts.values(), soap(max_dim=3), LR(0.01))
    for step in range(8):
        give(stack, step)
        for p, grad in zip(parts.values(), stack["w"].grad, strict=True):
            p.grad = grad
        opt.step()
        other.step()
    torch.testing.assert_close(stack["w"].detach(), torch.stack([*parts.values()]).detach())
    assert set(bases(other, parts["w0"])) == {"begun", "left", "left_basis"}


@FORMS
def test_vectors_and_what_is_empty_see_the_links_alone(first):
    params, others = model(), model()
    opt = Modular(params.values(), soap(first), LR(0.01))
    other = Modular(others.values(), Adam((0.9, 0.95), eps=1e-4), LR(0.01))
    for step in range(6):
        give(params, step)
        give(others, step)
        opt.step()
        if step or first != "skip":
            other.step()
    torch.testing.assert_close(params["bias"], others["bias"])
    assert not bases(opt, params["bias"])


@FORMS
@pytest.mark.parametrize("kind", ["zero", "rank one"])
def test_zero_and_rank_one_matrices_have_bases(first, kind):
    p = Parameter(drawn((4, 6), 0))
    opt, column, row = Modular([p], soap(first), LR(0.01)), drawn((4, 1), 1), drawn((1, 6), 2)
    for step in range(8):
        p.grad = column @ row * (step + 1) if kind == "rank one" else torch.zeros(4, 6)
        before = p.detach().clone()
        opt.step()
        moved = p - before
        assert moved.isfinite().all()
        if kind == "zero":
            assert not moved.any()
        elif step > 1:  # the direction of the gradient, and nothing else to speak of
            along = (moved * p.grad).sum() / (moved.norm() * p.grad.norm())
            assert along < -0.99
    for name in ("left_basis", "right_basis"):
        q = bases(opt, p)[name]
        torch.testing.assert_close(q.mT @ q, torch.eye(len(q)))
    assert opt.metrics()["InBasis/SOAPBasis/kept"] == 0


@FORMS
@both_engines
def test_bases_take_no_nan_and_adam_inside_does_as_torchs(first, compile):
    params = model(torch.float32)
    opt = Modular(params.values(), soap(first), LR(0.01), compile=compile)
    for step in range(6):
        give(params, step)
        if step == 3:
            params["wide"].grad[1, 2] = torch.nan
            before = {n: copy.deepcopy(bases(opt, params[n])) for n in ("wide", "tall")}
        opt.step()
        if step == 3:
            held = bases(opt, params["wide"])
            assert torch.equal(before["wide"]["left"], held["left"])
            assert not torch.equal(before["tall"]["left"], bases(opt, params["tall"])["left"])
            assert opt.metrics()["InBasis/SOAPBasis/kept"] == 1
    assert all(
        t.isfinite().all() for t in bases(opt, params["wide"]).values() if isinstance(t, Tensor)
    )
    assert params["wide"].isnan().all()
    assert all(p.isfinite().all() for n, p in params.items() if n != "wide")


@FORMS
@both_engines
def test_behind_a_guard_a_bad_step_is_none(first, compile):
    params, others = model(torch.float32), model(torch.float32)
    chain = Guard(), ClipNorm(1.0, dim="global"), soap(first), WeightDecay(0.1), LR(0.01)
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


@FORMS
def test_a_renewal_that_fails_leaves_bases_and_averages(first, monkeypatch):
    params = model(torch.float32)
    opt, p = Modular(params.values(), soap(first), LR(0.01)), params["square"]
    qr = torch.linalg.qr
    for step in range(9):
        give(params, step)
        fails = step == (2 if first == "use" else 3)
        if fails:
            before = copy.deepcopy(bases(opt, p))
            monkeypatch.setattr(torch.linalg, "qr", lambda x: type(qr(x))((qr(x).Q * torch.nan, x)))
        opt.step()
        monkeypatch.undo()
        if fails:
            assert opt.metrics()["InBasis/SOAPBasis/kept"] == 4
            assert torch.equal(before["left_basis"], bases(opt, p)["left_basis"])
            assert not torch.equal(before["left"], bases(opt, p)["left"])
    assert all(p.isfinite().all() for p in params.values())


@FORMS
def test_release_steps_as_the_optimizer_does_and_attach_takes_it(first):
    net, other, plain = [
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)) for _ in "abc"
    ]
    other.load_state_dict(net.state_dict())
    plain.load_state_dict(net.state_dict())
    chain = soap(first), LR(0.01)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.01)
    attach(sgd, soap("step" if first == "skip" else first))
    opts = Modular(net.parameters(), *chain), release(other, *chain), sgd
    for step in range(8):
        x = drawn((8, 4), step)
        for m, opt in zip((net, other, plain), opts, strict=True):
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()
    for p, q, r in zip(net.parameters(), other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        if first != "skip":
            torch.testing.assert_close(p, r)


@FORMS
def test_a_resumed_run_goes_on_to_the_bit(first):
    params = model(torch.float32)
    opt = Modular(params.values(), soap(first), LR(0.01))
    for step in range(5):
        give(params, step)
        opt.step()
    others = {n: Parameter(p.detach().clone()) for n, p in params.items()}
    other = Modular(others.values(), soap(first), LR(0.01))
    other.load_state_dict(saved(opt))
    for step in range(5, 11):
        for some, one in ((params, opt), (others, other)):
            give(some, step)
            one.step()
    assert all(torch.equal(p, others[n]) for n, p in params.items())


@pytest.mark.skipif(torch.__version__ < "2.9", reason="fake CUDA tensors need torch 2.9")
@FORMS
def test_nothing_waits_but_the_first_decomposition(first):
    few = {name: SHAPES[name] for name in ("wide", "bias")}
    with fake_cuda():
        params = twin(model(torch.float32, few).values())
        opt = Modular(params, ClipNorm(1.0), soap(first, every=2), WeightDecay(0.1), LR(0.01))
        for step in range(4):
            with Ledger() as ledger:
                opt.step()
            assert (ledger.reads, ledger.copies) == ([], [])
            assert (step == 0) == bool(ledger.waits)


@FORMS
@both_engines
def test_what_comes_late_leaves_the_others_as_they_are(first, compile):
    """Its first gradient makes bases of its own, beside matrices of its shape that have some."""
    shapes = {"a": (4, 6), "late": (4, 6), "b": (4, 6), "bias": (6,)}
    runs = []
    for late in (5, 99):
        params = model(torch.float32, shapes)
        opt = Modular(params.values(), soap(first), LR(0.01), compile=compile)
        for step in range(9):
            give(params, step)
            if step < late:
                params["late"].grad = None
            opt.step()
        runs.append((opt, params))
    (opt, params), (other, others) = runs
    for name in ("a", "b", "bias"):
        torch.testing.assert_close(params[name], others[name], rtol=1e-5, atol=1e-6)
    for key, t in bases(opt, params["b"]).items():
        torch.testing.assert_close(t, bases(other, others["b"])[key], rtol=1e-5, atol=1e-5)
    q = bases(opt, params["late"])["left_basis"]
    torch.testing.assert_close(q.mT @ q, torch.eye(4))
    assert not torch.equal(q, torch.eye(4))


@FORMS
def test_links_inside_may_be_for_some_of_the_matrices(first):
    """An average that some keep turns with the bases of these, among others of their shape."""
    shapes = {"a": (4, 6), "b": (4, 6), "c": (4, 6), "d": (4, 6), "e": (6, 4)}
    params, others = model(torch.float64, shapes), model(torch.float64, shapes)
    some = Masked(Momentum(0.9), lambda name, p: name in "bde")
    opt = Modular(params.items(), InBasis(SOAPBasis(0.9, 2, first), some), LR(0.01))
    with_it = Modular([others[n] for n in "bde"], Momentum(0.9), LR(0.01))
    without = Modular([others[n] for n in "ac"], LR(0.01))
    for step in range(7):
        give(params, step)
        give(others, step)
        opt.step()
        if step or first != "skip":
            with_it.step()
            without.step()
    for name, p in params.items():  # neither knows a basis
        torch.testing.assert_close(p, others[name])


@pytest.mark.parametrize("rows", [5, ROWS_TO_MIRROR, ROWS_TO_MIRROR + 3])
@pytest.mark.parametrize("count", [None, 1, 2])
def test_what_is_done_in_another_way_for_speed_is_the_same(rows, count):
    x = drawn((rows, 7) if count is None else (count, rows, 7), 0, torch.float64)
    for y in (x, x.mT):
        torch.testing.assert_close(gram(y), y @ y.mT, rtol=1e-12, atol=1e-12)
    wide = x.mT[..., :7]
    made = orthonormal(wide if rows > 6 else x)
    torch.testing.assert_close(made, torch.linalg.qr(wide if rows > 6 else x).Q)
    assert made.is_contiguous()
    order = drawn((*x.shape[:-2], 7), 1).argsort()
    one = order.unsqueeze(-2).expand(x.shape)
    assert torch.equal(ordered(x, order, -1), x.gather(-1, one))
    assert torch.equal(ordered(x.mT, order, -2), x.gather(-1, one).mT)


class Kept(Transform):
    """u ← u + m, m of the shape of u, of which nothing is said"""

    def init(self, param):
        return {"m": torch.zeros_like(param)}

    def update(self, u, state, group):
        return u.add_(state["m"])


@pytest.mark.parametrize(
    ("links", "words"),
    [
        (
            (),
            r"pass a basis and at least one transform, such as InBasis\(SOAPBasis\(\), Adam\(\)\), "
            r"got",
        ),
        ((Adam(),), "pass a basis and at least one transform"),
        ((SOAPBasis(), 3), r"must be transforms, such as Adam\(\), got 3"),
        ((SOAPBasis(), Kept()), r"InBasis: Kept has the state \['m'\], which cannot be rotated"),
        (
            (SOAPBasis(), SOAPBasis()),
            "SOAPBasis has the state of matrices, which cannot be rotated",
        ),
        ((SOAPBasis(), Mars()), r"Mars has the state \['previous'\]"),
    ],
)
def test_links_that_a_basis_cannot_turn_are_refused(links, words):
    with pytest.raises(TypeError, match=words):
        InBasis(*links)


def test_links_inside_must_return_every_parameter():
    with pytest.raises(ValueError, match="in every step, got Freeze: put Freeze before InBasis"):
        InBasis(SOAPBasis(), Freeze(lambda name, p: True), Adam())


def test_other_links_turn_along():
    params = model(torch.float32)
    chain = Momentum(0.9), Orthogonalize(layout=flat)
    one = {n: p for n, p in params.items() if p.dim() > 1 and p.numel()}
    opt = Modular(one.values(), InBasis(SOAPBasis(0.9, 2), *chain), LR(0.01))
    other = {n: Parameter(p.detach().clone()) for n, p in one.items()}
    plain = Modular(other.values(), *chain, LR(0.01))
    for step in range(7):
        give(one, step)
        give(other, step)
        opt.step()
        if step:
            plain.step()
    for name, p in one.items():  # both know no basis
        torch.testing.assert_close(p, other[name], rtol=1e-4, atol=1e-4)


def test_the_plan_and_the_file():
    opt = Modular(model(torch.float32).values(), named("soap"))
    assert (
        "InBasis/SOAPBasis: each matrix is refreshed in the first step and every 10"
        in opt.explain()
    )
    with pytest.raises(SourceError, match="InBasis"):
        opt.to_source()
