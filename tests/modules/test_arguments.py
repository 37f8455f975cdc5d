"""What is refused, where, and in which words."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import at_once, gradients, parameters, run_each, set_grads
from tests.modules.rows.row import EVERYWHERE, Bad, Row
from tests.table import NAMES, ROWS
from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    EMAQuantile,
    EMARatio,
    GeometricQuantile,
    InBasis,
    Lambda,
    Live,
    Modular,
    Momentum,
    NanToNum,
    Normalize,
    P2Quantile,
    Quantile,
    RMSprop,
    Scale,
    TensorList,
    Transform,
    WeightDecay,
    ZStat,
    clip_grad_norm_,
)
from torchzero_clip.core.annotation import Allowed
from torchzero_clip.core.bounds import Within
from torchzero_clip.core.description import Description

inf, nan = math.inf, math.nan


def given(row: Row) -> list[Bad]:
    """What a class refuses: its own rows, those of every class that takes the arguments, and what
    its annotations exclude."""
    everywhere = [bad for bad in EVERYWHERE if bad[0].keys() <= set(fields(row.cls))]
    return [*row.bad, *everywhere, *excluded(row.cls, row.args)]


def excluded(cls: type[Description], args: dict[str, Any]) -> list[Bad]:
    """Values that the annotations of a class exclude, with the error and its words."""
    found: list[Bad] = []
    for name in fields(cls):
        kind = cls._kinds.get(name)
        if kind is None or name not in inspect.signature(cls).parameters:
            continue
        # without bounds, the class's own check may come first, and say more
        words = f"{name} must be " if kind in PLAIN else f"{name} must be {kind}, got "
        usual = args.get(name, cls.__dataclass_fields__[name].default)
        found += [({name: value}, error, words) for value, error in wrong(kind, usual)]
    return found


PLAIN = [Allowed(type, optional) for type in (float, int) for optional in (False, True)]


def wrong(kind: Allowed, usual: Any) -> list[tuple[Any, type[Exception]]]:
    """Values that an annotation excludes: beyond each bound, NaN, and of other types."""
    if kind.length is not None:
        return wrong_tuples(kind, usual)
    none = [] if kind.optional else [(None, ValueError if kind.choices else TypeError)]
    if kind.choices:
        return [
            ("no such choice", ValueError),
            (3, ValueError),
            *([] if None in kind.choices else none),
        ]
    if kind.python_type not in (float, int):
        return [("yes", TypeError), (1, TypeError), *none]
    values = beyond(kind)
    if kind.python_type is float:
        values += [nan, *[torch.tensor(x) for x in values[:1]]]
    types = ["1", True, (1.0, 2.0), *([1.5] if kind.python_type is int else [])]
    return [*[(x, ValueError) for x in values], *[(x, TypeError) for x in types], *none]


def beyond(kind: Allowed) -> list[Any]:
    """Numbers of the type of the annotation beyond each of its bounds, near them and far away."""
    bounds, whole = kind.bounds or Within(), kind.python_type is int
    values: list[Any] = []
    if bounds.at_least is not None:
        values += [bounds.at_least - 1, -7] if whole else [bounds.at_least - 0.5, -inf]
    if bounds.above is not None:
        values += [bounds.above, -inf]
    if bounds.below is not None:
        values += [bounds.below, inf]
    if bounds.at_most is not None:
        values += [bounds.at_most + 0.5, inf]
    return values


def wrong_tuples(kind: Allowed, usual: Any) -> list[tuple[Any, type[Exception]]]:
    """The same for tuples: too short, too long, no tuple, and each place with a wrong number."""
    found: list[tuple[Any, type[Exception]]] = [
        (usual[:-1], ValueError),
        ((*usual, usual[-1]), ValueError),
        (usual[-1], TypeError),
    ]
    for place in range(len(usual)):
        for value, error in wrong(kind._replace(length=None), usual[place]):
            if not isinstance(value, torch.Tensor):
                found.append(((*usual[:place], value, *usual[place + 1 :]), error))
    return found


CRITERIA = (EMAQuantile, EMARatio, GeometricQuantile, P2Quantile, Quantile, ZStat)


def fields(cls: type[Description]) -> list[str]:
    return [] if cls is Chain else list(cls.__dataclass_fields__)


def live(row: Row) -> list[Bad]:
    """Those that a group may be given: the bad values of one live argument."""
    return [bad for bad in given(row) if len(bad[0]) == 1 and set(bad[0]) <= set(row.cls.live)]


def named(row: Row) -> str:
    return row.cls.__name__


def check_sentence(error: BaseException, row: Row, bad: Bad) -> None:
    """The sentence names the class and the argument, and replays a single value."""
    arguments, _, words = bad
    sentence = str(error)
    assert words in sentence, sentence
    assert sentence.startswith(f"{row.cls.__name__}: "), sentence
    assert all(name in sentence for name in arguments), sentence
    if len(arguments) == 1 and arguments != {"inverse_dims": True}:  # the fault of dim=None
        assert f"got {next(iter(arguments.values()))!r}" in sentence, sentence


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_bad_argument_is_refused_at_construction_in_a_sentence(row):
    def refused(bad: Bad) -> None:
        arguments, error, _ = bad
        with pytest.raises(error) as info:
            row.cls(**{**row.args, **arguments})
        assert type(info.value) is error
        check_sentence(info.value, row, bad)

    run_each(refused, "bad", given(row))


STRANGE = [torch.ones(3), [1.0], {"a": 1}, "x", object(), type]


def constructions() -> list[tuple[type[Description], dict[str, Any]]]:
    """Every class of ours that can be made, with the arguments that it cannot do without."""
    rows = [(row.cls, row.args) for row in ROWS if row.cls not in (Chain, InBasis)]
    return [*rows, *[(cls, {"q": 0.5} if "q" in fields(cls) else {}) for cls in CRITERIA]]


@at_once("cls, args", constructions())
def test_what_is_wrong_for_an_argument_is_said_in_a_sentence(cls, args):
    """Whatever is given: what `check` looks at may be anything."""
    cls(**args)
    for name, strange in itertools.product(fields(cls), STRANGE):
        words = refusal(cls, {**args, name: strange})
        assert words is None or words.startswith(f"{cls.__name__}: "), (name, strange, words)


def refusal(cls: type[Description], args: dict[str, Any]) -> str | None:
    try:
        cls(**args)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@at_once("cls", CRITERIA)
def test_a_bad_argument_of_a_criterion_is_refused_in_a_sentence(cls):
    args = {"q": 0.5} if "q" in fields(cls) else {}
    for arguments, error, words in excluded(cls, args):
        with pytest.raises(error, match=re.escape(words)) as info:
            cls(**{**args, **arguments})
        assert str(info.value).startswith(f"{cls.__name__}: ")


BOUNDS = {
    "2 finite numbers, each above 0": "eps etas",
    "2 finite numbers, each of at least 0 or None": "eps",
    "2 numbers, each of at least 0": "bounds step_sizes",
    "2 numbers, each of at least 0 and below 1": "betas",
    "3 numbers, each of at least 0 and below 1": "betas",
    "a finite number": "factor gamma nan",
    "a finite number above 0": "d0 d_coef eps initial",
    "a finite number of at least 0": (
        "a alpha b coefficient eps eta gamma initial_accumulator initial_accumulator_value lamb "
        "lambd layer_scale lr lr_decay momentum norm_value r rate relative weight_decay "
        "weight_lr_power"
    ),
    "a finite number of at least 0 or None": "clip_power",
    "a finite number of at most 0": "beta2_decay",
    "a finite number of at most 1": "dampening",
    "a number above 0": "clip_threshold tau threshold z_thresh",
    "a number above 0 and at most 1": "exponent share",
    "a number above 0 and below 1 or None": "beta",
    "a number above 1": "r_thresh",
    "a number of at least 0": (
        "abs absolute clipping max_norm max_rms momentum_decay rel sigmas t0 value zmax"
    ),
    "a number of at least 0 and at most 1": "alpha delta error precond_lr q",
    "a number of at least 0 and at most 100": "percentile",
    "a number of at least 0 and below 1": "alpha beta decay ema_decay rho theta",
    "a number of at least 0 and below 1 or None": "alpha beta beta3",
    "a number of at least 0 or None": "add max_norm min_value",
    "a number of at least 1": "d growth_rate",
    "a number of at least 1 or None": "max_decay max_ema_growth mul",
    "an integer of at least 0": "max_dim patience start wait warmup warmup_steps",
    "an integer of at least 1": "every k steps window window_size",
    "an integer of at least 1 or None": "alpha_warmup beta3_warmup every max_consecutive steps",
    "an integer of at least 10": "most",
    "an integer of at least 2": "window",
}
"""The names of arguments by the bounds that their values have."""
DIFFERENT = {
    "alpha": {
        "a finite number of at least 0": "ASGD AdEMAMix",
        "a number of at least 0 and at most 1": "Lookahead QKClip",
        "a number of at least 0 and below 1": "EMAQuantile EMARatio Grokfast ZClip ZStat",
        "a number of at least 0 and below 1 or None": "RMSprop",
    },
    "beta": {
        "a number above 0 and below 1 or None": "ScheduleFree",
        "a number of at least 0 and below 1": (
            "AdaGC ClipNormByEMA ClipValueByEMA EMA Kron NeuronNorm NormalizeByEMA"
        ),
        "a number of at least 0 and below 1 or None": "KLBasis Mars SOAPBasis SpikeClip",
    },
    "betas": {
        "2 numbers, each of at least 0 and below 1": (
            "ACClip ADOPT AdaBelief AdaGN Adam AdamAtan2 Adamax DAdaptAdam LaProp Lion "
            "NAdam Prodigy RAdam Shampoo StableAdam Yogi"
        ),
        "3 numbers, each of at least 0 and below 1": "AdEMAMix Adan CAME",
    },
    "eps": {
        "2 finite numbers, each above 0": "CAME",
        "2 finite numbers, each of at least 0 or None": "Adafactor",
        "a finite number above 0": "ACClip ADOPT DAdaptAdam Prodigy Shampoo StableAdam",
        "a finite number of at least 0": (
            "AGC AdEMAMix AdaBelief AdaGN Adadelta Adagrad Adam Adamax Adan "
            "ClipNormByEMA Kron LaProp NAdam NormalizeByEMA Orthogonalize RAdam RMSprop "
            "Standardize Yogi"
        ),
    },
    "every": {
        "an integer of at least 1": (
            "KLBasis Reset SOAPBasis Shampoo Watch WeightAverage WeightEMA"
        ),
        "an integer of at least 1 or None": "Kron SpikeClip",
    },
    "gamma": {
        "a finite number": "Noise",
        "a finite number of at least 0": "Mars",
    },
    "max_norm": {
        "a number of at least 0": ("ClipNorm ClipSpectral DeltaClip MaxNorm SkipLarge SoftClip"),
        "a number of at least 0 or None": "ZClip",
    },
    "steps": {
        "an integer of at least 1": "Accumulate Warmup",
        "an integer of at least 1 or None": "Orthogonalize",
    },
    "window": {
        "an integer of at least 1": "Quantile",
        "an integer of at least 2": "SkipSpike",
    },
}
"""The classes by the bounds of a name that has several."""
BOUNDED = {name for names in BOUNDS.values() for name in names.split()}


@at_once("cls, args", constructions())
def test_arguments_of_one_name_have_the_bounds_that_the_name_has(cls, args):
    """A new rule may choose the bounds of a name that no rule has had."""
    for name in fields(cls):
        kind = cls._kinds.get(name)
        if kind is not None and kind.bounds is not None and name in BOUNDED:
            assert name in BOUNDS.get(str(kind), "").split(), f"{name} is {kind}"
            known = DIFFERENT.get(name, {})
            if cls.__name__ in " ".join(known.values()).split():
                assert cls.__name__ in known.get(str(kind), "").split(), f"{name} is {kind}"


@pytest.mark.parametrize("row", [row for row in ROWS if live(row)], ids=named)
def test_a_bad_value_is_refused_in_a_group_with_the_same_sentence(row):
    params = parameters({"a.weight": (2, 2), "b.weight": (2, 2)})
    first, second = params.items()
    tfm = row.cls(**row.args)
    rate = [LR(0.1)] if "lr" in tfm.reads else []
    opt = Modular([first], *rate, tfm)

    def refused(bad: Bad) -> None:
        (key, value), error = *bad[0].items(), bad[1]
        qualified = {"params": [second], f"{row.cls.__name__}/{key}": value}
        with pytest.raises(error) as info:
            Modular([{"params": [first]}, qualified], *rate, tfm)
        check_sentence(info.value, row, bad)
        with pytest.raises(error) as info:
            opt.add_param_group({"params": [second], key: value})
        check_sentence(info.value, row, bad)
        assert len(opt.param_groups) == 1

    run_each(refused, "bad", live(row))
    set_grads(params, gradients({"a.weight": (2, 2)}))
    opt.step()  # as if nothing had been


@pytest.mark.parametrize("row", [row for row in ROWS if row.cls is not Chain], ids=named)
def test_an_unknown_argument_is_refused(row):
    with pytest.raises(TypeError, match="no argument 'no_such_argument'"):
        row.cls(**row.args, no_such_argument=1.0)


def test_a_chain_takes_transforms_only():
    with pytest.raises(TypeError, match="a chain must contain only transforms, got 'ClipNorm'"):
        Chain("ClipNorm")
    with pytest.raises(TypeError, match=re.escape("write ClipNorm(...)")):
        Chain(ClipNorm)
    with pytest.raises(TypeError, match="a chain must contain only transforms"):
        Modular([Parameter(torch.zeros(2))], torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("link", "advice"),
    [
        ([Scale(1.0)], "unpack the list with *"),
        (1e-3, "did you mean LR(0.001)?"),
        (ZStat(), "write AdaptiveClip(ZStat())"),
        (lambda u: u, "write Lambda(fn)"),
    ],
)
def test_what_is_no_transform_gets_advice(link, advice):
    with pytest.raises(TypeError, match=re.escape(advice)):
        Chain(link)


def test_a_module_is_no_parameters():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"pass model\.parameters\(\)"):
        Modular(model, Scale(1.0))
    with pytest.raises(TypeError, match=r"pass model\.parameters\(\)"):
        clip_grad_norm_(model, 1.0)


def test_numbers_and_truths_are_checked_without_a_line_of_code():
    class Blend(Transform):
        share: Live[float] = 0.5
        late: Live[float | None] = None
        steps: int = 1
        twice: bool = False

    for wrong, words in (
        ({"share": "a"}, "share must be a number, got 'a'"),
        ({"share": None}, "share must be a number, got None"),
        ({"late": [1]}, "late must be a number or None, got (1,)"),
        ({"steps": 1.5}, "steps must be an integer, got 1.5"),
        ({"twice": "yes"}, "twice must be True or False, got 'yes'"),
    ):
        with pytest.raises(TypeError, match=re.escape(f"Blend: {words}")):
            Blend(**wrong)
    assert Blend(torch.tensor(0.5), 1.0, 3, True).steps == 3


def test_target_and_name_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        Scale(1.0, "grad")
    with pytest.raises(TypeError, match="positional"):
        Adam((0.9, 0.99), 1e-8, False, True, True, "update")


def test_a_tensor_is_as_good_as_a_number():
    assert ClipNorm(torch.tensor(1.0)).max_norm == 1
    with pytest.raises(ValueError, match=r"ClipNorm: max_norm must be a number of at least 0, got"):
        ClipNorm(torch.tensor(-1.0))
    with pytest.raises(TypeError, match="ClipNorm: max_norm must be a number of at least 0, got"):
        ClipNorm(torch.ones(2))


@pytest.mark.parametrize("compile", [False, True])
def test_a_tensor_of_one_entry_is_as_good_as_a_number_for_what_replaces_an_infinity(compile):
    p = Parameter(torch.zeros(3))
    opt = Modular([p], NanToNum(*[torch.tensor([x]) for x in (1.0, 2.0, 3.0)]), compile=compile)
    p.grad = torch.tensor([torch.nan, torch.inf, -torch.inf])
    opt.step()
    assert p.tolist() == [-1.0, -2.0, -3.0]


# ---------------------------------------------------------------------- names of live values


def optimizer(*links: Transform, **group: Any) -> Modular:
    """An optimizer with one group that sets these keys."""
    return Modular([{"params": [Parameter(torch.ones(3))], **group}], *links)


def keys(opt: Modular) -> set[str]:
    return set(opt.param_groups[0]) - {"params", "chain"}


def test_one_owner_has_the_bare_name_and_several_the_qualified_ones():
    opt = optimizer(ClipNorm(1.0), ClipValue(0.5), Adam(), ClipNorm(2.0), LR(0.1))
    wanted = {"ClipNorm/max_norm", "ClipNorm_2/max_norm", "value", "betas", "eps", "lr"}
    assert keys(opt) == wanted
    assert opt.param_groups[0]["ClipNorm_2/max_norm"] == 2.0
    assert wanted <= set(opt.defaults)


def test_a_name_replaces_that_of_the_class():
    opt = optimizer(ClipNorm(1.0, name="first"), ClipNorm(2.0, name="second"))
    assert keys(opt) == {"first/max_norm", "second/max_norm"}


def test_names_inside_other_transforms_carry_the_path():
    inner = Chain(Scale(2.0), Scale(3.0))
    opt = optimizer(ClipValueByEMA(ema_tfm=inner), Scale(1.0))
    prefix = "ClipValueByEMA/Scale"
    assert keys(opt) == {"beta", f"{prefix}/factor", f"{prefix}_2/factor", "Scale/factor"}
    named = optimizer(Chain(Scale(2.0), name="inner"), Scale(1.0))
    assert keys(named) == {"inner/Scale/factor", "Scale/factor"}
    assert keys(optimizer(Chain(Scale(2.0), Chain(Scale(1.0))))) == {
        "Scale/factor",
        "Scale_2/factor",
    }


@pytest.mark.parametrize("key", ["max_norm", "ClipNorm/max_norm"])
def test_bare_and_qualified_names_mean_the_same(key):
    opt = optimizer(ClipNorm(1.0), LR(1.0), **{key: 0.25})
    assert keys(opt) == {"max_norm", "lr"}
    (p,) = opt.param_groups[0]["params"]
    p.grad = torch.full((3,), 10.0)
    opt.step()
    assert (1 - p).norm().item() == pytest.approx(0.25)


def test_both_names_at_once_are_refused():
    with pytest.raises(ValueError, match="both 'ClipNorm/max_norm' and 'max_norm'"):
        optimizer(ClipNorm(1.0), **{"max_norm": 1.0, "ClipNorm/max_norm": 2.0})


def test_two_links_of_one_name_are_refused():
    links = ClipNorm(1.0), ClipNorm(2.0), ClipNorm(3.0, name="ClipNorm_2")
    with pytest.raises(
        ValueError, match=r"names of transforms must differ.*'ClipNorm_2', 'ClipNorm_2'"
    ):
        optimizer(*links)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("max_nrom", "max_norm"),
        ("maxnorm", "max_norm"),
        ("max_norms", "max_norm"),
        ("beta", "betas"),
        ("lrr", "lr"),
        ("ClipNorm/max_nrom", "ClipNorm/max_norm"),
        ("weight_deacy", "weight_decay"),
        ("moemntum", "momentum"),
    ],
)
def test_a_misspelt_key_is_refused_with_a_suggestion(key, suggestion):
    links = (ClipNorm(1.0), Momentum(), Adam(), WeightDecay(0.1), LR(0.1))
    sentence = rf"unknown key '{key}' of a parameter group: did you mean '{suggestion}'\?"
    with pytest.raises(ValueError, match=sentence):
        optimizer(*links, **{key: 0.5})
    opt = optimizer(*links)
    with pytest.raises(ValueError, match=sentence):
        opt.add_param_group({"params": [Parameter(torch.ones(1))], key: 0.5})
    assert len(opt.param_groups) == 1
    opt.param_groups[0][key] = 0.5
    with pytest.raises(ValueError, match=sentence):
        opt.step()


def test_an_ambiguous_key_is_refused_with_the_choices():
    sentence = (
        r"the key 'max_norm' of a parameter group is ambiguous, .*: use one of "
        r"\['ClipNorm/max_norm', 'ClipNorm_2/max_norm'\]"
    )
    with pytest.raises(ValueError, match=sentence):
        optimizer(ClipNorm(1.0), Adam(), ClipNorm(2.0), max_norm=0.5)
    opt = optimizer(ClipNorm(1.0), ClipNorm(2.0))
    opt.param_groups[0]["max_norm"] = 0.5
    with pytest.raises(ValueError, match=sentence):
        opt.step()


@pytest.mark.parametrize(
    ("key", "value", "link"),
    [
        ("lr", 0.1, "LR"),
        ("weight_decay", 0.1, "WeightDecay"),
        ("momentum", 0.9, "Momentum"),
        ("dampening", 0.1, "Momentum"),
        ("nesterov", True, "Momentum"),
        ("betas", (0.9, 0.99), "Adam"),
        ("amsgrad", True, "Adam"),
        ("centered", True, "RMSprop(centered=True)"),
        ("maximize", True, "Scale(-1)"),
        ("max_norm", 1.0, "ClipNorm"),
    ],
)
def test_a_well_known_key_that_nothing_reads_is_refused_and_names_the_link(key, value, link):
    with pytest.raises(ValueError, match=f"no transform uses it: add .*{re.escape(link)}"):
        optimizer(Scale(0.5), **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight_decay", 0.0), ("weight_decay", 0), ("nesterov", False), ("maximize", False)],
)
def test_a_well_known_key_whose_value_changes_nothing_stays(key, value):
    opt = optimizer(ClipNorm(1.0), LR(0.1), **{key: value})
    assert opt.param_groups[0][key] == value


@pytest.mark.parametrize(
    ("rule", "key"),
    [
        (Adam(amsgrad=True), "amsgrad"),
        (Momentum(nesterov=True), "nesterov"),
        (RMSprop(centered=True), "centered"),
    ],
)
def test_a_well_known_key_that_repeats_a_fixed_argument_stays(rule, key):
    opt = optimizer(rule, LR(0.1), **{key: True})
    assert opt.param_groups[0][key] is True


@pytest.mark.parametrize(
    "key", ["initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"]
)
def test_the_keys_of_schedulers_stay(key):
    opt = optimizer(Momentum(), LR(0.1), **{key: 0.5})
    assert opt.param_groups[0][key] == 0.5


def test_keys_of_other_people_stay_and_mean_nothing():
    opt = optimizer(ClipNorm(1.0), LR(0.1), group_name="encoder", layer_scale=0.5)
    (p,) = opt.param_groups[0]["params"]
    p.grad = torch.ones(3)
    opt.step()
    group = opt.param_groups[0]
    assert (group["group_name"], group["layer_scale"]) == ("encoder", 0.5)


def test_one_link_may_own_lr_and_the_sentence_says_what_to_do_instead():
    with pytest.raises(
        ValueError, match=r"only one transform may have an lr.*groups, or put Scale\(factor\)"
    ):
        optimizer(LR(0.1), Adam(), LR(0.1))


def test_a_group_that_leaves_a_value_out_takes_that_of_the_transform():
    opt = Modular(
        [{"params": [Parameter(torch.ones(1))]}, {"params": [Parameter(torch.ones(1))], "lr": 1.0}],
        ClipNorm(3.0),
        LR(0.1),
    )
    assert [group["lr"] for group in opt.param_groups] == [0.1, 1.0]
    assert [group["max_norm"] for group in opt.param_groups] == [3.0, 3.0]


def test_a_value_set_in_a_group_is_read_at_the_next_step():
    opt = optimizer(Normalize(), LR(1.0))
    (p,) = opt.param_groups[0]["params"]
    for value in (0.5, torch.tensor(0.25), 2.0):
        before = p.detach().clone()
        opt.param_groups[0]["norm_value"] = value
        p.grad = torch.ones(3)
        opt.step()
        assert (before - p).norm().item() == pytest.approx(float(value))


# ---------------------------------------------------------------------- structure


def test_a_grad_link_whose_work_nothing_sees_is_refused():
    with pytest.raises(
        ValueError, match=r'ClipNorm with target="grad" has no effect, because Adam'
    ):
        optimizer(Adam(), ClipNorm(1.0, target="grad"), LR(0.1))
    optimizer(ClipNorm(1.0, target="grad"), Adam(), LR(0.1))


def test_a_layer_needs_names():
    sentence = "ClipNorm: dim='layer' needs the names.*model.named_parameters"
    with pytest.raises(ValueError, match=sentence):
        optimizer(ClipNorm(1.0, dim="layer"))
    opt = Modular([("a.weight", Parameter(torch.ones(1)))], ClipNorm(1.0, dim="layer"))
    with pytest.raises(ValueError, match="names"):
        opt.add_param_group({"params": [Parameter(torch.ones(1))]})
    assert len(opt.param_groups) == 1


def test_duplicate_parameters_are_refused_and_change_nothing():
    p = Parameter(torch.ones(1))
    opt = Modular([p], ClipNormGrowth(), LR(0.1))
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        opt.add_param_group({"params": [p]})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("row", [row for row in ROWS if row.cls is not Lambda], ids=named)
def test_the_repr_of_a_transform_makes_an_equal_one(row):
    for make in row.good.values():
        text = repr(make())
        assert repr(eval(text, NAMES)) == text  # every class, and the functions of the table


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ClipNorm(maxnorm=1.0), "ClipNorm: there is no argument 'maxnorm': did you mean"),
        (lambda: Adam(lr=1e-3), "Adam: there is no argument 'lr': add LR(...) to the chain"),
        (lambda: ClipNorm(1.0, foo=1), "the arguments are ['max_norm'"),
        (lambda: Modular(ClipNorm(1.0)), "Modular: the first argument must be the parameters, got"),
        (lambda: 2.0 * TensorList([torch.ones(2)]), "supports neither operators"),
        (lambda: TensorList([torch.ones(2)]) - 1, "supports neither operators"),
        (lambda: TensorList([torch.ones(2)])[0], "u.tensors[i]"),
    ],
)
def test_what_people_try_first_is_answered(make, said):
    with pytest.raises(TypeError, match=re.escape(said)):
        make()
