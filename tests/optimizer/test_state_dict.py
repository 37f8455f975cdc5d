"""state_dict: what is saved, what is loaded, what is refused."""

import copy
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.helpers import equal, one, param, saved, state_of
from tests.optimizer.chains import (
    CHAINS,
    NAMES,
    SHAPES,
    each_chain,
    give_grads,
    groups,
    parameters,
    train,
    trained,
)
from torchzero_clip import (
    EMA,
    LR,
    AdaGC,
    Adam,
    AdaptiveClip,
    AutoClip,
    ClipNorm,
    ClipNormGrowth,
    Clipper,
    Modular,
    Momentum,
    Partition,
    Quantile,
    Transform,
    Warmup,
)


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


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)],
)
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
    assert equal(second.state_dict(), first.state_dict())
    train(second, resumed, 3, start=3)
    assert equal(straight, resumed)
    assert equal(second.state_dict(), opt.state_dict())


@each_chain
def test_the_dtype_of_state_survives_loading_for_bfloat16_parameters(chain):
    params = parameters(torch.bfloat16)
    opt = Modular(groups(params), *CHAINS[chain]())
    train(opt, params, 2)
    other = Modular(groups(parameters(torch.bfloat16)), *CHAINS[chain]())
    other.load_state_dict(saved(opt.state_dict()))
    assert equal(state_of(other), state_of(opt))
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


@pytest.mark.parametrize("given", ["opt.pt", None, [1]])
def test_what_is_no_dict_is_no_checkpoint(given):
    said = rf"the result of state_dict\(\), a dict with .*, got {type(given).__name__}"
    with pytest.raises(ValueError, match=said):
        Modular([one()], LR(0.1)).load_state_dict(given)


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
    assert equal(other.state[q]["Adam/step"], opt.state[p]["Adam/step"])
    opt.step(), other.step()
    assert equal(p, q)


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
    assert equal(params, others)


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
    assert equal(state_of(opt), before)
    assert equal([p.detach() for g in opt.param_groups for p in g["params"]], params)


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
    refused(opt, trained(*links).state_dict(), "different transforms", "Adam(")


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
        "missing": "has no state 'Adam/exp_avg'",
        "extra": "Adam/exp_max",
        "dtype": "torch.float16",
    }
    refused(opt, checkpoint, words[damage])


@pytest.mark.parametrize(("now", "then"), [(None, "global"), ("global", None), (None, "group")])
@pytest.mark.parametrize("rest", [[], [Adam()]], ids=repr)
def test_state_of_norms_with_another_dim_is_refused_with_the_cause(now, then, rest):
    opt = trained(ClipNormGrowth(dim=now), *rest, LR(0.1))
    other = trained(ClipNormGrowth(dim=then), *rest, LR(0.1))
    words = r".*'ClipNormGrowth/previous'.*: ClipNormGrowth may have had another dim= when"
    with pytest.raises(ValueError, match=words):
        opt.load_state_dict(other.state_dict())


def test_another_chains_checkpoint_is_described_by_its_own_hyperparameters():
    params = parameters()
    saved_by_norm = Clipper(params, ClipNorm(1.0)).state_dict()
    words = r"The checkpoint has the hyperparameters \['max_norm'\] and no state, but this"
    with pytest.raises(ValueError, match=words):
        Clipper(params, AutoClip()).load_state_dict(saved_by_norm)


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
    opt, other = trained(now, LR(0.1)), trained(then, LR(0.1))
    with pytest.warns(UserWarning, match="different arguments of the transforms"):
        opt.load_state_dict(other.state_dict())
    loaded, given = state_of(opt), state_of(other)
    assert equal(loaded["state"], given["state"])


def test_the_same_fixed_arguments_do_not_warn():
    opt, other = trained(ClipNorm(1.0, 1), LR(0.1)), trained(ClipNorm(1.0, 1), LR(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.load_state_dict(other.state_dict())


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
    with pytest.warns(UserWarning, match="lr: 0.7 from the checkpoint replaces 0.1"):
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
    assert equal(second.state_dict()["state"], first.state_dict()["state"])
    second.step()


@each_chain
def test_saving_changes_nothing_and_is_repeatable(chain):
    params = parameters()
    opt = Modular(groups(params), *CHAINS[chain]())
    train(opt, params, 3)
    assert equal(state_of(opt), state_of(opt))
    assert equal(saved(opt.state_dict()), opt.state_dict())


def test_rules_that_decide_by_name_keep_the_names_of_the_optimizer():
    """A wrapper such as torch.compile adds a prefix to the names. A checkpoint has none."""

    def start(prefix):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 1)})
        named = [(prefix + name, p) for name, p in model.named_parameters()]
        rules = {"body": Adam(), "head": Momentum(0.9)}
        labels = {f"{prefix}head.*": "head", "*": "body"}
        return model, Modular(named, Partition(rules, labels), LR(0.1))

    def train(model, opt, steps):
        for step in steps:
            torch.manual_seed(step)
            opt.zero_grad()
            model["head"](model["body"](torch.randn(8, 3))).square().sum().backward()
            opt.step()

    model, opt = start("")
    train(model, opt, range(2))
    wrapped, resumed = start("_orig_mod.")
    wrapped.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert resumed.param_groups[0]["param_names"][0] == "_orig_mod.body.weight"
    for either in ((model, opt), (wrapped, resumed)):
        train(*either, range(2, 4))
    assert equal(list(model.parameters()), list(wrapped.parameters()))
    assert list(resumed.state[wrapped["head"].bias]) == list(opt.state[model["head"].bias])


@pytest.mark.parametrize("flat", [False, True])
def test_set_optimizer_state_dict_matches_names_in_any_order(flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def start(order):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 4)
        return model, Modular([*model.named_parameters()][::order], Adam(), LR(0.1))

    def train(model, opt):
        opt.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        opt.step()

    model, opt = start(1)
    train(model, opt)
    held = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
    other, resumed = start(-1)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, held, options=options)
    assert resumed.param_groups[0]["param_names"] == ["bias", "weight"]
    for either in ((model, opt), (other, resumed)):
        train(*either)
    assert equal(list(model.parameters()), list(other.parameters()))


def test_indices_that_json_has_made_strings_are_refused():
    """They would load as the state of a wrapper, and all state would start again."""
    params = parameters()
    opt = Modular(params, Adam(), LR(0.1))
    train(opt, params, 1)
    held = opt.state_dict()
    held["state"] = {str(index): state for index, state in held["state"].items()}
    with pytest.raises(ValueError, match="these parameters are in none of its groups"):
        opt.load_state_dict(held)


def test_names_in_place_of_indices_in_another_order_are_refused():
    """`get_optimizer_state_dict` returns such a dict, and `load_state_dict` maps by position."""
    model = torch.nn.Linear(3, 4)
    opt = Modular(model.named_parameters(), Adam(), LR(0.1))
    other = Modular([*model.named_parameters()][::-1], Adam(), LR(0.1))
    with pytest.raises(ValueError, match="parameter 0 of group 0 is 'weight' in the checkpoint"):
        other.load_state_dict(get_optimizer_state_dict(model, opt))


@pytest.mark.parametrize(
    "rule",
    [
        ClipNormGrowth,
        AdaGC,
        lambda: AdaptiveClip(Quantile(0.9, 4), dim=None),
        lambda: AdaptiveClip(Quantile(0.9, 4), dim="layer"),
    ],
)
@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_models_with_double_parameters_load_their_own_checkpoint(rule, first):
    params = [param(0.0, dtype=d, grad=[1.0]) for d in (first, torch.float64)]
    named = [("a.w", params[0]), ("a.b", params[1])]
    opt = Modular(named, rule(), LR(0.1))
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(copy.deepcopy(saved))
    for p, held in zip(params, saved["state"].values(), strict=True):
        for key, value in held.items():
            assert opt.state[p][key].dtype == value.dtype
            assert torch.equal(opt.state[p][key].nan_to_num(), value.nan_to_num())
