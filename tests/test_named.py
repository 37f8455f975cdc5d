"""named: the chain of a published method, and what it says of a name that it does not know."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch

from torchzero_clip import LR, Chain, Modular, NormRule, TrustRatio, named
from torchzero_clip.published import NAMES
from torchzero_clip.published.name import SETTINGS

each = pytest.mark.parametrize("name", sorted(NAMES))


@each
def test_a_name_is_a_chain_of_links_that_a_config_can_hold(name: str) -> None:
    chain = named(name)
    assert isinstance(chain, Chain)
    again = Chain.from_config(json.loads(json.dumps(chain.to_config())))
    assert repr(again) == repr(chain)


@each
def test_every_argument_of_a_name_changes_its_chain(name: str) -> None:
    usual = USUAL.get(name, {})
    for argument, parameter in inspect.signature(NAMES[name]).parameters.items():
        value = parameter.default
        assert value is not parameter.empty, f"{name}: {argument} has no default"
        other = OTHERS.get(argument) or changed(value)
        given = {**usual, argument: other}
        assert repr(named(name, **given)) != repr(named(name, **usual)), argument


@each
def test_an_option_is_one_key_or_told_to_be_ambiguous(name: str) -> None:
    """In a group and as a live value it does all that it does as an argument."""
    for option, parameter in inspect.signature(NAMES[name]).parameters.items():
        keys = Modular([torch.nn.Parameter(torch.ones(2, 2))], named(name)).keys
        if option not in (*keys.defaults, *keys.ambiguous):
            continue
        value = OTHERS.get(option) or changed(parameter.default)
        value = tuple([0.9 * x for x in parameter.default]) if option == "betas" else value
        given = trained(named(name, **{option: value}))
        for how in ({"group": {option: value}}, {"live": {option: value}}):
            if option in keys.ambiguous:
                with pytest.raises(
                    ValueError, match=f"{option!r} of a parameter group is ambiguous"
                ):
                    trained(named(name), **how)
            else:
                assert torch.equal(trained(named(name), **how), given), how


@each
def test_a_method_of_matrices_has_a_layout_unless_it_also_measures_whole_parameters(
    name: str,
) -> None:
    """With a layout, a fused weight moves as its separate weights do. These norms prevent that."""
    opt = Modular([("0", torch.nn.Parameter(torch.ones(2, 2)))], named(name))
    rules = [link.transform for link in opt.keys.links if link.transforms]
    if not any(["layout" in type(rule).__dataclass_fields__ for rule in rules]):
        return
    whole = {
        type(rule).__name__
        for rule in rules
        if isinstance(rule, NormRule) and type(rule).grid is NormRule.grid
    }
    assert ("layout" in inspect.signature(NAMES[name]).parameters) == (not whole)
    text = " ".join((inspect.getdoc(NAMES[name]) or "").split())
    for rule in whole:
        assert f"`{rule}`" in text.partition("There is no `layout`, because")[2]


def trained(chain: Chain, group: Any = (), live: Any = ()) -> torch.Tensor:
    """Where some matrices, two of one shape, are after six steps: lookahead_adam needs all."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=draw)) for s in [(4, 3), (4, 3), (3, 3)]]
    opt = Modular([{"params": params, **dict(group)}], chain)
    opt.param_groups[0].update(live)
    for _ in range(6):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw)
        opt.step()
    return torch.cat([p.detach().flatten() for p in params])


def no_heads(name: str, p: torch.Tensor) -> None:
    """The heads of a parameter: it has none."""


def other_heads(name: str, p: torch.Tensor) -> None:
    """Another such function."""


USUAL: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.5},  # without it there is nothing to dampen
    "kimi_k3": {"max_logits": no_heads},  # without it nothing is clipped
}
OTHERS: dict[str, Any] = {
    "layout": {"0": "(head rows) d -> head rows d, rows=1"},
    "max_logits": other_heads,
    "every": 5,
    "first": "step",
    "memory_save_mode": "one_diag",
    "norm": "Sign",
    "method": "ns",
    "alpha_warmup": 9,
    "beta3_warmup": 9,
    "etas": (0.4, 1.1),
    "d": 2.0,
    "beta3": 0.5,
    "shampoo_beta": 0.5,
    "growth_rate": 2.0,
}


def changed(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return None
    if isinstance(value, tuple):
        return tuple(0.1 if x is None else 0.5 * x for x in value)
    assert isinstance(value, (int, float))
    return value + 1 if isinstance(value, int) else value * 0.5 or 0.25


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
MUON = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1, "nesterov": True}
NORDION = {"lr": 0.01, "fraction": 0.25, "mu": 0.95, "muon_beta2": 0.95, "weight_decay": 0.01}
THEIRS: dict[str, dict[str, Any]] = {  # as their code has them, that of the identity unless it says
    "adagc": {**ADAM, "weight_decay": 0.1, "rel": 1.05, "abs": 1.0, "beta": 0.98,
              "warmup_steps": 100},
    "ademamix": {**ADAM, "betas": (0.9, 0.999, 0.9999), "alpha": 2.0, "weight_decay": 0.0,
                 "alpha_warmup": None, "beta3_warmup": None},
    "came": {"betas": (0.9, 0.999, 0.9999), "eps": (1e-30, 1e-16), "clip_threshold": 1.0,
             "weight_decay": 0.0},
    "cadamw": {**ADAM, "weight_decay": 1e-2},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0},
    "lambc": {**ADAM, "eps": 1e-6, "weight_decay": 0.01},
    "lars": {"momentum": 0.9, "weight_decay": 0.0, "trust_coefficient": 1e-3, "nesterov": False},
    "adabelief": {**ADAM, "eps": 1e-16, "weight_decay": 0.0, "rectify": True},
    "adam_atan2": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "a": 1.27, "b": 1.0},
    "adamc": {**ADAM, "weight_decay": 0.0},
    "adan": {**ADAM, "betas": (0.98, 0.92, 0.99), "weight_decay": 0.0, "no_prox": False},
    "adopt": {**ADAM, "betas": (0.9, 0.9999), "eps": 1e-6, "weight_decay": 0.0, "decouple": False},
    "grams": {**ADAM, "eps": 1e-6, "weight_decay": 0.0},
    "glm5": {"lr": 2.5e-4, "momentum": 0.95, "weight_decay": 0.1},  # of GLM-4.5
    "kimi_k3": {"lr": 2e-4, "weight_decay": 0.1, "tau": 100.0},  # lr and tau of Kimi K2
    "laprop": {**ADAM, "lr": 4e-4, "eps": 1e-15, "weight_decay": 0.0},
    "yogi": {**ADAM, "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0, "initial_accumulator": 1e-6},
    "prodigy": {**ADAM, "lr": 1.0, "beta3": None, "weight_decay": 0, "decouple": True,
                "use_bias_correction": False, "safeguard_warmup": False, "d0": 1e-6, "d_coef": 1.0,
                "growth_rate": float("inf")},
    "dadapt_adam": {**ADAM, "lr": 1.0, "weight_decay": 0, "decouple": False,
                    "use_bias_correction": False, "d0": 1e-6, "growth_rate": float("inf")},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "mars_adamw": {"lr": 3e-3, "betas": (0.95, 0.99), "eps": 1e-8, "weight_decay": 0.0,
                   "gamma": 0.025},
    "adamuon": {"lr": 0.02, "weight_decay": 0.01, "momentum": 0.95, "nesterov": True,
                "eps": 1e-8},
    "dion2": {"lr": 0.01, "fraction": 0.25, "ef_decay": 0.95, "weight_decay": 0.01},
    "dion3": NORDION,
    "nordion2": NORDION,
    "polar": {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95},
    "scion": {"lr": 1e-3, "momentum": 1.0, "scale": 1.0, "unconstrained": False},
    "muon_plus": MUON,
    "muoneq": MUON,  # and the scale of its decay, `adjust_lr_for_muon`
    "nanochat": {},
    "normuon": {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, "beta": 0.95,
                "nesterov": True},
    "klsoap": {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.01,
               "precondition_frequency": 10},
    "kron": {"lr": 3e-4, "b1": 0.9, "weight_decay": 0.0, "max_size_triangular": 8192,
             "memory_save_mode": None, "precond_lr": 0.1, "precond_init_scale": 1.0},
    "shampoo": {"lr": 1e-2, "epsilon": 1e-12, "weight_decay": 0.0},
    "soap_hyperball": {"lr": 1e-2, "ema_beta": 0.9, "momentum": 0.95, "q_freq": 1, "eps": 1e-8},
    "signum": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0},
    "soap": {"lr": 3e-3, "betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.01,
             "precondition_frequency": 10, "max_precond_dim": 10000},
    "spam": {**ADAM, "eps": 1e-6, "weight_decay": 0.0, "threshold": 5000.0, "every": 500,
             "warmup": 150, "wait": 20},
    "stable_adamw": {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 1e-2},
    "stable_spam": {**ADAM, "weight_decay": 0.0, "gammas": (0.7, 0.9), "theta": 0.999,
                    "every": 1000},
}  # fmt: skip


@each
def test_a_name_has_the_defaults_of_its_method(name: str) -> None:
    ours = {k: p.default for k, p in inspect.signature(NAMES[name]).parameters.items()}
    theirs = THEIRS[name] if name in THEIRS else defaults_in_torch(name)
    assert {key: ours[key] for key in theirs} == theirs


def defaults_in_torch(name: str) -> dict[str, Any]:
    """Those of the optimizer of torch, under the names that ours has too."""
    official = {key.lower(): made for key, made in vars(torch.optim).items()}.get(name)
    if official is None:
        pytest.skip(f"this torch has no {name}")
    names = inspect.signature(NAMES[name]).parameters
    found = inspect.signature(official).parameters
    return {key: found[key].default for key in names if key in found}


@each
def test_a_name_tells_what_it_is_and_where_it_comes_from(name: str) -> None:
    about, _, reference = (inspect.getdoc(NAMES[name]) or "").partition("\n\nReference:\n")
    assert about.partition("\n")[0].endswith(".")
    assert reference.strip()


def test_the_learning_rate_is_live() -> None:
    w = torch.nn.Parameter(torch.ones(2, 2))
    opt = Modular([w], named("lamb", lr=0.5))
    assert opt.param_groups[0]["lr"] == 0.5
    assert [type(link) for link in named("lamb")][2:] == [TrustRatio, LR]


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"unknown optimizer 'LAMP': did you mean 'lamb', 'lambc' or 'laprop'\?"
    ):
        named("LAMP")


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        ("adamw_hf", 'use named("adamw", eps=1e-06)'),
        ("sgdm", 'use named("sgd", momentum=0.9)'),
        ("NAdamW", 'use named("nadam", decoupled_weight_decay=True)'),
        ("signSGD", 'use named("signum", momentum=0.0)'),
        ("rmsprop_tf", "did you mean 'rmsprop' or 'rprop'?"),
        ("torch.optim.Adamx", "did you mean 'adamax', 'adam' or 'radam'?"),
        ("cadam-w", 'use named("cadamw")'),
        ("stableadamw", "did you mean 'stable_adamw'"),
        ("ScheduleFreeRAdam", "did you mean 'schedule_free_radam'"),
        ("optax.adamaxw", "did you mean 'adamax'"),
        ("optax.noisy_sgd", "did you mean 'sgd'?"),
        ("timm.nadamw", 'use named("nadam", decoupled_weight_decay=True)'),
        ("adabelief_pytorch", "did you mean 'adabelief'?"),
        ("adadeltaw", "did you mean 'adadelta'?"),
        ("adan_timm", "did you mean 'adan'"),
        ("lion8bit", "did you mean 'lion'?"),
        ("AdEMAMixW", "did you mean 'ademamix'"),
        (7, "did you mean '"),
    ],
)
def test_a_foreign_name_gets_the_setting_that_it_is_or_the_nearest(foreign, words) -> None:
    with pytest.raises(ValueError) as said:
        named(foreign)
    assert words in str(said.value)


@pytest.mark.parametrize("foreign", SETTINGS)
def test_the_setting_of_a_foreign_name_is_a_chain_of_its_own(foreign: str) -> None:
    name, arguments = SETTINGS[foreign]
    assert foreign not in NAMES
    assert (repr(named(name, **arguments)) != repr(named(name))) is bool(arguments)


def test_an_unknown_argument_gets_those_that_there_are() -> None:
    with pytest.raises(
        TypeError,
        match="'lion' has no argument 'momentum'; its arguments are lr, betas, weight_decay",
    ):
        named("lion", momentum=0.9)


def test_sgd_with_nesterov_needs_a_momentum_as_in_torch() -> None:
    with pytest.raises(ValueError, match="sgd: nesterov=True needs a momentum above 0"):
        named("sgd", nesterov=True)
