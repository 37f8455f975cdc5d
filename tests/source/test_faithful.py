"""What a file once said wrongly: each chain as its file, or the sentence that refuses it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts import chains
from tests.helpers import SHAPES, at_once, close, gradients, parameters, set_grads
from tests.source.files import written
from tests.source.test_source import compare, is_matrix, label
from torchzero_clip import (
    EMA,
    LR,
    AdaGC,
    Adagrad,
    Adam,
    AdEMAMix,
    AutoClip,
    Centralize,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipPercentile,
    Clippy,
    Graft,
    Group,
    Identity,
    Live,
    Mars,
    Masked,
    MaxNorm,
    Modular,
    Momentum,
    Noise,
    Partition,
    Reset,
    RMSprop,
    Scale,
    SoftClip,
    State,
    TensorList,
    Transform,
    TrustRatio,
    When,
    ZClip,
    named,
)
from torchzero_clip.source import SourceError

FLOAT64 = torch.float64


def refused(chain: list[Transform], words: str, **options: Any) -> None:
    with pytest.raises(SourceError, match=words):
        Modular(list(parameters().items()), *chain, **options).to_source()


# ---------------------------------------------------------------------- lists of several loops


@at_once(
    "last",
    [
        lambda: ClipNorm(0.1, dim="global", name="b"),
        lambda: TrustRatio(dim="layer"),
        lambda: AutoClip(warmup_steps=2),
        lambda: ZClip(warmup_steps=2),
    ],
)
@pytest.mark.parametrize("first", [Adam, pytest.param(AdEMAMix, marks=pytest.mark.slow)])
def test_a_list_stays_the_same_list_for_the_loops_after_it(
    first: Callable[[], Transform], last: Callable[[], Transform]
) -> None:
    compare([ClipNorm(1.0), first(), last(), LR(1.0)], SHAPES, FLOAT64)


@at_once(
    "averages",
    [
        lambda: [RMSprop(momentum=0.5, centered=True)],
        lambda: [Momentum(0.5)],
        lambda: [EMA(0.5)],
        lambda: [Masked(EMA(0.5), is_matrix), EMA(0.9)],
        lambda: [EMA(0.9), Masked(Momentum(0.5), is_matrix)],
        lambda: [Masked(Chain(EMA(0.5), ClipPercentile(40.0, dim="global")), is_matrix)],
    ],
)
def test_an_update_that_is_state_is_put_together_over_all_groups(
    averages: Callable[[], list[Transform]],
) -> None:
    chain = [*averages(), ClipPercentile(50.0, dim="global"), LR(0.1)]
    compare(chain, SHAPES, FLOAT64)


class Longer(Transform):
    """u ← 1.1 · u"""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul(1.1)


def is_long(name: str, p: Tensor) -> bool:
    return p.numel() > 6


@pytest.mark.parametrize(
    "average",
    [EMA(0.5, debias=True), pytest.param(Scale(0.9), marks=pytest.mark.slow)],
    ids=repr,
)
@at_once("last", [lambda: ClipNormByEMA(0.5), lambda: ClipNorm(0.1)])
def test_what_a_mask_inside_a_mask_has_made_is_not_written_over(
    average: Transform, last: Callable[[], Transform]
) -> None:
    inner = Chain(Longer(), ClipNormGrowth(mul=1.1, dim="global"))
    for where in (is_matrix, is_long):
        chain = [average, Masked(Masked(inner, is_long), where), last(), LR(0.01)]
        compare(chain, SHAPES, FLOAT64)


def test_a_sphere_after_an_average_takes_its_update_in_two_groups() -> None:
    """And a number that gets a line hides no name of another."""
    compare([TrustRatio(0.1, dim="layer"), Mars(), LR(0.1)], SHAPES, FLOAT64)
    compare([Centralize(), AdEMAMix(), MaxNorm(0.5, dim="layer"), LR(0.1)], SHAPES, FLOAT64)


def test_a_constant_is_on_the_device_of_what_was_measured_before_it() -> None:
    compare([AutoClip(warmup_steps=2), AdaGC(), LR(0.1)], SHAPES, FLOAT64)


def test_state_named_sum_hides_no_function() -> None:
    compare([Adagrad(), Centralize(dim="group"), LR(0.1)], SHAPES, FLOAT64)


def test_a_joint_norm_in_one_branch_stands_beside_a_plain_rule_in_another() -> None:
    parts = Partition({"matrix": TrustRatio(0.1, dim="layer"), "other": Clippy()}, label)
    compare([parts, LR(0.1)], SHAPES, FLOAT64)


@at_once("rule", [Clippy, lambda: MaxNorm(0.5, math.inf), lambda: ClipNorm(0.1, math.inf)])
def test_the_largest_magnitude_of_an_empty_parameter_is_zero(rule: Callable[[], Transform]) -> None:
    shapes = {"a.weight": (2, 3), "a.empty": (0, 3)}
    ours, theirs = parameters(shapes), parameters(shapes)
    a = Modular(list(ours.items()), rule(), LR(0.1), fused=False)
    b = written(a.to_source())(list(theirs.items()))
    for params, opt in ((ours, a), (theirs, b)):
        set_grads(params, gradients(shapes))
        opt.step()
    close(ours, theirs)


def test_a_limit_of_zero_leaves_a_zero_gradient_alone() -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    a = Modular([ours], SoftClip(0.0), LR(0.1))
    b = written(a.to_source())([theirs])
    ours.grad, theirs.grad = torch.zeros(2), torch.zeros(2)
    a.step(), b.step()
    assert ours.tolist() == theirs.tolist() == [1.0, 1.0]


def test_state_begins_with_the_number_of_the_parameters_own_precision() -> None:
    compare([Adagrad(initial_accumulator_value=0.3), LR(0.1)], SHAPES, FLOAT64)
    text = Modular([torch.zeros(1)], Adagrad(initial_accumulator_value=0.3)).to_source()
    assert "torch.full_like(p, 0.3, dtype=dtype)" in text


# ---------------------------------------------------------------------- steps that are counted


class EveryOther(Transform):
    """u ← 2 u in every other step"""

    reach = "tensor"

    def step(self, buckets: list[Any]) -> list[Any]:
        for bucket in buckets:
            count = bucket.group_state.get("EveryOther/steps", 0) + 1
            bucket.group_state["EveryOther/steps"] = count
            if count % 2:
                bucket.u = bucket.u.mul(2.0)
        return buckets


@at_once(
    "rule",
    [
        lambda: named("spam", every=7),
        lambda: Reset(EMA(0.5), 3, 2),
        lambda: When(lambda step: step <= 2, ClipNorm(0.1)),
        lambda: Masked(When(lambda step: step <= 2, ClipNorm(0.1)), is_matrix),
        lambda: Noise(0.1),
        EveryOther,
    ],
)
def test_what_counts_steps_is_refused(rule: Callable[[], Transform]) -> None:
    refused(
        [rule()],
        "as plain PyTorch code: the transform stores a scalar for the whole model",
    )


# ---------------------------------------------------------------------- numbers of the stand-in


class Anchored(Transform):
    """u ← u + pull · (w - w₀), w₀ half of the parameter as it began"""

    pull: Live[float] = 0.1

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"anchor": param.detach() / 2}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        away = group["params"].sub(state["anchor"])
        return u.add(away.mul_(group["pull"]))


class Sized(Transform):
    """u ← u / n, n the number of entries"""

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"entries": torch.full((), float(param.numel()))}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.div(state["entries"].stack())


class Rooted(Transform):
    """u ← √(1 - β) · u"""

    beta: Live[float] = 0.9

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul(math.sqrt(1 - group["beta"]))


class ByRows(Transform):
    """u ← u / rows"""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.map(lambda x: x / x.shape[0])


class Large(Transform):
    """u ← u / 2 in tensors with more than four entries"""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.map(lambda x: x / 2 if x.numel() > 4 else x)


class Rounded(Transform):
    """u ← ⌊steps / 2⌋ · u"""

    steps: Live[int] = 4

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul(group["steps"] // 2)


class Halved(Transform):
    """u ← u / 2 where β > 1/2, else u"""

    beta: Live[float] = 0.9

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul(0.5) if group["beta"] > 0.5 else u


class ByName(Transform):
    """u ← u, and an error of its own"""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        raise KeyError("scales")


@at_once(
    "rule, words",
    [
        (Anchored, "Anchored cannot .*the initial state depends on values or shapes"),
        (Sized, "Sized cannot .*the initial state depends on"),
        (Rooted, "Rooted cannot .* as a Python number, so the line .* for one step only"),
        (
            lambda: Rooted(0.0),
            "Rooted cannot .* as a Python number, so the line .* for one step only",
        ),
        (ByRows, "ByRows cannot .* the transform uses the shape of a parameter as Python"),
        (Large, "Large cannot .* branches on the number of elements of a parameter"),
        (Rounded, "Rounded cannot .* converts a hyperparameter to a Python number"),
        (
            lambda: Masked(Rooted(), is_matrix),
            "Masked/Rooted cannot .* would be right for one step",
        ),
        (ByName, "ByName cannot .* the step cannot be recorded .*'scales'"),
    ],
)
def test_what_a_file_would_only_know_of_the_watched_step_is_refused(rule: Any, words: str) -> None:
    refused([rule(), LR(0.1)], words)


def test_a_way_that_a_live_value_decides_is_written_with_the_values_that_take_it() -> None:
    opt = written(Modular([torch.zeros(1)], Halved(0.5001), LR(0.1)).to_source())([torch.zeros(1)])
    opt.param_groups[0]["beta"] = 0.4
    with pytest.raises(ValueError, match="write a new file for another beta"):
        opt.step()


@at_once("name", ["muoneq", "nanochat"])
def test_rules_for_matrices_are_refused_in_a_sentence(name: str) -> None:
    refused([named(name)], "cannot be exported as plain PyTorch code: ")


def test_state_that_is_rounded_at_random_is_refused() -> None:
    words = "Adam cannot .* in bfloat16 with stochastic rounding"
    refused([Adam(), LR(0.1)], words, state_dtype="bfloat16")
    refused([Adam(state_dtype="bfloat16"), LR(0.1)], words)


def test_layers_of_several_groups_need_one_value_where_norms_are_remembered() -> None:
    params = list(parameters().items())
    opt = written(Modular(params, AdaGC(dim="layer"), LR(0.1)).to_source())
    set_grads(dict(params), gradients())
    opt([{"params": params[:3]}, {"params": params[3:], "lr": 2.0, "rel": 2.0}]).step()
    made = opt([{"params": params[:3]}, {"params": params[3:], "beta": 0.5}])
    with pytest.raises(ValueError, match="give all groups the same beta for this file"):
        made.step()


# ---------------------------------------------------------------------- functions of the user

ENDS, SKIPS = ("weight", "scale"), ("head",)
LARGE = math.inf


def chosen(name: str, p: Tensor) -> bool:
    return p.dim() > 1


def norm(name: str, p: Tensor) -> bool:
    return p.dim() > 1


def tensors(name: str, p: Tensor) -> bool:
    return chosen(name, p) and any([e in name for e in ENDS if not any([s in e for s in SKIPS])])


def small(name: str, p: Tensor) -> bool:
    return p.numel() < LARGE


@at_once("where", [lambda name, p: p.dim() > 1, chosen, norm, tensors, small])
def test_functions_keep_their_names_apart_from_those_of_the_file(where: Any) -> None:
    rules = ClipNorm(0.1, "rms"), ClipNorm(0.05, dim="global")
    compare([*[Masked(rule, where) for rule in rules], LR(0.1)], SHAPES, FLOAT64)


def test_of_lambdas_on_one_line_each_stays_itself() -> None:
    weights, biases = (lambda name, p: name.endswith("weight")), (lambda name, p: "bias" in name)
    least, most = 2, 1
    rows = [lambda name, p: p.dim() >= least, lambda name, p: p.dim() <= most]
    for first, second in ((weights, biases), rows):
        chain = [Masked(Scale(0.5), first), Masked(Scale(3.0), second), LR(0.1)]
        compare(chain, SHAPES, FLOAT64)


def test_two_partitions_by_tables_of_names_keep_both() -> None:
    one = Partition({"a": Scale(0.5), "b": Scale(2.0)}, {"*weight": "a", "*": "b"})
    two = Partition({"a": Scale(3.0), "b": Scale(0.1)}, {"embed*": "a", "*": "b"})
    compare([one, two, LR(0.1)], SHAPES, FLOAT64)


def test_a_function_that_takes_more_than_a_name_and_a_parameter_is_refused() -> None:
    refused(
        [Masked(Scale(2.0), lambda name, p, *, dims=2: p.dim() >= dims)], "must have two arguments"
    )


def test_a_percentile_of_all_entries_inside_another_rule_is_refused() -> None:
    """A file took one for each parameter."""
    inside = Graft(ClipPercentile(60, "global"), Identity())
    with pytest.raises(
        SourceError, match="combines all parameters, which is not supported inside a transform"
    ):
        Modular([torch.zeros(2)], inside, LR(0.1)).to_source()


# ---------------------------------------------------------------------- random chains


@pytest.mark.filterwarnings(
    "ignore:.*from the checkpoint replaces:UserWarning"
)  # live values are scheduled
@pytest.mark.filterwarnings("ignore:.*the sum of past updates:UserWarning")
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 8), marks=pytest.mark.slow)])
def test_random_chains_do_the_same_or_are_refused(seeds: range) -> None:
    """A few of those that `make chains` runs for a minute."""
    found = {seed: chains.outcome(seed, chains.links_of(seed)) for seed in seeds}
    assert {seed: why for seed, (kind, why) in found.items() if kind == "wrong"} == {}
    assert "equal" in {kind for kind, _ in found.values()}


def test_the_script_of_random_chains_notices_a_file_that_is_wrong(monkeypatch: Any) -> None:
    """And prints the link that is."""
    real = chains.written
    monkeypatch.setattr(chains, "written", lambda text: real(text.replace('["lr"]', '["lr"] * 2')))
    links: list[Transform] = [Scale(0.5), Chain(EMA(0.5)), LR(0.1)]
    assert chains.outcome(0, links)[0] == "wrong"
    assert [type(link) for link in chains.smaller(0, links)] == [LR]
