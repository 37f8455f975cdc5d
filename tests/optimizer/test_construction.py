"""How an optimizer is made: parameters, groups, live values, links that are refused."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers import equal, one
from tests.optimizer.chains import parameters, train
from torchzero_clip import LR, Adam, ClipNorm, Clipper, Modular, Momentum, Scale, Sign


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
        "  group 0: 1 parameter, {'lr': 0.5, 'max_norm': 1}",
        f"  group 1: {len(params) - 1} parameters, {{'max_norm': 1, 'lr': 0.1}}",
    ]


def test_repr_shows_options_that_are_no_defaults():
    opt = Modular([one()], LR(0.1), compile=True, rounding="kahan", state_dtype="bfloat16")
    shown = "Modular(LR(lr=0.1), compile=True, rounding='kahan', state_dtype='bfloat16')"
    assert repr(opt).startswith(shown)
    assert repr(Modular([one()], LR(0.1), fused=False)).startswith(
        "Modular(LR(lr=0.1), fused=False)"
    )
    assert repr(Clipper([one()], Sign())).startswith("Clipper(Sign())\n")


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
        (Adam, r"a chain must contain only transforms, got <class .*Adam'>: write Adam\(\.\.\.\)"),
        (0.1, r"a chain must contain only transforms, got 0\.1"),
        (lambda u: u, "a chain must contain only transforms, got <function"),
    ],
)
def test_a_link_that_is_no_transform_is_an_error_that_says_what_to_write(link, message):
    with pytest.raises(TypeError, match=message):
        Modular([one()], link, LR(0.1))


@pytest.mark.parametrize(
    ("name", "value"), [("compile", "max-autotune"), ("fused", None), ("compile", 1)]
)
def test_a_truth_is_true_or_false(name, value):
    with pytest.raises(TypeError, match=f"Modular: {name} must be True or False, got {value!r}"):
        Modular([one()], LR(0.1), **{name: value})


def test_a_process_group_is_one():
    with pytest.raises(TypeError, match=r"Modular: process_group must be a ProcessGroup, .*'gloo'"):
        Modular([one()], LR(0.1), process_group="gloo")


@pytest.mark.parametrize(
    ("group", "given"), [({"param": [], "lr": 0.1}, r"\['param', 'lr'\]"), ((), r"\(\)")]
)
def test_a_group_is_a_dict_with_parameters(group, given):
    with pytest.raises(TypeError, match=f"must be a dict with 'params', got {given}"):
        Modular([one()], LR(0.1)).add_param_group(group)


def test_the_chain_of_a_group_is_a_dict():
    with pytest.raises(TypeError, match=r"'chain' in a parameter group must be a dict .*, got 3"):
        Modular([{"params": [one()], "chain": 3}], LR(0.1))


def test_what_is_no_closure_is_an_error():
    opt = Modular([one()], LR(0.1))
    with pytest.raises(TypeError, match=r"step: closure must be .* got tensor\(0\.5"):
        opt.step(torch.tensor(0.5))


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
    assert equal(params, reference)
    assert calls == ["pre", "post"] * 3
    assert type(copy.deepcopy(opt)) is MyAdam
