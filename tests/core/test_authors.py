"""What the author of a method may rely on, through public names alone."""

import io

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Guard,
    Live,
    Modular,
    NormRule,
    Numbers,
    Scope,
    TensorwiseTransform,
    Transform,
    Units,
    WeightDecay,
    release,
    zeros_like_state,
)
from torchzero_clip.testing import check_pure

SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "scale": (), "b.weight": (2, 5), "c.conv": (2, 3, 2)}
both_engines = pytest.mark.parametrize("compile", [False, True])
compiled_is_slow = pytest.mark.parametrize(
    "compile", [False, pytest.param(True, marks=pytest.mark.slow)]
)
"""Other tests hold the compiled engine equal to the default one."""


def drawn(shape, seed: int, dtype=torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def model(dtype=torch.float32) -> dict[str, Parameter]:
    rows = enumerate(SHAPES.items())
    return {name: Parameter(drawn(shape, i, dtype)) for i, (name, shape) in rows}


def give(params, step: int, missing=()) -> None:
    for i, (name, p) in enumerate(params.items()):
        p.grad = None if name in missing else drawn(p.shape, 100 * (step + 1) + i, p.dtype)


def saved(opt) -> dict:
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---------------------------------------------------------------------- state by shape


class PlainZeros(Transform):
    """m ← 0.99 m + 0.01 u;   u ← m"""

    def init(self, param):
        short = torch.zeros(2, dtype=param.dtype)
        return {"m": torch.zeros_like(param), "short": short, "seen": param > 0}

    def update(self, u, state, group):
        return state["m"].lerp_(u, 0.01)


@pytest.mark.parametrize("engine", [{"fused": False}, {}, {"compile": True}], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_state_that_torch_makes_like_a_half_parameter_is_float32(dtype, state_dtype, engine):
    params = model(dtype)
    opt = Modular(params.items(), PlainZeros(), LR(1.0), state_dtype=state_dtype, **engine)
    expected = {
        "PlainZeros/m": torch.float32 if state_dtype == "float32" else torch.bfloat16,
        "PlainZeros/short": torch.float32,
        "PlainZeros/seen": torch.bool,
    }
    for step in range(3):
        give(params, step)
        opt.step()
    for p in params.values():
        assert {key: x.dtype for key, x in opt.state[p].items()} == expected
    fresh = Modular(params.items(), PlainZeros(), LR(1.0), state_dtype=state_dtype, **engine)
    fresh.load_state_dict(saved(opt))


def test_an_average_of_a_half_parameter_does_not_stall():
    p = Parameter(torch.zeros(1, dtype=torch.bfloat16))
    opt = Modular([p], PlainZeros(), LR(0.0))
    for _ in range(400):
        p.grad = torch.ones_like(p)
        opt.step()
    assert opt.state[p]["PlainZeros/m"].item() == pytest.approx(1 - 0.99**400, rel=1e-4)


class Factored(Transform):
    """V ← β V + (1 - β) u², of matrices the means of rows and columns;   u ← u / √V"""

    beta: Live[float] = 0.9

    def init(self, param):
        if param.dim() < 2:
            return {"square": zeros_like_state(param)}
        *rest, rows, columns = param.shape
        row, column = (*rest, rows, 1), (*rest, 1, columns)
        return {"row": zeros_like_state(param, row), "column": zeros_like_state(param, column)}

    def update(self, u, state, group):
        weight, square = 1 - group["beta"], u.mul(u)
        if "square" in state:
            return u.div_(state["square"].lerp_(square, weight).sqrt())
        row = state["row"].lerp_(square.map(lambda x: x.mean(-1, keepdim=True)), weight)
        column = state["column"].lerp_(square.map(lambda x: x.mean(-2, keepdim=True)), weight)
        size = row.map(lambda r: r.mean(-2, keepdim=True))
        return u.div_(row.div(size).sqrt()).div_(column.sqrt())


def factored(p, grads) -> Tensor:
    """The parameter after these gradients and LR(0.1), by hand."""
    w, v, row, column = p.clone(), 0.0, 0.0, 0.0
    for g in grads:
        if p.dim() < 2:
            v = 0.9 * v + 0.1 * g * g
            w -= 0.1 * g / v.sqrt()
            continue
        row = 0.9 * row + 0.1 * (g * g).mean(-1, keepdim=True)
        column = 0.9 * column + 0.1 * (g * g).mean(-2, keepdim=True)
        w -= 0.1 * g / (row / row.mean(-2, keepdim=True) * column).sqrt()
    return w


@compiled_is_slow
def test_parameters_of_other_shapes_may_keep_state_under_other_names(compile):
    params, begun = model(torch.float64), model(torch.float64)
    opt = Modular(
        params.values(), ClipNorm(1e9, dim="global"), Factored(), LR(0.1), compile=compile
    )
    grads = {name: [] for name in params}
    for step in range(6):
        give(params, step, missing=("b.weight",) if step == 1 else ())
        for name, p in params.items():
            grads[name] += [] if p.grad is None else [p.grad]
        opt.step()
    for name, p in params.items():
        expected = factored(begun[name].detach(), grads[name])
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
        names = {"row", "column"} if p.dim() > 1 else {"square"}
        assert set(opt.state[p]) == {f"Factored/{x}" for x in names}


@both_engines
def test_state_by_shape_is_saved_and_goes_on_bit_for_bit(compile):
    params, others = model(), model()
    chain = Factored(), LR(0.1)
    opt = Modular(params.values(), *chain, compile=compile)
    other = Modular(others.values(), *chain, compile=compile)
    for step in range(3):
        give(params, step)
        opt.step()
    with torch.no_grad():
        for name, p in others.items():
            p.copy_(params[name])
    other.load_state_dict(saved(opt))
    for some, one in ((params, opt), (others, other)):
        give(some, 7)
        one.step()
    assert all(torch.equal(p, others[name]) for name, p in params.items())


def test_a_checkpoint_that_lacks_a_name_of_a_shape_is_a_sentence():
    params = model()
    opt = Modular(params.values(), Factored(), LR(0.1))
    give(params, 0)
    opt.step()
    given = saved(opt)
    del given["state"][0]["Factored/row"]
    with pytest.raises(ValueError, match="has no state 'Factored/row' for parameter 0"):
        opt.load_state_dict(given)
    given = saved(opt)
    given["state"][1]["Factored/row"] = torch.zeros(4, 1)
    with pytest.raises(ValueError, match=r"Factored/row.*but no transform of this optimizer has"):
        opt.load_state_dict(given)


def test_state_by_shape_may_be_small_and_released():
    params, others = model(), model()
    give(params, 0)
    opt = Modular(params.values(), Factored(), LR(0.1), state_dtype="bfloat16")
    opt.step()
    kept = {name: {x.dtype for x in opt.state[p].values()} for name, p in params.items()}
    assert kept["a.bias"] == {torch.bfloat16}  # in the shape of its parameter
    assert kept["a.weight"] == {torch.float32}
    params = model()
    opt = Modular(params.values(), Factored(), LR(0.1))
    free = release(others.values(), Factored(), LR(0.1))
    for step in range(3):
        for some, one in ((params, opt), (others, free)):
            give(some, step)
            one.step()
    assert all(torch.equal(p, others[name]) for name, p in params.items())


def test_none_is_a_name_that_a_parameter_has_not():
    seen = []

    class Basis(TensorwiseTransform):
        def init(self, param):
            sides = [torch.eye(n) if n < 5 else None for n in param.shape]
            return {f"basis_{i}": side for i, side in enumerate(sides)}

        def update_tensor(self, u, state, group):
            seen.append({name: tuple(t.shape) for name, t in state.items()})
            return u

    params = model()
    give(params, 0)
    opt = Modular(params.values(), Basis(), LR(0.1))
    opt.init_state()
    opt.step()
    expected = [
        {f"basis_{i}": (n, n) for i, n in enumerate(shape) if n < 5} for shape in SHAPES.values()
    ]
    assert sorted(map(str, seen)) == sorted(map(str, expected))
    assert set(opt.state[params["b.weight"]]) == {"Basis/basis_0"}
    opt.load_state_dict(saved(opt))


# ---------------------------------------------------------------------- the parameter


class Relative(TensorwiseTransform):
    """u ← u · max(floor, RMS(w))"""

    floor: Live[float] = 1e-3

    reads = ("param",)

    def update_tensor(self, u, state, group):
        size = group["param"].to(u.dtype).square().mean().sqrt()
        return u.mul_(size.clamp(min=group["floor"]))


@compiled_is_slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_tensor_has_its_parameter_where_the_class_says_so(compile, dtype):
    params = model(dtype)
    before = {name: p.detach().float().clone() for name, p in params.items()}
    opt = Modular(params.values(), Relative(), LR(0.125), compile=compile)
    give(params, 0)
    opt.step()
    for name, p in params.items():
        size = before[name].square().mean().sqrt()
        expected = (before[name] - 0.125 * size * p.grad.float()).to(dtype)
        torch.testing.assert_close(p.detach(), expected)


def test_the_parameter_stays_where_update_tensor_writes_its_update():
    class Shrink(TensorwiseTransform):
        reads = ("param",)

        def update_tensor(self, u, state, group):
            assert group["param"].data_ptr() != u.data_ptr()
            return u.copy_(group["param"]).mul_(0.5)

    p = Parameter(torch.tensor([2.0, -4.0]))
    p.grad = torch.zeros(2)
    Modular([p], Shrink()).step()
    assert p.tolist() == [1.0, -2.0]


def test_a_class_that_does_not_ask_gets_no_parameter():
    class Plain(TensorwiseTransform):
        def update_tensor(self, u, state, group):
            assert "param" not in group
            return u

    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    Modular([p], Plain()).step()
    assert p.tolist() == [0.0, 0.0]


# ---------------------------------------------------------------------- lists


class Powers(Transform):
    """u ← the smaller of u² / √(1 + v) and |u|^p + 0.5 u, v the largest u² so far"""

    power: Live[float] = 1.5

    pure = True

    def init(self, param):
        return {"largest": zeros_like_state(param)}

    def update(self, u, state, group):
        largest = state["largest"].maximum_(u.square())
        first = u.square().mul_(largest.add(1.0).rsqrt())
        return first.minimum(u.abs().pow(group["power"]).add(u, alpha=0.5))


@pytest.mark.parametrize("way", ["eager", "compiled", "file"])
def test_operators_of_lists_are_the_same_in_both_engines_and_in_a_file(way):
    params = model(torch.float64)
    begun = {name: p.detach().clone() for name, p in params.items()}
    chain = Powers(), LR(0.1)
    opt = Modular(params.values(), *chain, compile=way == "compiled")
    if way == "file":
        space = {}
        exec(opt.to_source("Mine"), space)
        opt = space["Mine"](params.values())
    largest = {name: torch.zeros_like(p) for name, p in begun.items()}
    for step in range(3):
        give(params, step)
        opt.step()
        for name, w in begun.items():
            g = params[name].grad
            largest[name] = torch.maximum(largest[name], g * g)
            first = g * g / (1 + largest[name]).sqrt()
            w -= 0.1 * torch.minimum(first, g.abs() ** 1.5 + 0.5 * g)
    for name, p in params.items():
        torch.testing.assert_close(p.detach(), begun[name], rtol=1e-12, atol=1e-12)


def test_operators_of_lists_are_repeated():
    check_pure(Powers(), LR(0.1))


# ---------------------------------------------------------------------- inner products


class Aligned(NormRule):
    """u ← u · min(1, |⟨w, g⟩| / ‖u‖²), that is, no more than the share along the weights"""

    dim: Scope = None

    pure = True

    def limit(self, norm, state, group):
        return self.dot(group["params"], group["grads"], group).abs() / norm


@pytest.mark.parametrize("dim", [None, "global", "layer", 0])
def test_a_norm_rule_has_the_inner_product_of_two_lists_at_its_scope(dim):
    params = model()
    opt = Modular(params.items(), Aligned(dim=dim), LR(0.1))
    give(params, 0)
    pairs = {name: (p.detach().double(), p.grad.double()) for name, p in params.items()}
    opt.step()
    if dim == 0:
        some = [x for x in pairs.values() if x[0].dim()]  # a number has no slices
        expected = [((w * g).sum(0).abs() / g.norm(dim=0)).flatten() for w, g in some]
        found = opt.metrics()["Aligned/limit"].double()
        found = found[~found.isnan()]
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-6, atol=1e-9)
        return
    unit = {None: lambda n: n, "global": lambda n: "", "layer": lambda n: n.rpartition(".")[0]}[dim]
    products, norms = {}, {}
    for name, (w, g) in pairs.items():
        products[unit(name)] = products.get(unit(name), 0) + (w * g).sum()
        norms[unit(name)] = norms.get(unit(name), 0) + g.square().sum()
    expected = torch.stack([products[x].abs() / norms[x].sqrt() for x in products])
    found = opt.metrics()["Aligned/limit"].double().view(-1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_an_inner_product_of_a_link_with_a_step_of_its_own():
    class Along(Transform):
        """u ← u - ⟨u, w⟩ / ⟨w, w⟩ · w, of all parameters as one"""

        pure = True

        def step(self, buckets):
            units = Units(buckets, "global")
            lists = [b.u for b in units.buckets], [b.params for b in units.buckets]
            share = units.dot(*lists) / units.dot(lists[1], lists[1])
            for bucket in units.buckets:
                u = bucket.u.to(bucket.state_dtype)
                bucket.u = u.sub_(bucket.params.mul(units.operand(bucket, share)))
            return buckets

    params = model()
    opt = Modular(params.values(), Along(), LR(1.0))
    give(params, 0)
    w, g = [torch.cat([x.flatten() for x in row]) for row in both(params)]
    opt.step()
    after = torch.cat([p.detach().flatten() for p in params.values()])
    torch.testing.assert_close(after, w - (g - (g @ w) / (w @ w) * w))
    check_pure(Along(), LR(0.1))


def both(params) -> list[list[Tensor]]:
    """The parameters as they are now, and their gradients."""
    return [[p.detach().clone() for p in params.values()], [p.grad for p in params.values()]]


# ---------------------------------------------------------------------- numbers kept once


class Averaging(Transform):
    """u ← c · u, c = p / Σ p of each group, p the largest lr so far to the power of two"""

    reads = ("lr",)
    pure = True

    def init_group(self):
        return {"largest": 0.0, "total": 0.0, "share": 0.0}

    def advance_group(self, numbers, group):
        largest = torch.maximum(numbers["largest"], group["lr"])
        total = numbers["total"] + largest.square()
        share = torch.where(total > 0, largest.square() / total, 0)
        return {"largest": largest, "total": total, "share": share}

    def update(self, u, state, group):
        return u.mul_(group["share"])


class EveryThird(Transform):
    """s ← u in every third step, s as it is in others;   u ← s"""

    reads = ("step",)
    pure = True

    def init(self, param):
        return {"slow": zeros_like_state(param)}

    def update(self, u, state, group):
        due = group["step"] % 3 == 0
        return state["slow"].copy_(u.where(due, state["slow"]))


def two_groups(params) -> list[dict]:
    names = list(params)
    some, others = names[:2], names[2:]
    return [
        {"params": [params[n] for n in some], "lr": 0.5},
        {"params": [params[n] for n in others]},
    ]


@compiled_is_slow
def test_numbers_of_a_group_are_kept_once_on_the_device(compile):
    params = model()
    before = {name: p.detach().clone() for name, p in params.items()}
    opt = Modular(two_groups(params), Averaging(), LR(0.25), compile=compile)
    totals, largest = [0.0, 0.0], [0.0, 0.0]
    for step, rates in enumerate([(0.5, 0.25), (0.125, 0.5), (1.0, 0.0), (0.0, 0.0)] * 2):
        for group, lr in zip(opt.param_groups, rates, strict=True):
            group["lr"] = lr
        give(params, step)
        opt.step()
        for i, group in enumerate(opt.param_groups):
            largest[i] = max(largest[i], rates[i])
            totals[i] += largest[i] ** 2
            for name in [n for n, p in params.items() if any(p is q for q in group["params"])]:
                before[name] -= rates[i] * largest[i] ** 2 / totals[i] * params[name].grad
            held = group["chain"]["Averaging/total"]
            assert (held.dtype, held.shape) == (torch.float64, ())
            assert held.item() == pytest.approx(totals[i], rel=1e-12)
    for name, p in params.items():
        torch.testing.assert_close(p.detach(), before[name])


@compiled_is_slow
def test_every_third_step_needs_no_read_on_the_host(compile):
    params = model()
    opt = Modular(params.values(), EveryThird(), LR(0.5), compile=compile)
    slow = {name: torch.zeros_like(p) for name, p in params.items()}
    for step in range(1, 8):
        give(params, step)
        before = {name: p.detach().clone() for name, p in params.items()}
        opt.step()
        for name, p in params.items():
            slow[name] = p.grad if step % 3 == 0 else slow[name]
            torch.testing.assert_close(p.detach(), before[name] - 0.5 * slow[name])
    assert opt.param_groups[0]["chain"]["EveryThird/step"] == 7


class Growing(TensorwiseTransform):
    """u ← d · u, d the root of twice itself for all parameters"""

    start: float = 1e-3

    shown = ("d",)
    pure = True

    def init_model(self):
        return {"d": self.start}

    def advance_model(self, numbers, group):
        return {"d": (2 * numbers["d"]).sqrt()}

    def update_tensor(self, u, state, group):
        return u.mul_(group["d"])


def test_a_parameter_that_comes_late_has_the_numbers_of_the_model():
    params = model()
    late = params.pop("c.conv")
    opt = Modular(two_groups(params), Growing(), LR(1.0))
    d = 1e-3
    for step in range(4):
        give(params, step)
        if step == 2:
            opt.add_param_group({"params": [late]})
        late.grad = torch.ones_like(late)
        before = late.detach().clone()
        opt.step()
        d = (2 * d) ** 0.5
        assert opt.metrics()["Growing/d"].item() == pytest.approx(d, rel=1e-6)
        if step >= 2:
            torch.testing.assert_close(late.detach(), before - d)
    held = [group["chain"]["Growing/d"] for group in opt.param_groups]
    assert all(x is held[0] for x in held)


@both_engines
def test_numbers_kept_once_are_saved_and_go_on_bit_for_bit(compile):
    params, others = model(), model()
    chain = Averaging(), EveryThird(), Growing(), LR(0.1)
    opt = Modular(two_groups(params), *chain, compile=compile)
    other = Modular(two_groups(others), *chain, compile=compile)
    other.init_state()
    for step in range(4):
        give(params, step)
        opt.step()
    with torch.no_grad():
        for name, p in others.items():
            p.copy_(params[name])
    other.load_state_dict(saved(opt))
    for step in range(4, 7):
        for some, one in ((params, opt), (others, other)):
            give(some, step)
            one.step()
    assert all(torch.equal(p, others[name]) for name, p in params.items())
    given = saved(opt)
    del given["param_groups"][1]["chain"]["Averaging/total"]
    with pytest.raises(ValueError, match="has no state 'Averaging/total' for group 1"):
        opt.load_state_dict(given)


@both_engines
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_guard_skips_moves_no_number(compile, fused):
    if compile and not fused:
        return
    params, others = model(), model()
    chain = Guard(), Averaging(), EveryThird(), Growing(), LR(0.1)
    opt = Modular(two_groups(params), *chain, compile=compile, fused=fused)
    other = Modular(two_groups(others), *chain, compile=compile, fused=fused)
    for step in range(6):
        give(params, step)
        if step in (0, 3):
            params["scale"].grad.fill_(torch.nan)
        else:
            give(others, step)
            other.step()
        opt.step()
    assert all(torch.equal(p, others[name]) for name, p in params.items())
    for ours, theirs in zip(opt.param_groups, other.param_groups, strict=True):
        kept = {key: x for key, x in ours["chain"].items() if not key.startswith("Guard")}
        assert all(torch.equal(x, theirs["chain"][key]) for key, x in kept.items())


def test_released_parameters_count_a_step_once():
    params, others = model(), model()
    chain = Averaging(), EveryThird(), Growing(), LR(0.1)
    opt, free = Modular(two_groups(params), *chain), release(two_groups(others), *chain)
    for step in range(5):
        for some, one in ((params, opt), (others, free)):
            give(some, step)
            one.step()
    for name, p in params.items():
        torch.testing.assert_close(p, others[name], rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(opt.param_groups, free.param_groups, strict=True):
        kept = {key: x for key, x in ours["chain"].items() if "/" in key}
        assert all(torch.equal(x, theirs["chain"][key]) for key, x in kept.items())


class Fading(NormRule):
    """‖u‖ ≤ c · lr / t, c doubled in every step of the group"""

    dim: Scope = "global"

    reads = ("lr", "step")

    def init_group(self):
        return {"c": 1.0}

    def advance_group(self, numbers, group):
        return {"c": 2 * numbers["c"]}

    def limit(self, norm, state, group):
        return group["c"] * group["lr"] / group["step"]


@compiled_is_slow
def test_a_limit_of_the_step_before_has_the_numbers_of_that_step(compile):
    params = model()
    free = release(two_groups(params), Fading(), LR(0.25), compile=compile, limit="last step")
    divisors = [1.0, 1.0]
    for step in range(1, 6):
        before = {name: p.detach().clone() for name, p in params.items()}
        give(params, step)
        grads = {name: p.grad.clone() for name, p in params.items()}
        free.step()
        for i, group in enumerate(free.param_groups):
            for name in [n for n, p in params.items() if any(p is q for q in group["params"])]:
                moved = before[name] - group["lr"] * grads[name] / divisors[i]
                torch.testing.assert_close(params[name].detach(), moved)
        norm = torch.stack([g.double().norm() for g in grads.values()]).norm().item()
        limits = [2**step * group["lr"] / step for group in free.param_groups]
        divisors = [max(1.0, norm / limit) for limit in limits]
        assert free.param_groups[0]["chain"]["Fading/step"] == step
    assert max(divisors) > 1.0


def test_numbers_kept_once_are_repeated():
    check_pure(Averaging(), EveryThird(), LR(0.1))
    check_pure(Guard(), Averaging(), EveryThird(), LR(0.1))


def test_a_step_of_ones_own_sets_numbers_from_what_it_measures():
    class Largest(Transform):
        """u ← u / n, n the largest norm of all gradients so far"""

        pure = True
        shown = ("norm",)

        def init_model(self):
            return {"norm": 0.0}

        def step(self, buckets):
            units, numbers = Units(buckets, "global"), Numbers(buckets)
            numbers.model["norm"] = torch.maximum(numbers.model["norm"], units.norm()[0])
            numbers.store()
            for bucket in buckets:
                bucket.u = bucket.u.to(bucket.state_dtype).div_(numbers.of(bucket)["norm"])
            return buckets

    params = model()
    opt = Modular(params.values(), Largest(), LR(0.1))
    largest = 0.0
    for step in range(3):
        give(params, step)
        norm = torch.cat([p.grad.flatten() for p in params.values()]).norm().item()
        largest = max(largest, norm)
        opt.step()
        assert opt.metrics()["Largest/norm"].item() == pytest.approx(largest, rel=1e-6)
    check_pure(Largest(), LR(0.1))


def test_a_number_that_was_not_declared_is_a_sentence():
    class Wrong(Transform):
        def init_group(self):
            return {"a": 0.0}

        def advance_group(self, numbers, group):
            return {"b": numbers["a"]}

    params = model()
    give(params, 0)
    with pytest.raises(KeyError, match=r"Wrong: the returned values .* \['a'\]"):
        Modular(params.values(), Wrong()).step()


# ---------------------------------------------------------------------- the loss


class Polyak(Transform):
    """u ← min(1, (loss - least) / ‖u‖²) · u, the step of Polyak"""

    least: Live[float] = 0.0

    reads = ("loss",)
    pure = True

    def step(self, buckets):
        units = Units(buckets, "global")
        square = units.norm()[0].square()
        for bucket in buckets:
            group = bucket.group
            share = ((group["loss"] - group["least"]) / square).clamp(0, 1)
            bucket.u = bucket.u.to(bucket.state_dtype).mul_(share)
        return buckets


@pytest.mark.parametrize(
    ("compile", "way"),
    [
        (False, "tensor"),
        (False, "number"),
        (False, "closure"),
        (True, "tensor"),
        pytest.param(True, "number", marks=pytest.mark.slow),
        pytest.param(True, "closure", marks=pytest.mark.slow),
    ],
)
def test_a_link_has_the_loss_of_the_step(compile, way):
    params = model()
    opt = Modular(params.values(), Polyak(), LR(1.0), compile=compile)
    for step in range(5):
        give(params, step)
        loss, before, grads = torch.tensor(1.0 + step), *both(params)
        if way == "closure":
            opt.step(lambda loss=loss: loss)
        else:
            opt.report(loss=loss if way == "tensor" else loss.item())
            opt.step()
        norm = torch.cat([g.flatten() for g in grads]).norm()
        share = (loss / norm**2).clamp(0, 1)
        for p, w, g in zip(params.values(), before, grads, strict=True):
            torch.testing.assert_close(p.detach(), w - share * g)


def test_a_link_that_needs_the_loss_says_how_to_tell_it():
    params = model()
    opt = Modular(params.values(), Polyak(), LR(1.0))
    give(params, 0)
    with pytest.raises(RuntimeError, match=r"Polyak needs the loss.*report\(loss=loss\).*closure"):
        opt.step()
    with pytest.raises(
        ValueError, match="release: Polyak is not supported, because Polyak needs the loss"
    ):
        release(params.values(), Polyak(), LR(1.0))


@pytest.mark.parametrize("link", [Relative(), Powers()], ids=repr)
def test_a_rule_that_writes_its_tensors_in_place_is_a_file(link):
    params, others = model(), model()
    space = {}
    opt = Modular(params.values(), link, LR(0.1))
    exec(opt.to_source("Mine"), space)
    other = space["Mine"](others.values())
    for step in range(3):
        for some, one in ((params, opt), (others, other)):
            give(some, step)
            one.step()
    for name, p in params.items():
        torch.testing.assert_close(p, others[name])


# ---------------------------------------------------------------------- first steps


class Whitened(Transform):
    """u ← u / s, s the size of the first gradient, which moves nothing"""

    drops = "first"
    pure = True

    def init(self, param):
        return {"size": zeros_like_state(param).fill_(torch.inf)}

    def update(self, u, state, group):
        size = state["size"]
        size.copy_(u.abs().add(1.0).where(size.isinf(), size))
        return u.div_(size)


@both_engines
@pytest.mark.parametrize("early", [False, True])
def test_the_first_gradient_of_a_parameter_may_make_state_alone(compile, early):
    params = model()
    chain = Whitened(), Adam(), WeightDecay(0.1), LR(0.1)
    opt = Modular(params.values(), *chain, compile=compile)
    if early:
        opt.init_state()
    sizes, twins, others = {}, {}, {}
    for step in range(5):
        give(params, step, missing=("b.weight",) if step < 2 else ())
        for name, p in params.items():
            if p.grad is None:
                continue
            if name not in sizes:
                sizes[name] = p.grad.abs() + 1
                twins[name] = Parameter(p.detach().clone())
                others[name] = Modular([twins[name]], *chain[1:])
            else:
                twins[name].grad = p.grad / sizes[name]
                others[name].step()
        opt.step()
        for name, p in twins.items():
            torch.testing.assert_close(params[name], p)
    steps = {name: opt.state[p]["Adam/step"].item() for name, p in params.items()}
    assert steps == {name: 2 if name == "b.weight" else 4 for name in params}
    assert {opt.state[p]["Whitened/begun"] for p in params.values()} == {1}


def test_a_first_step_that_a_guard_skips_is_none():
    params, others = model(), model()
    chain = Guard(), Whitened(), WeightDecay(0.1), LR(0.1)
    opt, other = Modular(params.values(), *chain), Modular(others.values(), *chain)
    give(params, 9)
    params["scale"].grad.fill_(torch.nan)
    opt.step()
    for step in range(3):
        for some, one in ((params, opt), (others, other)):
            give(some, step)
            one.step()
    assert all(torch.equal(p, others[name]) for name, p in params.items())


def test_a_parameter_that_has_begun_goes_on_from_a_checkpoint():
    params, others = model(), model()
    chain = Whitened(), Adam(), LR(0.1)
    opt, other = Modular(params.values(), *chain), Modular(others.values(), *chain)
    give(params, 0, missing=("b.weight",))
    opt.step()
    other.load_state_dict(saved(opt))
    for step in range(1, 3):
        for some, one in ((params, opt), (others, other)):
            give(some, step)
            one.step()
    assert all(torch.equal(p, others[name]) for name, p in params.items())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_first_steps_and_numbers_kept_once_may_be_compiled_by_torch(backend):
    torch._dynamo.reset()
    params, others = [{"w": Parameter(torch.ones(2))} for _ in range(2)]
    chain = Averaging(), EveryThird(), Whitened(), LR(0.1)
    if backend == "aot_eager":
        chain = *chain[:-1], Adam(), LR(0.1)
    opt, other = [Modular(some.values(), *chain, fused=False) for some in (params, others)]
    step = torch.compile(opt.step, fullgraph=True, backend=backend)
    for i in range(4):
        for some, one in ((params, step), (others, other.step)):
            give(some, i)
            one()
        torch.testing.assert_close(params["w"], others["w"])
        ours, theirs = opt.param_groups[0]["chain"], other.param_groups[0]["chain"]
        torch.testing.assert_close(ours["Averaging/total"], theirs["Averaging/total"])
    assert not params["w"].equal(torch.ones(2))
    assert opt.param_groups[0]["chain"]["EveryThird/step"] == 4
    if backend == "aot_eager":
        assert opt.state[params["w"]]["Adam/step"] == 3


def test_steps_after_the_first_are_repeated():
    check_pure(Whitened(), Adam(), LR(0.1))


def test_a_released_parameter_begins_by_itself():
    params, others = model(), model()
    chain = Whitened(), Adam(), LR(0.1)
    opt, free = Modular(params.values(), *chain), release(others.values(), *chain)
    for step in range(3):
        for some, one in ((params, opt), (others, free)):
            give(some, step)
            one.step()
    assert all(torch.equal(p, others[name]) for name, p in params.items())
