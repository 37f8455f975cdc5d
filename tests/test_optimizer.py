"""What the user of the optimizer sees, and what the author of a rule may rely on."""

import copy
import dataclasses
import gc
import io
import math
import pickle
import sys
import types
import warnings
import weakref
from typing import Annotated

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from examples import write_your_own
from examples.write_your_own import ClipToAverage, Grokfast
from torchzero_clip import (
    EMA,
    LR,
    Adagrad,
    Adam,
    Cautious,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Lion,
    Live,
    Modular,
    Momentum,
    NormalizeByEMA,
    NormRule,
    RMSprop,
    Scale,
    Sign,
    TensorList,
    TensorwiseTransform,
    Transform,
    Warmup,
    WeightDecay,
    zeros_like_state,
)

CHAINS = {
    "sgd": lambda: (ClipNorm(1.0), LR(0.1)),
    "adam": lambda: (ClipNorm(1.0, dim="global"), Adam(), LR(0.1)),
    "adamw": lambda: (Adam(amsgrad=True), WeightDecay(0.01), LR(0.1)),
    "momentum": lambda: (Momentum(0.9, nesterov=True), LR(0.1)),
    "rmsprop": lambda: (RMSprop(momentum=0.5, centered=True), LR(0.1)),
    "adagrad": lambda: (Adagrad(0.1, 0.1), LR(0.1)),
    "lion": lambda: (Lion(), Cautious(), LR(0.1), Warmup(5)),
    "growth": lambda: (ClipNormGrowth(), ClipValueGrowth(), LR(0.1)),
    "growth global": lambda: (ClipNormGrowth(dim="global"), Adam(), LR(0.1)),
    "growth group": lambda: (ClipNormGrowth(dim="group"), Adam(), LR(0.1)),
    "growth layer": lambda: (ClipNormGrowth(dim="layer"), Adam(), LR(0.1)),
    "ema": lambda: (
        ClipNormByEMA(0.9),
        NormalizeByEMA(0.9, dim="global"),
        ClipValueByEMA(0.9, ema_tfm=Chain(EMA(0.5), Scale(2.0))),
        EMA(0.5, debias=True),
        LR(0.1),
    ),
}
NAMES = ("a.weight", "a.bias", "b.weight")
SHAPES = ((3, 4), (3,), (2, 3))


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen).to(dtype).requires_grad_() for s in shapes]


def give_grads(params, step, scale=1.0):
    gen = torch.Generator().manual_seed(100 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=gen) * scale
        p.grad = (grad + 0.1 * p.detach().float()).to(p.dtype)


def train(opt, params, steps, start=0):
    for step in range(start, start + steps):
        give_grads(params, step)
        opt.step()
    return params


def groups(params, names=True):
    """Two groups, the second with a learning rate of its own; named, as layers need it."""
    given = list(zip(NAMES, params, strict=True)) if names else params
    return [{"params": given[:2]}, {"params": given[2:], "lr": 0.03}]


def state_of(opt):
    """Everything that the optimizer remembers, as one comparable tree."""
    return copy.deepcopy(opt.state_dict())


def same(a, b):
    """Whether two trees are equal, tensors bit by bit and with their dtype."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            return False
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def saved(state_dict):
    """A trip through a file, as a fresh process with weights_only=True sees it."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def one(value=1.0, dtype=torch.float32, grad=1.0):
    p = torch.tensor([value], dtype=dtype, requires_grad=True)
    p.grad = torch.tensor([grad], dtype=dtype)
    return p


each_chain = pytest.mark.parametrize("chain", CHAINS)


# --- it is an optimizer


def test_it_is_a_torch_optimizer_with_plain_groups():
    opt = Modular(parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
    assert isinstance(opt, torch.optim.Optimizer)
    (group,) = opt.param_groups
    assert type(group) is dict
    assert [group[k] for k in ("lr", "betas", "eps", "max_norm")] == [1e-3, (0.9, 0.999), 1e-8, 1.0]
    assert not callable(opt)


def test_repr_shows_the_chain_and_the_live_values_of_each_group():
    params = parameters()
    opt = Modular([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], ClipNorm(1), LR(0.1))
    first, *groups = repr(opt).splitlines()
    assert first == "Modular(ClipNorm(max_norm=1), LR(lr=0.1))"
    assert groups == [
        "  group 0: 1 parameters, {'lr': 0.5, 'max_norm': 1}",
        f"  group 1: {len(params) - 1} parameters, {{'max_norm': 1, 'lr': 0.1}}",
    ]


@pytest.mark.parametrize("kind", ["list", "generator", "named", "groups", "named groups"])
def test_every_way_to_give_parameters_gives_the_same_step(kind):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    reference = copy.deepcopy(model)
    given = {
        "list": lambda m: list(m.parameters()),
        "generator": lambda m: m.parameters(),
        "named": lambda m: m.named_parameters(),
        "groups": lambda m: [{"params": m[0].parameters()}, {"params": list(m[1].parameters())}],
        "named groups": lambda m: [{"params": m[i].named_parameters(str(i))} for i in (0, 1)],
    }[kind](model)
    pairs = (
        (model, Modular(given, Momentum(0.5), LR(0.1))),
        (reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)),
    )
    for net, opt in pairs:
        for x in (1.0, -2.0):
            opt.zero_grad()
            net(torch.full((4, 3), x)).square().sum().backward()
            opt.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_names_are_kept_in_the_groups():
    model = nn.Linear(2, 1)
    opt = Modular(model.named_parameters(), LR(0.1))
    assert opt.param_groups[0]["param_names"] == ["weight", "bias"]


def test_groups_override_every_live_value():
    a, b = one(), one()
    opt = Modular([{"params": [a]}, {"params": [b], "factor": 3.0, "lr": 0.2}], Scale(2.0), LR(0.1))
    opt.step()
    assert a.item() == pytest.approx(1 - 0.2)
    assert b.item() == pytest.approx(1 - 0.6)


def test_live_values_are_read_every_step():
    p = one()
    opt = Modular([p], Scale(1.0), LR(0.1))
    opt.step()
    opt.param_groups[0]["factor"] = 5.0
    opt.step()
    assert p.item() == pytest.approx(1 - 0.1 - 0.5)


def test_an_empty_parameter_list_is_an_error():
    with pytest.raises(ValueError, match="empty parameter list"):
        Modular([], LR(0.1))


def test_duplicates_are_rejected():
    p = one()
    with pytest.warns(UserWarning, match="duplicate"):
        Modular([p, p], LR(0.1))
    with pytest.raises(ValueError, match="more than one parameter group"):
        Modular([{"params": [p]}, {"params": [p]}], LR(0.1))
    opt = Modular([p], LR(0.1))
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": [p]})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize(
    ("params", "error"),
    [(torch.zeros(2), TypeError), ([1.0, 2.0], TypeError), ([torch.zeros(1) * one()], ValueError)],
)
def test_what_is_not_a_leaf_parameter_is_refused(params, error):
    with pytest.raises(error):
        Modular(params, LR(0.1))


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (Adam, r"every link must be a Transform, got <class .*Adam'>; write Adam\(\.\.\.\)"),
        (0.1, r"every link must be a Transform, got 0\.1"),
        (lambda u: u, "every link must be a Transform, got <function"),
    ],
)
def test_a_link_that_is_no_transform_is_an_error_that_says_what_to_write(link, message):
    with pytest.raises(TypeError, match=message):
        Modular([one()], link, LR(0.1))


def test_a_preset_is_a_subclass_with_an_init():
    class MyAdam(Modular):
        def __init__(self, params, lr=0.1):
            super().__init__(params, Adam(), LR(lr))

    params, reference = parameters(), parameters()
    opt = MyAdam(params, lr=0.2)
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    train(opt, params, 3)
    train(Modular(reference, Adam(), LR(0.2)), reference, 3)
    assert same(params, reference)
    assert calls == ["pre", "post"] * 3
    assert type(copy.deepcopy(opt)) is MyAdam


# --- the step


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_comes_back():
    p = torch.tensor([3.0], requires_grad=True)
    opt = Modular([p], LR(0.1))
    calls = []

    def closure():
        opt.zero_grad()
        loss = p.square().sum()
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    assert opt.step(closure).item() == 9.0
    assert calls == [True]
    assert p.item() == pytest.approx(3 - 0.6)


def test_a_step_needs_no_grad_mode_and_leaves_no_graph():
    p = one()
    opt = Modular([p], Adam(), WeightDecay(0.1), LR(0.1))
    with torch.enable_grad():
        opt.step()
    assert p.is_leaf
    assert p.requires_grad
    assert all(not v.requires_grad for v in opt.state[p].values())


def test_step_hooks_fire_exactly_once():
    p, calls = one(), []
    opt = Modular([p], Adam(), LR(0.1))
    hooks = [
        opt.register_step_pre_hook(lambda o, *_: calls.append(("pre", o is opt))),
        opt.register_step_post_hook(lambda o, *_: calls.append(("post", o is opt))),
        register_optimizer_step_pre_hook(lambda *_: calls.append("all pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("all post")),
    ]
    opt.step()
    for hook in hooks:
        hook.remove()
    opt.step()
    assert calls == ["all pre", ("pre", True), ("post", True), "all post"]


def test_a_pre_hook_may_change_the_gradient():
    p = one()
    opt = Modular([p], LR(0.1))
    opt.register_step_pre_hook(lambda *_: (p.grad.mul_(5), None)[1])
    opt.step()
    assert p.item() == pytest.approx(0.5)


@each_chain
def test_no_gradient_at_all_is_a_step_that_does_nothing(chain):
    params = parameters()
    before = [p.detach().clone() for p in params]
    opt = Modular(groups(params), *CHAINS[chain]())
    state = state_of(opt)
    opt.step()
    assert same([p.detach() for p in params], before)
    assert same(state_of(opt), state)


@each_chain
def test_zero_gradients_and_lr_zero_leave_every_bit(chain):
    """Checkpointing tools take such a step to make state."""
    params = parameters()
    before = [p.detach().clone() for p in params]
    opt = Modular(groups(params), *CHAINS[chain]())
    for group in opt.param_groups:
        group["lr"] = 0.0
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert same([p.detach() for p in params], before)
    assert all(
        v.isfinite().all() or "previous" in k for s in opt.state.values() for k, v in s.items()
    )


@each_chain
def test_the_gradient_is_left_as_it_was(chain):
    params = parameters()
    opt = Modular(groups(params), *CHAINS[chain]())
    for step in range(3):
        give_grads(params, step, scale=10.0)
        before = [(p.grad, p.grad.clone()) for p in params]
        opt.step()
        for p, (grad, values) in zip(params, before, strict=True):
            assert p.grad is grad
            assert torch.equal(grad, values)


@each_chain
def test_non_contiguous_parameters_and_gradients_take_the_same_steps(chain):
    params, reference = parameters(), parameters()
    strided = []
    for p in params:
        room = torch.zeros(*p.shape, 2)[..., 0]
        room.copy_(p.detach())
        strided.append(room.requires_grad_())
    a = Modular(groups(strided), *CHAINS[chain]())
    b = Modular(groups(reference), *CHAINS[chain]())
    for step in range(4):
        give_grads(reference, step)
        for p, q in zip(strided, reference, strict=True):
            room = torch.zeros(*p.shape, 3)[..., 1]
            p.grad = room.copy_(q.grad)
            assert not p.grad.is_contiguous()
        a.step(), b.step()
    for p, q in zip(strided, reference, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


# --- frozen parameters


@each_chain
def test_freezing_and_unfreezing(chain):
    """A frozen parameter keeps value and state; unfrozen it goes on from there."""
    params = parameters()
    opt = Modular(groups(params), *CHAINS[chain]())
    train(opt, params, 2)
    frozen = params[1]
    value, state = frozen.detach().clone(), copy.deepcopy(opt.state.get(frozen, {}))
    frozen.requires_grad_(False)
    for step in range(2, 5):
        give_grads(params, step)
        frozen.grad = None
        opt.step()
    assert torch.equal(frozen, value)
    if chain != "growth layer":  # there the layer's number goes on with the weight's
        assert same(opt.state.get(frozen, {}), state)
    frozen.requires_grad_()
    train(opt, params, 1, start=5)
    assert not torch.equal(frozen, value)


def test_state_is_lazy_and_belongs_to_parameters_with_a_gradient():
    a, b = one(), one()
    b.grad = None
    opt = Modular([a, b], Adam(), LR(0.1))
    assert len(opt.state) == 0
    opt.step()
    assert list(opt.state) == [a]
    assert set(opt.state[a]) == {"Adam/step", "Adam/exp_avg", "Adam/exp_avg_sq"}


# --- adding groups


def test_an_added_group_trains_with_its_own_values():
    a, b = one(), one()
    opt = Modular([a], Momentum(0.5), LR(0.1))
    opt.step()
    opt.add_param_group({"params": [b], "lr": 0.2})
    assert opt.param_groups[1]["momentum"] == 0.5
    opt.step()
    assert a.item() == pytest.approx(1 - 0.1 - 0.15)
    assert b.item() == pytest.approx(1 - 0.2)


def test_an_added_group_joins_the_global_norm_and_its_memory():
    a, b = one(grad=3.0), one(grad=4.0)
    opt = Modular([a], ClipNormGrowth(dim="global"))
    opt.step()  # p = 3
    opt.add_param_group({"params": [b]})
    a.data.zero_(), b.data.zero_()
    opt.step()
    assert (-a.item(), -b.item()) == pytest.approx((3 * 4.5 / 5, 4 * 4.5 / 5))


def test_adding_does_not_change_the_dict_that_was_given():
    given = {"params": [one()], "ClipNorm/max_norm": 0.5}
    opt = Modular([one()], ClipNorm(1.0), LR(0.1))
    opt.add_param_group(given)
    assert set(given) == {"params", "ClipNorm/max_norm"}
    assert opt.param_groups[1]["max_norm"] == 0.5


@pytest.mark.parametrize("bad", [{"max_nrom": 0.5}, {"max_norm": -1.0}, {"weight_decay": 0.1}])
def test_a_group_that_is_refused_is_not_added(bad):
    opt = Modular([one()], ClipNorm(1.0), LR(0.1))
    with pytest.raises(ValueError, match=r"max_norm|weight_decay"):
        opt.add_param_group({"params": [one()], **bad})
    assert len(opt.param_groups) == 1


def test_a_group_without_names_is_refused_where_layers_need_them():
    opt = Modular([("a.w", one())], ClipNorm(1.0, dim="layer"), LR(0.1))
    with pytest.raises(ValueError, match="name"):
        opt.add_param_group({"params": [one()]})
    assert len(opt.param_groups) == 1


# --- names of live values


def keys(*links):
    group = Modular([one()], *links).param_groups[0]
    return set(group) - {"params", "chain"}


def test_a_name_with_one_owner_is_bare_and_one_with_several_is_qualified():
    assert keys(ClipNorm(1.0), Adam(), LR(0.1)) == {"max_norm", "betas", "eps", "lr"}
    assert keys(ClipNorm(1.0), ClipNorm(2.0), LR(0.1)) == {
        "ClipNorm/max_norm",
        "ClipNorm_2/max_norm",
        "lr",
    }
    assert keys(Adam(), Adagrad(), LR(0.1)) == {
        "betas",
        "Adam/eps",
        "Adagrad/eps",
        "lr_decay",
        "lr",
    }


def test_a_name_of_its_own_stands_for_the_class():
    assert keys(ClipNorm(1.0, name="early"), ClipNorm(2.0, name="late")) == {
        "early/max_norm",
        "late/max_norm",
    }


def test_nested_names_follow_the_nesting_and_are_numbered_per_level():
    inner = ClipValueByEMA(0.5, ema_tfm=Chain(Scale(1.0), Scale(2.0)))
    assert keys(Scale(3.0), inner) == {
        "Scale/factor",
        "beta",
        "ClipValueByEMA/Scale/factor",
        "ClipValueByEMA/Scale_2/factor",
    }
    chain = Chain(ClipNorm(1.0), LR(0.1), name="front")
    assert keys(chain, ClipNorm(2.0)) == {"front/ClipNorm/max_norm", "ClipNorm/max_norm", "lr"}


def test_an_unnamed_chain_dissolves():
    assert keys(Chain(ClipNorm(1.0)), Chain(ClipNorm(2.0), LR(0.1))) == {
        "ClipNorm/max_norm",
        "ClipNorm_2/max_norm",
        "lr",
    }


def test_two_links_of_one_name_are_an_error():
    with pytest.raises(ValueError, match="same name"):
        Modular([one()], ClipNorm(1.0, name="x"), ClipNorm(1.0, name="x_2"), Scale(1.0, name="x"))


def test_the_qualified_form_is_always_accepted():
    a, b = one(grad=10.0), one(grad=10.0)
    opt = Modular([{"params": [a]}, {"params": [b], "ClipNorm/max_norm": 0.5}], ClipNorm(1.0))
    assert "ClipNorm/max_norm" not in opt.param_groups[1]
    opt.step()
    assert (a.item(), b.item()) == (0.0, 0.5)


def test_the_qualified_form_may_be_set_in_a_group_later():
    p = one(grad=10.0)
    opt = Modular([p], ClipNorm(1.0))
    opt.param_groups[0]["ClipNorm/max_norm"] = 3.0
    opt.step()
    assert p.item() == -2.0
    assert opt.param_groups[0]["max_norm"] == 3.0


def test_all_live_values_are_in_defaults():
    opt = Modular([one()], ClipNorm(1.0), ClipNorm(2.0), Momentum(0.8), LR(0.1))
    assert opt.defaults == {
        "ClipNorm/max_norm": 1.0,
        "ClipNorm_2/max_norm": 2.0,
        "momentum": 0.8,
        "dampening": 0.0,
        "lr": 0.1,
    }


def test_one_link_may_own_lr():
    with pytest.raises(ValueError, match=r"one link may own lr.*LR_2.*groups.*Scale"):
        Modular([one()], LR(0.1), Adam(), LR(0.2))


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("max_nrom", "max_norm"),
        ("maxnorm", "max_norm"),
        ("beta", "betas"),
        ("Lr", "lr"),
        ("ClipNorm/max_nrm", "ClipNorm/max_norm"),
    ],
)
def test_a_misspelt_key_is_an_error_with_the_suggestion(key, suggestion):
    links = ClipNorm(1.0), Adam(), LR(0.1)
    with pytest.raises(ValueError, match=f"'{key}'.*did you mean '{suggestion}'"):
        Modular([{"params": [one()], key: 0.5}], *links)
    opt = Modular([one()], *links)
    with pytest.raises(ValueError, match=f"'{key}'.*did you mean '{suggestion}'"):
        opt.add_param_group({"params": [one()], key: 0.5})
    opt.param_groups[0][key] = 0.5
    with pytest.raises(ValueError, match=f"'{key}'.*did you mean '{suggestion}'"):
        opt.step()


def test_an_ambiguous_bare_key_is_an_error_with_the_choices():
    with pytest.raises(ValueError, match=r"'max_norm'.*ClipNorm/max_norm.*ClipNorm_2/max_norm"):
        Modular([{"params": [one()], "max_norm": 1.0}], ClipNorm(1.0), ClipNorm(2.0))


def test_both_forms_of_one_key_are_an_error():
    group = {"params": [one()], "max_norm": 1.0, "ClipNorm/max_norm": 2.0}
    with pytest.raises(ValueError, match="both 'ClipNorm/max_norm' and 'max_norm'"):
        Modular([group], ClipNorm(1.0))


@pytest.mark.parametrize(
    ("key", "value", "link"),
    [
        ("weight_decay", 0.1, "WeightDecay"),
        ("lr", 0.1, "LR"),
        ("momentum", 0.9, "Momentum"),
        ("betas", (0.9, 0.99), "Adam"),
        ("max_norm", 1.0, "ClipNorm"),
        ("maximize", True, "Scale"),
    ],
)
def test_a_well_known_key_that_nobody_reads_is_an_error_that_names_the_link(key, value, link):
    with pytest.raises(ValueError, match=rf"{key}=.*add {link}\("):
        Modular([{"params": [one()], key: value}], ClipValue(1.0))


@pytest.mark.parametrize(("key", "value"), [("weight_decay", 0.0), ("maximize", False)])
def test_a_well_known_key_without_effect_is_kept(key, value):
    opt = Modular([{"params": [one()], key: value}], ClipValue(1.0))
    assert opt.param_groups[0][key] == value


def test_other_keys_are_the_users_own():
    opt = Modular([{"params": [one()], "tag": "encoder", "initial_lr": 0.1}], LR(0.1))
    opt.step()
    assert opt.param_groups[0]["tag"] == "encoder"


@pytest.mark.parametrize("key", ["max_norm", "ClipNorm/max_norm"])
def test_values_of_groups_are_checked_as_arguments_are(key):
    with pytest.raises(ValueError, match=r"ClipNorm: max_norm must be .*at least 0, got -1"):
        Modular([{"params": [one()], key: -1.0}], ClipNorm(1.0), LR(0.1))
    with pytest.raises(TypeError, match=r"ClipNorm: max_norm must be a number.*got '1'"):
        Modular([{"params": [one()], key: "1"}], ClipNorm(1.0), LR(0.1))


# --- state_dict


def test_the_state_dict_is_in_torchs_format():
    params = parameters()
    opt = Modular(groups(params, names=False), Adam(), LR(0.1))
    train(opt, params, 2)
    state_dict = opt.state_dict()
    assert set(state_dict) == {"state", "param_groups"}
    assert [group["params"] for group in state_dict["param_groups"]] == [[0, 1], [2]]
    assert state_dict["param_groups"][1]["lr"] == 0.03
    assert set(state_dict["state"]) == {0, 1, 2}
    assert set(state_dict["state"][0]) == {"Adam/step", "Adam/exp_avg", "Adam/exp_avg_sq"}
    assert Modular.state_dict is torch.optim.Optimizer.state_dict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@each_chain
def test_resuming_from_a_file_is_bitwise(chain, dtype):
    straight, resumed = parameters(dtype), parameters(dtype)
    opt = Modular(groups(straight), *CHAINS[chain]())
    train(opt, straight, 6)
    first = Modular(groups(resumed), *CHAINS[chain]())
    train(first, resumed, 3)
    checkpoint = saved(first.state_dict())
    second = Modular(groups(resumed), *CHAINS[chain]())
    second.load_state_dict(checkpoint)
    assert same(second.state_dict(), first.state_dict())
    train(second, resumed, 3, start=3)
    assert same(straight, resumed)
    assert same(second.state_dict(), opt.state_dict())


@each_chain
def test_the_dtype_of_state_survives_loading_for_bfloat16_parameters(chain):
    params = parameters(torch.bfloat16)
    opt = Modular(groups(params), *CHAINS[chain]())
    train(opt, params, 2)
    other = Modular(groups(parameters(torch.bfloat16)), *CHAINS[chain]())
    other.load_state_dict(saved(opt.state_dict()))
    assert same(state_of(other), state_of(opt))
    for state in other.state.values():
        assert {v.dtype for v in state.values()} <= {torch.float32}


def test_integer_and_bool_state_keep_their_dtype():
    class Counts(Transform):
        def init(self, param):
            return {"seen": torch.zeros(param.shape, dtype=torch.int64), "on": param > 100}

        def update(self, u, state, group):
            for t in state["seen"]:
                t.add_(2**40 + 1)
            return u

    p = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.ones_like(p)
    opt = Modular([p], Counts())
    opt.step()
    opt.load_state_dict(saved(opt.state_dict()))
    assert opt.state[p]["Counts/seen"].tolist() == [2**40 + 1] * 2
    assert opt.state[p]["Counts/on"].dtype == torch.bool


def test_a_loaded_state_is_a_copy():
    p = one()
    opt = Modular([p], Momentum(0.5), LR(0.1))
    opt.step()
    checkpoint = opt.state_dict()
    q = one()
    other = Modular([q], Momentum(0.5), LR(0.1))
    other.load_state_dict(copy.deepcopy(checkpoint))
    other.step()
    assert opt.state[p]["Momentum/momentum_buffer"].item() == 1.0
    assert other.state[q]["Momentum/momentum_buffer"].item() == 1.5


@pytest.mark.parametrize("number", [3, 3.0])
def test_a_number_stands_for_a_0_dim_tensor(number):
    p, q = one(), one()
    opt, other = Modular([p], Adam(), LR(0.1)), Modular([q], Adam(), LR(0.1))
    for _ in range(3):
        opt.step()
    checkpoint = copy.deepcopy(opt.state_dict())
    checkpoint["state"][0]["Adam/step"] = number
    q.data.copy_(p.data)
    other.load_state_dict(checkpoint)
    assert same(other.state[q]["Adam/step"], opt.state[p]["Adam/step"])
    opt.step(), other.step()
    assert same(p, q)


def test_a_number_stands_for_a_0_dim_tensor_of_the_chain():
    p, q = one(grad=1.0), one(grad=10.0)
    opt, other = (Modular([x], ClipNormGrowth(dim="global")) for x in (p, q))
    opt.step()
    checkpoint = copy.deepcopy(opt.state_dict())
    checkpoint["param_groups"][0]["chain"]["ClipNormGrowth/previous"] = 2
    other.load_state_dict(checkpoint)
    other.step()
    assert q.item() == pytest.approx(1 - 3.0)


def test_a_parameter_that_never_had_a_gradient_loads_without_state():
    params, others = parameters(), parameters()
    opt, other = Modular(params, Adam(), LR(0.1)), Modular(others, Adam(), LR(0.1))
    give_grads(params, 0)
    params[1].grad = None
    opt.step()
    other.load_state_dict(saved(opt.state_dict()))
    assert set(other.state_dict()["state"]) == {0, 2}
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    train(opt, params, 1, start=1), train(other, others, 1, start=1)
    assert same(params, others)


def refused(opt, checkpoint, *words, error=ValueError):
    """Loading raises a sentence with these words and changes nothing."""
    before, params = (
        state_of(opt),
        [p.detach().clone() for g in opt.param_groups for p in g["params"]],
    )
    with pytest.raises(error) as caught:
        opt.load_state_dict(checkpoint)
    for word in words:
        assert word in str(caught.value)
    assert same(state_of(opt), before)
    assert same([p.detach() for g in opt.param_groups for p in g["params"]], params)


def trained(*links, shapes=SHAPES, dtype=torch.float32):
    params = parameters(dtype, shapes)
    opt = Modular(params, *links)
    train(opt, params, 2)
    return opt


@pytest.mark.parametrize(
    "links",
    [
        (Adam(), LR(0.1)),
        (ClipNorm(1.0), Momentum(), LR(0.1)),
        (Adam(), ClipNorm(1.0), LR(0.1)),
        (ClipNorm(1.0, name="x"), Adam(), LR(0.1)),
        (ClipNorm(1.0), Adam(), LR(0.1), Warmup(3)),
    ],
    ids=repr,
)
def test_a_checkpoint_of_another_chain_is_refused(links):
    opt = trained(ClipNorm(1.0), Adam(), LR(0.1))
    refused(opt, trained(*links).state_dict(), "another chain", "Adam(")


def test_a_checkpoint_of_torch_is_refused():
    params = parameters()
    theirs = torch.optim.Adam(params)
    train(theirs, params, 1)
    refused(trained(Adam(), LR(0.1)), theirs.state_dict(), "chain")


@pytest.mark.parametrize("shapes", [SHAPES[:2], (*SHAPES, (1,))])
def test_a_checkpoint_of_another_number_of_parameters_is_refused(shapes):
    refused(trained(Adam(), LR(0.1)), trained(Adam(), LR(0.1), shapes=shapes).state_dict(), "3")


def test_a_checkpoint_of_another_number_of_groups_is_refused():
    params = parameters()
    other = Modular([{"params": params[:1]}, {"params": params[1:]}], Adam(), LR(0.1))
    refused(trained(Adam(), LR(0.1)), other.state_dict(), "[1, 2]", "[3]")


def test_a_checkpoint_of_other_shapes_is_refused_also_when_they_would_broadcast():
    other = trained(Adam(), LR(0.1), shapes=((3, 4), (1,), (2, 3)))
    refused(trained(Adam(), LR(0.1)), other.state_dict(), "shape (1,)", "(3,)")


@pytest.mark.parametrize("damage", ["missing", "extra", "dtype"])
def test_a_damaged_checkpoint_is_refused(damage):
    opt = trained(Adam(), LR(0.1))
    checkpoint = copy.deepcopy(opt.state_dict())
    state = checkpoint["state"][1]
    if damage == "missing":
        del state["Adam/exp_avg"]
    elif damage == "extra":
        state["Adam/exp_max"] = torch.zeros(3)
    else:
        state["Adam/exp_avg"] = state["Adam/exp_avg"].half()
    words = {
        "missing": "lacks 'Adam/exp_avg'",
        "extra": "Adam/exp_max",
        "dtype": "torch.float16",
    }
    refused(opt, checkpoint, words[damage])


def test_a_checkpoint_whose_group_lacks_a_live_value_is_refused():
    opt = trained(Adam(), LR(0.1))
    checkpoint = copy.deepcopy(opt.state_dict())
    del checkpoint["param_groups"][0]["betas"]
    refused(opt, checkpoint, "betas")


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (ClipNorm(1.0), ClipNorm(1.0, 1)),
        (ClipNorm(1.0), ClipNorm(1.0, dim="global")),
        (ClipNorm(1.0), ClipNorm(1.0, target="grad")),
        (Momentum(), Momentum(nesterov=True)),
    ],
    ids=repr,
)
def test_other_fixed_arguments_warn_and_load(now, then):
    opt, other = trained(now, LR(0.1)), trained(then, LR(0.2))
    with pytest.warns(UserWarning, match="fixed arguments"):
        opt.load_state_dict(other.state_dict())
    assert opt.param_groups[0]["lr"] == 0.2
    loaded, given = state_of(opt), state_of(other)
    assert same(loaded["state"], given["state"])


def test_the_same_fixed_arguments_do_not_warn():
    opt, other = trained(ClipNorm(1.0, 1), LR(0.1)), trained(ClipNorm(2.0, 1), LR(0.2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.load_state_dict(other.state_dict())
    assert opt.param_groups[0]["max_norm"] == 2.0


def test_load_hooks_see_what_they_should():
    params = parameters(torch.bfloat16)
    opt = Modular(params, EMA(0.9), LR(0.1))
    train(opt, params, 1)
    seen = []

    def before(optimizer, state_dict):
        seen.append("before")
        state_dict = copy.copy(state_dict)
        state_dict["param_groups"] = [dict(g, lr=0.7) for g in state_dict["param_groups"]]
        return state_dict

    def after(optimizer):
        seen.append(("after", optimizer.state[params[0]]["EMA/ema"].dtype))

    opt.register_load_state_dict_pre_hook(before)
    opt.register_load_state_dict_post_hook(after)
    opt.load_state_dict(opt.state_dict())
    assert seen == ["before", ("after", torch.float32)]
    assert opt.param_groups[0]["lr"] == 0.7
    opt.load_state_dict(opt.state_dict())
    assert len(seen) == 4


def test_state_dict_hooks_fire_once():
    opt, seen = trained(EMA(0.9), LR(0.1)), []
    opt.register_state_dict_pre_hook(lambda _: seen.append("pre"))
    opt.register_state_dict_post_hook(lambda _, state_dict: seen.append(len(state_dict)))
    opt.state_dict()
    assert seen == ["pre", 2]


@pytest.mark.parametrize("named", [(True, False), (False, True), (True, True)])
def test_names_do_not_stand_in_the_way_of_loading(named):
    def make(with_names):
        params = parameters()
        given = list(zip(NAMES, params, strict=True)) if with_names else params
        opt = Modular(given, Adam(), LR(0.1))
        train(opt, params, 2)
        return opt

    first, second = make(named[0]), make(named[1])
    second.load_state_dict(saved(first.state_dict()))
    assert same(second.state_dict()["state"], first.state_dict()["state"])
    second.step()


@each_chain
def test_saving_changes_nothing_and_is_repeatable(chain):
    params = parameters()
    opt = Modular(groups(params), *CHAINS[chain]())
    train(opt, params, 3)
    assert same(state_of(opt), state_of(opt))
    assert same(saved(opt.state_dict()), opt.state_dict())


# --- init_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_chain
def test_init_state_makes_what_the_first_step_makes_and_changes_no_step(chain, dtype):
    early, late = parameters(dtype), parameters(dtype)
    a, b = Modular(groups(early), *CHAINS[chain]()), Modular(groups(late), *CHAINS[chain]())
    a.init_state()
    fresh = state_of(a)
    a.init_state()
    assert same(state_of(a), fresh)
    train(a, early, 1), train(b, late, 1)
    assert same(state_of(a), state_of(b))
    layout = [{k: (v.shape, v.dtype) for k, v in s.items()} for s in fresh["state"].values()]
    after = [
        {k: (v.shape, v.dtype) for k, v in s.items()} for s in a.state_dict()["state"].values()
    ]
    assert layout == after
    chains = [set(g["chain"]) for g in fresh["param_groups"]]
    assert chains == [set(g["chain"]) for g in a.param_groups]
    train(a, early, 3, 1), train(b, late, 3, 1)
    assert same(early, late)


def test_init_state_skips_frozen_parameters_and_keeps_what_is_there():
    a, b = one(), torch.ones(1)
    opt = Modular([a, b], Adam(), LR(0.1))
    opt.step()
    before = state_of(opt)
    opt.init_state()
    assert b not in opt.state or not opt.state[b]
    assert same(state_of(opt), before)


def test_a_checkpoint_may_be_loaded_into_early_state():
    opt = trained(Adam(), LR(0.1))
    other = Modular(parameters(), Adam(), LR(0.1))
    other.init_state()
    other.load_state_dict(saved(opt.state_dict()))
    assert same(state_of(other), state_of(opt))


# --- copies


@each_chain
def test_a_deepcopy_goes_its_own_way(chain):
    params = parameters()
    opt = Modular(groups(params), *CHAINS[chain]())
    train(opt, params, 2)
    copied, twin = copy.deepcopy((opt, params))
    assert same(state_of(copied), state_of(opt))
    before = state_of(opt)
    train(copied, twin, 2, start=2)
    assert same(state_of(opt), before)
    train(opt, params, 2, start=2)
    assert same(params, twin)
    assert same(state_of(copied), state_of(opt))


@each_chain
def test_pickling_keeps_chain_state_and_values(chain):
    params = parameters()
    opt = Modular(groups(params), *CHAINS[chain]())
    opt.param_groups[0]["lr"] = 0.123
    train(opt, params, 2)
    copied, twin = pickle.loads(pickle.dumps((opt, params)))
    assert repr(copied.chain) == repr(opt.chain)
    train(copied, twin, 2, start=2), train(opt, params, 2, start=2)
    assert same(params, twin)
    assert same(state_of(copied), state_of(opt))
    assert copied.defaults.items() >= opt.defaults.items()  # torch adds a key of its own


def test_a_copy_still_checks_its_keys_and_takes_hooks():
    opt = copy.deepcopy(Modular([one()], ClipNorm(1.0), LR(0.1)))
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append(1))
    opt.step()
    assert calls == [1]
    with pytest.raises(ValueError, match="did you mean 'max_norm'"):
        opt.add_param_group({"params": [one()], "max_nrm": 1.0})


@pytest.mark.parametrize("dim", ["global", "group"])
def test_groups_handed_to_another_optimizer_bring_a_copy_of_their_memory(dim):
    p = one(0.0)
    first = Modular([p], ClipNormGrowth(dim=dim))
    first.step()
    second = Modular(first.param_groups, ClipNormGrowth(dim=dim))
    p.grad.fill_(100.0)
    p.data.zero_()
    second.step()
    assert -p.item() == pytest.approx(1.5)
    p.data.zero_()
    second.step()
    assert -p.item() == pytest.approx(2.25)
    p.data.zero_()
    first.step()
    assert -p.item() == pytest.approx(1.5)  # not touched by the second


def test_groups_handed_to_another_chain_start_afresh():
    p = one(0.0)
    first = Modular([p], ClipNormGrowth(dim="global"))
    first.step()
    second = Modular(first.param_groups, ClipNormGrowth(dim="global"), Scale(1.0))
    p.grad.fill_(100.0)
    p.data.zero_()
    second.step()
    assert -p.item() == 100.0


# --- no hold on anything


def test_no_reference_cycle_keeps_the_optimizer_alive():
    gc.collect()
    gc.disable()
    try:
        for chain in CHAINS.values():
            params = parameters()
            opt = Modular(groups(params), *chain())
            train(opt, params, 2)
            opt.init_state()
            opt.load_state_dict(opt.state_dict())
            opt_ref, param_ref = weakref.ref(opt), weakref.ref(params[0])
            del opt, params
            assert opt_ref() is None
            assert param_ref() is None
    finally:
        gc.enable()


@each_chain
def test_the_data_of_parameters_may_be_replaced_between_steps(chain):
    swapped, reference = parameters(), parameters()
    a, b = Modular(groups(swapped), *CHAINS[chain]()), Modular(groups(reference), *CHAINS[chain]())
    for step in range(4):
        train(a, swapped, 1, step), train(b, reference, 1, step)
        for p in swapped:
            p.data = p.data.clone()
            for key, value in a.state.get(p, {}).items():
                a.state[p][key] = value.clone()
    assert same(swapped, reference)


@each_chain
def test_parameters_may_be_exchanged_as_accelerate_does(chain):
    old, reference = parameters(), parameters()
    a, b = Modular(groups(old), *CHAINS[chain]()), Modular(groups(reference), *CHAINS[chain]())
    train(a, old, 2), train(b, reference, 2)
    new = [p.detach().clone().requires_grad_() for p in old]
    place = {id(p): q for p, q in zip(old, new, strict=True)}
    for group in a.param_groups:
        group["params"] = [place[id(p)] for p in group["params"]]
    for p, q in zip(old, new, strict=True):
        if p in a.state:
            a.state[q] = a.state.pop(p)
    before = [p.detach().clone() for p in old]
    train(a, new, 2, start=2), train(b, reference, 2, start=2)
    assert same(new, reference)
    assert same([p.detach() for p in old], before)


def test_a_parameter_may_change_its_dtype_before_the_first_step():
    p = one()
    opt = Modular([p], Adam(), LR(0.1))
    p.data, p.grad = p.data.double(), None
    p.grad = torch.ones(1, dtype=torch.float64)
    opt.step()
    assert opt.state[p]["Adam/exp_avg"].dtype == torch.float64


# --- schedulers


def cyclic(opt):
    return lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=4)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 7], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": cyclic,
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=15),
    "OneCycleLR lists": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=15),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, 5),
}


def scheduled(opt, params, make, steps=12):
    scheduler = make(opt)
    rows = []
    for step in range(steps):
        give_grads(params, step)
        opt.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        rows.append([(float(g["lr"]), g["betas"]) for g in opt.param_groups])
    return rows, torch.cat([p.detach().flatten() for p in params])


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR of older torch, of itself
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_does_what_it_does_to_adam(name, tensor_lr):
    ours, theirs = parameters(torch.float64), parameters(torch.float64)

    def lr(value):
        return torch.tensor(value, dtype=torch.float64) if tensor_lr else value

    def split(params):
        return [{"params": params[:2]}, {"params": params[2:], "lr": lr(0.02)}]

    a = Modular(split(ours), Adam((0.8, 0.99)), LR(lr(0.05)))
    b = torch.optim.Adam(split(theirs), lr=lr(0.05), betas=(0.8, 0.99))
    rows, end = scheduled(a, ours, SCHEDULERS[name])
    expected_rows, expected_end = scheduled(b, theirs, SCHEDULERS[name])
    assert rows == expected_rows
    assert len({str(row) for row in rows}) > 1
    torch.testing.assert_close(end, expected_end, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_momentum_is_cycled_too(name):
    params, reference = parameters(), parameters()
    a = Modular(params, Momentum(0.9), LR(0.05))
    b = torch.optim.SGD(reference, lr=0.05, momentum=0.9)
    for opt, mine in ((a, params), (b, reference)):
        scheduler = SCHEDULERS[name](opt)
        for step in range(10):
            train(opt, mine, 1, step)
            scheduler.step()
    assert a.param_groups[0]["momentum"] == b.param_groups[0]["momentum"] != 0.9
    for p, q in zip(params, reference, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_keeps_the_keys_that_schedulers_add():
    params = parameters()
    opt = Modular(params, Adam(), LR(0.1))
    scheduler = SCHEDULERS["OneCycleLR"](opt)
    for step in range(3):
        train(opt, params, 1, step)
        scheduler.step()
    checkpoint = saved({"opt": opt.state_dict(), "scheduler": scheduler.state_dict()})
    twin = [p.detach().clone().requires_grad_() for p in params]
    other = Modular(twin, Adam(), LR(0.1))
    resumed = SCHEDULERS["OneCycleLR"](other)
    other.load_state_dict(checkpoint["opt"])
    resumed.load_state_dict(checkpoint["scheduler"])
    for step in range(3, 6):
        train(opt, params, 1, step), train(other, twin, 1, step)
        scheduler.step(), resumed.step()
    assert same(params, twin)


def test_a_tensor_lr_may_be_filled_between_steps():
    p, lr = one(), torch.tensor(0.1)
    opt = Modular([p], LR(lr))
    opt.step()
    opt.param_groups[0]["lr"].fill_(0.5)
    opt.step()
    assert p.item() == pytest.approx(1 - 0.1 - 0.5)


# --- GradScaler


def test_grad_scaler_is_left_to_unscale():
    assert not hasattr(Modular([one()], LR(0.1)), "_step_supports_amp_scaling")


def test_under_grad_scaler_the_steps_are_those_of_torch_adam():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))]
    nets.append(copy.deepcopy(nets[0]))
    opts = [
        Modular(nets[0].parameters(), Adam(), LR(0.01)),
        torch.optim.Adam(nets[1].parameters(), lr=0.01),
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in nets]
    inputs = torch.randn(8, 16, 4)
    for x in inputs:
        for net, opt, scaler in zip(nets, opts, scalers, strict=True):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() != 2.0**10
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_step_with_inf_is_skipped_whole():
    p = one()
    opt = Modular([p], ClipNormGrowth(dim="global"), Adam(), LR(0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, math.inf, 1.0):
        opt.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        before, value = state_of(opt), p.detach().clone()
        scaler.step(opt)
        scaler.update()
        unchanged = same(state_of(opt), before) and torch.equal(p, value)
        assert unchanged == math.isinf(factor)
    assert scaler.get_scale() == 2.0
    assert opt.state[p]["Adam/step"].item() == 2


def test_unscaling_first_lets_the_chain_clip_real_gradients():
    p = one(0.0)
    opt = Modular([p], ClipNorm(1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt.zero_grad()
    scaler.scale((p * 0.5).sum()).backward()
    scaler.step(opt)
    assert -p.item() == 0.5


# --- target="grad"


def test_target_grad_writes_the_memory_of_the_gradient():
    p = torch.zeros(2, requires_grad=True)
    p.grad = grad = torch.tensor([3.0, 4.0])
    where = grad.data_ptr()
    Modular([p], ClipNorm(1.0, target="grad"), LR(0.1)).step()
    assert p.grad is grad
    assert grad.data_ptr() == where
    torch.testing.assert_close(grad, torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(p.detach(), torch.tensor([-0.06, -0.08]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_target_grad_works_in_every_dtype(dtype):
    p = torch.zeros(2, dtype=dtype, requires_grad=True)
    p.grad = grad = torch.tensor([3.0, 4.0], dtype=dtype)
    Modular([p], ClipNorm(1.0, target="grad"), Momentum(0.5), LR(1.0)).step()
    assert p.grad is grad
    assert grad.dtype == dtype
    expected = torch.tensor([0.6, 0.8]).to(dtype)
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(p.detach(), -expected)


@pytest.mark.parametrize(
    "link",
    [EMA(0.5, target="grad"), Adam(target="grad"), Scale(2.0, target="grad"), Sign(target="grad")],
    ids=repr,
)
def test_every_link_may_work_on_the_gradient(link):
    a, b = parameters(), parameters()
    on_grad = Modular(a, link, LR(0.1))
    on_update = Modular(b, type(link)(**{**fields(link), "target": "update"}), LR(0.1))
    for step in range(3):
        train(on_grad, a, 1, step), train(on_update, b, 1, step)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q)
        assert not torch.equal(p.grad, q.grad)


def fields(link):
    return {field.name: getattr(link, field.name) for field in dataclasses.fields(link)}


def test_state_returned_as_a_gradient_is_copied_not_shared():
    p = one(grad=4.0)
    opt = Modular([p], EMA(0.5, target="grad"), Scale(10.0, target="grad"))
    opt.step()
    assert p.grad.item() == 20.0
    assert opt.state[p]["EMA/ema"].item() == 2.0


@pytest.mark.parametrize("producer", [Scale(1.0), ClipNorm(1.0), Adam()], ids=repr)
def test_target_grad_after_an_update_is_an_error(producer):
    with pytest.raises(ValueError, match=r'ClipValue has target="grad".*after.*nothing'):
        Modular([one()], producer, ClipValue(1.0, target="grad"), LR(0.1))


def test_target_grad_after_an_update_is_allowed_before_a_reader_of_gradients():
    class Agree(Transform):
        reads_grads = True

        def update(self, u, state, group):
            return u.mul_(group["grads"])

    p = one(0.0, grad=10.0)
    Modular([p], Scale(2.0), ClipValue(3.0, target="grad"), Agree()).step()
    assert -p.item() == 20.0 * 3.0
    assert p.grad.item() == 3.0
    with pytest.raises(ValueError, match='ClipValue has target="grad"'):
        Modular([p], Scale(2.0), Agree(), ClipValue(3.0, target="grad"))
    Modular([p], Adam(), ClipNorm(1.0, target="grad"), Cautious(), LR(0.1))  # reads them too


def test_what_reads_the_gradient_later_sees_it_rewritten():
    p, seen = one(grad=10.0), []
    opt = Modular([p], ClipValue(2.0, target="grad"), LR(0.1))
    opt.register_step_post_hook(lambda *_: seen.append(p.grad.item()))
    opt.step()
    assert seen == [2.0]


# --- TensorList: copy on write


def test_a_borrowed_list_is_copied_at_the_first_write_and_written_from_then_on():
    t = torch.ones(2)
    u = TensorList([t])
    assert u.mul_(3) is u
    assert t.tolist() == [1, 1]
    memory = u.tensors[0]
    u.add_(1).div_(2)
    assert u.tensors[0] is memory
    assert memory.tolist() == [2, 2]


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
    "minimum_": (torch.minimum, 2),
    "neg": (torch.neg, 1),
    "abs": (torch.abs, 1),
    "sign": (torch.sign, 1),
    "sqrt": (torch.sqrt, 1),
    "reciprocal_": (torch.reciprocal, 1),
}


@pytest.mark.parametrize("kind", ["float", "0-dim", "list", "TensorList"])
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
        assert same(tensors, before)
        if method == written:
            mine = [t.clone() for t in tensors]
            getattr(TensorList(mine, owned=True), method)(*args)
            torch.testing.assert_close(mine, expected, equal_nan=True)
        else:
            mine = TensorList(tensors, owned=True)
            assert getattr(mine, method)(*args) is not mine
            assert same(tensors, before)


@pytest.mark.parametrize("alpha", [1, 2.5, torch.tensor(2.5)], ids=repr)
@pytest.mark.parametrize("x", [2.0, torch.tensor(2.0), [torch.tensor([1.0, 5.0])]], ids=repr)
@pytest.mark.parametrize("owned", [True, False])
def test_add_takes_alpha(x, alpha, owned):
    t = torch.tensor([1.0, -2.0])
    other = x[0] if isinstance(x, list) else x
    expected = t + alpha * other
    (out,) = TensorList([t.clone()], owned=owned).add_(x, alpha=alpha)
    torch.testing.assert_close(out, expected)


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


def run_once(*links, grad=4.0, steps=1, value=0.0):
    """One parameter through the links; the optimizer, the parameter and the updates."""
    p = one(value, grad=grad)
    opt = Modular([p], *links)
    updates = []
    for _ in range(steps):
        p.data.fill_(value)
        opt.step()
        updates.append(value - p.item())
    return opt, p, updates


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

    with pytest.raises(KeyError, match=r"Wrong\.update set state\['memory'\].*init"):
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


# --- transforms of one's own


def test_a_description_is_a_dataclass_in_signature_and_repr():
    class Mine(Transform):
        factor: Live[float]
        power: int = 2

    assert repr(Mine(3.0)) == "Mine(factor=3.0)"
    assert repr(Mine(3.0, 4, name="m", target="grad")) == (
        "Mine(target='grad', name='m', factor=3.0, power=4)"
    )
    assert Mine.live == ("factor",)
    with pytest.raises(TypeError, match="factor"):
        Mine()
    with pytest.raises(TypeError, match="positional"):
        Mine(3.0, 4, "grad")


def test_a_description_cannot_be_changed():
    clip = ClipNorm(1.0)
    with pytest.raises(AttributeError, match=r"ClipNorm\.max_norm.*groups\[i\]\['max_norm'\]"):
        clip.max_norm = 2.0
    with pytest.raises(AttributeError, match=r"ClipNorm\.ord.*new one"):
        clip.ord = 1


def test_one_description_serves_several_places_and_optimizers():
    ema = EMA(0.5)
    opt, p, updates = run_once(ema, ema, steps=2)
    assert updates == [1.0, 2.0]
    assert set(opt.state[p]) == {"EMA/ema", "EMA_2/ema"}
    _, _, updates = run_once(ema, steps=1)
    assert updates == [2.0]


def test_an_init_of_ones_own_is_kept_by_subclasses_too():
    class Twice(Transform):
        factor: Live[float]

        def __init__(self, half):
            self.factor = 2 * half

        def update(self, u, state, group):
            return u.mul_(group["factor"])

    class Thrice(Twice):
        extra: float = 1.5

    assert run_once(Twice(1.5))[2] == [12.0]
    thrice = Thrice(1.5)
    assert (thrice.factor, thrice.extra, thrice.target, thrice.name) == (3.0, 1.5, "update", None)
    assert run_once(Thrice(1.5))[2] == [12.0]


def test_a_check_runs_once_after_the_outermost_init_and_for_groups():
    calls = []

    class Checked(Transform):
        factor: Live[float]

        def check(self):
            super().check()
            calls.append(self.factor)
            self.require("factor", above=0)

        def update(self, u, state, group):
            return u.mul_(group["factor"])

    class Sub(Checked):
        other: float = 1.0

        def __init__(self, factor):
            super().__init__(factor)

    Sub(2.0)
    assert calls == [2.0]
    with pytest.raises(ValueError, match=r"Sub: factor must be a number above 0, got -1\.0"):
        Sub(-1.0)
    with pytest.raises(ValueError, match=r"Sub: factor must be a number above 0, got 0\.0"):
        Modular([{"params": [one()], "factor": 0.0}], Sub(1.0))


def test_annotations_that_cannot_be_evaluated_do_not_matter():
    class Local:
        pass

    class Mine(Transform):
        thing: "Local"
        factor: "Live[Nowhere]" = 2.0  # noqa: F821
        other: "Nowhere | None" = None  # noqa: F821

        def update(self, u, state, group):
            return u.mul_(group["factor"])

    assert Mine.live == ("factor",)
    assert run_once(Mine(Local()))[2] == [8.0]


def test_future_annotations_and_type_checking_imports_do_not_matter(monkeypatch):
    source = """
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nowhere import Thing
import torchzero_clip as tz
from torchzero_clip import Live, Transform
class Mine(Transform):
    thing: Thing
    factor: Live[float] = 2.0
    other: tz.Live[Thing | None] = None
    fixed: list[Thing] | None = None
"""
    module = types.ModuleType("elsewhere")
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    exec(source, vars(module))
    assert module.Mine.live == ("factor", "other")
    assert module.Mine(1).factor == 2.0


@pytest.mark.parametrize(
    "hint",
    [
        Live[float] | None,
        "Live[float] | None",
        "Live[Nowhere] | None",
        list[Live[float]],
        "dict[str, Live[float]]",
        Annotated[list[Live[float]], "more"],
    ],
    ids=str,
)
def test_live_inside_another_type_is_an_error_at_class_creation(hint):
    with pytest.raises(TypeError, match=r"Wrong: .*'beta'.*Live\[float \| None\]"):
        type("Wrong", (Transform,), {"__annotations__": {"beta": hint}, "__module__": __name__})


@pytest.mark.parametrize("base", [Transform, NormRule, TensorwiseTransform])
@pytest.mark.parametrize("name", ["update", "init", "step", "check", "require"])
def test_a_field_named_like_a_method_is_an_error_at_class_creation(base, name):
    with pytest.raises(TypeError, match=f"Wrong: the field '{name}' has the name of a method"):
        type("Wrong", (base,), {"__annotations__": {name: float}, name: 1.0})


def test_a_field_named_like_a_method_of_its_own_class_is_an_error_too():
    with pytest.raises(TypeError, match="Wrong: the field 'scaled' has the name of a method"):

        class Wrong(Transform):
            scaled: float

            def scaled(self):
                return 1.0


@pytest.mark.parametrize("name", ["limit", "observe", "measure", "init_unit"])
def test_a_field_of_a_norm_rule_named_like_a_method_is_an_error(name):
    with pytest.raises(TypeError, match=f"Wrong: the field '{name}' has the name of a method"):
        type("Wrong", (NormRule,), {"__annotations__": {name: float}, name: 1.0})


@pytest.mark.parametrize("name", ["params", "chain", "param_names", "grads"])
def test_a_live_field_may_not_take_a_key_of_the_group(name):
    with pytest.raises(TypeError, match=f"Wrong: '{name}' is taken"):
        type("Wrong", (Transform,), {"__annotations__": {name: Live[float]}})


def test_a_transform_without_update_says_what_to_write():
    class Nothing(Transform):
        pass

    with pytest.raises(NotImplementedError, match="Nothing has neither update nor step"):
        run_once(Nothing())


def test_a_norm_rule_of_ones_own_works_at_every_scope():
    class Halve(NormRule):
        """At most half of the norm before."""

        share: Live[float] = 0.5
        dim: "object" = None

        def init_unit(self):
            return {"previous": math.inf}

        def limit(self, norm, state, group):
            return state["previous"] * group["share"]

        def observe(self, norm, clipped, state, group):
            return {"previous": clipped}

    for dim in (None, "layer", "group", "global"):
        p = one(0.0, grad=8.0)
        opt = Modular([("a.w", p)], Halve(dim=dim))
        updates = []
        for _ in range(3):
            p.data.zero_()
            opt.step()
            updates.append(-p.item())
        assert updates == [8.0, 4.0, 2.0]
    with pytest.raises(ValueError, match=r"Halve: dim must be None.*memory"):
        Halve(dim=0)


def test_a_norm_rule_may_measure_the_parameters_at_its_scope():
    class Trust(NormRule):
        dim: "object" = None
        sets_norm = True

        def limit(self, norm, state, group):
            return self.measure(group["params"])

    a, b = one(3.0, grad=10.0), one(4.0, grad=10.0)
    Modular([a, b], Trust()).step()
    assert (a.item(), b.item()) == pytest.approx((0.0, 0.0))
    a, b = one(3.0, grad=10.0), one(4.0, grad=10.0)
    Modular([a, b], Trust(dim="global")).step()
    step = 5 / math.sqrt(2)
    assert (a.item(), b.item()) == pytest.approx((3 - step, 4 - step))


def test_observing_what_init_unit_does_not_make_is_an_error():
    class Wrong(NormRule):
        def init_unit(self):
            return {"a": 0.0}

        def limit(self, norm, state, group):
            return math.inf

        def observe(self, norm, clipped, state, group):
            return {"b": norm}

    with pytest.raises(KeyError, match=r"Wrong\.observe returned \['b'\]"):
        run_once(Wrong())


def test_a_norm_rule_without_limit_says_what_to_write():
    class Nothing(NormRule):
        pass

    with pytest.raises(NotImplementedError, match="Nothing has no limit"):
        run_once(Nothing())


def test_a_tensorwise_transform_sees_one_tensor_at_a_time():
    class Flip(TensorwiseTransform):
        shift: Live[float] = 1.0

        def init(self, param):
            return {"last": zeros_like_state(param)}

        def update_tensor(self, u, state, group):
            out = u.flip(0) + group["shift"] + state["last"]
            state["last"].copy_(u)
            u.zero_()
            return out

    p = torch.zeros(2, requires_grad=True)
    q = torch.zeros(1, requires_grad=True)
    p.grad, q.grad = torch.tensor([1.0, 2.0]), torch.tensor([5.0])
    opt = Modular([{"params": [p]}, {"params": [q], "shift": 10.0}], Flip())
    opt.step()
    assert (-p).tolist() == [3.0, 2.0]
    assert (-q).tolist() == [15.0]
    assert p.grad.tolist() == [1.0, 2.0]
    opt.step()
    assert (-p).tolist() == [3.0 + 4.0, 2.0 + 4.0]


def test_a_tensorwise_transform_may_return_its_state():
    class Last(TensorwiseTransform):
        def init(self, param):
            return {"m": zeros_like_state(param)}

        def update_tensor(self, u, state, group):
            return state["m"].add_(u)

    opt, p, updates = run_once(Last(), Scale(10.0), steps=2)
    assert updates == [40.0, 80.0]
    assert opt.state[p]["Last/m"].item() == 8.0


def test_a_link_may_end_the_step():
    class Every(Transform):
        """Level 3: every second step goes through."""

        def step(self, buckets):
            count = buckets[0].shared
            count["steps"] = count.get("steps", 0) + 1
            return buckets if count["steps"] % 2 == 0 else []

    _, _, updates = run_once(Every(), EMA(0.5), steps=4)
    assert updates == [0.0, 2.0, 0.0, 3.0]


def test_complex_updates_arrive_as_pairs_or_whole():
    seen = []

    class Pairs(Transform):
        def init(self, param):
            return {"m": zeros_like_state(param)}

        def update(self, u, state, group):
            seen.append([t.shape for t in (*u, *state["m"], *group["params"], *group["grads"])])
            return u.mul_(2)

    class Whole(Pairs):
        complex = "whole"

    for link in (Pairs(), Whole()):
        p = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
        p.grad = torch.tensor([1j, 2, 3 + 1j])
        Modular([p], link).step()
        torch.testing.assert_close(-p.detach(), 2 * p.grad)
    assert seen == [[(3, 2)] * 4, [(3,)] * 4]


# --- examples/write_your_own.py


def test_grokfast_adds_a_slow_average():
    opt, p, updates = run_once(Grokfast(beta=0.5, gain=3.0), steps=2)
    assert updates == [4.0 + 3 * 2.0, 4.0 + 3 * 3.0]
    assert opt.state[p]["Grokfast/slow"].item() == 3.0
    assert set(opt.param_groups[0]) == {"params", "chain", "beta", "gain"}


@pytest.mark.parametrize("dim", [None, "global"])
def test_clip_to_average_allows_a_multiple_of_the_norms_so_far(dim):
    p = one(0.0)
    opt = Modular([p], ClipToAverage(2.0, dim))
    updates = []
    for grad in (1.0, 10.0, math.nan, 10.0, 0.1):
        p.grad.fill_(grad)
        p.data.zero_()
        opt.step()
        updates.append(-p.item())
    # the average after each step: 1, 1.5, 1.5, 2.25, 1.175
    assert updates == pytest.approx([1.0, 2.0, math.nan, 3.0, 0.1], nan_ok=True)
    opt.param_groups[0]["factor"] = 1.0
    p.grad.fill_(10.0)
    p.data.zero_()
    opt.step()
    assert -p.item() == pytest.approx(1.175)


def test_the_example_finds_the_line_in_spite_of_wild_labels(capsys):
    slope, offset = write_your_own.main().tolist()
    assert (slope, offset) == pytest.approx((3.0, -1.0), abs=1e-3)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 12
    assert "step 300" in printed[-1]
    losses = [float(line.split()[3]) for line in printed]  # against the true labels
    assert max(losses) < 10
    assert losses[-1] < 1e-3


# --- many groups and kinds of parameters at once


def test_dtypes_may_be_mixed_within_a_group():
    params = [p for d in (torch.float32, torch.float64, torch.bfloat16) for p in parameters(d)]
    alone = [p for d in (torch.float32, torch.float64, torch.bfloat16) for p in parameters(d)]
    opt = Modular(params, ClipNorm(1.0), Adam(), LR(0.1))
    opts = [Modular([p], ClipNorm(1.0), Adam(), LR(0.1)) for p in alone]
    for step in range(3):
        give_grads(params, step)
        for p, q, o in zip(params, alone, opts, strict=True):
            q.grad = p.grad.clone()
            o.step()
        opt.step()
    assert same(params, alone)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch takes none")
def test_a_gradient_of_another_dtype_than_the_parameter_is_taken():
    p, q = one(1.0, torch.float32), one(1.0, torch.float32)
    a, b = Modular([p], Momentum(0.5), LR(0.1)), Modular([q], Momentum(0.5), LR(0.1))
    p.grad, p.grad_dtype = None, torch.float16
    p.grad = torch.tensor([0.5], dtype=torch.float16)
    q.grad = torch.tensor([0.5])
    a.step(), b.step()
    assert same(p, q)


def test_the_order_in_which_gradients_appear_does_not_matter():
    params, reference = parameters(), parameters()
    a = Modular(params, ClipNormGrowth(), Adam(), LR(0.1))
    opts = [Modular([p], ClipNormGrowth(), Adam(), LR(0.1)) for p in reference]
    pattern = [(0,), (2,), (0, 1), (1, 2), (0, 1, 2), (1,)]
    for step, present in enumerate(pattern):
        give_grads(params, step)
        for i, (p, q, o) in enumerate(zip(params, reference, opts, strict=True)):
            q.grad = p.grad.clone() if i in present else None
            p.grad = p.grad if i in present else None
            o.step()
        a.step()
    assert same(params, reference)
