"""A chain as text and as plain data, and back."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests import table
from tests.helpers import flow, gradients, parameters, same
from tests.modules.rows.flow import is_weight, kind, odd
from tests.table import GOOD, LOOSE, ROWS, Case, over, sampled
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    AdaptiveClip,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    ClipPercentile,
    ClipValueByEMA,
    Criterion,
    EMARatio,
    Lambda,
    Live,
    Masked,
    NanToNum,
    NormRule,
    Partition,
    Scale,
    TensorList,
    Transform,
    When,
    ZStat,
    mean_clipping,
)

inf = math.inf
NAMES = {**table.NAMES, "tanh": torch.tanh, "clone": torch.clone}


def nameless(config: Any) -> bool:
    """Whether a construction of the table holds a function that has no name."""
    return "<lambda>" in repr(config)


CASES = [case for case in [*GOOD, *LOOSE] if not nameless(case.make())]


def through_json(config: Any) -> Any:
    return json.loads(json.dumps(config, allow_nan=False))


# ---------------------------------------------------------------------- over the whole table


def test_nearly_every_construction_of_the_table_takes_part():
    assert len(CASES) > 0.95 * len([*GOOD, *LOOSE])
    assert {case.cls for case in CASES} == {row.cls for row in ROWS}


@over(CASES)
def test_the_repr_evaluates_to_an_equal_config(case: Case):
    tfm = case.make()
    again = eval(repr(tfm), dict(NAMES))
    assert type(again) is type(tfm)
    assert Chain(again).to_config() == Chain(tfm).to_config()
    assert repr(again) == repr(tfm)


@over(CASES)
def test_a_config_survives_json(case: Case):
    config = Chain(case.make()).to_config()
    again = Chain.from_config(through_json(config))
    assert again.to_config() == config
    assert repr(again) == repr(Chain(case.make()))


@sampled(lambda case: not (case.draws or nameless(case.make())))
def test_what_a_config_restores_does_the_same(case: Case):
    again = Chain.from_config(through_json(Chain(case.make()).to_config()))
    steps = [gradients(case.shapes, i, scale=i + 1) for i in range(4)]
    ours = flow(again, parameters(case.shapes), steps)
    for a, b in zip(ours, flow(case.make(), parameters(case.shapes), steps), strict=True):
        same(a, b)


# ---------------------------------------------------------------------- what it looks like


def test_a_chain_is_a_list_of_types_and_of_arguments_that_differ_from_the_defaults():
    chain = Chain(ClipNorm(1.0), Adam(), Adam(eps=1e-6), LR(0.1))
    assert chain.to_config() == [
        {"type": "ClipNorm", "max_norm": 1.0},
        {"type": "Adam"},
        {"type": "Adam", "eps": 1e-6},
        {"type": "LR", "lr": 0.1},
    ]


def test_a_criterion_is_nested_in_its_rule():
    chain = Chain(AdaptiveClip(ZStat(clipping=mean_clipping), observe="raw"))
    assert chain.to_config() == [
        {
            "type": "AdaptiveClip",
            "criterion": {
                "type": "ZStat",
                "clipping": {"function": "torchzero_clip.modules.adaptive.criterion:mean_clipping"},
            },
            "observe": "raw",
        }
    ]
    assert Chain.from_config(chain.to_config())[0].criterion.clipping is mean_clipping


@pytest.mark.parametrize(
    "written",
    [
        [{"type": "ClipNorm", "max_norm": 1.0}, {"type": "Adam"}, {"type": "LR", "lr": 0.1}],
        [("ClipNorm", {"max_norm": 1.0}), "Adam", ("LR", {"lr": 0.1})],
        [["ClipNorm", {"max_norm": 1.0}], ["Adam", {}], ["LR", {"lr": 0.1}]],
        [ClipNorm(1.0), "Adam", LR(0.1)],
        [[{"type": "ClipNorm", "max_norm": 1.0}, "Adam"], {"type": "LR", "lr": 0.1}],
    ],
    ids=["dicts", "pairs", "lists", "objects", "nested"],
)
def test_every_way_to_write_a_chain_by_hand_is_understood(written):
    made = Chain.from_config(written)
    flat = [tfm for tfm in made.walk() if not isinstance(tfm, Chain)]
    assert list(map(repr, flat)) == ["ClipNorm(max_norm=1.0)", "Adam()", "LR(lr=0.1)"]


@pytest.mark.parametrize("written", ["Adam", {"type": "Adam"}, ("Adam", {}), ["Adam", {}]])
def test_a_single_transform_becomes_a_chain_of_one(written):
    assert repr(Chain.from_config(written)) == "Chain(Adam())"


def test_a_written_chain_may_stand_where_a_transform_is_expected():
    made = Chain.from_config(
        [
            {
                "type": "ClipValueByEMA",
                "ema_tfm": [["EMA", {"beta": 0.5}], {"type": "Scale", "factor": 2}],
            }
        ]
    )
    assert repr(made[0].ema_tfm) == "Chain(EMA(beta=0.5), Scale(factor=2))"


@pytest.mark.parametrize(
    "tfm",
    [
        ClipNorm(inf, dim=(0, -1), inverse_dims=True),
        NanToNum(0.0, inf, -inf),
        ClipNormGrowth(None, 2.0, None, None),
        ClipPercentile(50, "global"),
        Adam(betas=(0.5, 0.9), name="first"),
        Scale(2, target="grad"),
        LR(torch.tensor(0.25)),
        Chain(),
        Chain(Chain(Adam()), name="outer"),
        ClipValueByEMA(ema_tfm=Chain(EMA(0.5), Scale(2.0), name="inner")),
        AdaptiveClip(EMARatio(), dim=None, warmup=ClipNorm(3.0), warmup_steps=3),
        AdaptiveClip(EMARatio(), warmup=None),
        Masked(Chain(ClipNorm(1.0), Adam()), is_weight),
        Partition({"weight": Adam(), "other": Chain(EMA(), Scale(2))}, kind),
        When(odd, Scale(2.0)),
    ],
    ids=lambda tfm: type(tfm).__name__,
)
def test_awkward_arguments_survive_text_and_json(tfm):
    chain = Chain(tfm)
    config = chain.to_config()
    assert Chain.from_config(through_json(config)).to_config() == config
    assert eval(repr(chain), dict(NAMES)).to_config() == config


def test_numbers_keep_their_kind():
    again = Chain.from_config(through_json(Chain(Scale(2), Scale(2.0)).to_config()))
    assert [type(tfm.factor) for tfm in again] == [int, float]


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (["Adm"], "unknown transform 'Adm': did you mean 'Adam'?"),
        ([{"type": "clipnorm", "max_norm": 1}], "unknown transform 'clipnorm'"),
        (["Xyzzyx"], "unknown transform 'Xyzzyx'$"),
        ([("Adam", {"beta": 1})], "Adam has no argument 'beta': did you mean 'betas'?"),
        ([{"type": "LR", "rate": 1}], "LR has no argument 'rate'"),
        (
            [{"type": "AdaptiveClip", "criterion": {"type": "ZStats"}}],
            "unknown transform 'ZStats': did you mean 'ZStat'?",
        ),
        (
            [{"type": "AdaptiveClip", "criterion": {"type": "ZStat", "alhpa": 0.5}}],
            "ZStat has no argument 'alhpa': did you mean 'alpha'?",
        ),
    ],
)
def test_unknown_names_and_arguments_are_errors_with_a_suggestion(config, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        Chain.from_config(config)


def test_values_are_checked_as_always():
    with pytest.raises(
        ValueError, match="ClipNorm: max_norm must be a number of at least 0, got -1"
    ):
        Chain.from_config([("ClipNorm", {"max_norm": -1})])


def test_a_missing_argument_names_the_class():
    with pytest.raises(ValueError, match="ClipNorm requires the argument 'max_norm'"):
        Chain.from_config(["ClipNorm"])


@pytest.mark.parametrize("config", [3, None, [3], [{"max_norm": 1.0}], {"lr": 1}, [None]])
def test_what_is_no_config_is_an_error_that_says_what_is(config):
    with pytest.raises(TypeError, match=r"a config must be a name, a pair \(name, arguments\)"):
        Chain.from_config(config)


@pytest.mark.parametrize(
    "tfm",
    [
        Lambda(lambda u: u),
        Masked(Adam(), lambda n, p: True),
        AdaptiveClip(ZStat(clipping=lambda z, t: t)),
    ],
    ids=lambda tfm: type(tfm).__name__,
)
def test_a_function_without_a_name_is_an_error_that_says_what_to_do(tfm):
    with pytest.raises(TypeError, match="define the function with def at the top level"):
        Chain(tfm).to_config()


def test_an_object_that_json_cannot_hold_is_an_error():
    with pytest.raises(TypeError, match="a config may contain only numbers, strings, functions"):
        Chain(Odd(thing=object())).to_config()


def test_a_tensor_with_several_elements_is_not_in_a_config_but_has_a_repr():
    odd = Odd(thing=torch.tensor([1.0, 2.0]))
    assert repr(odd) == "Odd(thing=tensor([1., 2.]))"
    with pytest.raises(TypeError, match=r"a config may contain only .*, got tensor\(\[1., 2.\]\)"):
        Chain(odd).to_config()


def test_functions_of_torch_survive():
    config = Chain(Lambda(torch.tanh), Lambda(torch.nn.functional.relu)).to_config()
    again = Chain.from_config(through_json(config))
    assert again[0].fn is torch.tanh
    assert again[1].fn is torch.nn.functional.relu


# ---------------------------------------------------------------------- classes of one's own


class Odd(Transform):
    """u ← factor · u"""

    factor: Live[float] = 2.0
    kind: Literal["a", "b"] = "a"
    thing: Any = None

    def update(self, u: TensorList, state: Any, group: dict[str, Any]) -> TensorList:
        return u.mul(group["factor"])


class HalfNorm(NormRule):
    """Half of what comes."""

    dim: Any = None

    def limit(self, norm: Tensor, state: Any, group: Any) -> Tensor:
        return norm / 2


class Fixed(Criterion):
    """A limit that never moves."""

    height: Live[float] = 1.0

    def init_unit(self) -> dict[str, Any]:
        return {"nothing": 0.0}

    def limit(self, norm: Tensor, state: Any, group: dict[str, Any]) -> Tensor:
        return torch.zeros_like(norm) + group["height"]

    def observe(self, norm: Tensor, state: Any, group: Any) -> dict[str, Tensor]:
        return {}


def test_classes_of_ones_own_take_part_without_being_registered():
    chain = Chain(
        Odd(3.0, "b"), HalfNorm("global"), AdaptiveClip(Fixed(2.0), warmup=None, warmup_steps=0)
    )
    config = through_json(chain.to_config())
    again = Chain.from_config(config)
    assert [type(tfm) for tfm in again] == [Odd, HalfNorm, AdaptiveClip]
    assert type(again[2].criterion) is Fixed
    assert (
        again.to_config()
        == chain.to_config()
        == eval(repr(chain), {**NAMES, **globals()}).to_config()
    )


def test_a_class_that_is_defined_twice_is_the_latest():
    first = type("Twice", (Scale,), {})
    second = type("Twice", (Scale,), {})
    assert first is not second
    assert type(Chain.from_config([("Twice", {"factor": 1.0})])[0]) is second


def test_a_class_whose_name_leads_to_a_class_defined_elsewhere_has_no_config():
    """Otherwise the config would restore the other class without an error."""
    first = Fixed(2.0)
    inside = AdaptiveClip(first, warmup=None, warmup_steps=0)
    type("Fixed", (Criterion,), {"__module__": "another.module"})
    with pytest.raises(TypeError, match=r"two classes Fixed, one in another\.module and one in "):
        Chain(inside).to_config()
    own = type("ClipNorm", (Scale,), {})
    with pytest.raises(TypeError, match=r"two classes ClipNorm, one in torchzero_clip\.modules"):
        Chain(own(2.0)).to_config()


def test_a_subclass_of_chain_survives():
    class Preset(Chain):
        """Two links."""

        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(Adam(), LR(lr))

    preset = Preset(0.5)
    again = Chain.from_config(through_json(Chain(preset).to_config()))
    assert [repr(tfm) for tfm in again.walk() if not isinstance(tfm, Chain)] == [
        "Adam()",
        "LR(lr=0.5)",
    ]


def test_a_config_does_not_depend_on_the_order_of_keys():
    config = Chain(Adam(betas=(0.5, 0.9), eps=1e-3, name="x")).to_config()
    backwards = [dict(reversed(list(one.items()))) for one in config]
    assert Chain.from_config(backwards).to_config() == config
