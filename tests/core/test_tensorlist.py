"""TensorList: torch's operators, and copies at the first write."""

import pytest
import torch

from tests.helpers import at_once, equal, one, run_once
from torchzero_clip import (
    EMA,
    LR,
    Chain,
    ClipValue,
    ClipValueByEMA,
    Modular,
    Scale,
    TensorList,
    Transform,
    zeros_like_state,
)
from torchzero_clip.core.tensor_kinds import shared_memory


def test_a_borrowed_list_is_copied_at_the_first_write_and_written_from_then_on():
    t = torch.ones(2)
    u = TensorList([t])
    assert u.mul_(3) is u
    assert t.tolist() == [1, 1]
    memory = u.tensors[0]
    u.add_(1).div_(2)
    assert u.tensors[0] is memory
    assert memory.tolist() == [2, 2]


def test_a_method_has_its_name_and_says_what_it_does():
    made = {name: x for name, x in vars(TensorList).items() if callable(x) and name[0] != "_"}
    assert {name: x.__name__ for name, x in made.items()} == {name: name for name in made}
    assert [name for name, x in made.items() if not x.__doc__] == []


def test_an_owned_list_is_written_in_place():
    t = torch.ones(2)
    TensorList([t], owned=True).mul_(3)
    assert t.tolist() == [3, 3]


def test_borrowing_protects_the_lender():
    lender = TensorList([torch.ones(2)], owned=True)
    lender.borrow().mul_(5)
    assert lender.tensors[0].tolist() == [1, 1]


OPERATORS = {
    "mul": (lambda x, y: x * y, 2),
    "div": (lambda x, y: x / y, 2),
    "add": (lambda x, y: x + y, 2),
    "sub": (lambda x, y: x - y, 2),
    "maximum": (torch.maximum, 2),
    "minimum": (torch.minimum, 2),
    "pow": (torch.pow, 2),
    "neg": (torch.neg, 1),
    "abs": (torch.abs, 1),
    "sign": (torch.sign, 1),
    "sqrt": (torch.sqrt, 1),
    "rsqrt": (torch.rsqrt, 1),
    "square": (torch.square, 1),
    "reciprocal_": (torch.reciprocal, 1),
}


@at_once("kind", ["float", "0-dim", "list", "TensorList"])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_that_of_torch_whatever_the_operand(name, kind):
    formula, arity = OPERATORS[name]
    tensors = [torch.tensor([1.0, -2.0]), torch.tensor([[3.0]])]
    others = [torch.tensor([0.5, 4.0]), torch.tensor([[-2.0]])]
    if kind in ("float", "0-dim"):
        others = [torch.tensor(1.5)] * 2
    operand = {
        "float": 1.5,
        "0-dim": torch.tensor(1.5),
        "list": others,
        "TensorList": TensorList(others),
    }[kind]
    args = (operand,) if arity == 2 else ()
    pairs = zip(tensors, others, strict=True)
    expected = [formula(x, y) if arity == 2 else formula(x) for x, y in pairs]
    plain, written = name.removesuffix("_"), name.removesuffix("_") + "_"
    for method in (plain, written):
        if not hasattr(TensorList, method):
            continue
        before = [t.clone() for t in tensors]
        out = getattr(TensorList(tensors), method)(*args)
        torch.testing.assert_close(list(out), expected, equal_nan=True)
        assert equal(tensors, before)
        if method == written:
            mine = [t.clone() for t in tensors]
            getattr(TensorList(mine, owned=True), method)(*args)
            torch.testing.assert_close(mine, expected, equal_nan=True)
        else:
            mine = TensorList(tensors, owned=True)
            assert getattr(mine, method)(*args) is not mine
            assert equal(tensors, before)


def test_numbers_that_were_moved_out_of_their_vector_are_no_part_of_it():
    """`t.data = ...` leaves a view its base, which then says nothing of where it lies."""
    memory = torch.arange(8.0)
    vector = torch.empty(0).set_(memory.untyped_storage(), 4, (4,))
    first, second, *_ = vector.unbind()
    assert shared_memory([first, second]).tolist() == [4, 5]
    for place in range(8):
        second.data = memory[place]
        assert (shared_memory([second]) is not None) == (place >= 4)
    first.data, second.data = memory[2], memory[3]
    assert shared_memory([first, second]) is None


@pytest.mark.parametrize("alpha", [1, 2.5, torch.tensor(2.5)], ids=repr)
@pytest.mark.parametrize("x", [2.0, torch.tensor(2.0), [torch.tensor([1.0, 5.0])]], ids=repr)
@pytest.mark.parametrize("owned", [True, False])
def test_add_takes_alpha(x, alpha, owned):
    t = torch.tensor([1.0, -2.0])
    other = x[0] if isinstance(x, list) else x
    expected = t + alpha * other
    (out,) = TensorList([t.clone()], owned=owned).add_(x, alpha=alpha)
    torch.testing.assert_close(out, expected)
    (out,) = TensorList([t], owned=owned).add(x, alpha=alpha)
    torch.testing.assert_close(out, expected)
    assert t.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("weight", [0.25, torch.tensor(0.25, dtype=torch.float64)], ids=repr)
def test_lerp_and_addcmul(weight):
    t, end = torch.tensor([1.0, -2.0]), torch.tensor([5.0, 6.0])
    ends = TensorList([end])
    expected = t + 0.25 * (end - t)
    torch.testing.assert_close(TensorList([t]).lerp(ends, weight).tensors[0], expected)
    torch.testing.assert_close(TensorList([t]).lerp_(ends, weight).tensors[0], expected)
    (out,) = TensorList([t]).addcmul_(ends, TensorList([t]), weight)
    torch.testing.assert_close(out, t + 0.25 * end * t)
    assert t.tolist() == [1, -2]


def test_writing_the_update_does_not_write_the_gradient():
    class Double(Transform):
        def update(self, u, state, group):
            return u.mul_(2)

    _, p, updates = run_once(Double(), Double(), steps=3)
    assert updates == [16.0] * 3
    assert p.grad.item() == 4.0


def test_a_state_handle_writes_the_state_also_when_it_is_returned():
    class Halved(Transform):
        def init(self, param):
            return {"ema": zeros_like_state(param)}

        def update(self, u, state, group):
            m = state["ema"].lerp_(u, 0.5)
            return m.div_(2)  # halves the state, as a method with an underscore says

    opt, p, updates = run_once(Halved(), steps=2)
    assert updates == [1.0, 1.25]
    assert opt.state[p]["Halved/ema"].item() == 1.25


def test_state_returned_as_the_update_is_borrowed_by_later_links():
    opt, p, updates = run_once(EMA(0.5), Scale(10.0), ClipValue(100.0), LR(0.1), steps=2)
    assert updates == pytest.approx([2.0, 3.0])
    assert opt.state[p]["EMA/ema"].item() == 3.0


def test_assigning_to_the_state_stores():
    class Keep(Transform):
        def init(self, param):
            return {"last": zeros_like_state(param)}

        def update(self, u, state, group):
            difference = u.sub(state["last"])
            state["last"] = u
            return difference

    opt, p, updates = run_once(Keep(), Scale(3.0), steps=2)
    memory = opt.state[p]["Keep/last"]
    assert updates == [12.0, 0.0]
    assert memory.item() == 4.0
    opt.step()
    assert opt.state[p]["Keep/last"] is memory


def test_assigning_what_is_returned_keeps_the_state_from_later_links():
    class Average(Transform):
        def init(self, param):
            return {"ema": zeros_like_state(param)}

        def update(self, u, state, group):
            state["ema"] = state["ema"].lerp(u, 0.5)
            return state["ema"]

    opt, p, updates = run_once(Average(), Scale(10.0), steps=2)
    assert updates == [20.0, 30.0]
    assert opt.state[p]["Average/ema"].item() == 3.0


def test_two_states_may_be_copied_into_each_other():
    class Older(Transform):
        def init(self, param):
            return {"new": zeros_like_state(param), "old": zeros_like_state(param)}

        def update(self, u, state, group):
            state["old"].copy_(state["new"])
            state["new"].copy_(u)
            return state["old"]

    _, _, updates = run_once(Older(), Scale(2.0), steps=3)
    assert updates == [0.0, 8.0, 8.0]


def test_setting_a_state_that_init_does_not_make_is_an_error():
    class Wrong(Transform):
        def update(self, u, state, group):
            state["memory"] = u
            return u

    with pytest.raises(KeyError, match=r"Wrong\.update must not add state\['memory'\]"):
        run_once(Wrong())


@pytest.mark.parametrize("result", [None, torch.ones(1), [torch.ones(1)]], ids=repr)
def test_an_update_that_returns_no_tensor_list_is_an_error(result):
    class Wrong(Transform):
        def update(self, u, state, group):
            return result

    with pytest.raises(TypeError, match=r"Wrong\.update must return a TensorList, got"):
        run_once(Wrong())


@pytest.mark.parametrize("key", ["params", "grads"])
def test_parameters_and_gradients_are_borrowed(key):
    class Vandal(Transform):
        def update(self, u, state, group):
            group[key].mul_(0)
            return u

    class Passing(Transform):
        def update(self, u, state, group):
            return group[key]

    _, p, updates = run_once(Vandal(), value=7.0)
    assert updates == [4.0]
    assert p.grad.item() == 4.0
    _, p, updates = run_once(Passing(), Scale(0.5), ClipValue(100.0), value=8.0)
    assert updates == [{"params": 4.0, "grads": 2.0}[key]]
    assert p.grad.item() == 4.0


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 4.0), (3.0, 8.0)])
def test_an_inner_chain_does_not_write_what_flows_outside(factor, expected):
    inner = ClipValueByEMA(0.0, ema_tfm=Chain(EMA(0.0), Scale(factor)))
    opt, p, updates = run_once(Scale(2.0), inner, Scale(1.0), steps=2)
    assert updates == [expected] * 2  # 8, and the bound 8 · factor
    assert opt.state[p]["ClipValueByEMA/ema"].item() == 8.0
    assert opt.state[p]["ClipValueByEMA/EMA/ema"].item() == 8.0


def test_half_precision_reaches_links_as_float32():
    seen = []

    class Look(Transform):
        def init(self, param):
            return {"m": zeros_like_state(param)}

        def update(self, u, state, group):
            seen.extend(t.dtype for t in (*u, *state["m"]))
            return u.div_(3)

    p = one(1.0, torch.bfloat16)
    Modular([p], Look(), Look(), Scale(9.0)).step()
    assert set(seen) == {torch.float32}
    assert abs(p.item()) < 1e-6  # a rounding to bfloat16 in between would leave 0.002


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_sums_and_inner_products_are_one_number_a_tensor(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 4), (), (0,), (300_001,), (70_000,)]
    some, others = [
        [torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(2)
    ]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    sums = torch.stack([x.to(wide).sum() for x in some])
    products = [(x.to(wide).conj() * y.to(wide)).sum() for x, y in zip(some, others, strict=True)]
    u = TensorList(some)
    torch.testing.assert_close(u.sum(), sums, rtol=1e-6, atol=2e-4)
    found = u.dot(TensorList(others))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.stack(products).real, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(u.dot(others), found)


def test_inner_products_are_right_in_every_range():
    for dtype, scale in ((torch.float32, 1e30), (torch.float32, 1e-40), (torch.float64, 1e200)):
        a = torch.tensor([3.0, 4.0, 0.0], dtype=dtype) * scale
        b = torch.tensor([2.0, 1.0, 5.0], dtype=dtype) / (scale if dtype == torch.float64 else 1)
        expected = sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))
        (found,) = TensorList([a]).dot(TensorList([b])).tolist()
        assert found == pytest.approx(expected, rel=1e-12)
    zero, endless = torch.zeros(2), torch.tensor([torch.inf, 1.0])
    found = TensorList([zero, endless, endless]).dot([endless, zero, torch.ones(2)])
    assert found.isnan().tolist() == [True, True, False]
    assert found[2] == torch.inf
