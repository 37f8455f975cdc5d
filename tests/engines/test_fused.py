"""The fused tail of a chain gives what the links' own formulas give."""

import copy
import functools

import pytest
import torch

from torchzero_clip import (
    LR,
    Accumulate,
    Adam,
    Cautious,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    Freeze,
    FusedKernel,
    Lion,
    Masked,
    Modular,
    Momentum,
    Partition,
    Scale,
    Transform,
    Warmup,
    WeightDecay,
)

CHAINS = {
    "adam": lambda: [Adam(), LR(1e-2)],
    "amsgrad": lambda: [Adam(amsgrad=True), LR(1e-2)],
    "adamw": lambda: [ClipNorm(0.1, dim="global"), Adam(), WeightDecay(0.1), LR(1e-2)],
    "decay after lr": lambda: [Adam(), LR(1e-2), WeightDecay(0.1)],
    "decay twice": lambda: [WeightDecay(0.1), Adam(), WeightDecay(0.1), LR(1e-2), WeightDecay(0.2)],
    "nothing but decay": lambda: [Adam(), WeightDecay(0.1), LR(0.0), WeightDecay(0.1)],
    "lr zero": lambda: [Adam(), WeightDecay(0.1), LR(0.0)],
    "uphill": lambda: [Scale(-1), Adam(), LR(1e-2)],
    "downhill": lambda: [Adam(), Scale(-1), WeightDecay(0.1), LR(1e-2)],
    "lr tensor": lambda: [Adam(), LR(torch.tensor(1e-2))],
    "lr tensor, decay": lambda: [Adam(), WeightDecay(0.1), LR(torch.tensor(1e-2))],
    "eps tensor": lambda: [Adam(eps=torch.tensor(1e-3)), LR(1e-2)],
    "read by a rule": lambda: [Adam(), ClipNorm(0.5), LR(1e-2)],
    "read by growth": lambda: [Adam(), WeightDecay(0.1), ClipNormGrowth(), LR(1e-2)],
    "scaled, then read": lambda: [Adam(), LR(1e-2), WeightDecay(0.1), ClipNorm(1e-3)],
    "cautious": lambda: [Adam(), Cautious(), LR(1e-2)],
    "warm-up": lambda: [Adam(), LR(1e-2), Warmup(3)],
    "adam twice": lambda: [Adam(), Adam(), LR(1e-2)],
    "masked decay": lambda: [Adam(), Masked(WeightDecay(0.1), lambda n, p: p.dim() > 1), LR(1e-2)],
    "masked adam": lambda: [Masked(Adam(), lambda n, p: p.dim() > 1), LR(1e-2)],
    "partition": lambda: [
        Partition(
            {"m": Chain(Adam(), WeightDecay(0.1)), "v": Momentum()},
            lambda n, p: "m" if p.dim() > 1 else "v",
        ),
        LR(1e-2),
    ],
    "some dropped": lambda: [Adam(), Freeze(lambda n, p: p.dim() == 1), LR(1e-2)],
    "all dropped": lambda: [Adam(), Freeze(lambda n, p: True), LR(1e-2)],
    "momentum": lambda: [ClipNorm(0.1), Momentum(0.9), LR(1e-2)],
    "momentum of what is clipped": lambda: [
        ClipNorm(0.1, dim="global"),
        Momentum(0.9),
        WeightDecay(0.1),
        LR(1e-2),
    ],
    "nesterov of what is clipped": lambda: [
        ClipNorm(0.1, dim="global"),
        Momentum(0.9, nesterov=True),
        LR(1e-2),
    ],
    "momentum, decay": lambda: [Momentum(0.9), WeightDecay(0.1), LR(1e-2)],
    "nesterov": lambda: [Momentum(0.9, nesterov=True), LR(1e-2)],
    "dampened": lambda: [Momentum(0.9, dampening=0.5), LR(1e-2), WeightDecay(0.1)],
    "momentum, read": lambda: [Momentum(0.9), ClipNorm(0.5), LR(1e-2)],
    "momentum, lr tensor": lambda: [Momentum(0.9), LR(torch.tensor(1e-2))],
    "lr alone": lambda: [LR(1e-2)],
    "lr, decay": lambda: [LR(1e-2), WeightDecay(0.1), Scale(2.0)],
    "lr, then read": lambda: [ClipNorm(0.1), LR(1e-2), ClipNorm(1e-3)],
    "lr, then a tensor": lambda: [LR(1e-2), Scale(torch.tensor(3.0))],
    "waits": lambda: [Adam(), Accumulate(2), LR(1e-2)],
}


def build(chain, dtype, fused):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, dtype=dtype)) for s in ((3, 4), (4,), (2, 3, 2))]
    return params, Modular(
        [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}], *CHAINS[chain](), fused=fused
    )


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)


def assert_close(a, b, dtype):
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_step_from_equal_state_is_the_plain_step(chain, dtype):
    fast_params, fast = build(chain, dtype, True)
    plain_params, plain = build(chain, dtype, False)
    for seed in range(4):
        give_gradients(fast_params, seed)
        give_gradients(plain_params, seed)
        grads = [p.grad.clone() for p in fast_params]
        fast.step()
        plain.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(fast_params, grads, strict=True))
        for p, q in zip(fast_params, plain_params, strict=True):
            assert_close(p.data, q.data, dtype)
            assert fast.state[p].keys() == plain.state[q].keys()
            for key, value in fast.state[p].items():
                other = plain.state[q][key]
                assert type(value) is type(other)
                assert getattr(value, "dtype", None) == getattr(other, "dtype", None)
                assert_close(torch.as_tensor(value), torch.as_tensor(other), dtype)
            p.data.copy_(q.data)
        fast.load_state_dict(copy.deepcopy(plain.state_dict()))


@pytest.mark.parametrize(
    ("chain", "runs"),
    [("adamw", True), ("lr tensor", True), ("lr tensor, decay", True), ("read by a rule", False)],
)
def test_the_kernel_runs_where_nothing_reads_the_update(chain, runs, monkeypatch):
    ran, kernel = [], torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *a, **kw: ran.append(kernel(*a, **kw)))
    params, opt = build(chain, torch.float32, True)
    give_gradients(params, 0)
    opt.step()
    assert bool(ran) == runs


@pytest.mark.parametrize(
    ("chain", "dtype", "scales"),
    [
        ("momentum of what is clipped", torch.float32, True),
        ("momentum of what is clipped", torch.float64, False),  # 1 - x would lose digits of it
        ("nesterov of what is clipped", torch.float32, False),  # which sees u once more
    ],
)
def test_the_kernel_of_sgd_scales_by_the_clip_in_its_own_pass(chain, dtype, scales, monkeypatch):
    taken, kernel = [], torch._fused_sgd_

    def seen(w, grads, *args, **options):
        taken.append((grads, options["dampening"]))
        kernel(w, grads, *args, **options)

    monkeypatch.setattr(torch, "_fused_sgd_", seen)
    params, opt = build(chain, dtype, True)
    give_gradients(params, 0)
    norm = torch.cat([p.grad.flatten() for p in params]).norm()
    opt.step()
    given = [grad for grads, _ in taken for grad in grads]
    alone = [grad is p.grad for grad, p in zip(given, params, strict=True)]
    assert set(alone) == {scales}
    for _, damped in taken:
        assert 1 - damped == pytest.approx(float(0.1 / norm) if scales else 1.0)


class Damped(Transform):
    """u, by a fused function of its own, whose `dampening` is another thing than SGD's"""

    def init(self, param):
        return {"seen": torch.zeros_like(param)}

    def update(self, u, state, group):
        return u

    def fused(self, group):
        def move(params, grads, seen, *, lr, weight_decay, dampening):
            assert dampening == 0.0
            torch._foreach_sub_(params, grads, alpha=lr)

        made = functools.partial(move, dampening=0.0)
        return FusedKernel(made, ("seen",), advance=lambda state: None, decays=False)


def test_a_fused_function_of_a_user_gets_its_options_as_it_gave_them():
    w = torch.nn.Parameter(torch.zeros(4))
    w.grad = torch.full((4,), 10.0)
    Modular([w], ClipNorm(1.0, dim="global"), Damped(), LR(1.0)).step()
    torch.testing.assert_close(w.data, torch.full((4,), -0.5))


class HalfAdam(Adam):
    """Adam, with half its update"""

    def update(self, u, state, group):
        return super().update(u, state, group).mul_(0.5)


class HalfLR(LR):
    """LR, with half its learning rate"""

    def update(self, u, state, group):
        return super().update(u, state, group).mul_(0.5)


class HalfDecay(WeightDecay):
    """WeightDecay, with half its decay"""

    def update(self, u, state, group):
        return u.add_(group["params"], alpha=0.5 * group["weight_decay"])


class ByMean(Lion):
    """Lion, divided by the mean of each tensor"""

    def update(self, u, state, group):
        u = super().update(u, state, group)
        return u.map(lambda t: t / t.abs().mean())


@pytest.mark.parametrize(
    ("changed", "equal"),
    [
        ([HalfAdam(), LR(1e-2)], [Adam(), LR(5e-3)]),
        ([Adam(), HalfLR(1e-2)], [Adam(), LR(5e-3)]),
        ([Adam(), HalfDecay(0.2), LR(1e-2)], [Adam(), WeightDecay(0.1), LR(1e-2)]),
    ],
)
def test_a_subclass_with_another_update_does_not_run_the_kernel_of_its_base(changed, equal):
    moved = []
    for chain in (changed, equal):
        w = torch.nn.Parameter(torch.ones(4))
        opt = Modular([w], *chain)
        for _ in range(3):
            w.grad = torch.tensor([1.0, -2.0, 3.0, 0.5])
            opt.step()
        moved.append(w.data)
    torch.testing.assert_close(*moved)


def test_a_subclass_with_another_update_is_not_elementwise_unless_it_says_so():
    assert Lion.per_entry
    assert not ByMean.per_entry


def test_one_argument_switches_it_off(monkeypatch):
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **kw: pytest.fail("the kernel ran"))
    params, opt = build("adamw", torch.float32, False)
    give_gradients(params, 0)
    opt.step()
    assert copy.deepcopy(opt).fused is False


@pytest.mark.parametrize("make", [lambda p: p.t().contiguous().t(), lambda p: p.to("meta")][:1])
def test_other_memory_takes_the_plain_path(make, monkeypatch):
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **kw: pytest.fail("the kernel ran"))
    p = torch.nn.Parameter(make(torch.randn(3, 4)))
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    Modular([p], Adam(), LR(0.1)).step()
    torch.testing.assert_close(p.data, before - 0.1, rtol=1e-2, atol=1e-2)
