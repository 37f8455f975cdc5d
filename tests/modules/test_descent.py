"""Chains follow torch.optim, and where torch has no such rule the formula written out here."""

import math

import pytest
import torch
from torch import nn

from tests.helpers import param
from torchzero_clip import (
    ASGD,
    EMA,
    LR,
    Adagrad,
    Adam,
    Cautious,
    ClipNorm,
    Clipper,
    Lion,
    Masked,
    Modular,
    Momentum,
    OrthoGrad,
    RMSprop,
    Rprop,
    Scale,
    Transform,
    Warmup,
    WeightDecay,
)

LR_ = 0.03
DECAY = 0.02
SHAPES = ((3, 4), (5,), (), (2, 2, 3))

# name: (torch's optimizer, its arguments, the links in front of LR)
RIVALS = {
    "Adam": (torch.optim.Adam, {"weight_decay": 0.0}, lambda: (Adam(),)),
    "Adam decay": (
        torch.optim.Adam,
        {"weight_decay": DECAY, "betas": (0.8, 0.95), "eps": 1e-6},
        lambda: (WeightDecay(DECAY), Adam((0.8, 0.95), 1e-6)),
    ),
    "amsgrad": (
        torch.optim.Adam,
        {"weight_decay": DECAY, "amsgrad": True},
        lambda: (WeightDecay(DECAY), Adam(amsgrad=True)),
    ),
    "AdamW": (
        torch.optim.AdamW,
        {"weight_decay": DECAY},
        lambda: (Adam(), WeightDecay(DECAY)),
    ),
    "AdamW amsgrad": (
        torch.optim.AdamW,
        {"weight_decay": DECAY, "amsgrad": True},
        lambda: (Adam(amsgrad=True), WeightDecay(DECAY)),
    ),
    "SGD": (torch.optim.SGD, {"weight_decay": DECAY}, lambda: (WeightDecay(DECAY),)),
    "SGD momentum": (
        torch.optim.SGD,
        {"weight_decay": DECAY, "momentum": 0.9},
        lambda: (WeightDecay(DECAY), Momentum(0.9)),
    ),
    "SGD nesterov": (
        torch.optim.SGD,
        {"weight_decay": DECAY, "momentum": 0.9, "nesterov": True},
        lambda: (WeightDecay(DECAY), Momentum(0.9, nesterov=True)),
    ),
    "SGD dampening": (
        torch.optim.SGD,
        {"weight_decay": DECAY, "momentum": 0.9, "dampening": 0.4},
        lambda: (WeightDecay(DECAY), Momentum(0.9, dampening=0.4)),
    ),
    "RMSprop": (
        torch.optim.RMSprop,
        {"weight_decay": DECAY},
        lambda: (WeightDecay(DECAY), RMSprop()),
    ),
    "RMSprop centered": (
        torch.optim.RMSprop,
        {"weight_decay": DECAY, "alpha": 0.9, "eps": 1e-6, "centered": True},
        lambda: (WeightDecay(DECAY), RMSprop(0.9, 1e-6, centered=True)),
    ),
    "RMSprop momentum": (
        torch.optim.RMSprop,
        {"weight_decay": DECAY, "momentum": 0.8},
        lambda: (WeightDecay(DECAY), RMSprop(momentum=0.8)),
    ),
    "RMSprop centered momentum": (
        torch.optim.RMSprop,
        {"weight_decay": DECAY, "momentum": 0.8, "centered": True, "alpha": 0.9},
        lambda: (WeightDecay(DECAY), RMSprop(0.9, momentum=0.8, centered=True)),
    ),
    "RMSprop and the link Momentum": (
        torch.optim.RMSprop,
        {"weight_decay": DECAY, "momentum": 0.8},
        lambda: (WeightDecay(DECAY), RMSprop(), Momentum(0.8)),
    ),
    "Adagrad": (
        torch.optim.Adagrad,
        {"weight_decay": DECAY},
        lambda: (WeightDecay(DECAY), Adagrad()),
    ),
    "Adagrad lr_decay": (
        torch.optim.Adagrad,
        {"weight_decay": DECAY, "lr_decay": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-6},
        lambda: (WeightDecay(DECAY), Adagrad(0.1, 0.3, 1e-6)),
    ),
}
TOLERANCE = {
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float64: 1e-11,
    torch.complex128: 1e-11,
}


def start(dtype, shapes=SHAPES, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes]


def noise(params, step, dtype):
    """A gradient that depends on the parameters, so that errors are fed back, and on the step."""
    gen = torch.Generator().manual_seed(1000 + step)
    for p in params:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        force = torch.randn(p.shape, generator=gen, dtype=wide)
        p.grad = (force + 0.5 * p.detach().to(wide) + 0.3).to(dtype)


def trajectory(make, dtype, steps=15, scheduler=None, split=2, group=None):
    """The parameters after every step of an optimizer made from two groups."""
    params = [p.requires_grad_() for p in start(dtype)]
    second = {"lr": LR_ / 3, "weight_decay": DECAY * 5} if group is None else group
    opt = make([{"params": params[:split]}, {"params": params[split:], **second}])
    plan = scheduler(opt) if scheduler else None
    out = []
    for step in range(steps):
        noise(params, step, dtype)
        opt.step()
        if plan is not None:
            plan.step()
        out.append(torch.cat([p.detach().flatten() for p in params]))
    return torch.stack(out)


def assert_same_trajectory(ours, theirs, dtype):
    tolerance = TOLERANCE[dtype]
    assert not torch.allclose(theirs[0], theirs[-1], rtol=0.01)  # something moved
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def rivals(name, first=(), maximize=False, lr=LR_, **changes):
    torch_class, arguments, links = RIVALS[name]
    extra = {"maximize": True} if maximize else {}
    in_front = (Scale(-1), *first) if maximize else first
    return (
        lambda groups: Modular(groups, *in_front, *links(), LR(lr)),
        lambda groups: torch_class(groups, lr=lr, **{**arguments, **extra, **changes}),
    )


IDENTITIES = (
    "Adam", "Adam decay", "amsgrad", "AdamW", "SGD", "SGD nesterov", "SGD dampening", "RMSprop",
    "RMSprop centered", "RMSprop and the link Momentum", "Adagrad", "Adagrad lr_decay",
)  # fmt: skip
"""Those that `tests/identities` compares with torch over two groups and schedules as well."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in IDENTITIES else ()) for n in RIVALS]
)
def test_two_groups_under_a_scheduler_follow_torch(name, dtype):
    ours, theirs = rivals(name)
    group = {"lr": LR_ / 3} if name == "Adam" else None

    def scheduler(opt):
        return torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)

    assert_same_trajectory(
        trajectory(ours, dtype, scheduler=scheduler, group=group),
        trajectory(theirs, dtype, scheduler=scheduler, group=group),
        dtype,
    )


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.complex64, marks=pytest.mark.slow), torch.complex128]
)
@pytest.mark.parametrize("name", RIVALS)
def test_complex_parameters_follow_torch(name, dtype):
    ours, theirs = rivals(name)
    group = {"lr": LR_ / 3} if name == "Adam" else None
    assert_same_trajectory(
        trajectory(ours, dtype, group=group), trajectory(theirs, dtype, group=group), dtype
    )


@pytest.mark.parametrize("decay", [0.0, 0.01, 0.1])
def test_complex_adamw_rounds_as_torch_does(decay):
    """After fifty steps within what torch.testing allows, 1.3e-6, of every entry, with no atol."""
    torch.manual_seed(0)
    ours, theirs = [nn.Parameter(torch.randn(1000, dtype=torch.complex64)) for _ in range(2)]
    ours.data.copy_(theirs.data)
    opt = Modular([ours], Adam(), WeightDecay(decay), LR(0.01))
    torchs = torch.optim.AdamW([theirs], lr=0.01, weight_decay=decay)
    for _ in range(50):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        opt.step()
        torchs.step()
    torch.testing.assert_close(ours.data, theirs.data, rtol=1.3e-6, atol=0.0)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]
)
@pytest.mark.parametrize("name", RIVALS)
def test_scale_by_minus_one_is_maximize(name, dtype):
    ours, theirs = rivals(name, maximize=True)
    group = {"lr": LR_ / 3}
    up = [trajectory(rival, dtype, group=group) for rival in (ours, theirs)]
    assert_same_trajectory(*up, dtype)  # uphill, rounding grows with every step


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD nesterov", "RMSprop", "Adagrad lr_decay"])
def test_a_learning_rate_may_be_a_0_dim_tensor(name):
    ours, _ = rivals(name, lr=torch.tensor(LR_, dtype=torch.float64))
    _, theirs = rivals(name)
    assert_same_trajectory(
        trajectory(ours, torch.float64, group={"lr": torch.tensor(0.01, dtype=torch.float64)}),
        trajectory(theirs, torch.float64, group={"lr": 0.01}),
        torch.float64,
    )


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD momentum"])
def test_the_tensor_lr_of_torch_does_the_same(name):
    lr = torch.tensor(LR_, dtype=torch.float64)
    ours, theirs = rivals(name, lr=lr)
    group = {"lr": lr / 3}
    assert_same_trajectory(
        trajectory(ours, torch.float64, group=group),
        trajectory(theirs, torch.float64, group=group),
        torch.float64,
    )


@pytest.mark.parametrize("key", ["betas", "eps"])
def test_every_live_value_of_adam_may_differ_between_groups(key):
    ours, theirs = rivals("AdamW")
    group = {"lr": 0.02, key: {"betas": (0.5, 0.9), "eps": 1e-2}[key]}
    same = trajectory(theirs, torch.float64, group={"lr": 0.02})
    different = trajectory(theirs, torch.float64, group=group)
    assert not torch.allclose(same, different)
    assert_same_trajectory(trajectory(ours, torch.float64, group=group), different, torch.float64)


def test_betas_may_change_between_steps():
    """OneCycleLR and CyclicLR do it."""

    class Cycle:
        def __init__(self, opt):
            self.opt, self.t = opt, 0

        def step(self):
            self.t += 1
            for group in self.opt.param_groups:
                group["betas"] = (0.8 + 0.1 * math.sin(self.t), 0.99)

    ours, theirs = rivals("AdamW")
    assert_same_trajectory(
        trajectory(ours, torch.float64, scheduler=Cycle),
        trajectory(theirs, torch.float64, scheduler=Cycle),
        torch.float64,
    )


@pytest.mark.parametrize("name", ["AdamW", "SGD dampening", "RMSprop momentum", "Adagrad lr_decay"])
def test_a_parameter_that_sits_out_steps_keeps_its_own_time(name):
    def now_and_then(make):
        params = [p.requires_grad_() for p in start(torch.float64)]
        opt = make([{"params": params}])
        for step in range(60):
            noise(params, step, torch.float64)
            for i, p in enumerate(params):
                if (step // 7 + i) % 3 == 0:
                    p.grad = None
            opt.step()
        return torch.cat([p.detach().flatten() for p in params])

    ours, theirs = rivals(name)
    torch.testing.assert_close(now_and_then(ours), now_and_then(theirs), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_in_front_of_adamw_is_clip_grad_norm_before_it(dtype):
    class Clipped(torch.optim.AdamW):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.5)
            return super().step(closure)

    def ours(groups):
        links = ClipNorm(1.5, dim="global"), Adam(), WeightDecay(DECAY), LR(LR_)
        return Modular(groups, *links)

    a = trajectory(ours, dtype)
    b = trajectory(lambda groups: Clipped(groups, lr=LR_, weight_decay=DECAY), dtype)
    # torch divides by norm + 1e-6, so the two differ by that much of the gradient
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_half_precision_parameters_follow_a_float32_average():
    """State in float32, one rounding a step: the reference computes just that."""
    p = start(torch.bfloat16, [(50,)])[0].requires_grad_()
    w = p.detach().clone()
    opt = Modular([p], Adam(), WeightDecay(DECAY), LR(LR_))
    m = v = torch.zeros(50)
    for t in range(1, 51):
        noise([p], t, torch.bfloat16)
        g = p.grad.float()
        opt.step()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + DECAY * w.float()
        w = (w.float() - LR_ * u).bfloat16()
        torch.testing.assert_close(p.detach(), w, rtol=1.6e-2, atol=2e-3)
        w = p.detach().clone()


# --- rules without a counterpart in torch.optim


def follow(links, formula, dtype, steps=40, lr=LR_):
    """Compare a chain with `formula(g, w, memory, t) -> u`, in float64."""
    params = [p.requires_grad_() for p in start(dtype, [(3, 4), (5,)])]
    weights = [p.detach().double().clone() for p in params]
    memories = [{} for _ in params]
    opt = Modular(params, *links)
    rows = []
    for t in range(1, steps + 1):
        noise(params, t, dtype)
        shadow = [w.clone() for w in weights]
        noise(shadow, t, torch.float64)
        opt.step()
        for i, w in enumerate(weights):
            g = params[i].grad.double() if dtype != torch.float64 else shadow[i].grad
            weights[i] = w - lr * formula(g, w, memories[i], t)
            rows.append((params[i].detach().double().clone(), weights[i]))
    return rows


def assert_follows(links, formula, dtype, **keys):
    tolerance = TOLERANCE[dtype]
    for ours, expected in follow(links, formula, dtype, **keys):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def lion(g, w, memory, t):
    m = memory.setdefault("m", torch.zeros_like(g))
    direction = (0.9 * m + 0.1 * g).sign()
    memory["m"] = 0.99 * m + 0.01 * g
    return direction + 0.1 * w


def cautious_adam(g, w, memory, t):
    m = memory["m"] = 0.9 * memory.get("m", torch.zeros_like(g)) + 0.1 * g
    v = memory["v"] = 0.999 * memory.get("v", torch.zeros_like(g)) + 0.001 * g * g
    u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    mask = (u * g > 0).double()
    return u * mask / mask.mean().clamp(min=1e-3)


def warm(g, w, memory, t):
    return g * min(1, t / 30)


def average(g, w, memory, t):
    m = memory["m"] = 0.9 * memory.get("m", torch.zeros_like(g)) + 0.1 * g
    return m


def ahead(g, w, memory, t):
    return 0.1 * g + 0.9 * average(g, w, memory, t)


def debiased(g, w, memory, t):
    return average(g, w, memory, t) / (1 - 0.9**t)


FORMULAS = {
    "Lion": ((Lion(), WeightDecay(0.1)), lion),
    "Cautious": ((Adam(), Cautious()), cautious_adam),
    "Warmup": ((Warmup(30),), warm),
    "EMA": ((EMA(0.9),), average),
    "EMA debias": ((EMA(0.9, debias=True),), debiased),
    "EMA nesterov": ((EMA(0.9, nesterov=True),), ahead),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_rule_follows_its_formula(name, dtype):
    links, formula = FORMULAS[name]
    assert_follows((*links, LR(LR_)), formula, dtype)


def test_a_parameter_that_is_unfrozen_later_warms_up_as_well():
    a, b = torch.zeros(2, 1).unbind()
    opt = Modular([a, b], Warmup(4))
    seen = []
    for step in range(6):
        a.zero_(), b.zero_()
        a.grad = torch.ones(1)
        b.grad = torch.ones(1) if step >= 3 else None
        opt.step()
        seen.append((-a.item(), -b.item()))
    assert seen == [(0.25, 0), (0.5, 0), (0.75, 0), (1, 0.25), (1, 0.5), (1, 0.75)]


@pytest.mark.parametrize("rule", [Adam, lambda: Warmup(1000), lambda: EMA(0.5, debias=True)])
def test_counters_are_float32_whatever_the_default_dtype(rule):
    torch.set_default_dtype(torch.bfloat16)
    try:
        p = param(0.0)
        opt = Modular([p], rule(), LR(0.0))
        for _ in range(300):
            p.grad = torch.ones(1, dtype=torch.float32)
            opt.step()
    finally:
        torch.set_default_dtype(torch.float32)
    (steps,) = [value for key, value in opt.state[p].items() if key.endswith("/step")]
    assert steps.item() == 300


# --- WeightDecay


def moved(w, grad, *links):
    """The update of a parameter after the links, by the way that runs their formulas."""
    p = param(*w, grad=grad)
    Modular([p], *links, LR(1.0), fused=False).step()
    return (torch.tensor(w) - p.detach()).tolist()


def test_cautious_decay_by_hand():
    found = moved([2.0, 2.0], [0.1, -0.1], WeightDecay(0.1, cautious=True))
    assert found == pytest.approx([0.3, -0.1])


def test_cautious_decay_takes_entries_whose_product_is_zero_or_underflows():
    found = moved([2.0, 1e-30, -1e-30], [0.0, 1e-30, 1e-30], WeightDecay(0.5, cautious=True))
    assert found == pytest.approx([1.0, 1.5e-30, 1e-30])


def test_decay_follows_the_learning_rate_from_the_largest_so_far():
    p = param(1.0)
    opt = Modular([p], WeightDecay(0.1, follows_lr=True), LR(0.5))
    for lr, share in ((0.25, 1.0), (0.5, 1.0), (0.25, 0.5), (0.0, 0.0), (0.5, 1.0), (1.0, 1.0)):
        p.data.fill_(1.0)
        p.grad = torch.zeros(1)
        opt.param_groups[0]["lr"] = lr
        opt.step()
        assert 1 - p.item() == pytest.approx(lr * 0.1 * share)


def test_decay_that_follows_a_learning_rate_of_zero_decays_nothing_and_gives_no_nan():
    p = param(1.0, grad=[1.0])
    Modular([p], WeightDecay(0.1, follows_lr=True), LR(0.0)).step()
    assert p.item() == 1.0


def replayed(opt: Modular) -> Modular:
    """The optimizer; a compiled one replays its steps in Python."""
    opt.engine = opt.engine.twin()
    return opt


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"compile": True}])
def test_groups_follow_their_own_learning_rate(lr, options):
    a, b = param(1.0, grad=[0.0]), param(1.0, grad=[0.0])
    chain = [Adam(), WeightDecay(0.1, follows_lr=True), LR(lr)]
    opt = replayed(Modular([{"params": [a]}, {"params": [b], "lr": 0.2}], *chain, **options))
    opt.step()
    opt.param_groups[1]["lr"] = 0.1
    opt.step()
    assert a.item() == pytest.approx((1 - 0.01) ** 2)
    assert b.item() == pytest.approx((1 - 0.02) * (1 - 0.1 * 0.1 * 0.5))


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"compile": True}])
@pytest.mark.parametrize("rule", [lambda: Scale(1.0), Adam])
def test_decay_afterwards_is_of_what_the_step_leaves(lr, options, rule):
    a, b = param(2.0), param(2.0)
    decay = WeightDecay(0.1, afterwards=True)
    groups = [{"params": [a]}, {"params": [b], "lr": 0.25, "weight_decay": 0.2}]
    opt = replayed(Modular(groups, rule(), decay, LR(lr), **options))
    plain = [param(2.0), param(2.0)]
    own = [{"params": [plain[0]]}, {"params": [plain[1]], "lr": 0.25}]
    without = replayed(Modular(own, rule(), LR(lr), **options))
    for grad in (1.0, -3.0, 2.0):
        for p in (a, b, *plain):
            p.grad = torch.tensor([grad])
        opt.step(), without.step()
        plain[0].data.mul_(1 - 0.5 * 0.1)
        plain[1].data.mul_(1 - 0.25 * 0.2)
        assert [a.item(), b.item()] == pytest.approx([p.item() for p in plain])


@pytest.mark.parametrize("other", ["cautious", "follows_lr"])
def test_decay_afterwards_is_a_plain_one(other):
    with pytest.raises(ValueError, match="afterwards=True cannot be combined with"):
        WeightDecay(0.1, afterwards=True, **{other: True})


# --- live values of other links


class Shows(Transform):
    """Adds the learning rate of another link."""

    reads = ("lr",)

    def update(self, u, state, group):
        return u.add_(group["lr"])


@pytest.mark.parametrize("order", [(Shows(), LR(0.5)), (LR(0.5), Shows())])
def test_a_rule_reads_the_live_value_that_another_link_owns(order):
    p = param(0.0, grad=[0.0])
    opt = Modular([p], *order)
    opt.param_groups[0]["lr"] = 2  # as a float, like its owner's
    opt.step()
    assert -p.item() == pytest.approx(4.0 if isinstance(order[0], Shows) else 2.0)


def test_a_link_inside_another_reads_it_too():
    p = param(0.0, grad=[0.0])
    Modular([p], Masked(Shows(), lambda name, p: True), LR(0.5)).step()
    assert -p.item() == pytest.approx(0.25)


def test_a_value_that_is_read_is_not_the_readers():
    opt = Modular([param(0.0)], Shows(), LR(0.5))
    assert [key for key in opt.param_groups[0] if key not in ("params", "chain")] == ["lr"]


class ReadsBeta(Shows):
    reads = ("beta",)


def test_a_value_that_no_link_owns_is_an_error_at_construction():
    with pytest.raises(ValueError, match=r"Shows reads lr, but no transform has lr: add LR\(...\)"):
        Modular([param(0.0)], Shows())
    with pytest.raises(ValueError, match=r"WeightDecay reads lr.*: add LR"):
        Clipper([param(0.0)], WeightDecay(0.1, follows_lr=True))


def test_a_value_that_several_own_is_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"reads beta, so only one transform may .*'EMA', 'EMA_2'"):
        Modular([param(0.0)], EMA(0.5), ReadsBeta(), EMA(0.5))


def test_what_maximises_before_cautious_writes_the_gradient():
    """Otherwise update and gradient disagree everywhere, and nothing is left of the step."""
    grads = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(5)]

    def steps(sign, *front):
        w = nn.Parameter(torch.ones(4, 3))
        opt = Modular([w], *front, Adam((0.0, 0.99)), Cautious(), LR(0.1))
        for grad in grads:
            w.grad = sign * grad
            opt.step()
        return w.detach()

    assert torch.equal(steps(-1.0), steps(1.0, Scale(-1.0, target="grad")))
    assert torch.equal(steps(1.0, Scale(-1.0)), torch.ones(4, 3))


def test_asgd_keeps_the_average_of_the_weights_that_torch_keeps():
    """From its first step on, through t0, behind which it is the mean of the weights."""
    ours, theirs = ([param(1.0, -2.0), param(3.0)] for _ in range(2))
    settings = {"lr": 0.1, "lambd": 0.3, "alpha": 0.6, "t0": 3.0}
    opt, reference = Modular(ours, ASGD(**settings)), torch.optim.ASGD(theirs, **settings)
    for step in range(8):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.sin(p.detach() + step)
            q.grad = p.grad.clone()
        opt.step(), reference.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(opt.state[p]["ASGD/ax"], reference.state[q]["ax"])
            assert torch.equal(opt.state[p]["ASGD/ax"], p) is (step < 5)


def test_rprop_starts_with_the_learning_rate_of_the_first_gradient():
    early, late = param(1.0), param(1.0)
    opt = Modular([early, late], Rprop(0.1))
    early.grad = torch.ones(1)
    opt.step()
    opt.param_groups[0]["lr"], late.grad = 0.3, torch.ones(1)
    opt.step()
    torch.testing.assert_close(early.detach(), torch.tensor([1 - 0.1 - 0.12]))
    torch.testing.assert_close(late.detach(), torch.tensor([1 - 0.3]))


@pytest.mark.parametrize(
    ("weight", "gradient", "left"),
    [
        ([2.0, 0.0], [3.0, 4.0], [0.0, 5.0]),
        ([0.0, 0.0], [3.0, 4.0], [3.0, 4.0]),  # nothing is along a weight of zero
        ([0.1, 0.7], [-0.3, -2.1], [0.0, 0.0]),  # all of it is, up to rounding
        ([0.3], [7.0], [0.0]),
        ([2.0, 1.0], [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_ortho_grad_keeps_what_turns_the_weights_at_the_length_of_the_gradient(
    weight, gradient, left
):
    for dtype in (torch.float32, torch.float64):
        p = param(*weight, dtype=dtype, grad=gradient)
        Clipper([p], OrthoGrad()).step()
        torch.testing.assert_close(p.grad, torch.tensor(left, dtype=dtype), rtol=1e-6, atol=1e-6)
