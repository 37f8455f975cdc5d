"""State of matrices: what a rule of a user may rely on; `processes/owners.py` has it sharded."""

import copy
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.core.test_authors import both_engines, drawn, saved
from torchzero_clip import (
    LR,
    Adam,
    Guard,
    Live,
    MatrixLayout,
    Modular,
    TensorwiseTransform,
    attach,
    release,
)
from torchzero_clip.audit import Ledger, fake_cuda, twin
from torchzero_clip.source import SourceError

SHAPES = {
    "wide": (3, 5),
    "bias": (4,),
    "conv": (4, 2, 2, 1),
    "number": (),
    "tall": (6, 2),
    "no": (0, 3),
}


class Whiten(TensorwiseTransform):
    """L ← β L + (1 - β) u uᵀ;   P ← (L + 1)^(-1/2) every few steps;   u ← P u"""

    beta: Live[float] = 0.5
    every: int = 3
    stagger: bool = False

    def init_matrix(self, rows: int, columns: int) -> dict[str, Tensor]:
        return {"left": torch.zeros(rows, rows), "root": torch.eye(rows)}

    def observe_matrix(self, u, state, group):
        return {"left": state["left"] + (u @ u.mT - state["left"]) * (1 - group["beta"])}

    def refresh_matrix(self, state, group):
        return {"root": root(state["left"])}

    def update_tensor(self, u, state, group):
        return state["root"] @ u


def root(left: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(left)
    return vectors * (values + 1).rsqrt() @ vectors.mT


def model(dtype=torch.float64) -> dict[str, Parameter]:
    return {n: Parameter(drawn(shape, i, dtype)) for i, (n, shape) in enumerate(SHAPES.items())}


def give(params, step: int, missing=()) -> None:
    for i, (name, p) in enumerate(params.items()):
        p.grad = None if name in missing else drawn(p.shape, 100 * (step + 1) + i, p.dtype)


@both_engines
def test_a_matrix_learns_is_refreshed_in_its_first_and_every_k_th_step_and_then_acts(compile):
    params, late = model(), ("tall",)
    opt = Modular(params.values(), Whiten(), LR(0.1), compile=compile)
    where = {name: p.detach().clone() for name, p in params.items()}
    left, roots, begun = {}, {}, set()
    for step in range(8):
        give(params, step, late if step < 4 else ())
        for name, p in params.items():
            if p.grad is None:
                continue
            u = p.grad
            if p.dim() > 1 and p.numel():
                flat = u.reshape(len(u), -1)
                left[name] = left.get(name, 0.0) * 0.5 + 0.5 * flat @ flat.mT
                if name not in begun or step % 3 == 0:
                    roots[name] = root(left[name])
                begun.add(name)
                u = (roots[name] @ flat).reshape(u.shape)
            where[name] -= 0.1 * u
        opt.step()
        for name, p in params.items():
            torch.testing.assert_close(p.detach(), where[name], rtol=1e-12, atol=1e-12)
    assert not opt.state[params["bias"]]
    assert opt.metrics()["Whiten/kept"] == 0


def test_in_turns_a_parameter_is_refreshed_as_often_and_not_all_in_one_step():
    params = {f"p{i}": Parameter(torch.ones(2, 2)) for i in range(6)}
    opt = Modular(params.values(), Whiten(every=3, stagger=True), LR(0.1))
    changed = []
    for step in range(7):
        before = [opt.state[p].get("Whiten/root", torch.zeros(())).clone() for p in params.values()]
        give(params, step)
        opt.step()
        after = [opt.state[p]["Whiten/root"] for p in params.values()]
        changed.append([not torch.equal(a, b) for a, b in zip(before, after, strict=True)])
    assert changed[0] == [True] * 6
    assert [sum(row) for row in changed[1:]] == [2] * 6
    assert all(sum(column) == 3 for column in zip(*changed, strict=True))


@both_engines
def test_what_is_not_finite_never_enters_and_metrics_tell(compile):
    params = {"a": Parameter(torch.ones(2, 3)), "b": Parameter(torch.ones(3, 2))}
    opt = Modular(params.values(), Whiten(every=1), LR(0.0), compile=compile)
    give(params, 0)
    opt.step()
    held = copy.deepcopy(opt.state[params["a"]])
    give(params, 1)
    params["a"].grad[0, 0] = torch.nan
    other = opt.state[params["b"]]["Whiten/left"].clone()
    opt.step()
    assert all(
        torch.equal(torch.as_tensor(held[k]), torch.as_tensor(v))
        for k, v in opt.state[params["a"]].items()
    )
    assert not torch.equal(other, opt.state[params["b"]]["Whiten/left"])
    assert opt.metrics()["Whiten/kept"] == 1


class Failing(Whiten):
    """A decomposition that gives no numbers from its second time on."""

    def refresh_matrix(self, state, group):
        made = super().refresh_matrix(state, group)["root"]
        return {"root": made if group["first"] else made * torch.nan}


def test_where_a_decomposition_fails_the_old_one_stays():
    params = {"a": Parameter(torch.ones(2, 3))}
    opt = Modular(params.values(), Failing(every=2), LR(0.1))
    kept = []
    for step in range(4):
        give(params, step)
        opt.step()
        kept.append(int(opt.metrics()["Failing/kept"]))
        if step == 0:
            first = opt.state[params["a"]]["Failing/root"].clone()
    assert kept == [0, 0, 1, 0]
    assert torch.equal(opt.state[params["a"]]["Failing/root"], first)


class Halves(Whiten):
    """The same of each half."""

    layout: MatrixLayout = None


def test_a_parameter_may_be_several_matrices():
    whole, halves = model(), model()
    cut = {**halves, "tall": [Parameter(t.clone()) for t in halves["tall"].detach().split(3)]}
    parts = {
        f"{n}{i}": p for n, ps in cut.items() for i, p in enumerate(ps if n == "tall" else [ps])
    }
    one, other = (
        Modular(whole.items(), Halves(layout={"tall": [3, 3]}), LR(0.1)),
        Modular(parts.values(), Whiten(), LR(0.1)),
    )
    for step in range(5):
        give(whole, step)
        for name, p in parts.items():
            grad = whole[name[:-1]].grad
            p.grad = grad.split(3)[int(name[-1])] if name.startswith("tall") else grad
        one.step()
        other.step()
    torch.testing.assert_close(whole["tall"], torch.cat([parts["tall0"], parts["tall1"]]))
    torch.testing.assert_close(whole["wide"], parts["wide0"])
    names = {"begun", "left", "root", "left_2", "root_2"}
    assert opt_names(one, whole["tall"]) == names
    again = Modular(whole.items(), Halves(layout={"tall": [3, 3]}), LR(0.1))
    again.load_state_dict(saved(one))
    again.step()


def opt_names(opt, p):
    return {key.rpartition("/")[2] for key in opt.state[p]}


def test_a_run_that_is_resumed_or_copied_goes_on_to_the_bit():
    params = model(torch.float32)
    opt = Modular(params.values(), Whiten(), Adam(), LR(0.1))
    for step in range(5):
        give(params, step)
        opt.step()
    others = {n: Parameter(p.detach().clone()) for n, p in params.items()}
    other = Modular(others.values(), Whiten(), Adam(), LR(0.1))
    other.load_state_dict(saved(opt))
    third, copied = copy.deepcopy((params, opt))
    for step in range(5, 9):
        for some, one in ((params, opt), (others, other), (third, copied)):
            give(some, step)
            one.step()
    for name, p in params.items():
        assert torch.equal(p, others[name])
        assert torch.equal(p, third[name])


def test_state_may_be_made_early():
    params, others = model(), model()
    opts = [Modular(some.values(), Whiten(), LR(0.1)) for some in (params, others)]
    opts[0].init_state()
    assert opt_names(opts[0], params["wide"]) == {"begun", "left", "root"}
    for step in range(4):
        for some, opt in zip((params, others), opts, strict=True):
            give(some, step, missing=("tall",) if step == 0 else ())
            opt.step()
    for name, p in params.items():
        assert torch.equal(p, others[name])


@both_engines
def test_a_step_that_a_guard_skips_is_none(compile):
    params, others = model(torch.float32), model(torch.float32)
    opts = [
        Modular(p.values(), Guard(), Whiten(every=2), LR(0.1), compile=compile)
        for p in (params, others)
    ]
    for step in range(6):
        give(params, step)
        if step in (2, 3):
            params["wide"].grad[0] = torch.inf
        opts[0].step()
        if step not in (2, 3):
            give(others, step)
            opts[1].step()
    for name, p in params.items():
        assert torch.equal(p, others[name])
    for key, value in opts[0].state[params["wide"]].items():
        assert torch.equal(
            torch.as_tensor(value), torch.as_tensor(opts[1].state[others["wide"]][key])
        )


def test_release_and_attach_take_it():
    net, twin_net = [
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)) for _ in "ab"
    ]
    twin_net.load_state_dict(net.state_dict())
    chain = Whiten(every=2), LR(0.1)
    opt, other = Modular(net.parameters(), *chain), release(twin_net, *chain)
    plain = copy.deepcopy(net)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    attach(sgd, Whiten(every=2))
    for step in range(4):
        x = drawn((8, 4), step)
        for m, one in ((net, opt), (twin_net, other), (plain, sgd)):
            one.zero_grad()
            m(x).square().mean().backward()
            one.step()
    for p, q, r in zip(net.parameters(), twin_net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, r)


class Number(Whiten):
    def init_matrix(self, rows, columns):
        return {"left": torch.tensor(0.0)}


class Both(Whiten):
    def init(self, param):
        return {"ema": torch.zeros_like(param)}


class Other(Whiten):
    def observe_matrix(self, u, state, group):
        return {"right": u.mT @ u}


def test_mistakes_are_sentences():
    params = model()
    give(params, 0)
    with pytest.raises(
        ValueError, match=r"Number: init_matrix must return .* a 0-dim tensor for 'left'"
    ):
        Modular(params.values(), Number(), LR(0.1)).step()
    with pytest.raises(TypeError, match="Both must not define both init and init_matrix"):
        Both()
    with pytest.raises(KeyError, match=r"keys are among \['left', 'root'\], got {'right'"):
        Modular(params.values(), Other(), LR(0.1)).step()
    opt = Modular(params.values(), Whiten(), LR(0.1))
    opt.step()
    state = opt.state_dict()
    kept = state["state"][0]["Whiten/left"]
    state["state"][0]["Whiten/left"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"the checkpoint has shape \(2, 2\) for 'Whiten/left'"):
        opt.load_state_dict(state)
    state["state"][0]["Whiten/left"] = kept
    state["state"][0]["Whiten/middle"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"\['Whiten/middle'\] for parameter 0, but no transform"):
        opt.load_state_dict(state)
    opt.state[next(iter(params.values()))]["Whiten/left"] = torch.zeros(2, 2)
    with pytest.raises(
        ValueError, match=r"has shape \(2, 2\), but the matrix needs state of shape"
    ):
        opt.step()
    with pytest.raises(SourceError, match="Whiten"):
        opt.to_source()


def test_the_plan_tells_what_is_refreshed_when():
    params = model()
    plan = Modular(params.values(), Whiten(every=7, stagger=True), LR(0.1)).explain()
    assert "Whiten: each matrix is refreshed in the first step and every 7 steps, at dif" in plan


class Powers(Whiten):
    """With products alone."""

    def refresh_matrix(self, state, group):
        q, _ = torch.linalg.qr(state["left"] @ state["root"])
        return {"root": q}


@pytest.mark.skipif(torch.__version__ < "2.9", reason="fake CUDA tensors need torch 2.9")
@pytest.mark.parametrize("every", [1, 4])
def test_a_step_and_a_refresh_read_nothing_on_the_host(every):
    with fake_cuda():
        params = twin(
            [Parameter(torch.ones(3, 4)), Parameter(torch.ones(4)), Parameter(torch.ones(5, 2))]
        )
        opt = Modular(params, Powers(every=every), Adam(), LR(0.1))
        opt.step()
        for _ in range(3):
            with Ledger() as ledger:
                opt.step()
            assert (ledger.reads, ledger.copies, ledger.waits) == ([], [], [])


class Stacked(Whiten):
    """The same of a stack."""

    batched = True
    shapes: ClassVar[list[tuple[int, ...]]] = []

    def observe_matrix(self, u, state, group):
        self.shapes.append(tuple(u.shape))
        return super().observe_matrix(u, state, group)

    def refresh_matrix(self, state, group):
        values, vectors = torch.linalg.eigh(state["left"])
        return {"root": vectors * (values + 1).rsqrt().unsqueeze(-2) @ vectors.mT}


class Heir(Stacked):
    """What is inherited is written for one matrix, for all that is known."""


EQUAL = {"a": (3, 5), "b": (4,), "c": (4, 2), "d": (3, 5), "e": (4, 2), "f": (3, 5)}


def equal(dtype=torch.float64):
    return {n: Parameter(drawn(shape, i, dtype)) for i, (n, shape) in enumerate(EQUAL.items())}


@both_engines
@pytest.mark.parametrize("stagger", [False, True])
def test_matrices_of_one_shape_are_one_call_and_come_out_as_one_by_one(compile, stagger):
    params, others = equal(), equal()
    opts = [
        Modular(some.values(), rule(every=2, stagger=stagger), LR(0.1), compile=compile)
        for some, rule in ((params, Stacked), (others, Whiten))
    ]
    for step in range(9):
        missing = {2: ("a",), 3: ("d", "c"), 4: ("e",)}.get(step, ())
        Stacked.shapes.clear()
        for some, opt in zip((params, others), opts, strict=True):
            give(some, step, missing)
            if step == 5:
                some["d"].grad[0] = torch.nan
            opt.step()
        if not missing:
            assert Stacked.shapes == [(3, 3, 5), (2, 4, 2)]
        if step == 3:  # what has no gradient stands between two that have one
            assert Stacked.shapes == [(1, 3, 5), (1, 4, 2), (1, 3, 5)]
        assert opts[0].metrics()["Stacked/kept"] == (step == 5) * 1
        assert opts[1].metrics()["Whiten/kept"] == (step == 5) * 1
        for name in ("root", "left"):
            for p, q in zip(params.values(), others.values(), strict=True):
                held = (
                    opts[0].state[p].get(f"Stacked/{name}"),
                    opts[1].state[q].get(f"Whiten/{name}"),
                )
                if held[1] is not None:
                    torch.testing.assert_close(*held, rtol=1e-12, atol=1e-12)
        if step == 5:  # the weight is NaN, and its state is not
            params["d"].data.copy_(others["a"]), others["d"].data.copy_(others["a"])
    for p, q in zip(params.values(), others.values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_a_class_that_inherits_does_not_take_stacks_by_itself():
    params = equal()
    Stacked.shapes.clear()
    give(params, 0)
    Modular(params.values(), Heir(), LR(0.1)).step()
    assert Stacked.shapes == [(3, 5), (4, 2), (3, 5), (4, 2), (3, 5)]


def test_state_stays_where_it_is_and_side_by_side_also_when_it_was_loaded_or_copied():
    params = equal(torch.float32)
    opt = Modular(params.values(), Stacked(), LR(0.1))
    for step in range(4):
        give(params, step)
        opt.step()
    others, (third, copied) = equal(torch.float32), copy.deepcopy((params, opt))
    for name, p in params.items():
        others[name].data.copy_(p)
    other = Modular(others.values(), Stacked(), LR(0.1))
    other.load_state_dict(saved(opt))
    for some, one in ((params, opt), (others, other), (third, copied)):
        places = []
        for step in (4, 5):
            give(some, step)
            Stacked.shapes.clear()
            one.step()
            assert Stacked.shapes == [(3, 3, 5), (2, 4, 2)]
            places.append([one.state[some[n]]["Stacked/left"].data_ptr() for n in "adf"])
        assert places[0] == places[1]
        assert places[0] == list(range(places[0][0], places[0][0] + 3 * 36, 36))
    for name, p in params.items():
        assert torch.equal(p, others[name])
        assert torch.equal(p, third[name])


def test_state_of_any_strides_and_without_entries_is_kept_as_it_is():
    class Odd(Stacked):
        """Its state begins as a transpose, which is another matrix than its memory, and as none."""

        batched = True

        def init_matrix(self, rows, columns):
            made = drawn((rows, rows), 0)
            return {"left": torch.zeros(rows, rows), "root": made.mT, "none": torch.zeros(0, 3)}

        def refresh_matrix(self, state, group):
            return {}

    params = {"a": Parameter(torch.zeros(3, 5)), "b": Parameter(torch.zeros(3, 5))}
    opt = Modular(params.values(), Odd(), LR(1.0))
    for step in range(2):
        give(params, step)
        for p in params.values():
            p.data.zero_()
        opt.step()
        for p in params.values():
            torch.testing.assert_close(p.detach(), -drawn((3, 3), 0).mT @ p.grad)
            assert opt.state[p]["Odd/none"].shape == (0, 3)


def test_matrices_of_equal_shape_are_a_stack_too():
    class Cut(Stacked):
        batched = True
        layout: MatrixLayout = None

    params = {"a": Parameter(drawn((7, 2), 0)), "b": Parameter(drawn((7, 2), 1))}
    pieces = [Parameter(t.clone()) for p in params.values() for t in p.detach().split([2, 2, 3])]
    cut = Cut(layout={"*": [2, 2, 3]})
    opt, other = Modular(params.items(), cut, LR(0.1)), Modular(pieces, Whiten(), LR(0.1))
    for step in range(4):
        give(params, step)
        grads = [t for p in params.values() for t in p.grad.split([2, 2, 3])]
        for p, grad in zip(pieces, grads, strict=True):
            p.grad = grad
        Stacked.shapes.clear()
        opt.step(), other.step()
        assert Stacked.shapes == [(4, 2, 2), (2, 3, 2)]
    torch.testing.assert_close(torch.cat(pieces), torch.cat(list(params.values())))


def test_state_that_comes_back_too_large_is_refused():
    class Large(Whiten):
        def observe_matrix(self, u, state, group):
            return {"left": torch.zeros(9, 9, dtype=u.dtype)}

    params = {"a": Parameter(drawn((2, 3), 0))}
    give(params, 0)
    with pytest.raises(RuntimeError, match="expand"):
        Modular(params.values(), Large(), LR(0.1)).step()
